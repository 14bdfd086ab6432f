"""Who started a sandbox: the mark that tells, after a crash, whether anybody still needs it.

A process id alone is used again. So an owner is boot id : namespace of process ids : pid : start time, and is known to
be dead only where this machine can see it: the same boot, the same namespace, and no such process.
"""

from __future__ import annotations

import os
from enum import Enum, auto
from functools import cache
from pathlib import Path

LABEL = "polar.owner"


class Life(Enum):
    ALIVE = auto()
    DEAD = auto()
    UNKNOWN = auto()
    """Of another machine, an earlier boot, or a namespace that cannot be seen from here."""


@cache
def _here() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(Path("/proc/self/ns/pid").stat().st_ino)


def mine() -> str:
    """The mark of this process."""
    return ":".join((*_here(), str(os.getpid()), _started(os.getpid()) or ""))


def life(mark: str) -> Life:
    """Of the process that has this mark."""
    boot, namespace, pid, started = (*mark.split(":"), "", "", "", "")[:4]
    if (boot, namespace) != _here() or not pid.isdigit():
        return Life.UNKNOWN
    return Life.ALIVE if _started(int(pid)) == started else Life.DEAD


def _started(pid: int) -> str | None:
    """When, in the kernel's ticks since boot; None where there is no such process, or but a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()
