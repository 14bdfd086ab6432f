"""What the rollout function gives slime, and what it makes of a data source's samples."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError, MergeError, PolarError
from polar_plugin.records import Attempt, FinishReason, Role, Status, Trajectory, VersionSpan, log_probs, mask
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import SampleLike, SampleStatus, TrainOutput

from .sessions import POLAR, Outcome, Prompts, ReadyService, scripted, trace, trajectory


def rollout(
    outcome: Outcome, *, prompts: int = 1, size: int = 2, source: Any = None, service: Any = None, **args: Any
) -> TrainOutput:
    told = SlimeArgs(**{"polar": POLAR, "rollout_batch_size": prompts, "n_samples_per_prompt": size, **args})
    with slime_rollout.use_service(service or ReadyService(outcome)):
        return slime_rollout.generate(told, 3, source or Prompts(SampleLike, size))


def only(output: TrainOutput) -> Any:
    ((sample,),) = [session for prompt in output.samples for session in prompt]
    return sample


def good(attempt: Attempt) -> Trajectory:
    return trajectory(attempt)


def test_the_signature_is_slimes_own() -> None:
    parameters = inspect.signature(slime_rollout.generate).parameters
    assert list(parameters) == ["args", "rollout_id", "data_source", "evaluation"]
    assert parameters["evaluation"].default is False


def test_a_rollout_is_prompts_of_sessions_of_traces() -> None:
    output = rollout(scripted([(1.0, 3), (0.0, 1), (0.0, 1), (0.0, 2)]), prompts=2)
    assert [[len(session) for session in prompt] for prompt in output.samples] == [[3, 1], [1, 2]]
    ids = [[{sample.rollout_id for sample in session} for session in prompt] for prompt in output.samples]
    assert ids == [[{0}, {1}], [{2}, {3}]]
    assert [prompt[0][0].group_index for prompt in output.samples] == [0, 1]


def test_every_trace_carries_the_whole_reward_of_its_session() -> None:
    """Case 48: not the reward divided by the number of traces."""
    output = rollout(scripted([(0.75, 3)]), size=1)
    assert [sample.reward for sample in output.samples[0][0]] == [0.75, 0.75, 0.75]


def test_a_reward_key_wraps_the_reward() -> None:
    assert only(rollout(good, size=1, reward_key="score")).reward == {"score": 1.0}


def test_a_sample_says_all_that_slime_and_its_users_read() -> None:
    recorded = trace(2, prompt=2, context=1, start=5, role=Role.SUB_AGENT, metadata={"break_reason": "new_thread"})
    sample = only(rollout(lambda attempt: trajectory(attempt, 1.0, [recorded]), size=1))
    assert (sample.tokens, sample.response_length, sample.response) == ([5, 6, 7, 8, 9], 3, "done")
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0, 1, 1], [0.0, -0.5, -0.5])
    assert all(type(one) is int for one in [*sample.tokens, *sample.loss_mask])
    assert (sample.status, sample.weight_versions) == (SampleStatus.COMPLETED, ["7"])
    assert (sample.prompt, sample.index, sample.remove_sample) == ("fix bug 0", 0, False)
    assert sample.non_generation_time == 3.0
    assert sample.session_id.startswith("r3-g0-0-")
    assert sample.metadata == {
        "limit": 3,
        "polar": {
            "session_id": sample.session_id,
            "task_id": "prompt-0",
            "harness": "shell",
            "builder": "prefix_merging",
            "status": "completed",
            "excluded": "",
            "delivered_fraction": 1.0,
            "trained_fraction": 0.5,
            "role": "sub_agent",
            "break_reason": "new_thread",
            "trace": 0,
        },
    }


def test_the_data_sources_samples_are_left_as_they_were() -> None:
    source = Prompts(SampleLike, 1)
    drawn = source.get_samples(1)
    before = repr(drawn)

    class Again:
        def get_samples(self, num_samples: int) -> list[list[Any]]:
            return drawn

    output = rollout(scripted([(1.0, 2)]), size=1, source=Again())
    assert repr(drawn) == before
    first, second = output.samples[0][0]
    first.metadata["polar"]["seen"] = True
    assert "seen" not in second.metadata["polar"]


def test_placeholders_of_a_task_are_filled_from_the_sample_and_the_rollout() -> None:
    task = {
        "task_id": "{rollout_id}/{group_index}/{index}",
        "instruction": "{sample.prompt} as version {policy_version}, label {sample.label}",
        "timeout_seconds": "{sample.metadata.limit}",
        "agent": {"harness": "shell", "command": "true", "env": {"BATCH": "{args.rollout_batch_size} prompt"}},
        "metadata": {"key": "{session_id}"},
    }
    service = ReadyService(good)
    rollout(good, size=2, service=service, polar={**POLAR, "task": task})
    last = service.attempts[-1]
    assert (last.task.task_id, last.task.timeout_seconds) == ("3/0/1", 3)
    assert last.task.instruction == "fix bug 0 as version 3, label None"
    assert (last.task.agent.env, last.task.metadata) == ({"BATCH": "1 prompt"}, {"key": last.session_id})
    assert len({attempt.session_id for attempt in service.attempts}) == 2


def test_a_placeholder_that_no_sample_has_is_refused_by_path() -> None:
    polar = {**POLAR, "task": {**POLAR["task"], "instruction": "{sample.metadata.missing}"}}
    with pytest.raises(ConfigError, match=r"task\.instruction: unknown placeholder \{sample\.metadata\.missing\}"):
        rollout(good, polar=polar)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.COMPLETED, SampleStatus.COMPLETED),
        (Status.TRUNCATED, SampleStatus.TRUNCATED),
        (Status.TIMED_OUT, SampleStatus.TRUNCATED),
        (Status.FAILED, SampleStatus.FAILED),
    ],
)
def test_what_the_policy_did_is_trained_under_slimes_word_for_it(status: Status, expected: SampleStatus) -> None:
    sample = only(rollout(lambda attempt: trajectory(attempt, 0.5, status=status), size=1))
    assert (sample.status, sample.reward, sample.remove_sample, sum(sample.loss_mask)) == (expected, 0.5, False, 4)


def test_a_turn_cut_at_the_length_limit_is_truncated_and_keeps_its_reward() -> None:
    """Case 61."""
    cut = trace(finish_reason=FinishReason.LENGTH)
    sample = only(rollout(lambda attempt: trajectory(attempt, 0.5, [cut]), size=1))
    assert (sample.status, sample.reward) == (SampleStatus.TRUNCATED, 0.5)


@pytest.mark.parametrize("status", [Status.INFRA_ERROR, Status.ABORTED])
def test_an_infrastructure_failure_becomes_a_placeholder(status: Status) -> None:
    """Case 58: with log-probabilities, so that no estimator trips over it."""
    output = rollout(scripted([(1.0, 1), status]))
    assert [len(prompt) for prompt in output.samples] == [2]
    (hole,) = output.samples[0][1]
    assert (hole.tokens, hole.response_length, hole.loss_mask) == ([0, 0], 1, [0])
    assert (hole.rollout_log_probs, hole.reward, hole.remove_sample) == ([0.0], 0.0, True)
    assert (hole.status, hole.rollout_id) == (SampleStatus.ABORTED, 1)
    assert hole.metadata["polar"]["excluded"] == status.value


def test_one_timeout_of_eight_leaves_the_other_seven_in_training() -> None:
    """Case 59, with `on_timeout: exclude`."""

    def outcome(attempt: Attempt) -> Trajectory:
        return trajectory(
            attempt, float(attempt.index % 2), status=Status.TIMED_OUT if attempt.index == 5 else Status.COMPLETED
        )

    output = rollout(outcome, size=8, polar={**POLAR, "on_timeout": "exclude"})
    assert [bool(sum(session[0].loss_mask)) for session in output.samples[0]] == [True] * 5 + [False] + [True] * 2
    assert output.metrics is not None
    assert output.metrics["rollout/session/excluded/timed_out"] == 1


@pytest.mark.parametrize(("reward", "reason"), [(None, "ungraded"), (float("nan"), "ungraded"), (1.0, "no_traces")])
def test_a_session_that_cannot_be_graded_or_was_never_sampled_is_excluded(reward: float | None, reason: str) -> None:
    def outcome(attempt: Attempt) -> Trajectory:
        return trajectory(attempt) if attempt.index else trajectory(attempt, reward, 0 if reason == "no_traces" else 1)

    output = rollout(outcome)
    assert output.samples[0][0][0].metadata["polar"]["excluded"] == reason


def test_an_over_long_trace_keeps_its_first_tokens_as_recorded() -> None:
    recorded = replace(
        trace(9, prompt=3),
        loss_mask=mask([1, 0, 1, 1, 0, 1, 1, 1, 1]),
        response_logprobs=log_probs([-0.25, 0, -0.5, -1, 0, -2, -2, -2, -2]),
        versions=(VersionSpan("1", 2), VersionSpan("2", 4), VersionSpan("3", 3)),
    )
    output = rollout(lambda a: trajectory(a, 1.0, [recorded]), size=1, max_tokens_per_gpu=4, context_parallel_size=2)
    sample = only(output)
    assert (sample.tokens, sample.response_length) == ([10, 11, 12, 13, 14, 15, 16, 17], 5)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 1, 1, 0], [-0.25, 0.0, -0.5, -1.0, 0.0])
    assert (sample.status, sample.reward, sample.weight_versions) == (SampleStatus.TRUNCATED, 1.0, ["1", "2"])
    assert output.metrics is not None
    assert output.metrics["rollout/session/dropped/over_long_tokens"] == 4


def test_a_trace_whose_prompt_alone_is_too_long_is_dropped_and_counted() -> None:
    traces = [trace(4, prompt=20), trace(4)]
    output = rollout(lambda attempt: trajectory(attempt, 1.0, traces), size=1, max_tokens_per_gpu=10)
    assert len(only(output).tokens) == 7
    assert output.metrics is not None
    assert output.metrics["rollout/session/dropped/over_long_traces"] == 1
    assert output.metrics["rollout/session/dropped/over_long_tokens"] == 4


def test_a_trace_that_trains_nothing_is_dropped_and_counted() -> None:
    output = rollout(lambda attempt: trajectory(attempt, 1.0, [trace(0, context=3), trace(4)]), size=1)
    assert sum(only(output).loss_mask) == 4
    assert output.metrics is not None
    assert output.metrics["rollout/session/dropped/untrained_traces"] == 1


def test_a_graded_session_with_nothing_left_to_train_still_votes() -> None:
    def outcome(attempt: Attempt) -> Trajectory:
        return trajectory(attempt, 1.0, [trace(4, prompt=20 if attempt.index == 0 else 3)])

    (hole,), _ = rollout(outcome, max_tokens_per_gpu=10).samples[0]
    assert (hole.remove_sample, hole.reward, hole.metadata["polar"]["excluded"]) == (True, 1.0, "")


def test_a_rollout_of_which_nothing_can_be_trained_stops_the_run() -> None:
    """Case 62: with the first failure in the message."""
    with pytest.raises(PolarError, match=r"none of 2 sessions can be trained \(\{'infra_error': 2\}\).*no space left"):
        rollout(scripted([Status.INFRA_ERROR, Status.INFRA_ERROR]))


def test_a_log_probability_that_is_not_finite_is_an_error_that_names_the_session() -> None:
    broken = replace(trace(2), response_logprobs=log_probs([-0.5, float("nan")]))
    with pytest.raises(MergeError, match=r"session r3-g0-0-\w+, trace 0: the log-probabilities must be 2 finite"):
        rollout(lambda attempt: trajectory(attempt, 1.0, [broken]))


def test_metrics_count_sessions_not_traces() -> None:
    table: list[Any] = [(1.0, 5), (0.0, 1), (0.0, 1), Status.INFRA_ERROR]
    service = ReadyService(scripted(table))
    metrics = rollout(good, prompts=2, service=service).metrics
    assert metrics is not None
    told = {name.removeprefix("rollout/session/"): value for name, value in metrics.items()}
    assert told["reward"] == pytest.approx(1 / 3)
    assert (told["traces"], told["trained_tokens"], told["context_tokens"]) == (7 / 4, 7.0, (5 * 3 + 3 + 3 + 2) / 4)
    assert (told["status/completed"], told["status/infra_error"], told["excluded"]) == (0.75, 0.25, 0.25)
    assert (told["dropped/sessions"], told["count/completions"]) == (1, 6)
    assert (told["delivered_fraction"], told["trained_fraction"]) == (1.0, 0.5)  # of sessions that sampled anything
    assert (told["uninformative_groups"], told["pass@1"], told["pass@2"]) == (0.5, 0.25, 0.5)
    assert told["seconds/agent"] == 5.0
    assert told["rollout/service/attempts"] == 4
    assert all(type(value) is float for value in metrics.values())


def test_samples_without_indices_are_numbered_by_position() -> None:
    def bare(**_: Any) -> SampleLike:
        return SampleLike(prompt="p")

    output = rollout(good, prompts=2, source=Prompts(bare, 2))
    flat = [sample for prompt in output.samples for (sample,) in prompt]
    assert [(s.group_index, s.rollout_id, s.index) for s in flat] == [(0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 3, 3)]


def test_a_prompt_of_one_message_is_its_text() -> None:
    service = ReadyService(good)
    source = Prompts(lambda **told: SampleLike(**{**told, "prompt": [{"role": "user", "content": "fix it"}]}), 2)
    rollout(good, source=source, service=service)
    assert service.attempts[0].task.instruction == "fix it"


def test_a_data_source_that_gives_too_little_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"groups of \[3\] samples, not 1 .* of .* 2"):
        rollout(good, source=Prompts(SampleLike, 3))


def test_without_arguments_there_is_no_rollout() -> None:
    with pytest.raises(ConfigError, match="slime passed no arguments"):
        slime_rollout.generate(None, 2, Prompts(SampleLike, 2), evaluation=False)
