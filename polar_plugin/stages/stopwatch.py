"""Where an attempt is and what its time goes to; the budgets of its stages, and the guard over all of them."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio

from .stage import Priority, Stage


class OverBudget(TimeoutError):
    """A deadline of ours, told apart from a TimeoutError that something inside raised."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} took longer than its budget of {seconds:g} s")
        self.what = what
        self.kind = f"{what}_timeout"


class Stopwatch:
    """Mutable; one an execution."""

    def __init__(self, priority: Priority, guard: float) -> None:
        """`guard`: seconds for everything together, waits for a slot excepted; it strikes where no budget did."""
        self.state = "queued"
        self.timings: dict[str, float] = {}
        """Seconds by state."""
        self.began = anyio.current_time()
        self._priority = priority
        self._seconds = self._left = guard
        self._guard = anyio.CancelScope()

    @contextmanager
    def timed(self, state: str, budget: float | None) -> Generator[None]:
        """Be in `state`, for at most `budget` seconds; raises OverBudget."""
        self.state, started = state, anyio.current_time()
        try:
            with anyio.move_on_after(budget) as scope:
                yield
        finally:
            self._took(state, started)
        if scope.cancelled_caught and budget is not None:
            raise OverBudget(state, budget)

    @asynccontextmanager
    async def slot(self, stage: Stage, waiting: str) -> AsyncGenerator[None]:
        """Hold a slot; the wait for it is timed as the state `waiting` and is on no budget, nor on the guard's."""
        self.state, started = waiting, anyio.current_time()
        left, self._guard.deadline = self._guard.deadline - started, math.inf
        async with stage.slot(self._priority):
            self._guard.deadline = anyio.current_time() + left
            self._took(waiting, started)
            yield

    @contextmanager
    def guarded(self, least: float = 0.0) -> Generator[None]:
        """What is left of the guard's time, at least `least` seconds; raises OverBudget."""
        self._guard = anyio.CancelScope(deadline=anyio.current_time() + max(self._left, least))
        try:
            with self._guard:
                yield
        finally:
            self._left = self._guard.deadline - anyio.current_time()
        if self._guard.cancelled_caught:
            raise OverBudget("attempt", self._seconds)

    def stop(self) -> None:
        self.timings["total"] = anyio.current_time() - self.began
        self.state = "done"

    def _took(self, state: str, started: float) -> None:
        self.timings[state] = self.timings.get(state, 0.0) + anyio.current_time() - started
