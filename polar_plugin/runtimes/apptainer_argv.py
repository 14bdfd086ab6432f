"""Apptainer's command lines. Pure.

What a program inside finds: the image, writable in one of three ways; its own /tmp, home and workspace on this
machine's disk; its own process table; and either no network but a loopback of its own, or the host's. No capability,
and none to be won (`--no-privs` sets no_new_privs), also where root runs us.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .bubblewrap import Mounts

Writable = Literal["overlay", "tmpfs", "copy"]
START_SCRIPT = "/.singularity.d/actions/start"
"""What an instance runs at first. An image directory that Apptainer did not build has none, and ours does nothing."""
_QUIET = ("--silent",)
_ROOTS_FILES = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/mtrr", "/proc/sysrq-trigger")
"""Where root runs us, the user inside is root as far as the kernel's files ask, capabilities or not."""


@dataclass(frozen=True, slots=True)
class Program:
    """The installed Apptainer (or SingularityCE)."""

    path: str
    env: Mapping[str, str]
    """What it is run with: where it keeps its own files, nothing of the trainer's."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the image is made writable, and the flags by which cgroups bound it: found out by trying."""

    writable: Writable
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Box:
    """What all command lines of one sandbox have in common."""

    image: str
    mounts: Mounts
    share_network: bool
    flags: tuple[str, ...]
    as_root: bool
    overlay: Path
    """The directory that takes what is written where `Way.writable` is "overlay"."""


def start_instance(program: Program, box: Box, way: Way, name: str, pid_file: Path) -> Iterator[str]:
    yield from (program.path, "--quiet", "instance", "start", "--pid-file", str(pid_file))
    yield from _isolation(box, way)
    yield from (box.image, name)


def in_instance(program: Program, name: str) -> Iterator[str]:
    """Everything before a command that is to run in a started instance."""
    yield from (program.path, *_QUIET, "exec", "--no-privs", "--cleanenv", "--pwd", "/", f"instance://{name}")


def alone(program: Program, box: Box, way: Way) -> Iterator[str]:
    """Everything before a command that is to run in a container of its own, as its first process."""
    yield from (program.path, *_QUIET, "exec", "--no-init", "--pwd", "/")
    yield from _isolation(box, way)
    yield box.image


def limits(*, memory_mb: int | None, cpus: float | None, processes: int | None) -> tuple[str, ...]:
    """The flags that have cgroups bound a container."""
    flags: list[str] = []
    if memory_mb is not None:
        flags += ["--memory", f"{memory_mb}M", "--memory-swap", f"{memory_mb}M"]
    if cpus is not None:
        flags += ["--cpus", f"{cpus:g}"]
    if processes is not None:
        flags += ["--pids-limit", str(processes)]
    return tuple(flags)


def _isolation(box: Box, way: Way) -> Iterator[str]:
    yield from ("--userns", "--no-privs", "--containall", "--cleanenv", "--no-home", "--no-umask", "--no-eval")
    yield from ("--no-mount", "bind-paths,sys" if box.as_root else "bind-paths", "--uts", "--hostname", "sandbox")
    if not box.share_network:
        yield from ("--net", "--network", "none")
    yield from box.flags
    yield from way.limits
    yield from _writable(box, way.writable)
    for inside, host in box.mounts.writable.items():
        yield from ("--mount", _mount(host, inside))
    for inside, host in box.mounts.read_only.items():
        yield from ("--mount", _mount(host, inside, "ro"))
    for place in _ROOTS_FILES if box.as_root else ():
        if Path(place).exists():
            yield from ("--mount", _mount(Path(place), place, "ro"))


def _writable(box: Box, writable: Writable) -> Sequence[str]:
    if writable == "overlay":
        return ("--overlay", str(box.overlay))
    return ("--writable-tmpfs",) if writable == "tmpfs" else ("--writable",)


def _mount(host: Path, inside: str, *options: str) -> str:
    """`--mount` takes a line of CSV, so that a path may have any character."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(("type=bind", f"source={host}", f"destination={inside}", *options))
    return line.getvalue()
