"""Stand-ins for what an attempt meets outside: sandboxes, an agent program, a proxy, a grader. In memory.

Each of their awaits goes through `World.at`, where a test says what happens there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import anyio.lowlevel

from polar_plugin.evaluators.base import Evaluator, Finished
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.traces import counts
from polar_plugin.records import (
    AgentSpec,
    Attempt,
    ChatRequest,
    Completion,
    CompletionSession,
    Evaluation,
    FinishReason,
    Generation,
    Message,
    Role,
    RuntimeSpec,
    SamplingParams,
    TaskSpec,
    Trace,
    log_probs,
    token_ids,
)
from polar_plugin.runtimes.base import ExecResult, Watch
from polar_plugin.stages.attempt import Parts, Stages

Step = Callable[[], Awaitable[object]]
OK = ExecResult(0, b"", b"", 0.0)


async def nothing() -> None:
    await anyio.lowlevel.checkpoint()


def raising(error: Exception) -> Step:
    async def step() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    return step


def taking(seconds: float) -> Step:
    async def step() -> None:
        await anyio.sleep(seconds)

    return step


def completion(name: str = "c", finish: FinishReason = FinishReason.STOP, role: Role = Role.MAIN) -> Completion:
    generation = Generation(token_ids([2, 3]), log_probs([-0.1, -0.2]), finish)
    request = ChatRequest((), role=role)
    return Completion(name, request, token_ids([1]), generation, Message("assistant"), SamplingParams(), 0.0, 1.0)


def ledger(*completions: Completion) -> CompletionSession:
    return CompletionSession("s0", completions or (completion(),))


EMPTY = CompletionSession("s0", ())


@dataclass
class World:
    """What all sandboxes of a test share: what happens at each await, and what was opened, closed and at work."""

    steps: dict[str, Step] = field(default_factory=dict[str, Step])
    anywhere: Step = nothing
    """What happens where `steps` has nothing."""
    result: ExecResult = OK
    prints: bytes = b""
    """What the agent program has printed before anything else happens to it."""
    opened: list[int] = field(default_factory=list[int])
    closed: list[int] = field(default_factory=list[int])
    seen: list[str] = field(default_factory=list[str])
    execs: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    busy: Counter[str] = field(default_factory=Counter[str])
    most: Counter[str] = field(default_factory=Counter[str])
    """The most that were at one place at once."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def at(self, place: str) -> None:
        self.seen.append(place)
        self.busy[place] += 1
        self.most[place] = max(self.most[place], self.busy[place])
        try:
            await self.steps.get(place, self.anywhere)()
        finally:
            self.busy[place] -= 1


class MemoryRuntime:
    proxy_url = "http://127.0.0.1:1"
    workdir = "/workspace"
    home = "/home/agent"

    def __init__(self, world: World, purpose: str) -> None:
        self.world, self.purpose = world, purpose
        self.number = next(world.numbers)

    @property
    def _open(self) -> bool:
        return self.number in self.world.opened and self.number not in self.world.closed

    async def start(self) -> None:
        self.world.opened.append(self.number)
        self.world.busy[self.purpose] += 1
        self.world.most[self.purpose] = max(self.world.most[self.purpose], self.world.busy[self.purpose])
        await self.world.at(f"{self.purpose}.start")

    async def stop(self) -> None:
        if self._open:
            self.world.closed.append(self.number)
            self.world.busy[self.purpose] -= 1
        await self.world.at(f"{self.purpose}.stop")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        watch: Watch | None = None,
    ) -> ExecResult:
        assert self._open, "exec in a sandbox that is not open"
        self.world.execs.append({"command": command, "env": env, "stdin": stdin, "timeout": timeout})
        if watch is None:
            await self.world.at(f"{self.purpose}.exec")
            return self.world.result
        return await self._watched(watch)

    async def _watched(self, watch: Watch) -> ExecResult:
        async with anyio.create_task_group() as group:

            async def over() -> None:
                await watch.over()
                group.cancel_scope.cancel()

            watch.saw(1, self.world.prints)
            group.start_soon(over)
            await self.world.at(f"{self.purpose}.exec")
            group.cancel_scope.cancel()
            return self.world.result
        return replace(self.world.result, exit_code=137, ended=True)

    async def upload(self, source: Path | bytes, target: str) -> None:
        assert self._open, "upload to a sandbox that is not open"
        await self.world.at(f"{self.purpose}.upload")

    async def download(self, source: str, target: Path) -> None:
        assert self._open, "download from a sandbox that is not open"
        await self.world.at(f"{self.purpose}.download")


class MemorySession:
    def __init__(self, key: str, sessions: MemorySessions) -> None:
        self.key, self.sealed, self._opened = key, False, anyio.current_time()
        self.calls, self.last_error, self._ledger = sessions.calls, sessions.last_error, sessions.ledger

    async def first_call(self) -> None:
        if not self.calls:
            await anyio.sleep_forever()

    async def stirred(self) -> None:
        await anyio.sleep_forever()

    async def quiet(self, seconds: float) -> None:
        await anyio.sleep_until(self._opened + seconds)

    def seal(self) -> CompletionSession:
        self.sealed = True
        return self._ledger


@dataclass
class MemorySessions:
    world: World
    ledger: CompletionSession = field(default_factory=ledger)
    calls: int = 1
    last_error: Exception | None = None
    opened: list[MemorySession] = field(default_factory=list[MemorySession])
    under_way: int = 0

    @asynccontextmanager
    async def open(self, attempt: Attempt) -> AsyncGenerator[MemorySession]:
        await self.world.at("session.open")
        session = MemorySession(f"key{len(self.opened)}", self)
        self.opened.append(session)
        self.under_way += 1
        try:
            yield session
        finally:
            self.under_way -= 1
            session.seal()


class MemoryHarness:
    name = "memory"

    def launch(self, context: LaunchContext) -> Launch:
        return Launch(("agent",), files={"/home/agent/config": b"x"}, env={"KEY": context.session_key}, stdin=b"do it")


@dataclass
class MemoryEvaluator:
    world: World
    evaluation: Evaluation = field(default_factory=lambda: Evaluation(1.0))
    finished: list[Finished] = field(default_factory=list[Finished])
    prewarm: bool = True

    async def before(self, runtime: object) -> None:
        await self.world.at("before")

    async def extract(self, runtime: object) -> bytes:
        await self.world.at("extract")
        return b"patch"

    async def evaluate(self, finished: Finished) -> Evaluation:
        self.finished.append(finished)
        await self.world.at("evaluate")
        async with finished.fresh_runtime() as runtime:
            await runtime.exec("tests")
        return self.evaluation


def attempt(name: str = "s0", **task: object) -> Attempt:
    spec = {"task_id": "t", "instruction": "i", "agent": AgentSpec("shell"), "timeout_seconds": 60.0, **task}
    return Attempt(name, TaskSpec(**spec), 0, 0)  # type: ignore[arg-type]


def stages(init: int = 2, ready: int = 2, run: int = 2, postrun: int = 2, prewarm: int = 2) -> Stages:
    return Stages.sized(init=init, ready=ready, run=run, postrun=postrun, prewarm=prewarm)


def running(stages: Stages) -> list[int]:
    return [stage.running for stage in stages]


def parts(world: World, evaluator: Evaluator | None = None, **replaced: object) -> Parts:
    def context(runtime: object, key: str) -> LaunchContext:
        return LaunchContext(AgentSpec("shell"), "i", "http://x", key, 1000, 100, "/workspace", "/home")

    made: dict[str, object] = {
        "harness": MemoryHarness(),
        "evaluator": evaluator or MemoryEvaluator(world),
        "builder": PrefixMerging(),
        "runtime": lambda purpose: MemoryRuntime(world, purpose),
        "launch_context": context,
        "count": counts,
    }
    return Parts(**{**made, **replaced})  # type: ignore[arg-type]


class Exploding:
    """A builder whose traces break an invariant."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        raise self.error


__all__ = [
    "EMPTY", "OK", "Exploding", "MemoryEvaluator", "MemoryRuntime", "MemorySession", "MemorySessions", "RuntimeSpec",
    "World", "attempt", "completion", "ledger", "nothing", "parts", "raising", "running", "stages", "taking",
]  # fmt: skip
