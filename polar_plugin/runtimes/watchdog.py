"""Bounds that no cgroup keeps, kept by looking: the memory of all processes of a sandbox together."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from .base import Watch

_SECONDS = 0.25


class MemoryWatch:
    """A `Watch` that ends a command once its sandbox holds more than `limit` bytes, or another watch says so."""

    def __init__(self, held: Callable[[], int], limit: int, also: Watch | None) -> None:
        """`held` looks; it is called in a thread."""
        self._held, self._limit, self._also = held, limit, also
        self.exceeded = False

    def saw(self, stream: int, piece: bytes) -> None:
        if self._also is not None:
            self._also.saw(stream, piece)

    async def over(self) -> None:
        async with anyio.create_task_group() as group:
            if self._also is not None:
                group.start_soon(self._other, self._also, group.cancel_scope)
            while await anyio.to_thread.run_sync(self._held) <= self._limit:  # noqa: ASYNC110 - no event tells
                await anyio.sleep(_SECONDS)
            self.exceeded = True
            group.cancel_scope.cancel()

    async def _other(self, also: Watch, scope: anyio.CancelScope) -> None:
        await also.over()
        scope.cancel()
