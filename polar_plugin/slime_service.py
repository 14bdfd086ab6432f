"""The one rollout service of a slime process: started at the first rollout, kept warm between rollouts, closed at exit.

slime calls synchronously, so the service lives in an event loop of its own thread, entered through a blocking portal.
"""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, Protocol, Self, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from .config import RolloutConfig
from .errors import ConfigError, PolarError
from .records import Attempt, Trajectory

T = TypeVar("T")
Key = TypeVar("Key")


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


@dataclass(eq=False)
class _Resident:
    config: RolloutConfig
    service: Rollouts
    portal: BlockingPortal
    lifetime: ExitStack
    batches: set[_Batch] = field(default_factory=set["_Batch"])
    """What is under way in it."""

    def close(self) -> None:
        for batch in tuple(self.batches):
            batch.end()
        self.lifetime.close()


_lock = threading.RLock()
_factory: Factory = rollout_service
_residents: list[_Resident] = []
"""One, but for the time in which another has something under way with other settings."""


@contextmanager
def use_service(factory: Factory) -> Generator[None]:
    """Within the block, services are made by `factory`: an engine of one's own, a stand-in for tests.

    Closes the services that run before and after.
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
    """Run all attempts to their end, and return with nothing of them in flight, also when interrupted.

    `on_done` is called in the service's thread.
    """
    with Flights(config) as flights:
        flights.submit(None, attempts, on_done)
        return flights.next()[1]


def start(config: RolloutConfig, attempts: Sequence[Attempt]) -> Future[list[Trajectory]]:
    """Begin to run attempts, from any thread. Cancelling the future ends them."""
    batch = _batch(config)
    future = batch.begin(attempts, lambda _: None)
    future.add_done_callback(lambda told: told.cancelled() and batch.abandon())
    return future


class Flights(Generic[Key]):
    """Batches of attempts, under way side by side and taken as they end. Leaving the block ends those that are not.

    Used by one thread. The service with `config` is started with the first of them.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._batches: dict[_Batch, Key] = {}
        self._ended: SimpleQueue[_Batch] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    @property
    def keys(self) -> list[Key]:
        """Of what is under way or not yet taken, as submitted."""
        return list(self._batches.values())

    def stopped(self, config: RolloutConfig) -> bool:
        """Whether the service that it ran on is closed, or `config` is another."""
        return config != self._config or not any(resident.config == config for resident in _residents)

    def submit(self, key: Key, attempts: Sequence[Attempt], on_done: Callable[[Trajectory], None]) -> None:
        batch = _batch(self._config)
        self._batches[batch] = key  # before it begins: an interrupt may come at any moment
        batch.begin(attempts, on_done).add_done_callback(lambda _: self._ended.put(batch))

    def next(self) -> tuple[Key, list[Trajectory]]:
        """Wait for the next batch to end: its key and trajectories. Raises what ended it, if that is an error."""
        batch = self._ended.get()
        key = self._batches.pop(batch)
        try:
            return key, batch.future.result()
        except CancelledError as error:
            raise PolarError("the service was closed while a rollout was under way") from error

    def ready(self) -> bool:
        """Whether `next` would return at once."""
        return not self._ended.empty()

    def end(self) -> None:
        """End all that is under way, and return when it has ended; nothing is left to be taken."""
        for batch in self._batches:
            batch.end()
        self._batches.clear()
        self._ended = SimpleQueue()


def totals() -> dict[str, int]:
    """The running services' counts since their start; empty where none runs."""
    return dict(sum((resident.service.counts for resident in _residents), Counter[str]()))


def call(config: RolloutConfig, ask: Callable[[Rollouts], Awaitable[T]]) -> T:
    """What `ask` says of the service with `config`, which is started where it does not run."""
    with _lock:
        resident = _started(config)
    return resident.portal.call(ask, resident.service)


def close() -> None:
    """End what is under way, and close the running service, if any, and its thread. The next rollout starts another."""
    with _lock:
        while _residents:
            _residents.pop().close()


def _batch(config: RolloutConfig) -> _Batch:
    with _lock:
        return _Batch(_started(config))


def _started(config: RolloutConfig) -> _Resident:
    for resident in _residents:
        if resident.config == config:
            return resident
    for resident in tuple(_residents):
        if resident.config.engine.kind not in SERVED_ENGINES:
            raise ConfigError(
                f"the embedded engine {resident.config.engine.kind!r} runs with other settings: it would lose its "
                "weights by a restart; use one sampling for training and evaluation, or call close() first"
            )
        if not resident.batches:
            _residents.remove(resident)
            resident.close()
    with ExitStack() as starting:
        portal = starting.enter_context(start_blocking_portal())
        service = starting.enter_context(portal.wrap_async_context_manager(_factory(config)))
        _residents.append(_Resident(config, service, portal, starting.pop_all()))
    return _residents[-1]


class _Batch:
    """One call of the service, which any thread can end at any moment of it."""

    future: Future[list[Trajectory]]

    def __init__(self, resident: _Resident) -> None:
        self._resident = resident
        self._scope: CancelScope | None = None
        self._ended = threading.Event()
        resident.batches.add(self)

    def begin(self, attempts: Sequence[Attempt], on_done: Callable[[Trajectory], None]) -> Future[list[Trajectory]]:
        self.future = self._resident.portal.start_task_soon(self._job, attempts, on_done)
        return self.future

    def end(self) -> None:
        """Cancel it, where it still runs, and wait until it has cleaned up."""
        if self._ended.is_set():
            return
        self._resident.portal.call(self._cancel)
        if self._scope:
            self._ended.wait(2 * self._resident.config.budgets.cleanup)
        self._resident.batches.discard(self)

    def abandon(self) -> None:
        """The same without waiting, from a thread that must not wait."""
        with suppress(RuntimeError):  # the portal has stopped: it ended already
            self._resident.portal.start_task_soon(self._cancel)

    async def _job(self, attempts: Sequence[Attempt], on_done: Callable[[Trajectory], None]) -> list[Trajectory]:
        with CancelScope() as self._scope:
            try:
                return await self._resident.service.run(attempts, on_done=on_done)
            finally:
                self._resident.batches.discard(self)
                self._ended.set()
        raise PolarError("the rollout was cancelled")

    def _cancel(self) -> None:
        """Runs in the loop after `_job` has begun, if that was submitted at all."""
        if self._scope:
            self._scope.cancel()


atexit.register(close)
