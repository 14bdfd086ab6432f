"""A batch: many attempts side by side, and exactly one Trajectory for each that was admitted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.abc import ObjectSendStream

from ..records import Attempt, Failure, Status, Trajectory

Run = Callable[[Attempt], Awaitable[Trajectory]]

_log = logging.getLogger("polar_plugin.stages")


class Batch:
    """Mutable: counters, and the scopes of what runs."""

    def __init__(self, run: Run, *, admitted: int, retries: int = 0) -> None:
        """`run` turns an attempt into its Trajectory; `admitted` bounds how many are under way or not yet consumed."""
        self._run = run
        self._retries = retries
        self._admission = anyio.CapacityLimiter(admitted)
        self._scopes: dict[str, anyio.CancelScope] = {}
        self.counts: Counter[str] = Counter()

    def abort(self, session_id: str) -> None:
        """End one attempt; its Trajectory has status ABORTED. Nothing happens where it is over already."""
        if scope := self._scopes.get(session_id):
            scope.cancel()

    async def run(self, attempts: Sequence[Attempt], out: ObjectSendStream[Trajectory]) -> None:
        """Send one Trajectory an attempt, in the order they end; `out` is closed at the end."""
        async with out, anyio.create_task_group() as group:
            for attempt in attempts:
                await self._admission.acquire_on_behalf_of(attempt.session_id)
                group.start_soon(self._one, attempt, out)

    async def _one(self, attempt: Attempt, out: ObjectSendStream[Trajectory]) -> None:
        try:
            trajectory = Trajectory(attempt, Status.ABORTED, failure=Failure("batch", "aborted", "aborted on request"))
            with anyio.CancelScope() as scope:
                self._scopes[attempt.session_id] = scope
                trajectory = await self._tried(attempt)
            await out.send(trajectory)  # a slow consumer holds the admission slot: backpressure
        finally:
            self._scopes.pop(attempt.session_id, None)
            self._admission.release_on_behalf_of(attempt.session_id)

    async def _tried(self, attempt: Attempt) -> Trajectory:
        """Infrastructure errors are run again, in a new sandbox and a new session; what the policy did never is."""
        for tries_left in range(self._retries, -1, -1):
            trajectory = await self._run(attempt)
            if trajectory.status is not Status.INFRA_ERROR or not tries_left:
                return trajectory
            self.counts["infra_retries"] += 1
            _log.warning("attempt %s: %s; running it again", attempt.session_id, trajectory.failure)
        raise AssertionError("unreachable")
