"""An event loop whose clock jumps to the next timer as soon as nothing else can run: hours of waiting take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class _Selector(selectors.SelectSelector):
    advance: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: every task waits, and nothing is left that could wake one")
        if not ready and timeout:
            self.advance(timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Deterministic. Not for tests that use threads: while one works, the clock would run on."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _Selector()
        selector.advance = self._advance
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _advance(self, seconds: float) -> None:
        self._now += seconds


JUMPING = ("asyncio", {"loop_factory": JumpingLoop})
"""For a module's `anyio_backend` fixture."""
