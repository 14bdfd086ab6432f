"""What trainers that died left of Apptainer: their instances and directories, found by name, and no one else's."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio.to_thread

from . import host_tree, owner
from .apptainer_container import kill_named
from .trees import remove_tree

PREFIX = "polar"
_log = logging.getLogger("polar_plugin.runtimes.apptainer")
_swept: set[Path] = set()


def name(token: str) -> str:
    """Of an instance, and of its directory: it tells its owner."""
    return f"{PREFIX}.{owner.mine().replace(':', '.')}.{token}"


def ownerless(found: str) -> bool:
    """Whether `found` is the name of an instance whose owner is known to be dead."""
    prefix, *mark = found.split(".")
    return prefix == PREFIX and len(mark) == 5 and owner.life(":".join(mark[:4])) is owner.Life.DEAD


async def sweep_once(root: Path) -> None:
    """`sweep`, the first time that this process asks for `root`."""
    if root not in _swept:
        _swept.add(root)
        await sweep(root)


async def sweep(root: Path) -> list[str]:
    """Kill the instances of dead owners and remove their directories below `root`; their names.

    Raises SandboxError where that fails.
    """
    dead = sorted(filter(ownerless, await anyio.to_thread.run_sync(_names, root)))
    for one in dead:
        _log.warning("sandbox %s is removed: its trainer has died", one)
        await anyio.to_thread.run_sync(kill_named, one)
        await remove_tree(root / one)
    return dead


def _names(root: Path) -> set[str]:
    """Of directories, and in the titles of Apptainer's own processes: "Apptainer instance: user [name]"."""
    titles = (host_tree.title(pid) for pid in host_tree.named(f"[{PREFIX}."))
    running = {title.rpartition("[")[2].partition("]")[0] for title in titles}
    return running | {path.name for path in root.glob(f"{PREFIX}.*")}
