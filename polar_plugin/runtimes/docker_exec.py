"""One run of a supervisor inside a container: what it is told, what it prints, and how it ends, once."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import anyio
from aiodocker import DockerError
from aiodocker.execs import Exec
from aiodocker.stream import Stream

from ..errors import SandboxError
from .base import Watch
from .process import KILL_GRACE, Tail

_REPORT_BYTES = 1 << 16
_LOST = (OSError, aiohttp.ClientError, RuntimeError, AssertionError, AttributeError)
"""What writing to a connection that has gone raises."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the supervisor says at the end; see `inside`."""

    code: int
    oom: bool
    error: str | None
    found: Mapping[str, Any]


@dataclass(slots=True)
class Conversation:
    """Runs once. Afterwards it tells what came of it."""

    header: Mapping[str, Any]
    payload: AsyncIterator[bytes]
    limit: int
    timeout: float | None = None
    watch: Watch | None = None
    sink: Callable[[bytes], Any] | None = None
    """Takes stdout, instead of a tail of it: awaited for each piece."""

    report: Report | None = None
    """None where the supervisor was ended from outside, or never began."""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    ended: bool = False
    stuck: bool = False
    """It was told to kill the command and did not end."""
    seconds: float = 0.0

    _nonce: str = field(default_factory=lambda: f"\0{secrets.token_hex(16)}")
    _fed: bool = False
    _finished: bool = False

    async def run(self, prepared: Exec, beginning: AbstractAsyncContextManager[None]) -> None:
        """To the end, to the deadline, or until `watch` ends it; cancelling kills the command too.

        `beginning` is held until the engine has begun. Raises SandboxError where it does not.
        """
        began = time.monotonic()
        out, err = Tail(self.limit), Tail(self.limit + _REPORT_BYTES)
        stream = prepared.start(detach=False)
        try:
            async with AsyncExitStack() as stack:
                async with beginning:
                    await stack.enter_async_context(cast("AbstractAsyncContextManager[Stream]", stream))
                await self._converse(stream, out, err)
        except (DockerError, aiohttp.ClientError, ConnectionError) as error:
            if not isinstance(error, DockerError) and self._fed:
                return  # the connection broke; without a report, that is what it is
            raise SandboxError(f"the engine did not start a command: {error}") from error
        finally:
            self.seconds = time.monotonic() - began
            self.stdout = out.content()
            self._read_report(err)
            self.truncated = self.truncated or out.truncated

    async def _converse(self, stream: Stream, out: Tail, err: Tail) -> None:
        refused: SandboxError | None = None
        try:
            async with anyio.create_task_group() as group:
                with anyio.move_on_after(self.timeout) as deadline:
                    group.start_soon(self._feed, stream)
                    if self.watch is not None:
                        group.start_soon(self._guard, self.watch, deadline)
                    try:
                        await self._drain(stream, out, err)
                    except SandboxError as error:  # the sink's
                        refused = error
                self.timed_out = deadline.cancelled_caught and not self.ended
                group.cancel_scope.cancel()
        finally:
            if not self._finished:
                await self._end(stream, out, err)
        if refused is not None:
            raise refused

    async def _guard(self, watch: Watch, deadline: anyio.CancelScope) -> None:
        await watch.over()
        self.ended = True
        deadline.cancel()

    async def _feed(self, stream: Stream) -> None:
        told = json.dumps({**self.header, "nonce": self._nonce}).encode()
        with suppress(*_LOST):
            await stream.write_in(len(told).to_bytes(4, "big") + told)
            async for piece in self.payload:
                await stream.write_in(piece)
            self._fed = True

    async def _drain(self, stream: Stream, out: Tail, err: Tail) -> None:
        marker = self._nonce.encode()
        while (message := await stream.read_out()) is not None:
            if message.stream == 2:
                err.add(message.data)
            elif self.sink is not None:
                await self.sink(message.data)
            else:
                out.add(message.data)
            if self.header.get("mode") == "unpack" and marker in message.data:
                _abort(stream)  # it has stopped reading, and while there is more to write the engine ends nothing
                break
            if self.watch is not None and (said := message.data.partition(marker)[0]):
                self.watch.saw(message.stream, said)
        self._finished = True

    async def _end(self, stream: Stream, out: Tail, err: Tail) -> None:
        """Have the command killed and wait for the report. One that has not heard its whole order has begun nothing."""
        self.sink = None if self.sink is None else _drop
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_GRACE):
            if self._fed:
                with suppress(*_LOST):
                    await stream.write_in(b"k")
                with suppress(*_LOST):
                    await self._drain(stream, out, err)
        self.stuck = self._fed and not self._finished

    def _read_report(self, err: Tail) -> None:
        said, marker, told = err.content().partition(self._nonce.encode())
        if marker and told.endswith(b"\n"):
            report = json.loads(told)
            self.report = Report(report["code"], report["oom"], report["error"], report.get("found") or {})
        self.stderr = said[-self.limit :]
        self.truncated = err.truncated or len(said) > self.limit


def _abort(stream: Any) -> None:
    """Drop what is not written yet: closing would wait for it."""
    with suppress(*_LOST):
        stream._resp.connection.transport.abort()


async def _drop(piece: bytes) -> None:
    return
