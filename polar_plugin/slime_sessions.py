"""From slime's samples to attempts and, when those have ended, back: what every rollout function of ours does."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from .config import RolloutConfig, load_task
from .errors import ConfigError, PolarError
from .records import Attempt, Trajectory
from .slime_args import SlimeArgs
from .slime_samples import Conversion, SessionSamples, convert
from .slime_types import session_field

Groups = list[list[Any]]
"""The data source's samples: prompt x session."""


@dataclass(frozen=True)
class Call:
    """One call of a rollout function."""

    args: Any
    told: SlimeArgs
    config: RolloutConfig
    rollout_id: int
    dataset: str | None = None
    """The evaluation's; None: training."""

    @property
    def conversion(self) -> Conversion:
        how = Conversion(self.told.reward_key, on_timeout=self.config.on_timeout)
        if self.dataset is not None:
            return how
        top_p = "top_p" in self.config.engine.replay
        return replace(how, max_tokens=self.told.max_trace_tokens, experts=self.told.experts, top_p=top_p)

    def attempts(self, slots: Sequence[Any], group: int, first: int) -> list[Attempt]:
        """One for each sample of a group, the `group`th of the call; `first` is the position of the first sample."""
        return [self._attempt(slot, group, first + place) for place, slot in enumerate(slots)]

    def converted(self, slots: Sequence[Any], trajectories: Sequence[Trajectory]) -> list[SessionSamples]:
        """A group's sessions, in the order of its samples; see `numbered` for their ids."""
        ids = [trajectory.attempt.index for trajectory in trajectories]
        return [convert(*each, self.conversion) for each in zip(trajectories, slots, ids, strict=True)]

    def _attempt(self, slot: Any, group: int, index: int) -> Attempt:
        group_index = group if slot.group_index is None else slot.group_index
        session_id = f"r{self.rollout_id}-g{group_index}-{index}-{uuid.uuid4().hex[:12]}"
        evaluation = self.dataset is not None
        known: dict[str, Any] = {
            "args": self.args,
            "rollout_id": self.rollout_id,
            "evaluation": evaluation,
            **({"dataset": self.dataset} if evaluation else {}),
            "sample": {**vars(slot), "prompt": _prompt(slot.prompt)},
            "group_index": group_index,
            "index": index,
            "session_id": session_id,
            "policy_version": self.rollout_id,
        }
        template = self.config.eval_task if evaluation and self.config.eval_task is not None else self.config.task
        task = load_task({"task_id": "prompt-{group_index}", "instruction": "{sample.prompt}", **template}, known)
        return Attempt(session_id, task, group_index, index, self.rollout_id, evaluation=evaluation)


def slots_of(drawn: Sequence[Sequence[Any]], size: int, wanted: int) -> Groups:
    """What a data source gave, one sample a session: of a session that comes back with its traces, the first stands.

    Raises ConfigError where that is not `wanted` groups of `size`.
    """
    groups = [[each[0] if isinstance(each, list) else each for each in group] for group in drawn]
    if len(groups) != wanted or any(len(group) != size for group in groups):
        raise ConfigError(
            f"the data source gave groups of {[len(group) for group in groups]} samples, not {wanted} "
            f"(--rollout-batch-size, --over-sampling-batch-size) of --n-samples-per-prompt {size}"
        )
    return groups


def numbered(groups: Sequence[Sequence[SessionSamples]]) -> None:
    """Give slime its session ids: the samples' own indices where each has one of its own, else their positions."""
    sessions = [session for group in groups for session in group]
    indices = [session.samples[0].index for session in sessions]
    distinct = None not in indices and len(set(indices)) == len(indices)
    for number, session in zip(indices if distinct else range(len(indices)), sessions, strict=True):
        for sample in session.samples:
            setattr(sample, session_field(sample), number)


def trains(group: Sequence[SessionSamples]) -> bool:
    """Whether it has a single trained token."""
    return any(any(sample.loss_mask) for session in group for sample in session.samples)


def nothing_to_train(groups: Sequence[Sequence[SessionSamples]], rollout_id: int) -> PolarError:
    sessions = [session for group in groups for session in group]
    reasons = Counter(session.excluded or "nothing to train" for session in sessions)
    failures = [s.trajectory.failure for s in sessions if s.trajectory.failure]
    first = (
        f"; the first failure: [{failures[0].boundary}] {failures[0].kind}: {failures[0].message}" if failures else ""
    )
    return PolarError(f"rollout {rollout_id}: none of {len(sessions)} sessions can be trained ({dict(reasons)}){first}")


def check_complete(attempts: Sequence[Attempt], trajectories: Sequence[Trajectory]) -> None:
    asked = [attempt.session_id for attempt in attempts]
    got = [trajectory.attempt.session_id for trajectory in trajectories]
    if asked != got:
        raise PolarError(f"the service returned {len(got)} trajectories that do not match {len(asked)} attempts")


def _prompt(prompt: Any) -> Any:
    """The text of a prompt that is one message; any other shape is left for the task's validation to refuse."""
    if isinstance(prompt, str):
        return prompt
    messages = cast("Sequence[Mapping[str, Any]]", prompt)
    return messages[0].get("content") if len(messages) == 1 else messages
