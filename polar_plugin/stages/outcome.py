"""What an attempt has come to so far, and what it is worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import EvaluationError
from ..merge.traces import unbuilt
from ..records import Attempt, CompletionSession, Evaluation, Failure, Status, Trace, Trajectory


@dataclass(slots=True)
class SoFar:
    """Mutable: wherever an attempt ends, this makes its Trajectory."""

    status: Status = Status.COMPLETED
    failure: Failure | None = None
    exit_code: int | None = None
    session: CompletionSession | None = None
    artifact: bytes | None = None
    """None until the agent's sandbox has given what is to be graded."""
    traces: tuple[Trace, ...] = ()
    evaluation: Evaluation | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    """What went on in the stages; what became of the tokens is in `tokens`."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])

    def graded(self, evaluation: Evaluation) -> None:
        """Raises EvaluationError where its rewards do not fit the traces."""
        self.traces = rewarded(self.traces, evaluation)
        self.evaluation = evaluation
        if evaluation.report.get("reason") == "empty_patch":
            self.counts["empty_patch"] += 1
            if self.status is Status.COMPLETED:
                self.status = Status.FAILED
                self.failure = Failure("agent", "empty_patch", "it ended well and left nothing to grade")

    def trajectory(self, attempt: Attempt, timings: Mapping[str, float]) -> Trajectory:
        return Trajectory(
            attempt=attempt,
            status=self.status,
            traces=self.traces,
            evaluation=self.evaluation,
            failure=self.failure,
            exit_code=self.exit_code,
            timings=dict(timings),
            counts={**self.tokens, **self.counts},
            session=self.session,
        )

    def cut(self, attempt: Attempt, timings: Mapping[str, float], status: Status, failure: Failure) -> Trajectory:
        """Where it was cancelled; tokens that were sampled are counted as `untrained_STATUS`."""
        tokens = unbuilt(self.session, status.value)
        cut = replace(self, status=status, failure=failure, traces=(), evaluation=None, tokens=tokens)
        return cut.trajectory(attempt, timings)


def rewarded(traces: Sequence[Trace], evaluation: Evaluation) -> tuple[Trace, ...]:
    """Traces with their rewards: one each where the evaluator graded them, else the outcome on all.

    Raises EvaluationError where their number does not fit, or one is not finite: a NaN would spoil its whole batch.
    """
    rewards = evaluation.trace_rewards
    if rewards is None:
        rewards = (evaluation.outcome_reward,) * len(traces)
    if not all(map(math.isfinite, (evaluation.outcome_reward, *rewards))):
        raise EvaluationError(f"rewards must be finite, got {evaluation.outcome_reward} and {rewards}")
    if len(rewards) != len(traces):
        raise EvaluationError(f"the evaluator gave {len(rewards)} trace rewards for {len(traces)} traces")
    return tuple(replace(trace, reward=float(reward)) for trace, reward in zip(traces, rewards, strict=True))
