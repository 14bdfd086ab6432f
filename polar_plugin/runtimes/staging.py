"""Where something is put together before it takes its place."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from .trees import copy_tree, remove_tree


@asynccontextmanager
async def staged(target: Path) -> AsyncGenerator[Path]:
    """A place of nobody else's, whose content goes to `target` where the block ends well: over what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".polar-", dir=target.parent))
    try:
        place = directory / "content"
        yield place
        await _put(place, target)
    finally:
        await remove_tree(directory)


async def _put(place: Path, target: Path) -> None:
    if await anyio.to_thread.run_sync(lambda: target.exists() or target.is_symlink()):
        await copy_tree(place, target)
    else:
        await anyio.to_thread.run_sync(place.rename, target)
