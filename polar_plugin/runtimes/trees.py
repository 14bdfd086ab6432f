"""Directory trees on this machine, copied and removed as they are: links stay links, nothing is followed."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import anyio
import anyio.to_thread

from ..errors import SandboxError


async def copy_tree(source: Path, target: Path) -> None:
    """Copy a file, or a directory into (or over) `target`, with modes and times. Raises SandboxError."""
    argv = ("cp", "-RPT", "--preserve=mode,timestamps,links", "--remove-destination", "--reflink=auto")
    done = await anyio.run_process([*argv, str(source), str(target)], check=False)
    if done.returncode:
        raise SandboxError(f"cannot copy {source} to {target}: {done.stderr.decode(errors='replace').strip()}")


async def remove_tree(path: Path) -> None:
    """Remove a tree, also where its directories forbid it."""
    await anyio.to_thread.run_sync(_remove, path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        _permit(path)
        shutil.rmtree(path)


def _permit(path: Path) -> None:
    """Let every directory below be listed and emptied, from the top, so that the next level can be seen."""
    path.chmod(stat.S_IRWXU)
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            _permit(child)
