"""Containers and networks of owners that are dead: removed, and nothing else is."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, cast

from .docker_engine import Engine, Missing
from .owner import LABEL, Life, life, mine

_EXIT_SECONDS = 30.0
_FILTER = json.dumps({"label": [LABEL]})


async def sweep(url: str | None = None) -> list[str]:
    """Remove what dead owners left at the engine; the names. Raises SandboxError where there is no engine.

    What belongs to a process that cannot be judged from here, another machine's say, is left to its TTL; of an earlier
    boot's what no longer runs is removed.
    """
    return await _remove(url, _abandoned)


async def sweep_own(url: str | None = None) -> list[str]:
    """Remove what this process has started at the engine and not stopped; the names."""
    return await _remove(url, lambda found: found["Labels"][LABEL] == mine())


async def _remove(url: str | None, wanted: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    engine = Engine(url)
    removed: list[str] = []
    try:
        for found in await _listed(engine, "containers/json", all="true"):
            if wanted(found):
                removed += await _gone(engine.delete(found["Id"]), found["Names"][0].lstrip("/"))
        for found in await _listed(engine, "networks"):
            if wanted(found):
                removed += await _gone(engine.delete_network(found["Id"]), found["Name"])
    finally:
        await engine.close()
    return removed


async def _gone(deletion: Any, name: str) -> list[str]:
    """Somebody else may have been faster."""
    try:
        await deletion
    except Missing:
        return []
    return [name]


async def _listed(engine: Engine, path: str, **params: str) -> list[dict[str, Any]]:
    async def ask() -> Any:
        return await engine.docker._query_json(path, params={"filters": _FILTER, **params})  # pyright: ignore[reportPrivateUsage]

    return cast("list[dict[str, Any]]", await engine.call("list what it has", ask))


def _abandoned(found: Mapping[str, Any]) -> bool:
    judged = life(found["Labels"][LABEL])
    return judged is Life.DEAD or (
        judged is Life.UNKNOWN and found.get("State") in ("exited", "dead") and _earlier(found)
    )


def _earlier(found: Mapping[str, Any]) -> bool:
    """Whether its owner belongs to no boot of now: only containers that such an owner left have stopped with it."""
    return not found["Labels"][LABEL].startswith(mine().partition(":")[0])


# --- when ------------------------------------------------------------------------------------------------------------

_log = logging.getLogger("polar_plugin.runtimes.docker")
_swept: set[str | None] = set()
living: set[tuple[str | None, str]] = set()
"""(engine, name) of the containers that this process has asked for and not yet removed."""


async def sweep_once(url: str | None) -> None:
    """`sweep`, the first time that this process asks for an engine; from then on its own are removed at its exit."""
    if url in _swept:
        return
    if not _swept:
        atexit.register(_at_exit)
        _on_terminate()
    _swept.add(url)
    for name in await sweep(url):
        _log.warning("container or network %s is removed: its trainer has died", name)


def _at_exit() -> None:
    """What is still there when the interpreter ends was not closed: a hard way out of the trainer's."""
    for url in {url for url, _ in living}:
        with contextlib.suppress(Exception):
            asyncio.run(asyncio.wait_for(sweep_own(url), _EXIT_SECONDS))
    living.clear()


def _on_terminate() -> None:
    """SIGTERM ends a Python without its exit functions; where nobody handles it, we do, and then let it end so."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sweeper = threading.Thread(target=_at_exit)  # an event loop may be running in this one
        sweeper.start()
        sweeper.join(_EXIT_SECONDS)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, handle)
