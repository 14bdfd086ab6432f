"""One command under the supervisor (`forward`), inside bubblewrap or beside us."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from anyio.abc import Process

from ..errors import SandboxError
from . import forward
from .base import ExecResult, Watch
from .process import Command, run

_CHILD_PID = re.compile(rb'"child-pid": *(\d+)')


@dataclass(frozen=True, slots=True)
class Start:
    """What the supervisor is told; see `forward`."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    listen: int | None
    socket: str
    limits: Mapping[str, int]
    own_tree: bool


class Around(Protocol):
    """The command line around a command; `status_fd` is where its first process's pid is told."""

    def __call__(self, *, status_fd: int) -> Iterable[str]: ...


def python() -> Path:
    """The interpreter itself, not a virtual environment's link to it."""
    path = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return path if path.exists() else Path(sys.executable).resolve()


async def run_isolated(
    start: Start,
    around: Around,
    supervisor: str,
    *,
    stdin: bytes,
    timeout: float | None,
    limit: int,
    watch: Watch | None = None,
) -> ExecResult:
    """Run under bubblewrap: `around` gives its command line from the descriptor it tells its child's pid on.

    Raises SandboxError, with what bubblewrap said, where the command was never started.
    """
    with contextlib.ExitStack() as stack:
        told = _Pipe(stack)
        started, begin = _Pipe(stack), _memory_file(stack)
        _write(begin, start, started)
        argv = [*around(status_fd=told.inlet), str(python()), "-I", "-S", supervisor, str(begin)]

        def kill(process: Process) -> None:
            """The namespace's first process takes the rest with it before bubblewrap, its parent, can end."""
            if found := _CHILD_PID.search(told.read()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(found[1]), signal.SIGKILL)
            else:
                process.kill()

        command = Command(argv, {}, (told.inlet, started.inlet, begin), kill)
        return _proven(await run(command, stdin=stdin, timeout=timeout, limit=limit, watch=watch), started)


async def run_contained(
    start: Start,
    enter: Sequence[str],
    supervisor: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: bytes,
    timeout: float | None,
    limit: int,
    watch: Watch | None = None,
    told_pid: Callable[[int], object] = id,
) -> ExecResult:
    """Run in a container that `enter`, a program started with `env`, leads into; descriptors pass through it.

    `supervisor` is the command line, inside, of `forward`. It hears of the end by a pipe that nobody inside can cut.
    `told_pid` is told which process of this machine all others of the command descend from.
    Raises SandboxError, with what `enter` said, where the command was never started.
    """
    with contextlib.ExitStack() as stack:
        started, begin, life = _Pipe(stack), _memory_file(stack), _Lifeline(stack)
        _write(begin, start, started, life)

        def kill(process: Process) -> None:
            if not life.cut():
                process.kill()

        argv = [*enter, *supervisor, str(begin)]
        command = Command(argv, env, (started.inlet, begin, life.outlet), kill, told_pid)
        return _proven(await run(command, stdin=stdin, timeout=timeout, limit=limit, watch=watch), started)


async def run_plain(
    start: Start, *, stdin: bytes, timeout: float | None, limit: int, watch: Watch | None = None
) -> ExecResult:
    """Run without isolation: the supervisor kills its descendants when it is told to end."""
    with contextlib.ExitStack() as stack:
        started, begin = _Pipe(stack), _memory_file(stack)
        _write(begin, start, started)
        argv = [str(python()), "-I", "-S", forward.__file__, str(begin)]

        def kill(process: Process) -> None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)

        command = Command(argv, {}, (started.inlet, begin), kill)
        return _proven(await run(command, stdin=stdin, timeout=timeout, limit=limit, watch=watch), started)


def _proven(result: ExecResult, started: _Pipe) -> ExecResult:
    if not started.read():
        text = result.text.strip() or f"exit code {result.exit_code}"
        raise SandboxError(f"the sandbox did not start its command: {text}")
    return result


class _Pipe:
    """A pipe whose `inlet` a child inherits and which is read here without waiting."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._outlet, self.inlet = os.pipe()
        stack.callback(os.close, self._outlet)
        stack.callback(os.close, self.inlet)
        os.set_blocking(self._outlet, False)
        self._seen = b""

    def read(self) -> bytes:
        """All that has been written so far."""
        with contextlib.suppress(BlockingIOError):
            self._seen += os.read(self._outlet, 65536)
        return self._seen


class _Lifeline:
    """A pipe that ends for a child when it is cut here, or this process dies."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.outlet, self._inlet = os.pipe()
        self._held = True
        stack.callback(os.close, self.outlet)
        stack.callback(self.cut)

    def cut(self) -> bool:
        """Whether it was whole."""
        held, self._held = self._held, False
        if held:
            os.close(self._inlet)
        return held


def _memory_file(stack: contextlib.ExitStack) -> int:
    fd = os.memfd_create("start")
    stack.callback(os.close, fd)
    return fd


def _write(fd: int, start: Start, started: _Pipe, life: _Lifeline | None = None) -> None:
    told = {**asdict(start), "started": started.inlet, "life": life and life.outlet}
    with open(fd, "wb", closefd=False) as stream:
        stream.write(json.dumps(told).encode())
    os.lseek(fd, 0, os.SEEK_SET)
