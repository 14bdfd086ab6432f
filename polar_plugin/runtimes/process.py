"""One child process: run to its end under a deadline, its output read in linear time and bounded memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteReceiveStream, Process

from ..errors import SandboxError
from .base import ExecResult

OUTPUT_LIMIT = 8 << 20  # bytes kept of each stream: the tail
LEFTOVER_GRACE = 2.0  # seconds for pipes that outlive their command


@dataclass
class Tail:
    """The last bytes of a stream. Mutable."""

    limit: int = OUTPUT_LIMIT
    truncated: bool = False
    _size: int = 0
    _chunks: deque[bytes] = field(default_factory=deque[bytes])

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= self.limit:
            self._size -= len(self._chunks.popleft())
            self.truncated = True

    def bytes(self) -> bytes:
        data = b"".join(self._chunks)
        if len(data) > self.limit:
            self.truncated = True
        return data[-self.limit :]


async def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes = b"",
    timeout: float | None = None,
    kill: Callable[[Process], None] | None = None,
) -> ExecResult:
    """Run `command` once, in a process group of its own. `kill` ends it and all it started; default: the group.

    Output of a command that was killed is kept. Raises SandboxError where it cannot be started.
    """
    kill = kill or kill_group
    started = time.monotonic()
    try:
        process = await anyio.open_process(
            command, env=dict(env), cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SandboxError(f"cannot start {command[0]!r}: {error}") from error
    out, err = Tail(), Tail()
    timed_out = False
    try:
        with anyio.move_on_after(timeout) as scope:
            await _communicate(process, stdin, out, err)
        timed_out = scope.cancelled_caught
    finally:
        kill(process)
        with anyio.CancelScope(shield=True):
            if timed_out:
                await _drain(process, out, err)
            await process.wait()
            await process.aclose()
    code = process.returncode or 0
    return ExecResult(
        137 if timed_out else 128 - code if code < 0 else code,
        out.bytes(),
        err.bytes(),
        time.monotonic() - started,
        timed_out=timed_out,
        truncated=out.truncated or err.truncated,
    )


def kill_group(process: Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


async def _communicate(process: Process, stdin: bytes, out: Tail, err: Tail) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_read, process.stdout, out)
        group.start_soon(_read, process.stderr, err)
        group.start_soon(_write, process, stdin)
        await process.wait()
        # a daemon that the command left behind may hold the pipes open; what it says later is not the command's
        group.cancel_scope.deadline = anyio.current_time() + LEFTOVER_GRACE


async def _drain(process: Process, out: Tail, err: Tail) -> None:
    """What a killed command had still in its pipes."""
    with anyio.move_on_after(LEFTOVER_GRACE):
        async with anyio.create_task_group() as group:
            group.start_soon(_read, process.stdout, out)
            group.start_soon(_read, process.stderr, err)


async def _read(stream: ByteReceiveStream | None, tail: Tail) -> None:
    if stream:
        async for chunk in stream:
            tail.add(chunk)


async def _write(process: Process, data: bytes) -> None:
    """Give `data` and then end-of-file; a command that does not read is no error."""
    if process.stdin:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
            await process.stdin.send(data)
        with suppress(anyio.BrokenResourceError, ConnectionError):
            await process.stdin.aclose()
