"""Sandboxes on this machine: bubblewrap namespaces by default, a plain subprocess only when told.

Each command is one bubblewrap process with its own namespaces; what lasts is a directory of the attempt's own
(workspace, home, /tmp). Under `proxy_only` a sandbox has no network:
a forwarder inside leads 127.0.0.1 to the proxy's Unix socket.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import anyio.to_thread
from anyio.abc import Process

from ..errors import ConfigError, SandboxError
from ..records import RuntimeSpec
from . import forward
from .base import ExecResult, ProxyEndpoint
from .process import kill_group, run

_log = logging.getLogger("polar_plugin.runtimes")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl",
    "ca-certificates",
    "localtime",
    "mime.types",
)
_NETWORKS = ("proxy_only", "none", "host")
_PROXY_PORT = 8_080  # inside a network namespace of its own any port is free
_MARK = "POLAR_SANDBOX_EXEC"


class LocalRuntime:
    """`Runtime` on this machine. Limits on memory are per process (RLIMIT_AS); there is no limit on CPU or disk."""

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        proxy: ProxyEndpoint | None,
        labels: Mapping[str, str],
        isolation: str = "bubblewrap",
        ro_binds: Sequence[str] = (),
        root: str | None = None,
    ) -> None:
        """`spec.image`, if set, is a directory whose content the workspace starts with.

        `ro_binds` are host paths shown read-only under the same path (a Node.js prefix, say); `root` is where the
        attempt's directory is made. Raises ConfigError for what this backend cannot do.
        """
        if isolation not in ("bubblewrap", "none"):
            raise ConfigError(f"runtime.kwargs.isolation: use `bubblewrap` or `none`, got {isolation!r}")
        if spec.network not in _NETWORKS:
            raise ConfigError(f"runtime.network: the local backend has {', '.join(_NETWORKS)}; got {spec.network!r}")
        if spec.gpus:
            raise ConfigError("runtime.gpus: the local backend gives no GPUs")
        self._spec = spec
        self._proxy = proxy
        self._labels = labels
        self._isolated = isolation == "bubblewrap"
        self._binds = tuple(ro_binds)
        self._parent = root
        self._directory: Path | None = None
        self._stopped = False
        self.proxy_url = ""
        self.workdir = spec.workdir or "/workspace"

    async def start(self) -> None:
        if self._stopped:
            raise SandboxError("this sandbox was stopped")
        if self._isolated and not shutil.which("bwrap"):
            raise SandboxError(
                "bubblewrap is not installed: `apt-get install bubblewrap`, or set runtime.kwargs.isolation to `none`"
                " to run agents without isolation"
            )
        self._directory = Path(tempfile.mkdtemp(prefix="polar-", dir=self._parent))
        await anyio.to_thread.run_sync(self._populate, self._directory)
        self.proxy_url = self._inside_url()
        if not self._isolated:
            _log.warning(
                "sandbox %s: agents run WITHOUT isolation, as this user, with this machine's network", self.name
            )
            self.workdir = str(self._directory / "workspace")
        elif self._spec.network == "host":
            _log.warning("sandbox %s: agents share this machine's network", self.name)

    @property
    def name(self) -> str:
        return self._labels.get("session", "") or "local"

    @property
    def home(self) -> str:
        """The home directory, as seen inside."""
        return "/home/agent" if self._isolated else str(self._root / "home")

    @property
    def _root(self) -> Path:
        if self._directory is None or self._stopped:
            raise SandboxError("this sandbox is not running")
        return self._directory

    def _populate(self, directory: Path) -> None:
        for name in ("home", "tmp"):
            (directory / name).mkdir()
        workspace = directory / "workspace"
        try:
            if self._spec.image:
                shutil.copytree(self._spec.image, workspace, symlinks=True)
            else:
                workspace.mkdir()
            shutil.copy(forward.__file__, directory / "forward.py")
        except OSError as error:
            raise SandboxError(f"cannot fill the workspace from image {self._spec.image!r}: {error}") from error

    def _inside_url(self) -> str:
        if self._proxy is None or self._spec.network == "none":
            return ""
        if not self._isolated or self._spec.network == "host":
            return self._proxy.url
        if self._proxy.unix_socket is None:
            raise SandboxError("network `proxy_only` needs the proxy on a Unix socket")
        return f"http://127.0.0.1:{_PROXY_PORT}"

    async def stop(self) -> None:
        """Commands end with the tasks that run them; what is left is the directory."""
        self._stopped = True
        if self._directory is not None:
            await anyio.to_thread.run_sync(_remove, self._directory)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
    ) -> ExecResult:
        argv = ("bash", "-c", command) if isinstance(command, str) else tuple(command)
        variables = {**self._base_env(), **self._spec.env, **(env or {})}
        if self._spec.memory_mb:
            argv = ("prlimit", f"--as={self._spec.memory_mb << 20}", "--", *argv)
        if not self._isolated:
            mark = uuid.uuid4().hex
            where = self._outside(cwd or self.workdir)
            variables[_MARK] = mark
            return await run(argv, env=variables, cwd=str(where), stdin=stdin, timeout=timeout, kill=_killer(mark))
        return await run(
            self._wrapped(argv, cwd or self.workdir), env=variables, stdin=stdin, timeout=timeout, kill=kill_group
        )

    def _base_env(self) -> dict[str, str]:
        path = os.pathsep.join(dict.fromkeys((*_interpreter_bin(), "/usr/local/bin", "/usr/bin", "/bin")))
        return {"PATH": path, "HOME": self.home, "TMPDIR": self._inside("tmp"), "LANG": "C.UTF-8", "USER": "agent"}

    def _inside(self, name: str) -> str:
        return f"/{name}" if self._isolated else str(self._root / name)

    def _wrapped(self, argv: Sequence[str], cwd: str) -> tuple[str, ...]:
        """The bubblewrap command line. It holds paths only: variables and prompts go by environment and files."""
        root = self._root
        line = [
            "bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent", "--new-session",
            "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", *self._system(),
            "--proc", "/proc", "--dev", "/dev", "--bind", str(root / "tmp"), "/tmp",
            "--bind", str(root / "home"), self.home, "--bind", str(root / "workspace"), self.workdir,
        ]  # fmt: skip
        if self._spec.network == "host":
            line += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        if self._spec.network != "proxy_only" or self._proxy is None:
            return (*line, "--chdir", cwd, "--", *argv)
        line += ["--bind", str(self._proxy.unix_socket), "/run/polar/proxy.sock"]
        line += ["--ro-bind", str(root / "forward.py"), "/run/polar/forward.py", "--chdir", cwd, "--"]
        return (*line, _python(), "-I", "/run/polar/forward.py", str(_PROXY_PORT), "/run/polar/proxy.sock", *argv)

    def _system(self) -> Iterator[str]:
        for path in _SYSTEM:
            if Path(path).is_symlink():
                yield from ("--symlink", str(Path(path).readlink()), path)
            elif Path(path).exists():
                yield from ("--ro-bind", path, path)
        for name in _ETC:
            yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
        for path in (*_interpreter_prefixes(), *self._binds):
            yield from ("--ro-bind", path, path)

    async def upload(self, source: Path | bytes, target: str) -> None:
        await anyio.to_thread.run_sync(self._upload, source, self._outside(target))

    def _upload(self, source: Path | bytes, target: Path) -> None:
        try:
            if isinstance(source, Path):
                _copy(source, target)
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(source)
        except OSError as error:
            raise SandboxError(f"cannot upload to {target.name!r}: {error}") from error

    async def download(self, source: str, target: Path) -> None:
        await anyio.to_thread.run_sync(self._download, self._outside(source), target)

    def _download(self, source: Path, target: Path) -> None:
        try:
            _copy(source, target)
        except OSError as error:
            raise SandboxError(f"cannot download {source.name!r}: {error}") from error

    def _outside(self, path: str) -> Path:
        """The host path of a path inside; only the attempt's own directories can be named, links not followed out."""
        root, inner = self._root, PurePosixPath(path)
        if not self._isolated and inner.is_relative_to(root):
            return _contained(Path(inner), root, path)
        mounts = {self.workdir: "workspace", "/workspace": "workspace", "/home/agent": "home", "/tmp": "tmp"}
        for mount, name in mounts.items():
            if inner.is_relative_to(mount):
                return _contained(root / name / inner.relative_to(mount), root / name, path)
        raise SandboxError(
            f"{path!r} is not under {self.workdir}, /home/agent or /tmp, the writable places of a sandbox"
        )


def _contained(path: Path, root: Path, told: str) -> Path:
    """An agent may have left a link to the host on the way to where we copy."""
    if path != root and not path.parent.resolve().is_relative_to(root.resolve()):
        raise SandboxError(f"{told!r} leads out of the sandbox")
    return path


def _copy(source: Path, target: Path) -> None:
    """A file or tree; links are copied as links, never followed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(directory: Path) -> None:
    def again(function: Callable[..., object], path: str, error: object) -> None:
        Path(path).parent.chmod(0o700)  # an agent may have taken its own permissions away
        Path(path).chmod(0o700)
        function(path)

    if directory.exists():
        shutil.rmtree(directory, onerror=again)


def _interpreter_prefixes() -> list[str]:
    """This interpreter's own directories, where they are not the system's, so that the sandbox has the same Python."""
    paths = {os.path.realpath(path) for path in (sys.base_prefix, sysconfig.get_path("stdlib"))}
    outer = [path for path in sorted(paths) if not path.startswith(("/usr/", "/bin/", "/lib")) and path != "/usr"]
    return [path for path in outer if not any(path != other and Path(path).is_relative_to(other) for other in outer)]


def _interpreter_bin() -> list[str]:
    return [str(Path(prefix) / "bin") for prefix in _interpreter_prefixes() if (Path(prefix) / "bin").is_dir()]


def _python() -> str:
    return str(Path(os.path.realpath(sys.executable)))


def _killer(mark: str) -> Callable[[Process], None]:
    """Kills a command and all it started, also what left its group: by a variable they inherited."""

    def kill(process: Process) -> None:
        kill_group(process)
        for _ in range(3):
            for pid in _marked(mark):
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue

    return kill


def _marked(mark: str) -> Iterator[int]:
    needle = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found = needle in (entry / "environ").read_bytes()
            except OSError:
                continue
            if found:
                yield int(entry.name)
