"""Dynamic sampling, over-sampling and slime's last hooks, over groups of sessions of any number of traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError, PolarError
from polar_plugin.records import Attempt, Status, Trajectory
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import SampleLike, TrainOutput

from .sessions import POLAR, Outcome, Prompts, ReadyService, trajectory

OURS = "polar_plugin.slime_rollout.check_reward_nonzero_std"
SEEN: dict[str, list[Any]] = {}


@dataclass
class Buffered(Prompts):
    """slime's data source with its buffer: what comes back is drawn first."""

    buffer: list[list[Any]] = field(default_factory=list[list[Any]])

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        again, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return again + super().get_samples(num_samples - len(again))

    def add_samples(self, samples: list[list[Any]]) -> None:
        assert all(len(group) == self.size for group in samples)
        self.buffer += samples


def rollout(outcome: Outcome, source: Any = None, **told: Any) -> TrainOutput:
    told = {"polar": POLAR, "rollout_batch_size": 2, "n_samples_per_prompt": 2, **told}
    with slime_rollout.use_service(ReadyService(outcome)):
        return slime_rollout.generate(SlimeArgs(**told), 0, source or Buffered(SampleLike, 2))


def every_third_informs(attempt: Attempt) -> Trajectory:
    """Groups 0, 3, 6, ... differ in reward, in sessions of 3 and 1 traces; the others do not."""
    informs = attempt.group_index % 3 == 0
    return trajectory(attempt, float(informs and attempt.index % 2 == 0), 3 - 2 * (attempt.index % 2))


def groups_of(output: TrainOutput) -> list[int]:
    return [prompt[0][0].group_index for prompt in output.samples]


def test_groups_that_the_filter_drops_are_replaced_and_counted() -> None:
    output = rollout(every_third_informs, dynamic_sampling_filter_path=OURS)
    assert groups_of(output) == [0, 3]
    assert output.metrics is not None
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 2
    assert [len(session) for session in output.samples[1]] == [3, 1]


def test_what_was_drawn_beyond_need_goes_back_and_is_drawn_first() -> None:
    source = Buffered(SampleLike, 2)
    output = rollout(lambda attempt: trajectory(attempt), source, over_sampling_batch_size=5)
    assert len(output.samples) == 2
    kept, back = groups_of(output), [group[0].group_index for group in source.buffer]
    assert sorted(kept + back) == [0, 1, 2, 3, 4]
    again = groups_of(rollout(lambda attempt: trajectory(attempt), source, over_sampling_batch_size=2))
    assert again == back[:2]


def test_a_source_without_a_buffer_loses_what_is_not_needed_and_that_is_counted() -> None:
    output = rollout(lambda attempt: trajectory(attempt), Prompts(SampleLike, 2), over_sampling_batch_size=3)
    assert output.metrics is not None
    assert output.metrics["rollout/groups/lost"] == 1


def test_with_fallback_no_further_prompt_is_drawn() -> None:
    source = Buffered(SampleLike, 2)
    output = rollout(every_third_informs, source, dynamic_sampling_filter_path=f"{OURS}_with_fallback")
    assert (groups_of(output), source.drawn) == ([0, 1], 2)


def test_a_group_in_the_buffer_that_has_its_traces_already_is_run_again() -> None:
    source = Buffered(SampleLike, 2)
    first = rollout(every_third_informs, source)
    source.add_samples(first.samples)
    assert groups_of(rollout(every_third_informs, source)) == [0, 1]


def test_case_56_groups_are_told_dull_by_their_variance_and_by_sessions() -> None:
    """Case 56: all 0.5 is dropped, [0, 1] is kept; the votes of one session's three traces are one."""

    def group(*rewards: tuple[float, int]) -> list[list[SampleLike]]:
        return [[SampleLike(reward=reward)] * traces for reward, traces in rewards]

    keeps = {
        "dull": slime_rollout.check_reward_nonzero_std(SlimeArgs(), group((0.5, 3), (0.5, 1))),
        "informative": slime_rollout.check_reward_nonzero_std(SlimeArgs(), group((0.0, 3), (1.0, 1))),
    }
    assert [(told.keep, told.reason) for told in keeps.values()] == [(False, "zero_std_0.5"), (True, None)]
    flat = [SampleLike(reward=1.0), SampleLike(reward=0.0)]
    assert slime_rollout.check_reward_nonzero_std(SlimeArgs(), flat).keep


def test_a_failed_session_has_no_vote_in_the_filter() -> None:
    lost = {"polar": {"excluded": "infra_error"}}
    group = [[SampleLike(reward=1.0)], [SampleLike(reward=0.0, metadata=lost)]]
    assert not slime_rollout.check_reward_nonzero_std(SlimeArgs(), group).keep


def odd_groups(args: Any, group: Any) -> bool:
    return group[0][0].group_index % 2 == 1


def remember_kept(args: Any, data: Any) -> None:
    SEEN["kept"] = [group[0][0].group_index for group in data]
    data[0][0][0].remove_sample = True


def remember_all(args: Any, data: Any, get_samples: Any) -> None:
    SEEN["all"] = [group[0][0].group_index for group in data]
    SEEN["next"] = [get_samples(1)[0][0].group_index]


def test_slimes_last_hooks_see_what_was_kept_and_all_there_was() -> None:
    here = __name__
    output = rollout(
        lambda attempt: trajectory(attempt),
        dynamic_sampling_filter_path=f"{here}.odd_groups",
        rollout_sample_filter_path=f"{here}.remember_kept",
        rollout_all_samples_process_path=f"{here}.remember_all",
    )
    assert groups_of(output) == [1, 3]
    assert SEEN == {"kept": [1, 3], "all": [0, 1, 2, 3], "next": [4]}
    assert output.samples[0][0][0].remove_sample


def test_case_53_a_group_that_lost_too_much_is_replaced_and_no_other_is() -> None:
    """Case 53: of group 0 one session of two is left, which cannot be compared with anything."""

    def outcome(attempt: Attempt) -> Trajectory:
        return trajectory(attempt, status=Status.INFRA_ERROR if attempt.index == 1 else Status.COMPLETED)

    output = rollout(outcome, polar={**POLAR, "groups": {"incomplete_group": {"train_if": 2}}})
    assert groups_of(output) == [1, 2]
    assert output.metrics is not None
    assert output.metrics["rollout/dynamic_filter/drop_incomplete_group"] == 1


def test_a_filter_that_meets_nothing_but_failures_stops_the_run() -> None:
    """Case 62, under a filter that would draw for ever."""
    with pytest.raises(PolarError, match="none of 4 sessions can be trained"):
        rollout(lambda a: trajectory(a, status=Status.INFRA_ERROR), dynamic_sampling_filter_path=OURS)


def test_a_hook_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no no\.such\.filter"):
        rollout(every_third_informs, dynamic_sampling_filter_path="no.such.filter")
