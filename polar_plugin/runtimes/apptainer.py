"""Sandboxes of Apptainer (or SingularityCE), without root's rights: an image in a SIF file or a directory.

What holds: no write outside the attempt's own directories, no capability, no process of this machine in sight; no process
outlives its `exec`; under `network: proxy_only` the only peer is the proxy; all processes die with the trainer, or after
`ttl` seconds. What does not: disk space is unlimited, and without cgroups `cpus` is not enforced and `memory_mb` is looked
after four times a second. Programs inside run as the trainer's user: do not be root.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import anyio
import anyio.to_thread

from ..errors import ConfigError, SandboxError
from ..records import RuntimeSpec
from . import apptainer_argv, apptainer_sweep, archive, host_tree, kit
from .apptainer_argv import START_SCRIPT, Box, Program, Way, Writable
from .apptainer_container import Alone, Container, Instance, Relay
from .base import ExecResult, ProxyEndpoint, Watch
from .bubblewrap import CONTROL, HOME, Mounts
from .process import Command, run
from .supervised import Start, run_contained
from .trees import copy_tree, remove_tree
from .watchdog import MemoryWatch

PROXY_PORT = 8399
NETWORKS = ("proxy_only", "none", "host")
_SOCKET = f"{CONTROL}/proxy.sock"
_KIT = f"{CONTROL}/kit"
_GIVEN = f"{CONTROL}/in"
_STATE = ("APPTAINER_", "SINGULARITY_", "XDG_")
_OURS = ("APPTAINER_", "SINGULARITY_", "PROMPT_COMMAND", "PS1", "PWD", "OLDPWD", "SHLVL", "HOME", "TERM")
_PROBE = """
import json, os, sys
os.makedirs(sys.argv[1], exist_ok=True)
open("/.polar", "w").close()
os.unlink("/.polar")
shells = [shell for shell in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.path.exists(shell)]
json.dump({"env": dict(os.environ), "shell": (shells or ["/bin/sh"])[0]}, sys.stdout)
"""
_UNPACK = """
import os, sys
from polar_plugin.runtimes import archive
source, target = sys.argv[1:]
os.makedirs(os.path.dirname(target) or "/", exist_ok=True)
pieces, rest = archive.pack(source), b""
def read(size):
    global rest
    rest = rest or next(pieces, b"")
    taken, rest = rest[:size], rest[size:]
    return taken
try:
    archive.unpack(read, target)
except (OSError, ValueError) as error:
    sys.exit(str(error))
"""
_PACK = """
import sys
from polar_plugin.runtimes import archive
try:
    for piece in archive.pack(sys.argv[1]):
        sys.stdout.buffer.write(piece)
except OSError as error:
    sys.exit(str(error))
"""

_log = logging.getLogger("polar_plugin.runtimes.apptainer")
_told: set[str] = set()
_found: dict[tuple[str, str, str, bool], Way] = {}
"""What worked last: the program, the image, what was asked -> the way."""


@dataclass(frozen=True, slots=True)
class ApptainerOptions:
    """`runtime.kwargs` of this backend."""

    mode: Literal["instance", "one_shot"] = "instance"
    """One container that all commands enter, or one for each command (slower, and nothing runs between commands)."""
    writable: Literal["auto", "overlay", "tmpfs", "copy"] = "auto"
    """How the image is made writable: a directory laid over it, memory laid over it (small), or a copy of an image
    directory. "auto": overlay, and tmpfs where that fails; the copy for `mode: one_shot`, which can do nothing else."""
    root: str | None = None
    """Where attempts' directories are made; default: the system's temporary directory."""
    program: str | None = None
    """Default: `apptainer`, else `singularity`, on PATH."""
    flags: Sequence[str] = ()
    """More flags of `apptainer exec` and `instance start`: --fakeroot, say."""
    ro_binds: Sequence[str] = ()
    """More of this machine, read-only: "PATH" or "PATH:INSIDE"."""
    output_bytes: int = 8 << 20
    """How much of a command's stdout, and of its stderr, is kept: the tail."""
    max_processes: int | None = None
    """Processes at once; without cgroups not enforced where the trainer runs as root."""
    ttl: float = 86400.0
    """Seconds after which an instance is killed even if nobody stops it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Execution:
    """One command under way: the directory with its files, and how `stop` ends it."""

    directory: Path
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class ApptainerRuntime:
    """One attempt's directories, and the containers on them.

    `spec.image` is a SIF file or an image directory. Without `spec.workdir` commands start in an empty /workspace; with
    it, in that directory of the image. Files persist over commands; processes do not.
    """

    def __init__(
        self, spec: RuntimeSpec, *, proxy: ProxyEndpoint | None, labels: Mapping[str, str], **options: Any
    ) -> None:
        """`options` go before `spec.kwargs`; see `ApptainerOptions`. Raises ConfigError."""
        self._options = _options({**spec.kwargs, **options})
        _check(spec, proxy)
        self._spec, self._labels = spec, labels
        relayed = proxy is not None and spec.network == "proxy_only"
        self._relay = Relay(PROXY_PORT, cast("Path", proxy.unix_socket)) if relayed else None
        self._proxy = proxy
        self._name = apptainer_sweep.name(secrets.token_hex(6))
        self._directory: Path | None = None
        self._program = Program("", {})
        self._container: Container | None = None
        self._kit: kit.Kit | None = None
        self._base: Mapping[str, str] = {}
        self._shell = "/bin/sh"
        self._bounded = False
        self._stopped = False
        self._running: set[_Execution] = set()
        self._numbers = itertools.count()
        self.workdir = spec.workdir or "/workspace"
        self.home = HOME
        self.proxy_url = ""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find out how the image can be run, run it, and prove that a command runs. Raises SandboxError."""
        if self._directory is not None or self._stopped:
            raise SandboxError("a sandbox is started once")
        self._program = _installed(self._options.program)
        root = Path(self._options.root or tempfile.gettempdir())
        await apptainer_sweep.sweep_once(root)
        if not Path(str(self._spec.image)).exists():
            raise SandboxError(f"image {self._spec.image!r} is not there: `apptainer pull` or `apptainer build` it first")
        self._kit = await anyio.to_thread.run_sync(kit.installed)
        self._directory = await anyio.to_thread.run_sync(self._make_directories, root)
        if self._writables[0] == "copy":
            await copy_tree(Path(str(self._spec.image)), self._host("image"))
        await self._open()
        self._set_addresses()
        proof = await self.exec(("true",), timeout=60)
        if not proof.ok:
            raise SandboxError(f"the sandbox cannot run a command: {proof.text.strip()}")

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

    @property
    def _writables(self) -> tuple[Writable, ...]:
        asked = self._options.writable
        if asked != "auto":
            return (asked,)
        return ("copy",) if self._options.mode == "one_shot" else ("overlay", "tmpfs")

    def _ways(self) -> Iterator[Way]:
        """In the order in which they are tried: what worked last time, then with cgroups before without."""
        spec = self._spec
        flags = apptainer_argv.limits(
            memory_mb=spec.memory_mb, cpus=spec.cpus, processes=self._options.max_processes
        )
        if (known := _found.get(self._key)) is not None:
            yield replace(known, limits=flags if known.limits else ())
        for limits in (flags, ()) if flags else ((),):
            for writable in self._writables:
                yield Way(writable, limits)

    @property
    def _key(self) -> tuple[str, str, str, bool]:
        spec = self._spec
        limited = any(bound is not None for bound in (spec.memory_mb, spec.cpus, self._options.max_processes))
        return self._program.path, str(spec.image), f"{self._options.mode} {self._options.writable}", limited

    async def _open(self) -> None:
        """Open the container by the first way that works. Raises SandboxError with what each way came to."""
        failures: list[str] = []
        for way in self._ways():
            if way.limits and any("cgroup" in failure for failure in failures):
                continue
            container = self._container = self._new(way)
            try:
                await container.open(way)
                await self._probe(container)
            except SandboxError as error:
                failures.append(f"{way.writable}{' with cgroups' if way.limits else ''}: {error}")
                await container.close()
            else:
                _found[self._key], self._bounded = way, bool(way.limits)
                return self._warn(way, failures)
        raise SandboxError("the image cannot be run. " + "; ".join(failures))

    def _new(self, way: Way) -> Container:
        box = self._box(way)
        if self._options.mode == "one_shot":
            return Alone(self._program, box)
        return Instance(self._program, box, self._name, self._host("start"), self._relay, self._options.ttl)

    async def _probe(self, container: Container) -> None:
        """Write to the image, and learn the environment that it sets."""
        argv = [*container.enter(), *self._python, "-c", _PROBE, self.workdir]
        command = Command(argv, self._program.env, (), lambda process: process.kill())
        result = await run(command, stdin=b"", timeout=60, limit=1 << 20)
        try:
            told = json.loads(result.stdout)
        except ValueError as error:
            raise SandboxError(result.text.strip()[-2000:] or f"exit code {result.exit_code}") from error
        self._base = {name: value for name, value in told["env"].items() if not name.startswith(_OURS)}
        self._shell = told["shell"]

    def _warn(self, way: Way, failures: Sequence[str]) -> None:
        if failures:
            _once(f"Apptainer falls back to {way.writable}{'' if way.limits else ' without cgroups'}: {failures}")
        if self._spec.network == "host":
            _once("network: host. The agent can reach whatever this machine can")
        if os.getuid() == 0:
            _once("the trainer runs as root, and so do the programs in its sandboxes, if without capabilities")
        if self._spec.cpus is not None and not way.limits:
            _once("runtime.cpus is not enforced: Apptainer has no cgroups here")

    def _set_addresses(self) -> None:
        if self._proxy is not None and self._spec.network != "none":
            self.proxy_url = f"http://127.0.0.1:{PROXY_PORT}" if self._relay else self._proxy.url

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
            place = self._inside(cwd or self.workdir)
            return await self._run(execution, argv, cwd=place, env=env, stdin=stdin, timeout=timeout, watch=watch)

    async def upload(self, source: Path | bytes, target: str) -> None:
        """As `Runtime.upload`. The copy is made inside, with the sandbox's own rights: planted links lead nowhere."""
        with self._execution() as execution:
            given = execution.directory / "given"
            if isinstance(source, bytes):
                given.write_bytes(source)
                given.chmod(0o644)
            elif source.exists() or source.is_symlink():
                await copy_tree(source, given)
            else:
                raise SandboxError(f"cannot upload {source}: it does not exist")
            place = f"{_GIVEN}/{execution.directory.name}/given"
            argv = (*self._python, "-c", _UNPACK, place, self._inside(target))
            await self._copied(await self._run(execution, argv, cwd="/"), target)

    async def download(self, source: str, target: Path) -> None:
        """As `Runtime.download`. Set-uid bits are dropped; links stay links, wherever they lead."""
        with self._execution() as execution, tempfile.TemporaryFile(dir=self._host("start")) as file:
            argv = (*self._python, "-c", _PACK, self._inside(source))
            result = await self._run(execution, argv, cwd="/", watch=_Into(file.write), limit=1 << 16)
            await self._copied(result, source)
            file.seek(0)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                await anyio.to_thread.run_sync(archive.unpack, file.read, str(target))
            except (OSError, ValueError) as error:
                raise SandboxError(f"cannot copy {source!r} to {target}: {error}") from error

    async def _copied(self, result: ExecResult, what: str) -> None:
        if not result.ok:
            raise SandboxError(f"cannot copy {what!r}: {result.stderr.decode(errors='replace').strip()}")

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
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        watch: Watch | None = None,
        limit: int | None = None,
    ) -> ExecResult:
        container = self._container
        assert container is not None
        memory = self._memory_watch(watch)
        contained = partial(
            run_contained,
            self._start(argv, cwd, env or {}),
            container.enter(),
            [*self._python, f"{_KIT}/{self._forward}"],
            env=self._program.env,
        )
        with execution.scope:
            try:
                result = await contained(
                    stdin=stdin, timeout=timeout, limit=limit or self._options.output_bytes, watch=memory or watch
                )
            finally:
                with anyio.CancelScope(shield=True):
                    await container.tidy()
            return replace(result, ended=False, oom=True) if memory and memory.exceeded else result
        raise SandboxError("the sandbox was stopped while a command ran")

    def _memory_watch(self, also: Watch | None) -> MemoryWatch | None:
        limit = self._spec.memory_mb
        if limit is None or self._bounded:
            return None
        return MemoryWatch(lambda: host_tree.memory(host_tree.below(host_tree.named(self._name))), limit << 20, also)

    def _start(self, argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> Start:
        own = {"HOME": self.home, "USER": "agent", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        limits = {"nproc": self._options.max_processes} if self._options.max_processes else {}
        alone = self._options.mode == "one_shot"
        return Start(
            argv=list(argv),
            env={**self._base, **own, **self._spec.env, **env},
            cwd=cwd,
            listen=PROXY_PORT if alone and self._relay else None,
            socket=_SOCKET,
            limits=limits,
            own_tree=not alone,
        )

    def _script(self, execution: _Execution, text: str) -> tuple[str, str]:
        """The argument vector that runs `text`, which itself stays off every command line."""
        (execution.directory / "script").write_bytes(text.encode(errors="surrogateescape"))
        return self._shell, f"{_GIVEN}/{execution.directory.name}/script"

    @property
    def _python(self) -> list[str]:
        """The command line, inside, of an interpreter that needs nothing of the image."""
        assert self._kit is not None
        loader = self._kit.loader
        loaded = [f"{_KIT}/{loader}", "--library-path", f"{_KIT}/libraries"] if loader else []
        return [*loaded, f"{_KIT}/bin/python", "-I", "-S", "-X", "utf8"]

    @property
    def _forward(self) -> str:
        assert self._kit is not None
        (found,) = self._kit.directory.rglob("forward.py")
        return str(found.relative_to(self._kit.directory))

    def _box(self, way: Way) -> Box:
        assert self._kit is not None
        writable = {"/tmp": self._host("tmp"), self.home: self._host("home")}
        if self._spec.workdir is None:
            writable[self.workdir] = self._host("workspace")
        shown = {_GIVEN: self._host("in"), _KIT: self._kit.directory}
        if self._options.mode == "instance":
            shown[START_SCRIPT] = self._host("start") / "script"
        elif self._relay is not None:
            shown[_SOCKET] = self._relay.socket
        shown |= dict(_bind(bind) for bind in self._options.ro_binds)
        image = self._host("image") if way.writable == "copy" else Path(str(self._spec.image)).absolute()
        if way.writable == "copy":
            _make_places(image, (*writable, *shown), files=(START_SCRIPT, _SOCKET))
        return Box(
            image=str(image),
            mounts=Mounts(writable, shown),
            share_network=self._spec.network == "host",
            flags=(*self._options.flags, *(("--nv",) if self._spec.gpus else ())),
            as_root=os.getuid() == 0,
            overlay=self._host("overlay"),
        )

    def _make_directories(self, root: Path) -> Path:
        directory = root.resolve() / self._name
        try:
            directory.mkdir(parents=True, mode=0o700)
            for name in ("overlay", "home", "tmp", "workspace", "in", "start"):
                (directory / name).mkdir()
            (directory / "tmp").chmod(0o1777)
            (directory / "start" / "script").write_text("#!/bin/sh\nexit 0\n")
            (directory / "start" / "script").chmod(0o755)
            (directory / "labels.json").write_text(json.dumps(dict(self._labels)))
        except OSError as error:
            raise SandboxError(f"cannot make the attempt's directories: {error}") from error
        return directory

    def _host(self, name: str) -> Path:
        if self._directory is None:
            raise SandboxError("the sandbox is not started")
        return self._directory / name

    def _inside(self, path: str) -> str:
        return os.path.join(self.workdir, path)  # noqa: PTH118 - a path of the sandbox's, not of this machine's


class _Into:
    """A `Watch` that passes stdout on as it comes."""

    def __init__(self, write: Any) -> None:
        self._write = write

    def saw(self, stream: int, piece: bytes) -> None:
        if stream == 1:
            self._write(piece)

    async def over(self) -> None:
        await anyio.sleep_forever()


def _options(given: Mapping[str, Any]) -> ApptainerOptions:
    try:
        options = ApptainerOptions(**given)
    except TypeError as error:
        known = ", ".join(ApptainerOptions.__slots__)
        raise ConfigError(f"runtime.kwargs {dict(given)!r}: the apptainer runtime knows {known}") from error
    if options.mode not in ("instance", "one_shot"):
        raise ConfigError(f"runtime.kwargs.mode is 'instance' or 'one_shot', not {options.mode!r}")
    if options.writable not in ("auto", "overlay", "tmpfs", "copy"):
        raise ConfigError(f"runtime.kwargs.writable is auto, overlay, tmpfs or copy, not {options.writable!r}")
    if options.mode == "one_shot" and options.writable not in ("auto", "copy"):
        raise ConfigError(
            f"runtime.kwargs.writable: {options.writable} would lose between commands of mode: one_shot what they "
            "wrote: use copy"
        )
    return options


def _check(spec: RuntimeSpec, proxy: ProxyEndpoint | None) -> None:
    if spec.network not in NETWORKS:
        raise ConfigError(
            f"runtime.network of the apptainer runtime is one of {', '.join(NETWORKS)}, not {spec.network!r}"
        )
    if spec.image is None:
        raise ConfigError("runtime.image of the apptainer runtime is a SIF file or an image directory: give one")
    if "://" in spec.image:
        raise ConfigError(f"runtime.image: make a file of it once, `apptainer pull image.sif {spec.image}`, and name that")
    if spec.workdir is not None and not spec.workdir.startswith("/"):
        raise ConfigError(f"runtime.workdir must be absolute, not {spec.workdir!r}")
    if spec.network == "proxy_only" and proxy is not None and proxy.unix_socket is None:
        raise ConfigError("runtime.network: proxy_only needs the proxy's Unix socket, and it listens on none")


def _installed(program: str | None) -> Program:
    found = shutil.which(program or "apptainer") or (None if program else shutil.which("singularity"))
    if found is None:
        raise SandboxError(
            f"{program or 'apptainer'} is not installed: see https://apptainer.org, or name it in runtime.kwargs.program"
        )
    wanted = ("HOME", "PATH", "USER", "TMPDIR")
    env = {name: value for name, value in os.environ.items() if name in wanted or name.startswith(_STATE)}
    return Program(found, env)


def _make_places(image: Path, places: Sequence[str], *, files: Sequence[str]) -> None:
    """What is mounted over must be there in an image that is written to itself. Links of the image lead nowhere."""
    for place in places:
        inside = image
        for part in place.strip("/").split("/"):
            inside = inside / part
            if inside.is_symlink():
                inside.unlink()
            if str(inside.relative_to(image)) == place.strip("/") and place in files:
                inside.touch()
            elif not inside.is_dir():
                inside.mkdir()


def _bind(text: str) -> tuple[str, Path]:
    host, _, inside = text.partition(":")
    return inside or host, Path(host)


def _once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.warning("%s", text)
