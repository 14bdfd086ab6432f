"""Trajectories to slime's samples: one a trace, all of a session under one `rollout_id`. No I/O.

Samples are copies of the data source's own, so their class is slime's where slime is there; see `slime_types`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from .errors import EvaluationError, MergeError
from .merge.traces import first_spans
from .records import Experts, FinishReason, Message, Status, Trace, Trajectory
from .slime_types import METADATA_KEY, session_field, session_of

_STATUS = {
    Status.COMPLETED: "completed",
    Status.TRUNCATED: "truncated",
    Status.TIMED_OUT: "truncated",
    Status.FAILED: "failed",
    Status.INFRA_ERROR: "aborted",
    Status.ABORTED: "aborted",
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What the trainer asks of samples."""

    reward_key: str | None = None
    max_tokens: int | None = None
    """The longest trace the trainer takes; None: any."""
    on_timeout: Literal["train", "exclude"] = "train"
    experts: tuple[int, int] | None = None
    """Layers, and experts a token, where the trainer replays the router."""
    top_p: bool = False
    """Whether the trainer replays what top-p left to draw from."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionSamples:
    """One session as the trainer gets it."""

    trajectory: Trajectory
    samples: list[Any]
    """One a trace; a single placeholder without a trained token where there is none to train."""
    reward: float
    excluded: str = ""
    """Why it leaves the baseline; "" where it counts."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """What is not trained, by reason: `over_long_traces`, `over_long_tokens`, `untrained_traces`, `sessions`.

    `unroutable_traces`, `choiceless_traces` and `unreplayable_tokens` lack what the trainer replays.
    """


def convert(trajectory: Trajectory, slot: Any, rollout_id: int, how: Conversion) -> SessionSamples:
    """The samples of one session. `slot` is the data source's sample for it: copied, never changed.

    Every trace carries the session's whole outcome reward; the baseline is taken over sessions, so the number of
    traces must not enter. An excluded session, and one with nothing left to train, becomes a placeholder, so that the
    number of sessions stays what slime's batch size counts on.
    """
    excluded = exclusion(trajectory, how.on_timeout)
    traces, dropped = ((), Counter[str]()) if excluded else _trainable(trajectory.traces, how)
    reward = 0.0 if excluded else float(cast("float", trajectory.reward))
    if excluded:
        dropped["sessions"] += 1
    common = _common(trajectory, slot, rollout_id, _keyed(reward, how), excluded)
    process = _process_rewards(trajectory)
    samples = [_sample(common, trace, position, process, how) for position, trace in traces]
    samples = samples or [_placeholder(common, how)]
    return SessionSamples(trajectory, samples, reward, excluded, dict(dropped))


def exclusion(trajectory: Trajectory, on_timeout: Literal["train", "exclude"]) -> str:
    """Why the session says nothing about the policy; "" where it does."""
    if not trajectory.status.gradable:
        return trajectory.status.value
    if trajectory.status is Status.TIMED_OUT and on_timeout == "exclude":
        return trajectory.status.value
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        return "ungraded"
    return "" if trajectory.traces else "no_traces"


def validate(groups: Sequence[Sequence[SessionSamples]]) -> None:
    """Check all that slime takes on trust; raises MergeError that names the session."""
    owners: dict[Any, str] = {}
    for session in (session for group in groups for session in group):
        name = session.trajectory.attempt.session_id
        if not session.samples:
            raise MergeError(f"session {name}: no sample, not even a placeholder")
        for position, sample in enumerate(session.samples):
            if fault := _fault(sample):
                raise MergeError(f"session {name}, trace {position}: {fault}")
            owner = owners.setdefault(session_of(sample), name)
            if owner != name:
                raise MergeError(f"sessions {owner} and {name} share the rollout id {session_of(sample)}")


def _trainable(traces: Sequence[Trace], how: Conversion) -> tuple[Sequence[tuple[int, Trace]], Counter[str]]:
    """The traces that train something, with their positions, cut to the longest that the trainer takes."""
    kept: list[tuple[int, Trace]] = []
    dropped = Counter[str]()
    for position, trace in enumerate(traces):
        if lacking := _lacking(trace, how):
            dropped[lacking] += 1
            dropped["unreplayable_tokens"] += trace.trained
            continue
        cut = clipped(trace, how.max_tokens)
        dropped["over_long_tokens"] += trace.trained - (cut.trained if cut else 0)
        if cut and cut.trained:
            kept.append((position, cut))
        else:
            dropped["over_long_traces" if trace.trained else "untrained_traces"] += 1
    return kept, +dropped


def _lacking(trace: Trace, how: Conversion) -> str:
    """What the trainer would replay and the engine did not tell of it; "" where all is there."""
    if not trace.trained:
        return ""
    if how.experts and trace.routing is None:
        return "unroutable_traces"
    return "choiceless_traces" if how.top_p and trace.nucleus is None else ""


def clipped(trace: Trace, limit: int | None) -> Trace | None:
    """Its first `limit` tokens, still exact since they depend on nothing behind; None where no response is left."""
    if limit is None or len(trace.prompt_ids) + len(trace.response_ids) <= limit:
        return trace
    room = limit - len(trace.prompt_ids)
    if room < 1:
        return None
    return replace(
        trace,
        response_ids=trace.response_ids[:room],
        loss_mask=trace.loss_mask[:room],
        response_logprobs=trace.response_logprobs[:room],
        versions=first_spans(trace.versions, room),
        routing=None if trace.routing is None else trace.routing[: limit - 1],
        nucleus=trace.nucleus and trace.nucleus.first(room),
        finish_reason=FinishReason.LENGTH,
    )


def _common(trajectory: Trajectory, slot: Any, rollout_id: int, reward: Any, excluded: str) -> Any:
    """A copy of `slot` with what all samples of the session share."""
    attempt = trajectory.attempt
    sample = copy.copy(slot)
    setattr(sample, session_field(sample), rollout_id)
    sample.group_index = attempt.group_index
    sample.index = attempt.index if slot.index is None else slot.index
    sample.session_id = attempt.session_id
    sample.reward = reward
    sample.status = type(slot).Status(_STATUS[trajectory.status])
    sample.remove_sample = bool(excluded)
    sample.non_generation_time = _non_generation_time(trajectory)
    sample.metadata = {
        **(slot.metadata or {}),
        METADATA_KEY: {
            "session_id": attempt.session_id,
            "task_id": attempt.task.task_id,
            "harness": attempt.task.agent.plugin,
            "builder": attempt.task.builder.strategy,
            "status": trajectory.status.value,
            "excluded": excluded,
            "delivered_fraction": trajectory.delivered_fraction,
            "trained_fraction": trajectory.trained_fraction,
        },
    }
    return sample


def _sample(common: Any, trace: Trace, position: int, process: Sequence[float] | None, how: Conversion) -> Any:
    sample = _copy(common, role=trace.role.value, break_reason=trace.metadata.get("break_reason", ""), trace=position)
    if process is not None:
        sample.metadata[METADATA_KEY]["process_reward"] = process[position]
    if trace.finish_reason is FinishReason.LENGTH and sample.status is type(sample).Status.COMPLETED:
        sample.status = type(sample).Status.TRUNCATED
    sample.tokens = np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
    sample.response = _text(trace.response_messages)
    sample.response_length = len(trace.response_ids)
    sample.loss_mask = trace.loss_mask.astype(int).tolist()
    sample.rollout_log_probs = trace.response_logprobs.tolist()
    sample.weight_versions = [span.version for span in trace.versions if span.version]
    if how.experts and trace.routing is not None:
        sample.rollout_routed_experts = _experts(trace.routing, how.experts)
    if how.top_p and trace.nucleus is not None:
        sample.rollout_top_p_token_ids = trace.nucleus.ids.tolist()
        sample.rollout_top_p_token_offsets = trace.nucleus.offsets.tolist()
    return sample


def _experts(routing: Experts, shape: tuple[int, int]) -> NDArray[np.int32]:
    """int32 [tokens - 1, layers, experts a token], as slime's trainer takes them."""
    layers, chosen = shape
    if routing.shape[1] != layers * chosen:
        raise MergeError(
            f"the engine told {routing.shape[1]} experts a token, but --num-layers {layers} x --moe-router-topk"
            f" {chosen} are {layers * chosen}: trainer and engine hold different models"
        )
    return routing.astype(np.int32).reshape(-1, layers, chosen)


def _placeholder(common: Any, how: Conversion) -> Any:
    """Holds a session's place in the batch: one prompt token, one response token, nothing trained."""
    sample = _copy(common)
    if how.experts:  # those of no token; slime refuses rows that are all 0
        layers, chosen = how.experts
        sample.rollout_routed_experts = np.tile(np.arange(chosen, dtype=np.int32), (1, layers, 1))
    if how.top_p:
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [], [0, 0]
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [0], [0.0], []
    sample.remove_sample = True
    return sample


def _copy(common: Any, **told: Any) -> Any:
    """A copy that shares nothing its owner may change in place."""
    sample = copy.copy(common)
    for counters in ("spec_info", "prefix_cache_info"):
        if hasattr(sample, counters):
            setattr(sample, counters, type(getattr(sample, counters))())
    sample.metadata = {**common.metadata, METADATA_KEY: {**common.metadata[METADATA_KEY], **told}}
    return sample


def _keyed(reward: float, how: Conversion) -> Any:
    return {how.reward_key: reward} if how.reward_key else reward


def _process_rewards(trajectory: Trajectory) -> Sequence[float] | None:
    rewards = trajectory.evaluation.trace_rewards if trajectory.evaluation else None
    if rewards is not None and len(rewards) != len(trajectory.traces):
        raise EvaluationError(
            f"session {trajectory.attempt.session_id}: the evaluator gave {len(rewards)} trace rewards for "
            f"{len(trajectory.traces)} traces"
        )
    return rewards


def _non_generation_time(trajectory: Trajectory) -> float:
    """Seconds in which no completion was being sampled; without a session, those of all stages but the agent's."""
    timings = trajectory.timings
    if trajectory.session is None:
        return sum(seconds for stage, seconds in timings.items() if stage not in ("agent", "total"))
    generating = sum(completion.ended - completion.started for completion in trajectory.session.completions)
    return max(0.0, timings.get("total", 0.0) - generating)


def _text(messages: Sequence[Message]) -> str:
    """For logs only: training reads ids."""
    parts = [
        part
        for message in messages
        for part in (message.reasoning, message.content, *(f"{c.name}({c.arguments})" for c in message.tool_calls))
    ]
    return "\n".join(part for part in parts if part)


def _fault(sample: Any) -> str:
    """What slime's conversion or its trainer would trip over, or train wrongly on, without saying where."""
    length, mask, log_probs = sample.response_length, sample.loss_mask, sample.rollout_log_probs
    if not isinstance(sample.tokens, list) or not 1 <= length < len(sample.tokens):
        return (
            f"{length} response tokens of {len(sample.tokens)}: at least one prompt and one response token are needed"
        )
    if mask is None or len(mask) != length or not set(mask) <= {0, 1}:
        return f"the loss mask must be {length} zeros and ones"
    if log_probs is None or len(log_probs) != length or not np.isfinite(log_probs).all():
        return f"the log-probabilities must be {length} finite numbers"
    if min(sample.tokens) < 0:
        return "negative token id"
    if fault := _replay_fault(sample):
        return fault
    rewards = sample.reward.values() if isinstance(sample.reward, dict) else [sample.reward]
    if not all(isinstance(reward, float) and math.isfinite(reward) for reward in rewards):
        return f"the reward {sample.reward!r} is not a finite float"
    return "" if isinstance(sample.response, str) else "the response must be a str"


def _replay_fault(sample: Any) -> str:
    experts, offsets = (getattr(sample, f"rollout_{name}", None) for name in ("routed_experts", "top_p_token_offsets"))
    if experts is not None and len(experts) != len(sample.tokens) - 1:
        return f"{len(experts)} rows of experts, but {len(sample.tokens)} tokens need {len(sample.tokens) - 1}"
    if offsets is not None and len(offsets) != sample.response_length + 1:
        return f"the choices are of {len(offsets) - 1} tokens, but the response has {sample.response_length}"
    return ""
