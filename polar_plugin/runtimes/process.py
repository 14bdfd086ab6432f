"""One process run to its end: output in linear time and bounded memory, a deadline, and nobody left behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from subprocess import PIPE

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from ..errors import SandboxError
from .base import ExecResult, Watch

KILL_GRACE = 10.0
"""Seconds that killed processes may take to vanish (a large one in an uninterruptible write, say)."""
_KILLED = 137


class Tail:
    """The last `limit` bytes of a stream, kept as its chunks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self.truncated = False

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= self._limit:
            self._size -= len(self._chunks.popleft())
            self.truncated = True

    def content(self) -> bytes:
        kept = b"".join(self._chunks)
        self.truncated = self.truncated or len(kept) > self._limit
        return kept[-self._limit :]


@dataclass(frozen=True, slots=True)
class Command:
    """What to start, on this side."""

    argv: Sequence[str]
    env: Mapping[str, str]
    pass_fds: Sequence[int]
    kill: Callable[[Process], None]
    """Kills it and all it has started; called again it does no harm."""
    started: Callable[[int], object] = id
    """Is told its pid."""


async def run(
    command: Command, *, stdin: bytes, timeout: float | None, limit: int, watch: Watch | None = None
) -> ExecResult:
    """Run to the end, to `timeout` seconds, or until `watch` ends it; cancelling kills too.

    `limit` bytes are kept of each stream.

    Raises SandboxError where the process cannot be started, or killed.
    """
    began = time.monotonic()
    out, err = Tail(limit), Tail(limit)
    process = await _spawn(command)
    command.started(process.pid)
    timed_out = ended = False
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_drain, process.stdout, out, watch, 1)
            group.start_soon(_drain, process.stderr, err, watch, 2)
            group.start_soon(_feed, process.stdin, stdin)
            with anyio.move_on_after(timeout) as scope:
                ended = await _ended_by(watch, process)
            timed_out = scope.cancelled_caught
            if timed_out or ended:
                await _killed(process, command)
            group.cancel_scope.deadline = anyio.current_time() + KILL_GRACE  # the pipes end with their last writer
    finally:
        gone = await _killed(process, command)
    if not gone:
        raise SandboxError(f"process {process.pid} is still there {KILL_GRACE:.0f} s after it was killed")
    code = _KILLED if timed_out or ended else _shell_code(process.returncode)
    stdout, stderr = out.content(), err.content()
    truncated = out.truncated or err.truncated
    return ExecResult(code, stdout, stderr, time.monotonic() - began, timed_out, truncated=truncated, ended=ended)


async def _ended_by(watch: Watch | None, process: Process) -> bool:
    """Wait for the process, or for its watch to end it; whether that came first."""
    if watch is None:
        await process.wait()
        return False
    async with anyio.create_task_group() as group:

        async def over() -> None:
            await watch.over()
            group.cancel_scope.cancel()

        group.start_soon(over)
        await process.wait()
        group.cancel_scope.cancel()
        return False
    return True


async def _spawn(command: Command) -> Process:
    """Shielded, so that a cancellation cannot come between the start and the block that ends it."""
    argv = list(command.argv)
    process: Process | None = None
    try:
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(
                argv, stdin=PIPE, env=command.env, pass_fds=command.pass_fds, start_new_session=True
            )
    except OSError as error:
        raise SandboxError(f"cannot start {argv[0]}: {error.strerror}") from error
    assert process is not None
    return process


async def _drain(stream: ByteReceiveStream | None, tail: Tail, watch: Watch | None, number: int) -> None:
    assert stream is not None
    try:
        async for chunk in stream:
            tail.add(chunk)
            if watch is not None:
                watch.saw(number, chunk)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


async def _feed(stream: ByteSendStream | None, data: bytes) -> None:
    assert stream is not None
    try:
        if data:
            await stream.send(data)
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # the command did not read all of it: its own choice
    finally:
        with anyio.CancelScope(shield=True):
            await stream.aclose()


async def _killed(process: Process, command: Command) -> bool:
    """Kill and wait, whatever happens around us; whether it has ended. Does nothing where it had ended already."""
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            command.kill(process)
            with anyio.move_on_after(KILL_GRACE):
                await process.wait()
        if process.returncode is not None:
            await process.aclose()
    return process.returncode is not None


def _shell_code(returncode: int | None) -> int:
    assert returncode is not None
    return returncode if returncode >= 0 else 128 - returncode
