"""Stand-ins for what an attempt meets outside: a sandbox, an agent program, a grader. In memory, told what to do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from polar_plugin.evaluators.base import Finished
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.records import AgentSpec, Attempt, CompletionSession, Evaluation, RuntimeSpec, TaskSpec, Trace
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages.attempt import Parts, Stages
from polar_plugin.stages.stage import Stage

Step = Callable[[], Awaitable[object]]


async def nothing() -> None:
    await anyio.lowlevel.checkpoint()


OK = ExecResult(0, b"", b"", 0.0)


@dataclass
class World:
    """What all sandboxes of a test share: what they do at each await, and what was opened and closed."""

    steps: dict[str, Step] = field(default_factory=dict[str, Step])
    result: ExecResult = OK
    opened: list[int] = field(default_factory=list[int])
    closed: list[int] = field(default_factory=list[int])
    seen: list[str] = field(default_factory=list[str])
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def at(self, name: str) -> None:
        self.seen.append(name)
        await self.steps.get(name, nothing)()


class MemoryRuntime:
    proxy_url = "http://127.0.0.1:1"
    workdir = "/workspace"
    home = "/home/agent"

    def __init__(self, world: World, purpose: str) -> None:
        self.world, self.purpose = world, purpose
        self.number = next(world.numbers)

    async def start(self) -> None:
        self.world.opened.append(self.number)
        await self.world.at(f"{self.purpose}.start")

    async def stop(self) -> None:
        if self.number in self.world.opened and self.number not in self.world.closed:
            self.world.closed.append(self.number)
        await self.world.at(f"{self.purpose}.stop")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
    ) -> ExecResult:
        await self.world.at(f"{self.purpose}.exec")
        return self.world.result

    async def upload(self, source: Path | bytes, target: str) -> None:
        await self.world.at(f"{self.purpose}.upload")

    async def download(self, source: str, target: Path) -> None:
        await self.world.at(f"{self.purpose}.download")


class MemorySession:
    key = "key"

    def __init__(self, session: CompletionSession, calls: int, last_error: Exception | None) -> None:
        self._session, self.last_error, self.sealed = session, last_error, False
        self.counts = Counter(calls=calls)
        self.called = anyio.Event()
        if calls:
            self.called.set()

    def seal(self) -> CompletionSession:
        self.sealed = True
        return self._session


@dataclass
class MemorySessions:
    ledger: CompletionSession
    calls: int = 1
    last_error: Exception | None = None
    opened: list[MemorySession] = field(default_factory=list[MemorySession])

    @asynccontextmanager
    async def open(self, attempt: Attempt) -> AsyncGenerator[MemorySession]:
        session = MemorySession(self.ledger, self.calls, self.last_error)
        self.opened.append(session)
        yield session
        session.seal()


class MemoryHarness:
    name = "memory"

    def launch(self, context: LaunchContext) -> Launch:
        return Launch(("agent",), files={"/home/agent/config": b"x"})


@dataclass
class MemoryEvaluator:
    world: World
    reward: float = 1.0
    fresh: bool = True

    async def extract(self, runtime: object) -> bytes:
        await self.world.at("extract")
        return b"patch"

    async def evaluate(self, finished: Finished) -> Evaluation:
        await self.world.at("evaluate")
        if self.fresh:
            async with finished.fresh_runtime() as runtime:
                await runtime.exec("tests")
        return Evaluation(self.reward)


def attempt(name: str = "s0", timeout: float = 60.0) -> Attempt:
    task = TaskSpec("t", "i", AgentSpec("shell"), timeout_seconds=timeout, runtime=RuntimeSpec())
    return Attempt(name, task, 0, 0)


def stages(live: int = 4, init: int = 2, run: int = 2, postrun: int = 2) -> Stages:
    return Stages(Stage("live", live), Stage("init", init), Stage("run", run), Stage("postrun", postrun))


def parts(world: World, evaluator: MemoryEvaluator | None = None) -> Parts:
    def context(runtime: object, key: str) -> LaunchContext:
        return LaunchContext(AgentSpec("shell"), "i", "http://x", key, 1000, 100, "/workspace", "/home")

    def count(session: CompletionSession, traces: Sequence[Trace]) -> Mapping[str, int]:
        return {"traces": len(traces)}

    return Parts(
        harness=MemoryHarness(),
        evaluator=evaluator or MemoryEvaluator(world),
        builder=PrefixMerging(),
        runtime=lambda purpose: MemoryRuntime(world, purpose),
        launch_context=context,
        count=count,
    )
