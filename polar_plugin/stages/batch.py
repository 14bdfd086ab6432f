"""A batch: many attempts side by side, and exactly one Trajectory for each that was admitted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio
from anyio.abc import ObjectSendStream

from ..errors import ConfigError, MergeError, PolarError
from ..records import Attempt, Failure, Status, Trajectory
from .stage import failure_of

_log = logging.getLogger("polar_plugin.stages")
_FUTILE = frozenset({ConfigError.__name__, MergeError.__name__})
"""Kinds of failure that would only fail again: a wrong setting, a fault of ours."""
ON_REQUEST = Failure("batch", "aborted", "aborted on request")
STRAGGLER = Failure("batch", "straggler", "its group had enough usable attempts (groups.min_usable)")
STOPPING = Failure("batch", "stopping", "it had not started when the service was told to stop")


class Grouping(Protocol):
    """What attempts owe to others of their group; `groups.Groups` is one."""

    def refill(self, trajectory: Trajectory, made: int) -> float | None:
        """Seconds until a sample that was lost, and refilled `made` times, is run once more; None: it is not."""
        ...

    def ended(self, trajectory: Trajectory) -> Iterable[str]:
        """Takes how an attempt ended; the session ids of stragglers, which are ended now."""
        ...


class Ungrouped:
    """Each attempt by itself."""

    def refill(self, trajectory: Trajectory, made: int) -> None:
        return None

    def ended(self, trajectory: Trajectory) -> tuple[str, ...]:
        return ()


class Run(Protocol):
    """One execution of an attempt."""

    @property
    def state(self) -> str:
        """Where it is: "queued", "init", "ready", "agent", ..., "done"."""
        ...

    async def run(self) -> Trajectory:
        """Run to the end. Whatever fails is in the Trajectory; only cancellation leaves as an exception."""
        ...

    def cut_short(self, status: Status, failure: Failure) -> Trajectory:
        """What there was when `run` was cancelled."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    attempt: Attempt
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    run: Run | None = None
    ends_by: Failure = ON_REQUEST
    lost: Counter[str] = field(default_factory=Counter[str])

    def cut_short(self, status: Status, failure: Failure) -> Trajectory:
        if self.run is None:
            return Trajectory(self.attempt, status, failure=failure)
        return self.run.cut_short(status, failure)

    @property
    def state(self) -> str:
        return self.run.state if self.run else "queued"

    def abort(self, why: Failure) -> None:
        self.ends_by = why
        self.scope.cancel()


class Batch:
    """Mutable: counters, and what is under way. Lives on one event loop."""

    def __init__(
        self, start: Callable[[Attempt], Run], *, admitted: int, retries: int = 0, groups: Grouping | None = None
    ) -> None:
        """`start` makes an execution of an attempt, as `attempt.Script`, and a new one for each retry.

        `admitted` bounds how many attempts are under way or not yet consumed; `retries` is how often an attempt is run
        again at once after an infrastructure error, `groups` says whether and when it is after those.
        """
        self._start = start
        self._retries = retries
        self._groups = groups or Ungrouped()
        self._stopping = False
        self._admission = anyio.CapacityLimiter(admitted)
        self._entries: dict[str, _Entry] = {}
        self.counts: Counter[str] = Counter()
        """`admitted`, and how many ended in each status."""

    @property
    def states(self) -> dict[str, str]:
        """Where each attempt is that is not over yet, by session id."""
        return {name: entry.state for name, entry in self._entries.items()}

    def abort(self, session_id: str, why: Failure = ON_REQUEST) -> None:
        """End one attempt: its Trajectory has status ABORTED and what was recorded. No effect where it is over.

        One that is not admitted yet will end so without having started.
        """
        if entry := self._entries.get(session_id):
            entry.abort(why)

    def abort_task(self, task_id: str) -> None:
        """End all attempts at one task."""
        for entry in self._entries.values():
            if entry.attempt.task.task_id == task_id:
                entry.abort(ON_REQUEST)

    def abort_all(self) -> None:
        for entry in self._entries.values():
            entry.abort(ON_REQUEST)

    def stop(self) -> None:
        """Start nothing more: what has a sandbox runs to its end, everything else ends ABORTED."""
        self._stopping = True
        for entry in self._entries.values():
            if entry.state == "queued":
                entry.abort(STOPPING)

    async def one(self, attempt: Attempt) -> Trajectory:
        """Run one attempt, once it is admitted. Raises ValueError where its session id is under way already."""
        with self._known([attempt]) as (entry,):
            async with self._admitted(entry):
                return await self._ended(entry)

    async def run(self, attempts: Sequence[Attempt], out: ObjectSendStream[Trajectory]) -> None:
        """Send one Trajectory an attempt, in the order they end; `out` is closed at the end.

        A slow consumer holds the admission slots of what it did not take: backpressure. Cancelling ends all, closes
        what they opened, and sends nothing more. Raises ValueError where two attempts share a session id.
        """
        async with out, anyio.create_task_group() as group:
            with self._known(attempts) as entries:
                for entry in entries:
                    await self._admission.acquire_on_behalf_of(entry)
                    group.start_soon(self._sent, entry, out)

    async def _sent(self, entry: _Entry, out: ObjectSendStream[Trajectory]) -> None:
        try:
            await out.send(await self._ended(entry))
        finally:
            self._admission.release_on_behalf_of(entry)

    @asynccontextmanager
    async def _admitted(self, entry: _Entry) -> AsyncGenerator[None]:
        await self._admission.acquire_on_behalf_of(entry)
        try:
            yield
        finally:
            self._admission.release_on_behalf_of(entry)

    @contextmanager
    def _known(self, attempts: Sequence[Attempt]) -> Generator[list[_Entry]]:
        """Entries that `abort` finds, from before they are admitted until they are over."""
        entries = {attempt.session_id: _Entry(attempt) for attempt in attempts}
        if len(entries) < len(attempts) or entries.keys() & self._entries.keys():
            raise ValueError("each attempt needs a session id of its own; some are given twice or under way already")
        self._entries |= entries
        if self._stopping:
            self.stop()
        try:
            yield list(entries.values())
        except BaseException:
            for name in entries:
                self._entries.pop(name, None)
            raise

    async def _ended(self, entry: _Entry) -> Trajectory:
        """The attempt's one Trajectory, aborted or not."""
        self.counts["admitted"] += 1
        trajectory: Trajectory | None = None
        try:
            with entry.scope:
                trajectory = await self._tried(entry)
        finally:
            self._entries.pop(entry.attempt.session_id, None)
        if trajectory is None:
            trajectory = entry.cut_short(Status.ABORTED, entry.ends_by)
        self.counts[trajectory.status] += 1
        for straggler in self._groups.ended(trajectory):
            self.abort(straggler, STRAGGLER)
        lost = {name: count for name, count in entry.lost.items() if count}
        return replace(trajectory, counts={**trajectory.counts, **lost}) if lost else trajectory

    async def _tried(self, entry: _Entry) -> Trajectory:
        """Infrastructure errors are run again, in a new sandbox and a new session; what the policy did never is."""
        while True:
            trajectory = await self._retried(entry)
            pause = self._groups.refill(trajectory, entry.lost["refills"]) if self._again(trajectory) else None
            if pause is None:
                return trajectory
            self._forget(entry, trajectory, "refills")
            await anyio.sleep(pause)

    async def _retried(self, entry: _Entry) -> Trajectory:
        for _ in range(self._retries):
            trajectory = await self._executed(entry)
            if not self._again(trajectory):
                return trajectory
            self._forget(entry, trajectory, "retries")
        return await self._executed(entry)

    def _again(self, trajectory: Trajectory) -> bool:
        kind = trajectory.failure.kind if trajectory.failure else ""
        return trajectory.status is Status.INFRA_ERROR and kind not in _FUTILE and not self._stopping

    @staticmethod
    def _forget(entry: _Entry, trajectory: Trajectory, why: str) -> None:
        """What a try that is run again leaves behind: its count, and that of the tokens that were sampled in vain."""
        completions = trajectory.session.completions if trajectory.session else ()
        entry.lost[why] += 1
        entry.lost["retried_tokens"] += sum(len(each.generation.output_ids) for each in completions)
        entry.run = None
        _log.warning("attempt %s: %s; running it again (%s)", entry.attempt.session_id, trajectory.failure, why)

    async def _executed(self, entry: _Entry) -> Trajectory:
        try:
            entry.run = self._start(entry.attempt)
            return await entry.run.run()
        except Exception as error:  # an attempt that cannot even be started is data too: it must not end the others
            _log.exception("attempt %s could not be started", entry.attempt.session_id)
            boundary = error.boundary if isinstance(error, PolarError) else "batch"
            return entry.cut_short(Status.INFRA_ERROR, failure_of(boundary, error))
