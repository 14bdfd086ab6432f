"""A gate that holds new turns while weights change, and always reopens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio


class Gate:
    """Open unless somebody is inside `closed()`; several may be."""

    def __init__(self) -> None:
        self._holders = 0
        self._reopened = anyio.Event()

    @asynccontextmanager
    async def closed(self) -> AsyncGenerator[None]:
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._reopened.set()
                self._reopened = anyio.Event()

    async def passed(self) -> None:
        """Wait until the gate is open; at once where it is."""
        while self._holders:
            await self._reopened.wait()
