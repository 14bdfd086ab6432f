"""What ends an agent program that does not end by itself: before its first call, after its result, after an error."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import anyio

from .parts import Budgets, OpenSession
from .verdict import Stopped

_HEAD = 4096
"""Bytes of a line that are looked at: a result may be megabytes, and its kind stands at its beginning."""


class Watchdog:
    """A `runtimes.base.Watch` over one run of an agent program."""

    def __init__(self, session: OpenSession, budgets: Budgets, finished: str) -> None:
        """`finished` is `Launch.finished`."""
        self.stopped: Stopped | None = None
        """Why it ended the program, if it did."""
        self._session = session
        self._budgets = budgets
        self._finished = re.compile(finished.encode()) if finished else None
        self._line = b""
        self._printed_result = anyio.Event()
        self._printed_at = anyio.current_time()

    def saw(self, stream: int, piece: bytes) -> None:
        self._printed_at = anyio.current_time()
        if self._finished is None or stream != 1:
            return
        for number, part in enumerate(piece.split(b"\n")):
            line = b"" if number else self._line
            self._line = line if len(line) >= _HEAD else (line + part)[:_HEAD]
            if len(self._line) > len(line):
                self._read(done=bool(self._finished.search(self._line)))

    def _read(self, *, done: bool) -> None:
        """A result is the last line: a program that goes on printing goes on working."""
        if done:
            self._printed_result.set()
        elif self._printed_result.is_set():
            self._printed_result = anyio.Event()

    async def over(self) -> None:
        """Returns once `stopped` says why."""
        budgets = self._budgets
        async with anyio.create_task_group() as group:
            for reason, ends, seconds in (
                (Stopped.NO_FIRST_CALL, self._no_first_call, budgets.first_call),
                (Stopped.LINGERED, self._lingers, budgets.linger),
                (Stopped.HUNG, self._hangs, budgets.idle),
            ):
                if seconds is not None:
                    group.start_soon(self._stop, reason, ends, seconds, group.cancel_scope)
            await anyio.sleep_forever()

    async def _stop(
        self, reason: Stopped, ends: Callable[[float], Awaitable[None]], seconds: float, scope: anyio.CancelScope
    ) -> None:
        await ends(seconds)
        self.stopped = self.stopped or reason
        scope.cancel()

    async def _no_first_call(self, seconds: float) -> None:
        with anyio.move_on_after(seconds) as scope:
            await self._session.first_call()
        if not scope.cancelled_caught:
            await anyio.sleep_forever()

    async def _lingers(self, seconds: float) -> None:
        """Other threads of the program may still be at work: its last call counts, not its result alone."""
        while True:
            result = self._printed_result
            await result.wait()
            await anyio.sleep(seconds)
            await self._session.quiet(seconds)
            if result is self._printed_result:
                return

    async def _hangs(self, seconds: float) -> None:
        while True:
            await self._session.quiet(seconds)
            left = self._printed_at + seconds - anyio.current_time()
            if self._session.last_error is None:
                await self._session.stirred()
            elif left > 0:
                await anyio.sleep(left)
            else:
                return
