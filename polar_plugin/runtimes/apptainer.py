"""Sandboxes of Apptainer (or SingularityCE), without root's rights: an image in a SIF file or a directory.

What holds: no write outside the attempt's own directories, no capability, no process of this machine in sight; no
process outlives its `exec`; under `network: proxy_only` the only peer is the proxy; all processes die with the trainer,
or after `ttl` seconds. What does not: disk space is unlimited, and without cgroups `cpus` is not enforced and
`memory_mb` is looked after four times a second. Programs inside run as the trainer's user: do not be root.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread

from ..errors import SandboxError
from ..records import RuntimeSpec
from . import apptainer_argv, apptainer_directories, apptainer_inside, apptainer_sweep, archive, host_tree, kit
from .apptainer_argv import Program, Way
from .apptainer_container import Alone, Container, Instance, Relay
from .apptainer_directories import GIVEN, SOCKET, WORKSPACE
from .apptainer_inside import Interior, interior, interpreter, supervisor
from .apptainer_options import check, installed, options_of
from .base import ExecResult, ProxyEndpoint, Watch
from .bubblewrap import HOME
from .process import Command, run
from .supervised import Start, run_contained
from .trees import copy_tree, remove_tree
from .watchdog import MemoryWatch

PROXY_PORT = 8399
_log = logging.getLogger("polar_plugin.runtimes.apptainer")
_PATIENCE = 1.0
"""Seconds for a container to be seen to have ended with a command that was killed, and not by us."""
_told: set[str] = set()
_found: dict[tuple[str, ...], Way] = {}
"""What worked last, by program, image and what was asked: tried first the next time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Execution:
    """One command under way: the directory with its files, and how `stop` ends it."""

    directory: Path
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    clients: list[int] = field(default_factory=list[int])
    """The process of this machine from which those inside descend, once it is there."""

    def inside(self, name: str) -> str:
        return f"{GIVEN}/{self.directory.name}/{name}"


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a started sandbox is made of."""

    container: Container
    interior: Interior
    kit: kit.Kit
    bounded: bool
    """Whether cgroups keep its limits."""


class ApptainerRuntime:
    """One attempt's directories, and the containers on them.

    `spec.image` is a SIF file or an image directory. Without `spec.workdir` commands start in an empty /workspace; with
    it, in that directory of the image. Files persist over commands; processes do not.
    """

    def __init__(
        self, spec: RuntimeSpec, *, proxy: ProxyEndpoint | None, labels: Mapping[str, str], **options: Any
    ) -> None:
        """`options` go before `spec.kwargs`; see `ApptainerOptions`. Raises ConfigError."""
        self._options = options_of({**spec.kwargs, **options})
        check(spec, proxy)
        self._spec, self._proxy, self._labels = spec, proxy, labels
        relayed = proxy is not None and spec.network == "proxy_only"
        self._relay = Relay(PROXY_PORT, cast("Path", proxy.unix_socket)) if relayed else None
        self._limits = apptainer_argv.limits(
            memory_mb=spec.memory_mb, cpus=spec.cpus, processes=self._options.max_processes
        )
        self._name = apptainer_sweep.name(secrets.token_hex(6))
        self._program = Program("", {})
        self._directory: Path | None = None
        self._container: Container | None = None
        self._opened: _Opened | None = None
        self._stopped = False
        self._running: set[_Execution] = set()
        self._numbers = itertools.count()
        self.workdir = spec.workdir or WORKSPACE
        self.home = HOME
        self.proxy_url = ""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find out how the image can be run, run it, and prove that a command runs. Raises SandboxError."""
        if self._directory is not None or self._stopped:
            raise SandboxError("a sandbox is started once")
        self._program = installed(self._options.program)
        root, image = self._places()
        await apptainer_sweep.sweep_once(root)
        interpreter_kit = await anyio.to_thread.run_sync(kit.installed)
        self._directory = root / self._name
        apptainer_directories.make(self._directory, self._labels)
        if self._options.writables[0] == "copy":
            await copy_tree(image, self._directory / "image")
        self._opened = await self._open(interpreter_kit)
        if self._proxy is not None and self._spec.network != "none":
            self.proxy_url = f"http://127.0.0.1:{PROXY_PORT}" if self._relay else self._proxy.url
        proof = await self.exec(("true",), timeout=60)
        if not proof.ok:
            raise SandboxError(f"the sandbox cannot run a command: {proof.text.strip()}")

    def _places(self) -> tuple[Path, Path]:
        """Where directories are made, and the image."""
        image = Path(str(self._spec.image))
        if not image.exists():
            raise SandboxError(f"image {str(image)!r} is not there: `apptainer pull` or `apptainer build` it first")
        return Path(self._options.root or tempfile.gettempdir()).resolve(), image

    async def stop(self) -> None:
        """Kill what still runs and remove the directories. Twice is fine, and so is after a failed start."""
        self._stopped = True
        running = tuple(self._running)
        for execution in running:
            execution.scope.cancel()
        for execution in running:
            await execution.ended.wait()
        if self._container is not None:
            await self._container.close()
        if self._directory is not None:
            await remove_tree(self._directory)

    async def _open(self, interpreter_kit: kit.Kit) -> _Opened:
        """Open the container by the first way that works. Raises SandboxError with what each way came to."""
        failures: list[str] = []
        for way in self._ways():
            if way.limits and any("cgroup" in failure for failure in failures):
                continue
            container = self._container = self._new(way, interpreter_kit)
            try:
                await container.open(way)
                found = await self._probed(container, interpreter_kit)
            except SandboxError as error:
                failures.append(f"{way.writable}{' with cgroups' if way.limits else ''}: {error}")
                await container.close()
            else:
                _found[self._asked] = way
                self._warn(way, failures)
                return _Opened(container, found, interpreter_kit, bounded=bool(way.limits))
        raise SandboxError("the image cannot be run. " + "; ".join(failures))

    def _ways(self) -> Iterator[Way]:
        """In the order in which they are tried: what worked last time, then with cgroups before without."""
        if (known := _found.get(self._asked)) is not None:
            yield replace(known, limits=self._limits if known.limits else ())
        for limits in (self._limits, ()) if self._limits else ((),):
            for writable in self._options.writables:
                yield Way(writable, limits)

    @property
    def _asked(self) -> tuple[str, ...]:
        options = self._options
        return self._program.path, str(self._spec.image), options.mode, options.writable, *self._limits[::2]

    def _new(self, way: Way, interpreter_kit: kit.Kit) -> Container:
        directory, options = self._host(""), self._options
        box = apptainer_directories.box(directory, self._spec, options, way, kit=interpreter_kit, relay=self._relay)
        if options.mode == "one_shot":
            return Alone(self._program, box)
        return Instance(self._program, box, self._name, directory / "start", self._relay, options.ttl)

    async def _probed(self, container: Container, interpreter_kit: kit.Kit) -> Interior:
        """Write to the image, and learn the environment that it sets. Raises SandboxError."""
        argv = [*container.enter(), *interpreter(interpreter_kit), "-c", apptainer_inside.PROBE, self.workdir]
        command = Command(argv, self._program.env, (), lambda process: process.kill())
        return interior(await run(command, stdin=b"", timeout=60, limit=1 << 20))

    def _warn(self, way: Way, failures: Sequence[str]) -> None:
        if failures:
            _once(f"Apptainer falls back to {way.writable}{'' if way.limits else ' without cgroups'}", failures)
        if self._spec.network == "host":
            _once("network: host. The agent can reach whatever this machine can")
        if os.getuid() == 0:
            _once("the trainer runs as root, and so do the programs in its sandboxes, if without capabilities")
        if self._spec.cpus is not None and not way.limits:
            _once("runtime.cpus is not enforced: Apptainer has no cgroups here")

    # --- what can be done with it -------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        watch: Watch | None = None,
    ) -> ExecResult:
        """As `Runtime.exec`; a script runs under bash, or sh without one. A missing `cwd` is exit code 126."""
        with self._execution() as execution:
            argv = self._script(execution, command) if isinstance(command, str) else tuple(command)
            start = self._start(argv, self._inside(cwd or self.workdir), env or {})
            return await self._run(execution, start, stdin=stdin, timeout=timeout, watch=watch)

    async def upload(self, source: Path | bytes, target: str) -> None:
        """As `Runtime.upload`. The copy is made inside, with the sandbox's own rights: planted links lead nowhere."""
        with self._execution() as execution:
            await copy_tree(_given(source, execution), execution.directory / "given")
            await self._work(execution, apptainer_inside.UNPACK, execution.inside("given"), self._inside(target))

    async def download(self, source: str, target: Path) -> None:
        """As `Runtime.download`. Set-uid bits are dropped; links stay links, wherever they lead."""
        with self._execution() as execution, tempfile.TemporaryFile(dir=self._host("start")) as file:
            await self._work(execution, apptainer_inside.PACK, self._inside(source), watch=_Into(file.write))
            file.seek(0)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                await anyio.to_thread.run_sync(archive.unpack, file.read, str(target))
            except (OSError, ValueError) as error:
                raise SandboxError(f"cannot copy {source!r} to {target}: {error}") from error

    async def _work(self, execution: _Execution, program: str, *arguments: str, watch: Watch | None = None) -> None:
        """Run a program of `apptainer_inside`, of whose arguments the last one is told where it fails."""
        argv = (*interpreter(self._started.kit), "-c", program, *arguments)
        result = await self._run(execution, self._start(argv, "/", {}), watch=watch)
        if not result.ok:
            raise SandboxError(f"cannot copy {arguments[-1]!r}: {result.stderr.decode(errors='replace').strip()}")

    # --- one command --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _execution(self) -> Generator[_Execution]:
        """A command's directory, gone with it. Raises SandboxError before `start` and after `stop`."""
        if self._stopped:
            raise SandboxError("the sandbox is stopped")
        execution = _Execution(self._host("in") / str(next(self._numbers)))
        execution.directory.mkdir()
        self._running.add(execution)
        try:
            yield execution
        finally:
            self._running.discard(execution)
            shutil.rmtree(execution.directory, ignore_errors=True)
            execution.ended.set()

    async def _run(
        self,
        execution: _Execution,
        start: Start,
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        watch: Watch | None = None,
    ) -> ExecResult:
        opened = self._started
        memory = self._memory_watch(opened, watch)
        enter, around, env = opened.container.enter(), supervisor(opened.kit), self._program.env
        limit = self._options.output_bytes
        with execution.scope:
            patience = 0.0
            try:
                result = await run_contained(
                    start,
                    enter,
                    around,
                    env=env,
                    stdin=stdin,
                    timeout=timeout,
                    limit=limit,
                    watch=memory or watch,
                    told_pid=execution.clients.append,
                )
                killed = result.exit_code > 128 and not (result.timed_out or result.ended)
                patience = _PATIENCE if killed else 0.0
            finally:
                with anyio.CancelScope(shield=True):
                    await opened.container.tidy(patience=patience)
            return replace(result, ended=False, oom=True) if memory and memory.exceeded else result
        raise SandboxError("the sandbox was stopped while a command ran")

    def _script(self, execution: _Execution, text: str) -> tuple[str, str]:
        """The argument vector that runs `text`, which itself stays off every command line."""
        (execution.directory / "script").write_bytes(text.encode(errors="surrogateescape"))
        return self._started.interior.shell, execution.inside("script")

    def _memory_watch(self, opened: _Opened, also: Watch | None) -> MemoryWatch | None:
        limit = self._spec.memory_mb
        if limit is None or opened.bounded:
            return None
        return MemoryWatch(self._held, limit << 20, also)

    def _held(self) -> int:
        """Bytes of memory, of all commands together."""
        clients = [pid for execution in tuple(self._running) for pid in execution.clients]
        return host_tree.memory(host_tree.below(clients))

    def _start(self, argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> Start:
        own = {"HOME": self.home, "USER": "agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        alone, processes = self._options.mode == "one_shot", self._options.max_processes
        return Start(
            argv=list(argv),
            env={**self._started.interior.env, **own, **self._spec.env, **env},
            cwd=cwd,
            listen=PROXY_PORT if alone and self._relay else None,
            socket=SOCKET,
            limits={"nproc": processes} if processes else {},
            own_tree=not alone,
        )

    @property
    def _started(self) -> _Opened:
        if self._opened is None:
            raise SandboxError("the sandbox is not started")
        return self._opened

    def _host(self, name: str) -> Path:
        if self._directory is None:
            raise SandboxError("the sandbox is not started")
        return self._directory / name

    def _inside(self, path: str) -> str:
        return os.path.join(self.workdir, path)  # noqa: PTH118 - a path of the sandbox's, not of this machine's


class _Into:
    """A `Watch` that passes stdout on as it comes."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def saw(self, stream: int, piece: bytes) -> None:
        if stream == 1:
            self._write(piece)

    async def over(self) -> None:
        await anyio.sleep_forever()


def _given(source: Path | bytes, execution: _Execution) -> Path:
    if isinstance(source, Path):
        if not source.exists() and not source.is_symlink():
            raise SandboxError(f"cannot upload {source}: it does not exist")
        return source.absolute()
    path = execution.directory / "bytes"
    path.write_bytes(source)
    path.chmod(0o644)
    return path


def _once(text: str, failures: Sequence[str] = ()) -> None:
    """Told once a process."""
    if text not in _told:
        _told.add(text)
        _log.warning("%s", "; ".join((text, *failures)))
