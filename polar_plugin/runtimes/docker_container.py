"""What a container is made of: the engine's configuration, from a RuntimeSpec. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..records import RuntimeSpec
from .base import ProxyEndpoint
from .harness_roots import check_harness_root
from .kit import Kit

PROXY_PORT = 8399
"""Where the proxy is found inside, on a loopback of the container's own."""
CONTROL = "/run/polar"
KIT = f"{CONTROL}/kit"
SOCKET = f"{CONTROL}/proxy.sock"
DEFAULT_WORKDIR, DEFAULT_HOME = "/workspace", "/home/agent"
NETWORKS = ("proxy_only", "none", "bridge", "host")


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """`runtime.kwargs` of this backend."""

    url: str | None = None
    """The engine, as in unix:///PATH (a rootless Podman's socket, say); default: DOCKER_HOST, or Docker's own."""
    user: str | None = None
    """As in "1000:1000" or a name of the image's; default: the image's user."""
    home: str | None = None
    """Default: that user's home where it can write there, else /home/agent, which is made."""
    read_only: bool = False
    """The image cannot be written to: only workspace, home, /tmp and `tmpfs` can."""
    cap_add: Sequence[str] = ()
    """Capabilities that are not dropped. `apt-get` as root needs CHOWN, DAC_OVERRIDE, FOWNER, SETGID and SETUID."""
    pids: int = 1024
    ulimits: Mapping[str, int] = field(default_factory=dict[str, int])
    """As in {"nofile": 65536}: soft and hard."""
    shm_mb: int | None = None
    tmpfs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path inside to mount options, as in {"/scratch": "size=1g,mode=1777"}."""
    ro_binds: Sequence[str] = ()
    """More of this machine, read-only: "PATH" or "PATH:INSIDE"."""
    volumes: Sequence[str] = ()
    """As Docker writes them, "PATH:INSIDE" or "PATH:INSIDE:ro". What is writable is the agent's."""
    pull: Literal["missing", "never", "always"] = "missing"
    auth: Mapping[str, str] | None = None
    """{"username": ..., "password": ...} for the image's registry; default: none."""
    ttl_seconds: int = 86_400
    """When a container ends by itself, should everybody have forgotten it."""
    start_seconds: float = 120.0
    """How long the engine may take for each step of a start."""
    output_bytes: int = 8 << 20
    """How much of a command's stdout, and of its stderr, is kept: the tail."""
    download_bytes: int = 16 << 30
    """How much one download may bring out."""


def options(given: Mapping[str, Any]) -> DockerOptions:
    """Raises ConfigError."""
    try:
        found = DockerOptions(**given)
    except TypeError as error:
        known = ", ".join(DockerOptions.__slots__)
        raise ConfigError(f"runtime.kwargs {dict(given)!r}: the docker runtime knows {known}") from error
    if found.pull not in ("missing", "never", "always"):
        raise ConfigError(f"runtime.kwargs.pull is 'missing', 'never' or 'always', not {found.pull!r}")
    return found


def check(spec: RuntimeSpec, proxy: ProxyEndpoint | None) -> None:
    """Raises ConfigError for what cannot be honoured."""
    check_harness_root(spec)
    if not spec.image:
        raise ConfigError("runtime.image is not set: the docker runtime needs the name of an image")
    if spec.network not in NETWORKS:
        raise ConfigError(
            f"runtime.network of the docker runtime is one of {', '.join(NETWORKS)}, not {spec.network!r}"
        )
    if spec.workdir is not None and not spec.workdir.startswith("/"):
        raise ConfigError(f"runtime.workdir must be absolute, not {spec.workdir!r}")
    if spec.network == "proxy_only" and proxy is not None and proxy.unix_socket is None:
        raise ConfigError("runtime.network: proxy_only needs the proxy's Unix socket, and it listens on none")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what a container is."""

    spec: RuntimeSpec
    options: DockerOptions
    kit: Kit
    socket: Path | None
    """The proxy's, where the container relays to it."""
    workdir: str
    labels: Mapping[str, str]

    def config(self) -> dict[str, Any]:
        """The body of the engine's `containers/create`."""
        relayed = (str(PROXY_PORT), SOCKET) if self.socket else ("0", "-")
        config: dict[str, Any] = {
            "Image": self.spec.image,
            "Entrypoint": self.kit.argv(KIT, "init", *relayed, str(self.options.ttl_seconds)),
            "Cmd": [],
            "Env": ["LD_PRELOAD=", "LD_LIBRARY_PATH="],
            "WorkingDir": "/",
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": dict(self.labels),
            "HostConfig": self._host_config(),
        }
        if self.options.user is not None:
            config["User"] = self.options.user
        if self.options.read_only:
            config["Volumes"] = {self.workdir: {}, self.options.home or DEFAULT_HOME: {}}
        return config

    def _host_config(self) -> dict[str, Any]:
        spec, options = self.spec, self.options
        limits: dict[str, Any] = {
            "PidsLimit": options.pids,
            "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in options.ulimits.items()],
        }
        if spec.memory_mb:
            limits |= {"Memory": spec.memory_mb << 20, "MemorySwap": spec.memory_mb << 20}
        if spec.cpus:
            limits["NanoCpus"] = int(spec.cpus * 1e9)
        if options.shm_mb:
            limits["ShmSize"] = options.shm_mb << 20
        if spec.gpus:
            limits["DeviceRequests"] = [{"Count": spec.gpus, "Capabilities": [["gpu"]]}]
        return {
            "Binds": list(self._binds()),
            "NetworkMode": spec.network if spec.network in ("bridge", "host") else "none",
            "CapDrop": ["ALL"],
            "CapAdd": list(options.cap_add),
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": options.read_only,
            "Tmpfs": {**({"/tmp": "mode=1777,exec"} if options.read_only else {}), **options.tmpfs},
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
            **limits,
        }

    def _binds(self) -> list[str]:
        options = self.options
        binds = [f"{self.kit.directory}:{KIT}:ro"]
        if self.socket:
            binds.append(f"{self.socket}:{SOCKET}")
        if self.spec.harness_root is not None:
            binds.append(f"{self.spec.harness_root}:{self.spec.harness_root}:ro")
        binds += [f"{bind if ':' in bind else f'{bind}:{bind}'}:ro" for bind in options.ro_binds]
        return [*binds, *options.volumes]
