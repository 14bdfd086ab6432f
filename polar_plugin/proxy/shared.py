"""One generation and the calls that wait for it.

A harness that loses patience sends the same request again while the first is still being answered. Both then wait for
one generation, which lives in a task of the proxy's own: it ends early only when the last of them has hung up.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import anyio

from ..records import ChatRequest, Completion


class Signs(Protocol):
    """Signs of life that a waiting call gives its client."""

    @property
    def seconds(self) -> float:
        """Until the next one is due."""
        ...

    async def give(self) -> None: ...


class Silence:
    """None at all."""

    seconds = math.inf

    async def give(self) -> None:
        return None


class Shared:
    """Mutable: under way, then ended with a completion, an error, or neither where it was cancelled."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        """As the first of the calls sent it."""
        self.completion: Completion | None = None
        """Set once it is recorded."""
        self._meaning = _meaning(request)
        self._error: Exception | None = None
        self._waiting = 0
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it. One that nobody wants is being cancelled, and is joined no more."""
        return self._waiting > 0

    def answers(self, request: ChatRequest) -> bool:
        """Whether `request` asks for the same, in whatever dialect, streamed or whole."""
        return self.wanted and self._meaning == _meaning(request)

    async def run(self, generate: Callable[[], Awaitable[Completion]]) -> None:
        """Generate, and wake the calls. Raises nothing: they do."""
        try:
            with self._scope:
                self.completion = await generate()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    async def result(self, signs: Signs) -> Completion | None:
        """What it came to; None where `cancel` ended it. Raises what the generation raised, and what the signs raise.

        A call that is cancelled here leaves the others their generation; the last one takes it with it.
        """
        self._waiting += 1
        try:
            while not self._ended.is_set():
                with anyio.move_on_after(signs.seconds) as patience:
                    await self._ended.wait()
                if patience.cancelled_caught:
                    await signs.give()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._scope.cancel()
        if self._error is not None:
            raise self._error
        return self.completion

    def cancel(self) -> None:
        """End it: the engine's call is aborted."""
        self._scope.cancel()


def _meaning(request: ChatRequest) -> ChatRequest:
    """What is asked, without how it was sent. Compared by equality, which ignores wire ids."""
    return replace(request, api="", stream=False, retry=False, ignored=())
