"""The one rollout service of a slime process: started at the first rollout, kept warm between rollouts, closed at exit.

slime calls synchronously, so the service lives in an event loop of its own thread, entered through a blocking portal.
"""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from .config import RolloutConfig
from .errors import ConfigError, PolarError
from .records import Attempt, Trajectory


class Rollouts(Protocol):
    """What is needed of a service; `service.RolloutService` is one."""

    counts: Counter[str]
    """Totals since the start."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> bool | None: ...

    async def run(
        self, attempts: Sequence[Attempt], *, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Exactly one trajectory an attempt, in input order; `on_done` gets each as it ends."""
        ...


Factory = Callable[[RolloutConfig], Rollouts]

SERVED_ENGINES = ("sglang", "vllm")
"""Engines with a server of their own: a service over them may be closed and opened without losing weights."""


def rollout_service(config: RolloutConfig) -> Rollouts:
    """The real service. Imported here, so that the reward hook alone starts nothing."""
    from .service import RolloutService

    return RolloutService(config)


@dataclass(frozen=True)
class _Resident:
    config: RolloutConfig
    service: Rollouts
    portal: BlockingPortal
    lifetime: ExitStack


_lock = threading.RLock()
_factory: Factory = rollout_service
_resident: _Resident | None = None


@contextmanager
def use_service(factory: Factory) -> Generator[None]:
    """Within the block, services are made by `factory`: an engine of one's own, a stand-in for tests.

    Closes the service that runs before and after.
    """
    global _factory
    close()
    before, _factory = _factory, factory
    try:
        yield
    finally:
        _factory = before
        close()


def run(config: RolloutConfig, attempts: Sequence[Attempt], on_done: Callable[[Trajectory], None]) -> list[Trajectory]:
    """Run all attempts to their end, and return with nothing in flight, also when interrupted.

    `on_done` is called in the service's thread.
    """
    with _lock:
        return _Batch(_started(config)).run(attempts, on_done)


def totals() -> dict[str, int]:
    """The running service's counts since its start; empty where none runs."""
    return dict(_resident.service.counts) if _resident else {}


def close() -> None:
    """Close the running service, if any, and its thread. The next rollout starts another."""
    global _resident
    with _lock:
        resident, _resident = _resident, None
        if resident:
            resident.lifetime.close()


def _started(config: RolloutConfig) -> _Resident:
    global _resident
    if _resident and _resident.config == config:
        return _resident
    if _resident and _resident.config.engine.kind not in SERVED_ENGINES:
        raise ConfigError(
            f"the embedded engine {_resident.config.engine.kind!r} runs with other settings: it would lose its "
            "weights by a restart; use one sampling for training and evaluation, or call close() first"
        )
    close()
    with ExitStack() as starting:
        portal = starting.enter_context(start_blocking_portal())
        service = starting.enter_context(portal.wrap_async_context_manager(_factory(config)))
        _resident = _Resident(config, service, portal, starting.pop_all())
    return _resident


class _Batch:
    """One call of the service, which the calling thread can end at any moment of it."""

    def __init__(self, resident: _Resident) -> None:
        self._resident = resident
        self._scope: CancelScope | None = None
        self._ended = threading.Event()

    def run(self, attempts: Sequence[Attempt], on_done: Callable[[Trajectory], None]) -> list[Trajectory]:
        try:
            return self._resident.portal.call(self._job, attempts, on_done)
        except BaseException:  # an interrupt reaches this thread alone: the attempts must end before it goes on
            self._resident.portal.call(self._cancel)
            if self._scope:
                self._ended.wait(2 * self._resident.config.budgets.cleanup)
            raise

    async def _job(self, attempts: Sequence[Attempt], on_done: Callable[[Trajectory], None]) -> list[Trajectory]:
        with CancelScope() as self._scope:
            try:
                return await self._resident.service.run(attempts, on_done=on_done)
            finally:
                self._ended.set()
        raise PolarError("the rollout was cancelled")

    def _cancel(self) -> None:
        """Runs in the loop after `_job` has begun, if that was submitted at all."""
        if self._scope:
            self._scope.cancel()


atexit.register(close)
