"""The rollout services of a verl worker process: one a configuration, with one proxy, shared by all its sessions.

verl makes an agent loop a session, and starts them all at once in one event loop; the service is started by the first
of them, under a lock, and serves until the loop ends. How many sessions run at a time, its stages say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from .config import RolloutConfig
from .errors import PolarError
from .service import RolloutService

Make = Callable[[RolloutConfig], RolloutService]


@dataclass
class _Loop:
    """What belongs to one event loop."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    services: list[tuple[RolloutConfig, RolloutService]] = field(
        default_factory=list[tuple[RolloutConfig, RolloutService]]
    )
    owners: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()


async def service_of(config: RolloutConfig, make: Make) -> RolloutService:
    """The running service of `config` in this event loop; made by `make` and started where there is none.

    Raises what its start raises; the next call tries again.
    """
    here = _loops.setdefault(asyncio.get_running_loop(), _Loop())
    async with here.lock:
        for known, service in here.services:
            if known == config:
                return service
        service = make(config)
        here.owners.append(await _started(service))
        here.services.append((config, service))
        return service


async def close() -> None:
    """End the services of this event loop."""
    here = _loops.pop(asyncio.get_running_loop(), None)
    if here is None:
        return
    for owner in here.owners:
        owner.cancel()
    await asyncio.gather(*here.owners, return_exceptions=True)


async def _started(service: RolloutService) -> asyncio.Task[None]:
    """Its owner: a task of its own, since the session that starts it ends long before the service does."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    owner = asyncio.create_task(_serve(service, ready), name="polar_plugin service")
    await ready
    return owner


async def _serve(service: RolloutService, ready: asyncio.Future[None]) -> None:
    try:
        async with service:
            ready.set_result(None)
            await asyncio.Event().wait()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)
    finally:
        if not ready.done():
            ready.set_exception(PolarError("the rollout service was cancelled while it started"))
