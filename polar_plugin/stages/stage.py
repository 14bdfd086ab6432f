"""A stage is a limiter with a name and counters; what fails in it becomes a Failure, what it opens is closed.

Slots are lexical (`async with`): no path can release one twice or keep one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from ..records import Failure

_log = logging.getLogger("polar_plugin.stages")


class Stage:
    """At most `slots` attempts inside at once; the others wait in order."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self._limiter = anyio.CapacityLimiter(slots)
        self.done = 0
        """How many have left, however they ended."""

    @property
    def slots(self) -> int:
        return int(self._limiter.total_tokens)

    @property
    def running(self) -> int:
        return self._limiter.borrowed_tokens

    @property
    def waiting(self) -> int:
        return self._limiter.statistics().tasks_waiting

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Wait for a slot, without a deadline, then hold it."""
        async with self._limiter:
            try:
                yield
            finally:
                self.done += 1


@asynccontextmanager
async def closing(
    close: Callable[[], Awaitable[object]], *, grace: float, name: str, counts: Counter[str]
) -> AsyncGenerator[None]:
    """Await `close` on the way out, also while cancelled, but for at most `grace` seconds.

    Enter it before the resource is opened. A close that fails or overruns is logged and counted (`close_failed`,
    `close_overran`), never raised: it must not hide what the block did.
    """
    try:
        yield
    finally:
        with anyio.move_on_after(grace, shield=True) as scope:
            try:
                await close()
            except Exception:
                counts["close_failed"] += 1
                _log.exception("closing %s failed", name)
        if scope.cancelled_caught:
            counts["close_overran"] += 1
            _log.error("closing %s took longer than %g s and was given up", name, grace)


def failure_of(boundary: str, error: Exception) -> Failure:
    """An exception as data."""
    return Failure(boundary, type(error).__name__, str(error) or repr(error))
