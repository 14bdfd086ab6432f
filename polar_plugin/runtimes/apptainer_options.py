"""What can be said of Apptainer sandboxes, and whether it can be honoured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, SandboxError
from ..records import RuntimeSpec
from .apptainer_argv import Program, Writable
from .base import ProxyEndpoint
from .harness_roots import check_harness_root

NETWORKS = ("proxy_only", "none", "host")
_STATE = ("APPTAINER_", "SINGULARITY_", "XDG_")


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

    @property
    def writables(self) -> tuple[Writable, ...]:
        """In the order in which they are tried."""
        if self.writable != "auto":
            return (self.writable,)
        return ("copy",) if self.mode == "one_shot" else ("overlay", "tmpfs")


def options_of(given: Mapping[str, Any]) -> ApptainerOptions:
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


def check(spec: RuntimeSpec, proxy: ProxyEndpoint | None) -> None:
    if spec.network not in NETWORKS:
        raise ConfigError(
            f"runtime.network of the apptainer runtime is one of {', '.join(NETWORKS)}, not {spec.network!r}"
        )
    if spec.image is None:
        raise ConfigError("runtime.image of the apptainer runtime is a SIF file or an image directory: give one")
    if "://" in spec.image:
        raise ConfigError(f"runtime.image: make a file of it, `apptainer pull image.sif {spec.image}`, and name that")
    if spec.workdir is not None and not spec.workdir.startswith("/"):
        raise ConfigError(f"runtime.workdir must be absolute, not {spec.workdir!r}")
    check_harness_root(spec)
    if spec.network == "proxy_only" and proxy is not None and proxy.unix_socket is None:
        raise ConfigError("runtime.network: proxy_only needs the proxy's Unix socket, and it listens on none")


def installed(program: str | None) -> Program:
    found = shutil.which(program or "apptainer") or (None if program else shutil.which("singularity"))
    if found is None:
        raise SandboxError(
            f"{program or 'apptainer'} is not installed (https://apptainer.org); runtime.kwargs.program names another"
        )
    wanted = ("HOME", "PATH", "USER", "TMPDIR")
    env = {name: value for name, value in os.environ.items() if name in wanted or name.startswith(_STATE)}
    return Program(found, env)
