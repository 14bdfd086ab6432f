"""What becomes of a group, the attempts at one prompt, that the infrastructure took attempts from.

In this order: the attempt is run again at once (`retries`, in `batch`), then refilled, each sample by itself, so that
the group stays whole; what cannot be refilled leaves the group, which is then trained or dropped as a whole
(`GroupPolicy.trains`). None of it is ever a reward of 0. Pure: `batch` waits and ends, a bridge to a trainer asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..records import Attempt, Status, Trajectory


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """`config.GroupsConfig`, as the stages and the bridges need it."""

    refills: int = 0
    """How often one sample is refilled."""
    refill_pause: float = 0.0
    """Seconds before the first refill, doubled with each: what broke the attempt may be over by then."""
    train_if: int | None = 2
    """How many usable attempts an incomplete group must have to be trained; None: it is dropped."""
    min_usable: int | None = None
    """With how many usable attempts a group is done, so that the others are ended. None: all are waited for."""
    on_timeout: Literal["train", "exclude"] = "train"

    def usable(self, trajectory: Trajectory) -> bool:
        """Whether it has a reward and something to train, and takes part in the baseline."""
        if trajectory.status is Status.TIMED_OUT and self.on_timeout == "exclude":
            return False
        return trajectory.status.gradable and trajectory.reward is not None and bool(trajectory.traces)

    def trains(self, group: Sequence[Trajectory]) -> bool:
        """Whether an ended group is trained; `group` has one Trajectory a sample.

        A group from which nothing was lost (no infrastructure error, none aborted) always is.
        """
        if all(trajectory.status.gradable for trajectory in group):
            return True
        return self.train_if is not None and sum(map(self.usable, group)) >= self.train_if


class Groups:
    """Mutable: what the groups of one batch have come to."""

    def __init__(self, attempts: Sequence[Attempt], policy: GroupPolicy) -> None:
        self._policy = policy
        self._usable: Counter[int] = Counter()
        self._under_way: dict[int, dict[str, Attempt]] = {}
        for attempt in attempts:
            self._under_way.setdefault(attempt.group_index, {})[attempt.session_id] = attempt

    def refill(self, trajectory: Trajectory, made: int) -> float | None:
        """Seconds until a sample that was lost, and refilled `made` times, is run once more; None: it is not."""
        if made >= self._policy.refills or self._done(trajectory.attempt):
            return None
        return self._policy.refill_pause * 2**made

    def ended(self, trajectory: Trajectory) -> tuple[str, ...]:
        """Note how an attempt ended; returns the session ids of stragglers, which are to be ended now."""
        attempt = trajectory.attempt
        group = self._under_way[attempt.group_index]
        group.pop(attempt.session_id, None)
        self._usable[attempt.group_index] += self._policy.usable(trajectory)
        return tuple(group) if self._done(attempt) else ()

    def _done(self, attempt: Attempt) -> bool:
        """An evaluation's denominator is fixed: none of its attempts is a straggler."""
        least = self._policy.min_usable
        return least is not None and not attempt.evaluation and self._usable[attempt.group_index] >= least
