"""One session with its token side and a scripted model, driven call by call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import anyio

from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.gate import Gate
from polar_plugin.proxy.session import Session
from polar_plugin.records import ChatRequest, Completion, CompletionSession, Delivery, SamplingParams

from .letters import Letters

T = TypeVar("T")


@dataclass
class Call:
    """A call under way."""

    task: asyncio.Task[Completion]
    release: anyio.Event


class World:
    """An event loop that runs only while something is asked of it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._script: list[Reply] = []
        self.engine = ScriptedEngine(lambda _: self._script.pop(0), lambda text: (), context_length=1_000_000)
        policy = Policy(self.engine, Letters(), SamplingParams(max_tokens=1_000_000), 1_000_000)
        ticks, names = count(), count()
        conversation = Conversation(
            policy, "s", clock=lambda: float(next(ticks)), new_id=lambda: f"c{next(names)}",
            delivered=lambda name: self.session.delivered(name),
        )  # fmt: skip
        self._tasks: set[asyncio.Task[None]] = set()
        self.session = self._run(self._open(conversation))

    async def _open(self, conversation: Conversation) -> Session:
        return Session("key", "s", conversation, Gate(), self._spawn, {})

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def answer(self, request: ChatRequest, reply: Reply, *, delivered: bool = True) -> Completion:
        """A call from its beginning to its end; raises what it raises."""
        self._script.append(reply)
        completion = self._run(self.session.turn(request))
        self.mark(completion, delivered)
        return completion

    def mark(self, completion: Completion, delivered: bool) -> None:
        self.session.mark(completion.id, Delivery.DELIVERED if delivered else Delivery.UNDELIVERED)

    def begin(self, request: ChatRequest, reply: Reply) -> Call:
        """A call that is held in the engine."""
        release = anyio.Event()
        self._script.append(replace(reply, until=release))
        call = Call(self._loop.create_task(self.session.turn(request)), release)
        self._run(self._settled(lambda: not self._script))
        return call

    def join(self, request: ChatRequest) -> asyncio.Task[Completion]:
        """A call that equals one under way."""
        joined = self.session.counts["joined"]
        task = self._loop.create_task(self.session.turn(request))
        self._run(self._settled(lambda: self.session.counts["joined"] > joined))
        return task

    def end(self, call: Call) -> Completion:
        call.release.set()
        return self._run(self._result(call.task))

    def result(self, task: asyncio.Task[Completion]) -> Completion:
        return self._run(self._result(task))

    async def _result(self, task: asyncio.Task[Completion]) -> Completion:
        return await task

    def hang_up(self, task: asyncio.Task[Completion]) -> None:
        task.cancel()
        self._run(self._settled(task.done))
        assert task.cancelled()

    def idle(self) -> None:
        """Until nothing is under way."""
        self._run(self._settled(lambda: not self._tasks))

    async def _settled(self, condition: Callable[[], bool]) -> None:
        for _ in range(100):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came about")

    def seal(self) -> CompletionSession:
        self.idle()
        return self.session.seal()

    def close(self) -> None:
        self._loop.close()
