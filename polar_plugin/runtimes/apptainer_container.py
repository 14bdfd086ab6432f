"""The containers of one sandbox: a single one that all commands enter, or one for each command."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import Process

from ..errors import SandboxError
from . import apptainer_argv, guard, host_tree
from .apptainer_argv import Box, Program, Way
from .supervised import python

START_SECONDS = 120.0
_END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Relay:
    """A port inside that leads to a Unix socket of this machine."""

    port: int
    socket: Path


class Container(Protocol):
    async def open(self, way: Way) -> None:
        """Raises SandboxError with what Apptainer said; another way may be tried then."""
        ...

    def enter(self) -> list[str]:
        """The command line before a command."""
        ...

    async def tidy(self, *, patience: float = 0.0) -> None:
        """Called after each command: kill what its supervisor was kept from killing.

        `patience`: seconds within which a container that is ending may be seen to have ended. A container
        that was ended from inside is opened anew on its files, which is as if all commands had been killed. Raises
        SandboxError where that cannot be.
        """
        ...

    async def close(self) -> None:
        """End all processes inside. Twice is fine, also after a failed `open`. Raises SandboxError where some stay."""
        ...


class Alone:
    """A container for each command, which ends with it."""

    def __init__(self, program: Program, box: Box) -> None:
        self._program, self._box = program, box
        self._way = Way("copy")

    async def open(self, way: Way) -> None:
        self._way = way

    def enter(self) -> list[str]:
        return list(apptainer_argv.alone(self._program, self._box, self._way))

    async def tidy(self, *, patience: float = 0.0) -> None:
        """The kernel ends a process table with its first process."""

    async def close(self) -> None:
        """Commands have ended by now."""


class Instance:
    """One instance. What guards it (`guard`) is a process of this machine that nobody inside can see."""

    def __init__(self, program: Program, box: Box, name: str, directory: Path, relay: Relay | None, ttl: float) -> None:
        """`directory` is where the files about the start go."""
        self._program, self._box, self._name = program, box, name
        self._directory, self._relay, self._ttl = directory, relay, ttl
        self._way = Way("overlay")
        self._until = 0.0
        self._reviving = anyio.Lock()
        self._pid: int | None = None
        self._ended: int | None = None
        """A descriptor of the first process, readable once it has ended."""
        self._guard: _Guard | None = None

    async def open(self, way: Way) -> None:
        """Shielded, as what is cut off in the middle of its start comes up afterwards."""
        self._way, self._until = way, time.monotonic() + self._ttl
        pid_file = self._directory / "pid"
        argv = apptainer_argv.start_instance(self._program, self._box, way, self._name, pid_file)
        try:
            with anyio.CancelScope(shield=True):
                self._ended = await self._started([*argv], pid_file)
        except BaseException:
            await self._killed()
            raise
        await anyio.lowlevel.checkpoint()
        self._guard = await _Guard.started(self._told())

    async def _started(self, argv: list[str], pid_file: Path) -> int:
        said = self._directory / "said"
        with said.open("wb") as file, anyio.move_on_after(START_SECONDS) as scope:
            done = await _ended(argv, self._program, file.fileno())
        if scope.cancelled_caught:
            raise SandboxError(f"the instance was not there after {START_SECONDS:.0f} s: {_text(said)}")
        try:
            self._pid = _number(pid_file)
            return os.pidfd_open(self._pid)
        except (OSError, ValueError) as error:
            raise SandboxError(f"the instance did not start (exit code {done}): {_text(said)}") from error

    def _told(self) -> dict[str, object]:
        listen, socket = (self._relay.port, str(self._relay.socket)) if self._relay else (None, None)
        return {"pid": self._pid, "listen": listen, "socket": socket, "ttl": self._ttl}

    def enter(self) -> list[str]:
        return list(apptainer_argv.in_instance(self._program, self._name))

    async def tidy(self, *, patience: float = 0.0) -> None:
        async with self._reviving:
            if self._pid is None or self._ended is None or await _readable(self._ended, patience):
                return await self._revive()
        if not await anyio.to_thread.run_sync(lambda pid: host_tree.kill_below(pid, seconds=10), self._pid):
            await self.close()
            raise SandboxError("processes inside could not be killed, so the instance was")

    async def _revive(self) -> None:
        """An agent can end its instance, by `kill 1`, and shall win nothing by it."""
        left = self._until - time.monotonic()
        if self._guard is None:
            raise SandboxError("the instance is closed")
        if left <= 1 or self._way.writable == "tmpfs":
            raise SandboxError("the instance has ended" + (f": its {self._ttl:g} s are over" if left <= 1 else ""))
        await self.close()
        await self.open(self._way)
        self._until = time.monotonic() + left

    async def close(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            await guard.end()
        await self._killed()

    async def _killed(self) -> None:
        """By name, as a start that failed half-way tells no pid."""
        with anyio.CancelScope(shield=True):
            gone = await anyio.to_thread.run_sync(kill_named, self._name)
        if self._ended is not None:
            os.close(self._ended)
            self._ended = None
        if not gone:
            raise SandboxError(f"instance {self._name} is still there {_END_SECONDS:.0f} s after it was killed")


class _Guard:
    """A running `guard`."""

    def __init__(self, process: Process, life: int) -> None:
        self._process, self._life = process, life

    @classmethod
    async def started(cls, told: dict[str, object]) -> _Guard:
        """Returns once the relay listens. Raises SandboxError."""
        with contextlib.ExitStack() as stack:
            outlet, started, ends, life = (*os.pipe(), *os.pipe())
            begin = os.memfd_create("guard")
            for fd in (outlet, ends, begin):
                stack.callback(os.close, fd)
            os.write(begin, json.dumps({**told, "started": started, "life": ends}).encode())
            os.lseek(begin, 0, os.SEEK_SET)
            argv = [str(python()), "-I", "-S", guard.__file__, str(begin)]
            try:
                with anyio.CancelScope(shield=True):
                    process = await _open(argv, (begin, started, ends))
            finally:
                os.close(started)
            this = cls(process, life)
            try:
                await this._listens(outlet)
            except BaseException:
                await this.end()
                raise
            return this

    async def _listens(self, outlet: int) -> None:
        with anyio.move_on_after(START_SECONDS):
            await anyio.wait_readable(outlet)
            if os.read(outlet, 1):
                return
        assert self._process.stderr is not None
        with anyio.move_on_after(5):
            said = (await self._process.stderr.receive()).decode(errors="replace").strip()
            raise SandboxError(f"nothing can be relayed into the instance: {said}")
        raise SandboxError("nothing can be relayed into the instance")

    async def end(self) -> None:
        with anyio.CancelScope(shield=True):
            os.close(self._life)
            with anyio.move_on_after(_END_SECONDS):
                await self._process.wait()
            await self._process.aclose()


async def _open(argv: list[str], pass_fds: tuple[int, ...]) -> Process:
    """In a session of its own, so that a signal to the trainer's group leaves it the time to end its instance."""
    return await anyio.open_process(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={}, pass_fds=pass_fds, start_new_session=True
    )


async def _ended(argv: list[str], program: Program, said: int) -> int:
    """Run to the end; output goes to a file, as what stays behind keeps a pipe open."""
    done = await anyio.run_process(
        argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False, env=program.env
    )
    return done.returncode


def kill_named(name: str) -> bool:
    """Kill whatever has `name` in its command line, and all below it; whether it has gone."""
    deadline = time.monotonic() + _END_SECONDS
    while roots := host_tree.named(name) - {os.getpid()}:
        for pid in host_tree.below(roots):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        if time.monotonic() > deadline:
            return False
    return True


async def _readable(fd: int, seconds: float) -> bool:
    if seconds:
        with anyio.move_on_after(seconds):
            await anyio.wait_readable(fd)
    return bool(select.select([fd], [], [], 0)[0])


def _number(path: Path) -> int:
    return int(path.read_text())


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip()[-2000:]
