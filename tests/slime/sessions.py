"""Sessions to convert, a service that has them ready, and a data source that draws prompts as slime's does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import anyio.lowlevel
import numpy as np

from polar_plugin.config import RolloutConfig
from polar_plugin.records import (
    Attempt,
    Evaluation,
    Failure,
    FinishReason,
    Message,
    Role,
    Status,
    Trace,
    Trajectory,
    VersionSpan,
    log_probs,
    mask,
    token_ids,
)

POLAR = {
    "engine": {"kind": "scripted"},
    "task": {"agent": {"harness": "shell", "command": "true"}},
    "groups": {"incomplete_group": {"train_if": 1}},
}


COUNTS = {"completions": 2, "sampled_tokens": 8, "delivered_tokens": 8, "trained_tokens": 4, "untrained_side": 4}


def trace(trained: int = 4, *, prompt: int = 3, context: int = 0, start: int = 10, **told: Any) -> Trace:
    """`prompt` prompt tokens, then `context` response tokens that are not trained, then `trained` that are."""
    length = context + trained
    is_trained = np.arange(length) >= context
    return Trace(
        prompt_ids=token_ids(range(start, start + prompt)),
        response_ids=token_ids(range(start + prompt, start + prompt + length)),
        loss_mask=mask(is_trained),
        response_logprobs=log_probs(np.where(is_trained, -0.5, 0.0)),
        **{
            "finish_reason": FinishReason.STOP,
            "versions": (VersionSpan("", context), VersionSpan("7", trained)),
            "response_messages": (Message("assistant", "done"),),
            "role": Role.MAIN,
            "metadata": {"break_reason": "first_call"},
            **told,
        },
    )


def trajectory(
    attempt: Attempt,
    reward: float | None = 1.0,
    traces: Sequence[Trace] | int = 1,
    status: Status = Status.COMPLETED,
    trace_rewards: tuple[float, ...] | None = None,
) -> Trajectory:
    """What the service would return of an attempt; an infrastructure failure has neither traces nor a grade."""
    timings = {"init": 1.0, "agent": 5.0, "evaluation": 2.0, "total": 9.0}
    if not status.gradable:
        return Trajectory(attempt, status, failure=Failure("init", "SandboxError", "no space left"), timings=timings)
    built = tuple(trace() for _ in range(traces)) if isinstance(traces, int) else tuple(traces)
    evaluation = None if reward is None else Evaluation(reward, trace_rewards)
    return Trajectory(attempt, status, built, evaluation, exit_code=0, timings=timings, counts=COUNTS)


Outcome = Callable[[Attempt], Trajectory]


@dataclass
class ReadyService:
    """A rollout service whose sessions have ended already."""

    outcome: Outcome
    counts: Counter[str] = field(default_factory=Counter[str])
    configs: list[RolloutConfig] = field(default_factory=list[RolloutConfig])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    opened: int = 0
    closed: int = 0

    def __call__(self, config: RolloutConfig) -> Self:
        self.configs.append(config)
        return self

    async def __aenter__(self) -> Self:
        self.opened += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.closed += 1

    async def run(
        self, attempts: Sequence[Attempt], *, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        self.attempts.extend(attempts)
        ended: list[Trajectory] = []
        for attempt in attempts:
            await anyio.lowlevel.checkpoint()
            ended.append(self.outcome(attempt))
            if on_done:
                on_done(ended[-1])
        self.counts["attempts"] += len(ended)
        return ended


@dataclass
class Prompts:
    """slime's data source, as far as a rollout function uses it: groups of samples with running indices."""

    make: Callable[..., Any]
    size: int
    drawn: int = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups: list[list[Any]] = []
        for _ in range(num_samples):
            first = self.drawn * self.size
            group = [
                self.make(
                    group_index=self.drawn, index=first + i, prompt=f"fix bug {self.drawn}", metadata={"limit": 3}
                )
                for i in range(self.size)
            ]
            self.drawn += 1
            groups.append(group)
        return groups


def scripted(table: Sequence[tuple[float | None, int] | Trajectory | Status]) -> Outcome:
    """Outcomes by the attempt's index: (reward, number of traces), or a bare status."""

    def outcome(attempt: Attempt) -> Trajectory:
        told = table[attempt.index]
        if isinstance(told, Status):
            return trajectory(attempt, reward=0.0, status=told)
        assert not isinstance(told, Trajectory)
        return trajectory(attempt, told[0], told[1])

    return outcome
