"""Sandboxes on this machine: bubblewrap, or, only when told, plain processes without isolation.

What holds under bubblewrap: no write outside workspace, home and /tmp, which are the attempt's own; nothing of the
host's home directories or of other attempts is visible; no process outlives its `exec`; under `network: proxy_only`
the only peer is the proxy. What does not: disk space is unlimited, and `memory_mb` bounds each process's data
(RLIMIT_DATA), not their sum. Where the trainer runs as root, files made inside belong to root outside, and
`max_processes` has no effect (the kernel exempts root).

With `isolation: none` an agent can do whatever the trainer's user can. Its processes are killed by following the
process tree; one that kills its supervisor first escapes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import STDOUT
from typing import Any, Literal

import anyio

from ..errors import ConfigError, SandboxError
from ..records import RuntimeSpec
from . import bubblewrap, forward
from .base import ExecResult, ProxyEndpoint, Watch
from .bubblewrap import CONTROL, ETC_STUBS, HOME, Mounts, Program
from .harness_roots import check_harness_root
from .supervised import Start, python, run_isolated, run_plain
from .trees import copy_tree, remove_tree

PROXY_PORT = 8399
"""Where the proxy is found inside; each command has a loopback of its own, so it never collides."""
NETWORKS = ("proxy_only", "none", "host")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SOCKET = f"{CONTROL}/proxy.sock"
_COPY = """set -e
if [ ! -e "$1" ] && [ ! -L "$1" ]; then echo "it does not exist" >&2; exit 1; fi
mkdir -p "$(dirname "$2")"
cp -RPT --preserve=mode,timestamps --remove-destination "$1" "$2"
"""

_log = logging.getLogger("polar_plugin.runtimes.local")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """`runtime.kwargs` of this backend."""

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    root: str | None = None
    """Where attempts' directories are made; default: the system's temporary directory."""
    ro_binds: Sequence[str] = ()
    """More of the host, read-only: "PATH" or "PATH:INSIDE". A node installation, say."""
    output_bytes: int = 8 << 20
    """How much of a command's stdout, and of its stderr, is kept: the tail."""
    max_processes: int | None = None
    """Processes of one command at once (RLIMIT_NPROC); not enforced where the trainer runs as root."""


@dataclass(frozen=True, slots=True, eq=False)
class _Execution:
    """One command under way: its control directory, and how `stop` ends it."""

    directory: Path
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class LocalRuntime:
    """One attempt's directories, and one sandbox around each command that runs on them.

    `spec.image` is a directory whose content is copied into the workspace at `start`. Workspace, $HOME and /tmp
    persist over commands; processes do not.
    """

    def __init__(
        self, spec: RuntimeSpec, *, proxy: ProxyEndpoint | None, labels: Mapping[str, str], **options: Any
    ) -> None:
        """`options` go before `spec.kwargs`; see `LocalOptions`. Raises ConfigError."""
        self._options = _options({**spec.kwargs, **options})
        self._isolated = self._options.isolation == "bubblewrap"
        self._shares_network = spec.network == "host" or not self._isolated
        self._relayed = proxy is not None and spec.network == "proxy_only" and self._isolated
        self._spec, self._proxy, self._labels = spec, proxy, labels
        self._directory: Path | None = None
        self._bubblewrap: Program | None = None
        self._stopped = False
        self._running: set[_Execution] = set()
        self._numbers = itertools.count()
        self.workdir = spec.workdir or "/workspace"
        self.home = HOME
        self.proxy_url = ""
        _check(spec, proxy, shares_network=self._shares_network)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Make the attempt's directories, copy `image`, and prove that a command runs. Raises SandboxError."""
        if self._directory is not None or self._stopped:
            raise SandboxError("a sandbox is started once")
        self._warn()
        if self._isolated:
            self._bubblewrap = await _installed_bubblewrap()
        self._directory = _make_directories(self._options.root, self._labels)
        if self._spec.image:
            await copy_tree(Path(self._spec.image), self._host("workspace"))
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
        if self._directory is not None:
            await remove_tree(self._directory)

    def _warn(self) -> None:
        if not self._isolated:
            _log.warning("isolation: none. The agent can read and write whatever this user can, and reach any network")
        elif self._shares_network:
            _log.warning("network: host. The agent can reach whatever this machine can")
        if self._spec.cpus is not None:
            _log.warning("runtime.cpus is not enforced by the local runtime")

    def _set_addresses(self) -> None:
        if not self._isolated:
            self.workdir, self.home = str(self._host("workspace")), str(self._host("home"))
        if self._proxy is not None and self._spec.network != "none":
            self.proxy_url = self._proxy.url if self._shares_network else f"http://127.0.0.1:{PROXY_PORT}"

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
            place = cwd or self.workdir
            return await self._run(execution, argv, cwd=place, env=env, stdin=stdin, timeout=timeout, watch=watch)

    async def upload(self, source: Path | bytes, target: str) -> None:
        """As `Runtime.upload`. The copy is made inside, with the sandbox's own rights: planted links lead nowhere."""
        with self._execution() as execution:
            given = _given(source, execution)
            origin = f"{CONTROL}/from" if self._isolated else str(given)
            mounts = self._mounts(execution, read_only={origin: given})
            await self._copy(execution, mounts, origin, self._inside(target), told=target)

    async def download(self, source: str, target: Path) -> None:
        """As `Runtime.download`. Set-uid bits are dropped; links stay links, wherever they lead."""
        with self._execution() as execution:
            staging = execution.directory / "staging"
            staging.mkdir()
            place = f"{CONTROL}/to" if self._isolated else str(staging)
            mounts = self._mounts(execution, writable={place: staging})
            await self._copy(execution, mounts, self._inside(source), f"{place}/copy", told=source)
            _drop_set_id_bits(staging / "copy")
            target.parent.mkdir(parents=True, exist_ok=True)
            await copy_tree(staging / "copy", target)

    async def _copy(self, execution: _Execution, mounts: Mounts, source: str, target: str, *, told: str) -> None:
        argv = (*self._script(execution, _COPY), source, target)
        result = await self._run(execution, argv, cwd="/", mounts=mounts)
        if not result.ok:
            raise SandboxError(f"cannot copy {told!r}: {result.text.strip()}")

    # --- one command --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _execution(self) -> Generator[_Execution]:
        """A command's control directory, gone with it. Raises SandboxError before `start` and after `stop`."""
        if self._stopped:
            raise SandboxError("the sandbox is stopped")
        execution = _Execution(self._host("exec") / str(next(self._numbers)))
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
        mounts: Mounts | None = None,
    ) -> ExecResult:
        start = self._start(argv, self._inside(cwd), env or {})
        limit = self._options.output_bytes
        with execution.scope:
            if self._bubblewrap is None:
                return await run_plain(start, stdin=stdin, timeout=timeout, limit=limit, watch=watch)
            around = partial(
                bubblewrap.arguments,
                self._bubblewrap,
                mounts or self._mounts(execution),
                share_network=self._shares_network,
            )
            return await run_isolated(
                start, around, f"{CONTROL}/forward.py", stdin=stdin, timeout=timeout, limit=limit, watch=watch
            )
        raise SandboxError("the sandbox was stopped while a command ran")

    def _start(self, argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> Start:
        data, count = self._spec.memory_mb, self._options.max_processes
        limits = {"data": data << 20 if data else None, "nproc": count}
        return Start(
            argv=list(argv),
            env={**self._base_env(), **self._spec.env, **env},
            cwd=cwd,
            listen=PROXY_PORT if self._relayed else None,
            socket=_SOCKET,
            limits={name: value for name, value in limits.items() if value is not None},
            own_tree=not self._isolated,
        )

    def _base_env(self) -> dict[str, str]:
        path = _PATH if python().is_relative_to("/usr") else f"{python().parent}:{_PATH}"
        temporary = "/tmp" if self._isolated else str(self._host("tmp"))
        return {"PATH": path, "HOME": self.home, "USER": "agent", "LANG": "C.UTF-8", "TMPDIR": temporary}

    def _script(self, execution: _Execution, text: str) -> tuple[str, str]:
        """The argument vector that runs `text`, which itself stays off every command line."""
        path = execution.directory / "script"
        path.write_bytes(text.encode(errors="surrogateescape"))
        shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
        return shell, f"{CONTROL}/exec/script" if self._isolated else str(path)

    def _mounts(
        self,
        execution: _Execution,
        *,
        read_only: Mapping[str, Path] | None = None,
        writable: Mapping[str, Path] | None = None,
    ) -> Mounts:
        own = {"/tmp": self._host("tmp"), self.home: self._host("home"), self.workdir: self._host("workspace")}
        shown = {f"/etc/{name}": self._host("etc") / name for name in ETC_STUBS}
        shown |= {f"{CONTROL}/forward.py": Path(forward.__file__), f"{CONTROL}/exec": execution.directory}
        if not Path(sys.base_prefix).is_relative_to("/usr"):
            shown[sys.base_prefix] = Path(sys.base_prefix)
        if self._relayed and self._proxy is not None and self._proxy.unix_socket is not None:
            shown[_SOCKET] = self._proxy.unix_socket
        if self._spec.harness_root is not None:
            shown[self._spec.harness_root] = Path(self._spec.harness_root)
        shown |= dict(_bind(bind) for bind in self._options.ro_binds)
        return Mounts({**own, **(writable or {})}, {**shown, **(read_only or {})})

    def _host(self, name: str) -> Path:
        if self._directory is None:
            raise SandboxError("the sandbox is not started")
        return self._directory / name

    def _inside(self, path: str) -> str:
        return os.path.join(self.workdir, path)  # noqa: PTH118 - a path of the sandbox's, not of this machine's


def _options(given: Mapping[str, Any]) -> LocalOptions:
    try:
        options = LocalOptions(**given)
    except TypeError as error:
        known = ", ".join(LocalOptions.__slots__)
        raise ConfigError(f"runtime.kwargs {dict(given)!r}: the local runtime knows {known}") from error
    if options.isolation not in ("bubblewrap", "none"):
        raise ConfigError(f"runtime.kwargs.isolation is 'bubblewrap' or 'none', not {options.isolation!r}")
    return options


def _check(spec: RuntimeSpec, proxy: ProxyEndpoint | None, *, shares_network: bool) -> None:
    if spec.network not in NETWORKS:
        raise ConfigError(f"runtime.network of the local runtime is one of {', '.join(NETWORKS)}, not {spec.network!r}")
    if spec.gpus:
        raise ConfigError("runtime.gpus: the local runtime passes no GPU into its sandbox")
    if spec.workdir is not None and not spec.workdir.startswith("/"):
        raise ConfigError(f"runtime.workdir must be absolute, not {spec.workdir!r}")
    if spec.image is not None and not Path(spec.image).is_dir():
        raise ConfigError(f"runtime.image of the local runtime is a directory to copy, and {spec.image!r} is none")
    check_harness_root(spec)
    if spec.network == "proxy_only" and proxy is not None and not shares_network and proxy.unix_socket is None:
        raise ConfigError("runtime.network: proxy_only needs the proxy's Unix socket, and it listens on none")


async def _installed_bubblewrap() -> Program:
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(
            "bubblewrap is not installed: `apt-get install bubblewrap`, or give up isolation with "
            "`runtime.kwargs.isolation: none`"
        )
    told = await anyio.run_process((path, "--help"), check=False, stderr=STDOUT)
    return Program(path, can_disable_userns=b"--disable-userns" in told.stdout)


def _make_directories(root: str | None, labels: Mapping[str, str]) -> Path:
    try:
        if root is not None:
            Path(root).mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="polar-sandbox-", dir=root)).resolve()
        for name in ("workspace", "home", "tmp", "etc", "exec"):
            (directory / name).mkdir()
        for name, text in ETC_STUBS.items():
            (directory / "etc" / name).write_text(text)
        (directory / "labels.json").write_text(json.dumps(dict(labels)))
    except OSError as error:
        raise SandboxError(f"cannot make the attempt's directories: {error}") from error
    return directory


def _given(source: Path | bytes, execution: _Execution) -> Path:
    if isinstance(source, Path):
        if not source.exists() and not source.is_symlink():
            raise SandboxError(f"cannot upload {source}: it does not exist")
        return source.absolute()
    path = execution.directory / "given"
    path.write_bytes(source)
    path.chmod(0o644)
    return path


def _drop_set_id_bits(path: Path) -> None:
    """Files made inside may belong to the trainer's user outside, root even: none may run as it."""
    for found in (path, *path.rglob("*")):
        mode = found.lstat().st_mode
        if found.is_file() and not found.is_symlink() and mode & 0o6000:
            found.chmod(mode & 0o1777)


def _bind(text: str) -> tuple[str, Path]:
    host, _, inside = text.partition(":")
    return inside or host, Path(host)
