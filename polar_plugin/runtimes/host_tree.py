"""Processes of a sandbox as this machine sees them: told by descent, stopped before they are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from . import forward

_PAGE = os.sysconf("SC_PAGE_SIZE")


def below(roots: Iterable[int]) -> set[int]:
    """All descendants of `roots`, without these."""
    parents = dict(forward.processes())
    top = set(roots)
    return {pid for pid in parents if pid not in top and _descends(pid, top, parents)}


def _descends(pid: int, top: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid in top:
            return True
    return False


def named(text: str) -> set[int]:
    """Processes with `text` in their command line."""
    return {pid for pid, _ in forward.processes() if text in title(pid)}


def title(pid: int) -> str:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").strip("\0")
    except OSError:
        return ""


def kill_below(root: int, *, seconds: float) -> bool:
    """Kill all descendants of `root`; whether they have gone within `seconds`.

    They are stopped first: what is stopped cannot fork faster than it is killed.
    """
    deadline = time.monotonic() + seconds
    while True:
        stopped: set[int] = set()
        while new := below((root,)) - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        if not stopped or time.monotonic() > deadline:
            return not stopped
        _signal(stopped, signal.SIGKILL)
        time.sleep(0.005)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def memory(pids: Iterable[int]) -> int:
    """Bytes of memory that these processes hold by themselves: not what they share with files."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(resident) - int(shared)) * _PAGE
    return total
