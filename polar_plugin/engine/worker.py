"""The one thread that owns a scheduler: others reach it by commands, which run between two tokens, without a lock."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from ..errors import EngineError
from .scheduler import Scheduler

T = TypeVar("T")
Command = Callable[[Scheduler], None]


class Worker:
    """Runs a scheduler from `start` to `stop`. Its methods are called on the event loop."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._scheduler: Scheduler | None = None

    @property
    def scheduler(self) -> Scheduler:
        """To read from; changes go through `call`. Raises EngineError where the worker is not running."""
        if self._scheduler is None:
            raise EngineError("the embedded engine is not open: use it inside `async with TransformersEngine(...)`")
        return self._scheduler

    async def start(self, build: Callable[[], Scheduler]) -> None:
        """Build the scheduler in the thread and begin to serve; what `build` raises is raised here."""
        ready: Future[Scheduler] = Future()
        self._thread = threading.Thread(target=_run, args=(build, ready, self._inbox), name="polar-engine", daemon=True)
        self._thread.start()
        try:
            self._scheduler = await asyncio.wrap_future(ready)
        except BaseException:
            self._inbox.put(None)
            raise

    async def stop(self) -> None:
        """Let the step that runs end, fail what is left, and join the thread. Later commands are refused."""
        self._scheduler = None
        self._inbox.put(None)
        if self._thread is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._thread.join)

    def send(self, command: Command) -> None:
        """Run `command` between two tokens."""
        if self.scheduler:
            self._inbox.put(command)

    async def call(self, work: Callable[[Scheduler], T]) -> T:
        """Run `work` between two tokens and return what it returns; cancelled before its turn, it never runs."""
        future: Future[T] = Future()
        self.send(partial(_execute, work, future))
        return await asyncio.wrap_future(future)


def _run(build: Callable[[], Scheduler], ready: Future[Scheduler], inbox: queue.SimpleQueue[Command | None]) -> None:
    """Commands first, then a step; until None comes. A step that breaks ends the calls in it, not the engine."""
    try:
        scheduler = build()
    except Exception as error:
        if ready.set_running_or_notify_cancel():
            ready.set_exception(error)
        return
    if ready.set_running_or_notify_cancel():
        ready.set_result(scheduler)
    while (command := _next(inbox, scheduler)) is not None:
        command(scheduler)
    scheduler.close()


def _next(inbox: queue.SimpleQueue[Command | None], scheduler: Scheduler) -> Command | None:
    try:
        return inbox.get(block=scheduler.idle)
    except queue.Empty:
        return _step


def _step(scheduler: Scheduler) -> None:
    try:
        scheduler.step()
    except Exception as error:
        failure = EngineError(f"the embedded engine's forward pass failed: {error}")
        failure.__cause__ = error
        scheduler.fail(failure)


def _execute(work: Callable[[Scheduler], T], future: Future[T], scheduler: Scheduler) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work(scheduler))
    except Exception as error:
        future.set_exception(error)
