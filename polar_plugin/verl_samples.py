"""Trajectories to verl's rows: one a trace, the primary one last, each with the same keys. No I/O, no verl."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from .errors import MergeError
from .records import Role, Trace, Trajectory
from .slime_samples import clipped, exclusion
from .verl_engine import global_steps

METADATA_KEY = "polar"
"""Where a row's `extra_fields` say which session it is of."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One session as verl gets it."""

    rows: list[dict[str, Any]]
    """The arguments of an `AgentLoopOutput` each; empty where there is nothing to train."""
    reward: float
    excluded: str = ""
    """Why it leaves the baseline; "" where it counts."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """What is not trained, by reason: `over_long_traces`, `over_long_tokens`, `untrained_traces`."""


def convert(
    trajectory: Trajectory, *, step: int, max_tokens: int | None, on_timeout: Literal["train", "exclude"] = "train"
) -> Rows:
    """The rows of one session.

    `step` is verl's global step that asked for it, the weight version of rows whose engine told none. `max_tokens` is
    the longest row that fits a micro-batch: longer traces keep their first tokens, which depend on nothing behind.
    Raises MergeError where a row would crash verl's trainer, or train wrongly.
    """
    excluded = exclusion(trajectory, on_timeout)
    if excluded:
        return Rows([], 0.0, excluded)
    kept, dropped = _trainable(trajectory.traces, max_tokens)
    reward = float(cast("float", trajectory.reward))
    rows = [_row(trajectory, position, trace, reward, step) for position, trace in _primary_last(kept)]
    for row in rows:
        _check(row, trajectory.attempt.session_id)
    return Rows(rows, reward, "" if rows else "no_traces", dict(+dropped))


def _trainable(traces: Sequence[Trace], limit: int | None) -> tuple[list[tuple[int, Trace]], Counter[str]]:
    kept: list[tuple[int, Trace]] = []
    dropped = Counter[str]()
    for position, trace in enumerate(traces):
        cut = clipped(trace, limit)
        dropped["over_long_tokens"] += trace.trained - (cut.trained if cut else 0)
        if cut and cut.trained:
            kept.append((position, cut))
        else:
            dropped["over_long_traces" if trace.trained else "untrained_traces"] += 1
    return kept, dropped


def _primary_last(traces: Sequence[tuple[int, Trace]]) -> list[tuple[int, Trace]]:
    """verl reads a session's advantage, its metrics and its validation off the last row.

    That is the main agent's longest trace; where none of its is left, the longest of all.
    """
    if not traces:
        return []
    primary = max(traces, key=lambda one: (one[1].role is Role.MAIN, one[1].trained))
    return [*(one for one in traces if one is not primary), primary]


def _row(trajectory: Trajectory, position: int, trace: Trace, reward: float, step: int) -> dict[str, Any]:
    oldest, newest = global_steps(trace.versions, step)
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": trace.response_ids.tolist(),
        "response_mask": trace.loss_mask.astype(int).tolist(),
        "response_logprobs": trace.response_logprobs.tolist(),
        "reward_score": reward,
        "num_turns": max(1, len(trace.prompt_messages) + len(trace.response_messages)),
        "metrics": _metrics(trajectory),
        "extra_fields": {
            "reward_extra_info": {"acc": reward},
            "global_steps": newest,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            METADATA_KEY: _metadata(trajectory, position, trace),
        },
    }


def _metrics(trajectory: Trajectory) -> dict[str, float]:
    """Seconds, under verl's names: sampling, the rest of the agent's time, grading."""
    session, timings = trajectory.session, trajectory.timings
    sampling = sum(one.ended - one.started for one in session.completions) if session else 0.0
    return {
        "generate_sequences": sampling,
        "tool_calls": max(0.0, timings.get("agent", 0.0) - sampling),
        "compute_score": timings.get("evaluation", 0.0),
    }


def _metadata(trajectory: Trajectory, position: int, trace: Trace) -> dict[str, Any]:
    attempt, evaluation = trajectory.attempt, trajectory.evaluation
    process = evaluation.trace_rewards if evaluation else None
    return {
        "session_id": attempt.session_id,
        "task_id": attempt.task.task_id,
        "harness": attempt.task.agent.plugin,
        "builder": attempt.task.builder.strategy,
        "status": trajectory.status.value,
        "role": trace.role.value,
        "break_reason": str(trace.metadata.get("break_reason", "")),
        "trace": position,
        "process_reward": 0.0 if process is None else float(process[position]),
        "delivered_fraction": trajectory.delivered_fraction,
        "trained_fraction": trajectory.trained_fraction,
    }


def _check(row: Mapping[str, Any], session_id: str) -> None:
    lengths = {len(row[name]) for name in ("response_ids", "response_mask", "response_logprobs")}
    fault = ""
    if not row["prompt_ids"] or len(lengths) != 1 or 0 in lengths:
        fault = "prompt and response need at least one token each, and the response's lists one length"
    elif not all(map(math.isfinite, row["response_logprobs"])):
        fault = "a log-probability is not finite"
    elif min(row["prompt_ids"]) < 0 or min(row["response_ids"]) < 0:
        fault = "a token id is negative"
    if fault:
        raise MergeError(f"session {session_id}: {fault}")
