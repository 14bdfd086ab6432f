"""A stage is a limiter with a name and counters; what fails in it becomes a Failure, what it opens is closed.

Slots are lexical (`async with`): no path can release one twice or keep one.
"""

from __future__ import annotations

import enum
import errno
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from ..records import Attempt, Failure

_log = logging.getLogger("polar_plugin.stages")


class Priority(enum.IntEnum):
    """Who goes first; among equals, who came first."""

    EVALUATION = 0
    TRAINING = 1

    @classmethod
    def of(cls, attempt: Attempt) -> Priority:
        return cls.EVALUATION if attempt.evaluation else cls.TRAINING


@dataclass(order=True, slots=True)
class _Waiter:
    priority: Priority
    number: int
    called: anyio.Event = field(compare=False, default_factory=anyio.Event)
    """Set when it was handed a slot."""


class Stage:
    """At most `slots` attempts inside at once; the others wait, evaluations before training attempts."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.running = 0
        self.done = 0
        """How many have left, however they ended."""
        self.peak = 0
        """The most that were inside at once."""
        self._busy = 0.0
        self._since = 0.0
        self._queue: list[_Waiter] = []
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def busy_seconds(self) -> float:
        """Seconds that slots were held, all slots together, until now."""
        return self._busy + (self.running * (anyio.current_time() - self._since) if self.running else 0.0)

    @asynccontextmanager
    async def slot(self, priority: Priority = Priority.TRAINING) -> AsyncGenerator[None]:
        """Wait for a slot, without a deadline, then hold it."""
        await self._enter(priority)
        try:
            yield
        finally:
            self.done += 1
            self._hand_over()

    @asynccontextmanager
    async def spare(self) -> AsyncGenerator[bool]:
        """Hold a slot if one is free at this moment; whether one was. Never waits."""
        if self.running >= self.slots:
            yield False
            return
        self._hold(+1)
        try:
            yield True
        finally:
            self.done += 1
            self._hand_over()

    async def _enter(self, priority: Priority) -> None:
        """A slot that was handed over at the moment of being cancelled goes to the next one."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self.running < self.slots:
            self._hold(+1)
            return
        waiter = _Waiter(priority, next(self._numbers))
        heapq.heappush(self._queue, waiter)
        entered = False
        try:
            await waiter.called.wait()
            entered = True
        finally:
            if not entered:
                self._give_up(waiter)

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter.called.is_set():
            self._hand_over()
        else:
            self._queue.remove(waiter)
            heapq.heapify(self._queue)

    def _hand_over(self) -> None:
        """A slot goes to who waits, and is put back only where nobody does: who comes just then cannot overtake."""
        if self._queue:
            heapq.heappop(self._queue).called.set()
        else:
            self._hold(-1)

    def _hold(self, change: int) -> None:
        self._busy, self._since = self.busy_seconds, anyio.current_time()
        self.running += change
        self.peak = max(self.peak, self.running)


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
    """An exception as data. Its kind is the error's own `kind` where it has one, else its class's name.

    A disk or a memory of the machine that is full is told whoever ran into it: `disk_full`, `host_memory`.
    """
    kind = _machine(error) or getattr(error, "kind", "") or type(error).__name__
    return Failure(boundary, kind, str(error) or repr(error))


_MACHINE = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.ENOMEM: "host_memory",
}


def _machine(error: BaseException | None) -> str:
    """What the machine lacks, by the first error in the chain of causes that says so."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            return _MACHINE[error.errno]
        if isinstance(error, MemoryError):
            return "host_memory"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""
