"""The reward hook, on samples as slime hands them over: flat, in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_rollout import leave_one_out_rewards, post_process_rewards
from polar_plugin.slime_types import SampleLike, SampleStatus

CENTRED = SlimeArgs(grpo_std_normalization=False)


def sample(group: int, session: int | None, reward: float, **told: Any) -> SampleLike:
    return SampleLike(group_index=group, rollout_id=session, reward=reward, status=SampleStatus.COMPLETED, **told)


def test_traces_get_their_sessions_share_in_input_order() -> None:
    samples = [sample(0, 4, 1.0), sample(1, 9, 3.0), sample(0, 5, 0.0), sample(0, 4, 1.0), sample(1, 8, 1.0)]
    assert post_process_rewards(CENTRED, samples) == ([1.0, 3.0, 0.0, 1.0, 1.0], [0.5, 1.0, -0.5, 0.5, -1.0])


def test_the_other_sessions_are_the_baseline_where_asked() -> None:
    samples = [sample(0, i, reward) for i, reward in enumerate([1.0, 0.0, 0.0])]
    assert leave_one_out_rewards(CENTRED, samples)[1] == [1.0, -0.5, -0.5]


def test_sessions_of_others_are_excluded_by_removal_or_abortion() -> None:
    samples = [
        sample(0, 0, 1.0),
        sample(0, 1, 0.0),
        sample(0, 2, 0.0, remove_sample=True),
        SampleLike(group_index=0, rollout_id=3, reward=0.0, status=SampleStatus.ABORTED),
    ]
    assert post_process_rewards(CENTRED, samples)[1] == [0.5, -0.5, 0.0, 0.0]


def test_process_rewards_add_to_their_own_trace() -> None:
    told = [{"polar": {"excluded": "", "process_reward": extra}} for extra in (0.25, -0.25)]
    samples = [sample(0, 0, 1.0, metadata=told[0]), sample(0, 0, 1.0, metadata=told[1]), sample(0, 1, 0.0)]
    assert post_process_rewards(CENTRED, samples)[1] == [0.75, 0.25, -0.5]


def test_a_session_whose_traces_disagree_is_refused() -> None:
    with pytest.raises(ValueError, match="traces with different rewards"):
        post_process_rewards(CENTRED, [sample(0, 0, 1.0), sample(0, 0, 0.5)])


def test_the_same_session_id_in_two_groups_is_two_sessions() -> None:
    samples = [sample(group, session, float(group == session)) for group in (0, 1) for session in (0, 1)]
    assert post_process_rewards(CENTRED, samples)[1] == [0.5, -0.5, -0.5, 0.5]


def test_samples_without_a_session_id_are_sessions_by_themselves() -> None:
    assert post_process_rewards(CENTRED, [sample(0, None, 1.0), sample(0, None, 0.0)])[1] == [0.5, -0.5]


@pytest.mark.parametrize("told", [{"advantage_estimator": "ppo"}, {"rewards_normalization": False}])
def test_rewards_are_left_alone_where_slime_leaves_them_alone(told: dict[str, Any]) -> None:
    assert post_process_rewards(SlimeArgs(**told), [sample(0, 0, 1.0), sample(0, 1, 3.0)])[1] == [1.0, 3.0]


def test_rewards_by_key_are_read_by_it() -> None:
    samples = [SampleLike(group_index=0, rollout_id=i, reward={"score": float(i)}) for i in (0, 1)]
    assert post_process_rewards(SlimeArgs(reward_key="score"), samples)[0] == [0.0, 1.0]


def test_arguments_that_say_nothing_mean_grpo() -> None:
    raw, told = post_process_rewards(SimpleNamespace(), [sample(0, 0, 1.0), sample(0, 1, 0.0)])
    assert (raw, told) == ([1.0, 0.0], pytest.approx([0.7071, -0.7071], abs=1e-4))


def test_the_release_that_calls_a_session_group_id_is_understood() -> None:
    """slime v0.3.0 raises where `rollout_id` is read."""
    from dataclasses import dataclass

    @dataclass
    class Sample030:
        group_index: int
        group_id: int
        reward: float
        metadata: None = None
        remove_sample: bool = False
        status: SampleStatus = SampleStatus.COMPLETED

        @property
        def rollout_id(self) -> int:
            raise AttributeError("Sample.rollout_id is deprecated and write-only; use Sample.group_id instead.")

    samples = [Sample030(0, 7, 1.0), Sample030(0, 7, 1.0), Sample030(0, 8, 0.0)]
    assert post_process_rewards(CENTRED, samples)[1] == [0.5, 0.5, -0.5]
