"""An evaluation sandbox that is made ready before it is asked for."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from ..runtimes.base import Runtime
from .stage import Stage

_log = logging.getLogger("polar_plugin.stages")
Opens = Callable[[], AbstractAsyncContextManager[Runtime]]
"""Opens a started and prepared sandbox; closed on leaving the block."""


class Prewarm:
    """At most one sandbox, opened by a task of its own. Where it does not come to be there is none: ask again, lazily.

    Counts `prewarmed` where it was taken, `prewarm_unused` where it was not, else `prewarm_failed`, or `prewarm_full`.
    """

    def __init__(self, opens: Opens, stage: Stage, seconds: float, counts: Counter[str]) -> None:
        """`seconds` bounds its start; `stage` bounds how many there are, and none waits for a slot of it."""
        self._opens, self._stage, self._seconds, self._counts = opens, stage, seconds, counts
        self._group: TaskGroup | None = None
        self._asked = self._taken = False
        self._runtime: Runtime | None = None
        self._settled, self._released, self._closed = anyio.Event(), anyio.Event(), anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Within it `start` may be called; at its end, what was not taken is closed."""
        async with anyio.create_task_group() as self._group:
            yield
            self._group.cancel_scope.cancel()
        if self._runtime is not None and not self._taken:
            self._counts["prewarm_unused"] += 1

    async def start(self) -> None:
        """Begin to open it, once; returns at once."""
        if self._group is not None and not self._asked:
            self._asked = True
            self._group.start_soon(self._keep)

    @asynccontextmanager
    async def taken(self) -> AsyncGenerator[Runtime | None]:
        """The sandbox, once, when it is ready; None where there is none. It is closed when the block is left."""
        if self._taken or not self._asked:
            yield None
            return
        self._taken = True
        await self._settled.wait()
        if self._runtime is not None:
            self._counts["prewarmed"] += 1
        try:
            yield self._runtime
        finally:
            self._released.set()
            with anyio.CancelScope(shield=True):  # as long as it takes to close it, which is bounded
                await self._closed.wait()

    async def _keep(self) -> None:
        try:
            async with self._stage.spare() as free:
                if free:
                    await self._open()
                else:
                    self._counts["prewarm_full"] += 1
        finally:
            self._settled.set()
            self._closed.set()

    async def _open(self) -> None:
        try:
            with anyio.move_on_after(self._seconds) as scope:
                async with self._opens() as runtime:
                    scope.deadline = math.inf
                    if not scope.cancel_called:
                        self._runtime = runtime
                        self._settled.set()
                    await self._released.wait()
            if scope.cancelled_caught:
                self._counts["prewarm_failed"] += 1
        except Exception as error:  # the evaluation makes a sandbox of its own: its failure is the one that counts
            self._counts["prewarm_failed"] += 1
            _log.warning("an evaluation sandbox could not be made ready early: %r", error)
