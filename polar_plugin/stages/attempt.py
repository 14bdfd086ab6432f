"""The script of one attempt: INIT -> READY -> RUNNING -> POSTRUN.

How it ends:

| what happened                                   | status      | traces      | graded              |
|-------------------------------------------------|-------------|-------------|---------------------|
| the program ended with an accepted exit code    | COMPLETED   | yes         | yes                 |
| ... and the last answer was cut by length       | TRUNCATED   | yes         | yes                 |
| the agent's budget ran out                      | TIMED_OUT   | yes         | yes, as it stands   |
| the program ended with another exit code        | FAILED      | yes         | yes (a fact apart)  |
| the program ended without one model call        | FAILED      | none        | yes                 |
| no model call within `first_call`               | INFRA_ERROR | none        | no                  |
| sandbox, engine or grading broke, or a budget   | INFRA_ERROR | where built | no                  |
| other than the agent's ran out                  |             |             |                     |
| `Batch.abort`                                   | ABORTED     | none        | no                  |
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, cast

import anyio
import anyio.to_thread

from ..errors import EvaluationError, PolarError, SandboxError
from ..evaluators.base import Evaluator, Finished
from ..harnesses.base import Harness, Launch, LaunchContext
from ..merge.builders import Builder
from ..records import (
    Attempt,
    CompletionSession,
    Evaluation,
    Failure,
    FinishReason,
    PrepareAction,
    Status,
    Trace,
    Trajectory,
)
from ..runtimes.base import ExecResult, Runtime
from .stage import Stage, closing


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds each stage may take; the agent's own is `TaskSpec.timeout_seconds`."""

    init: float = 600.0
    build: float = 120.0
    evaluation: float = 1800.0
    cleanup: float = 30.0
    first_call: float | None = None


@dataclass(frozen=True, slots=True)
class Stages:
    """Acquired in the order live, init, run; postrun alone: so nobody waits for what another waiter holds."""

    live: Stage
    """Started sandboxes: INIT + READY + RUNNING."""
    init: Stage
    run: Stage
    postrun: Stage


class OpenSession(Protocol):
    """An open ledger, as the script needs it."""

    key: str
    called: anyio.Event
    """Set at the first model call."""
    counts: Counter[str]
    """`calls` among them."""
    last_error: Exception | None
    """What the latest model call failed with; None again once one succeeds."""

    def seal(self) -> CompletionSession: ...


class Sessions(Protocol):
    def open(self, attempt: Attempt) -> AbstractAsyncContextManager[OpenSession]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What one attempt is made of; resolved from its task before anything starts."""

    harness: Harness
    evaluator: Evaluator
    builder: Builder
    runtime: Callable[[str], Runtime]
    """Makes a sandbox; the argument is its purpose, "agent" or "evaluation"."""
    launch_context: Callable[[Runtime, str], LaunchContext]
    """From the started runtime and the session's key."""
    count: Callable[[CompletionSession, Sequence[Trace]], Mapping[str, int]]
    check: Callable[[Sequence[Trace], CompletionSession], None] | None = None


async def run_attempt(
    attempt: Attempt, *, parts: Parts, sessions: Sessions, stages: Stages, budgets: Budgets
) -> Trajectory:
    """Run one attempt to its Trajectory. What fails becomes data; only cancellation leaves as an exception."""
    return await _Script(attempt, parts, sessions, stages, budgets).run()


def failed(attempt: Attempt, status: Status, failure: Failure) -> Trajectory:
    """The Trajectory of an attempt that has nothing else to show."""
    return Trajectory(attempt, status, failure=failure)


@dataclass(slots=True)
class _Script:
    """One run of the script; its fields fill as it goes, so that wherever it ends they make the Trajectory."""

    attempt: Attempt
    parts: Parts
    sessions: Sessions
    stages: Stages
    budgets: Budgets
    boundary: str = "init"
    timings: dict[str, float] = field(default_factory=dict[str, float])
    status: Status = Status.COMPLETED
    failure: Failure | None = None
    exit_code: int | None = None
    artifact: bytes = b""
    session: CompletionSession | None = None
    traces: tuple[Trace, ...] = ()
    evaluation: Evaluation | None = None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    async def run(self) -> Trajectory:
        started = time.monotonic()
        try:
            async with self.stages.live.slot():
                await self._agent()
            async with self.stages.postrun.slot():
                await self._build()
                await self._evaluate()
        except Exception as error:  # the one place where a failed attempt becomes data
            self._fail(error)
        self.timings["total"] = time.monotonic() - started
        return self._trajectory()

    async def _agent(self) -> None:
        """INIT, READY and RUNNING, within the life of the sandbox and of the session."""
        runtime = self.parts.runtime("agent")
        grace = self.budgets.cleanup
        async with closing(runtime.stop, grace=grace, name="sandbox"), self.sessions.open(self.attempt) as session:
            try:
                async with self.stages.init.slot():
                    with self._timed("init", self.budgets.init):
                        launch = await self._initialised(runtime, session)
                waiting = time.monotonic()
                async with self.stages.run.slot():
                    self.timings["ready"] = time.monotonic() - waiting
                    await self._launched(runtime, session, launch)
            finally:
                self.session = session.seal()

    async def _initialised(self, runtime: Runtime, session: OpenSession) -> Launch:
        await runtime.start()
        await prepare(runtime, self.attempt.task.runtime.prepare)
        launch = self.parts.harness.launch(self.parts.launch_context(runtime, session.key))
        for path, content in launch.files.items():
            await runtime.upload(content, path)
        return launch

    async def _launched(self, runtime: Runtime, session: OpenSession, launch: Launch) -> None:
        with self._timed("agent", math.inf):
            result = await self._watched(runtime, session, launch)
        session.seal()  # before anything is extracted or graded: a straggler's call must not count
        self._judge(result, session, launch)
        with self._timed("extract", self.budgets.evaluation):
            self.artifact = await self.parts.evaluator.extract(runtime)

    async def _watched(self, runtime: Runtime, session: OpenSession, launch: Launch) -> ExecResult:
        """Run the program under the agent's budget, and end it where no model call comes at all."""
        result: ExecResult | None = None
        async with anyio.create_task_group() as group:
            if self.budgets.first_call:
                group.start_soon(self._expect_call, session, group.cancel_scope, self.budgets.first_call)
            result = await runtime.exec(
                launch.command, env=launch.env, stdin=launch.stdin, timeout=self.attempt.task.timeout_seconds
            )
            group.cancel_scope.cancel()
        if result is None:
            raise SandboxError(
                f"no model call within {self.budgets.first_call:.0f} s: the agent did not start, or cannot reach us"
            )
        return result

    @staticmethod
    async def _expect_call(session: OpenSession, scope: anyio.CancelScope, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await session.called.wait()
            return
        scope.cancel()

    def _judge(self, result: ExecResult, session: OpenSession, launch: Launch) -> None:
        """Status from how the program ended. The exit code never touches the reward."""
        self.exit_code = result.exit_code
        if isinstance(session.last_error, PolarError) and session.last_error.infrastructure:
            raise session.last_error  # the agent ended on an answer that we could not give
        if result.timed_out:
            self.status = Status.TIMED_OUT
        elif result.oom:
            raise SandboxError("the sandbox ran out of memory: raise runtime.memory_mb")
        elif not session.counts["calls"]:
            self.status = Status.FAILED
            self.failure = Failure("agent", "no_model_call", _tail(result))
        elif result.exit_code not in launch.ok_exit_codes:
            self.status = Status.FAILED
            self.failure = Failure("agent", "exit_code", f"exit code {result.exit_code}: {_tail(result)}")

    async def _build(self) -> None:
        session = self.session
        assert session is not None
        with self._timed("build", self.budgets.build):
            self.traces, self.counts = await anyio.to_thread.run_sync(self._built, session)
        cut = session.completions and session.completions[-1].generation.finish_reason is FinishReason.LENGTH
        if cut and self.status is Status.COMPLETED:
            self.status = Status.TRUNCATED

    def _built(self, session: CompletionSession) -> tuple[tuple[Trace, ...], Mapping[str, int]]:
        traces = self.parts.builder.build(session)
        if self.parts.check:
            self.parts.check(traces, session)
        return traces, self.parts.count(session, traces)

    async def _evaluate(self) -> None:
        assert self.session is not None
        finished = Finished(
            self.attempt, self.status, self.exit_code, self.session, self.artifact, self._fresh_runtime,
            self.attempt.task.evaluator.env,
        )  # fmt: skip
        with self._timed("evaluation", self.budgets.evaluation):
            evaluation = await self.parts.evaluator.evaluate(finished)
        self.traces = rewarded(self.traces, evaluation)
        self.evaluation = evaluation

    @asynccontextmanager
    async def _fresh_runtime(self) -> AsyncGenerator[Runtime]:
        runtime = self.parts.runtime("evaluation")
        spec = self.attempt.task.runtime
        async with closing(runtime.stop, grace=self.budgets.cleanup, name="evaluation sandbox"):
            await runtime.start()
            await prepare(runtime, spec.prepare if spec.eval_prepare is None else spec.eval_prepare)
            yield runtime

    @contextmanager
    def _timed(self, boundary: str, budget: float) -> Generator[None]:
        self.boundary = boundary
        started = time.monotonic()
        try:
            with anyio.fail_after(None if math.isinf(budget) else budget):
                yield
        finally:
            self.timings[boundary] = time.monotonic() - started

    def _fail(self, caught: Exception) -> None:
        error = _alone(caught)
        infrastructure = error.infrastructure if isinstance(error, PolarError) else True
        self.status = Status.INFRA_ERROR if infrastructure else Status.FAILED
        if isinstance(error, TimeoutError):
            text = f"{self.boundary} took longer than its budget"
            self.failure = Failure(self.boundary, f"{self.boundary}_timeout", text)
        else:
            self.failure = Failure(self.boundary, type(error).__name__, str(error) or repr(error))

    def _trajectory(self) -> Trajectory:
        return Trajectory(
            self.attempt, self.status, self.traces, self.evaluation, self.failure, self.exit_code,
            dict(self.timings), dict(self.counts), self.session,
        )  # fmt: skip


def _alone(error: Exception) -> Exception:
    """The one error inside the group that a task group makes of it."""
    while isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        if len(group.exceptions) != 1:
            return group
        error = group.exceptions[0]
    return error


def rewarded(traces: Sequence[Trace], evaluation: Evaluation) -> tuple[Trace, ...]:
    """Traces with their rewards: one each where the evaluator graded them, else the outcome on all.

    Raises EvaluationError where their number does not fit.
    """
    rewards = evaluation.trace_rewards
    if rewards is None:
        rewards = (evaluation.outcome_reward,) * len(traces)
    if len(rewards) != len(traces):
        raise EvaluationError(f"the evaluator gave {len(rewards)} trace rewards for {len(traces)} traces")
    return tuple(replace(trace, reward=float(reward)) for trace, reward in zip(traces, rewards, strict=True))


async def prepare(runtime: Runtime, actions: Sequence[PrepareAction]) -> None:
    """Make a sandbox ready; an action is tried `max_attempts` times with growing pauses. Raises SandboxError."""
    for position, action in enumerate(actions):
        for attempt in range(1, action.max_attempts + 1):
            try:
                await _act(runtime, action, f"prepare.{position}")
                break
            except SandboxError:
                if attempt == action.max_attempts:
                    raise
                await anyio.sleep(action.retry_backoff_seconds * 2 ** (attempt - 1))


async def _act(runtime: Runtime, action: PrepareAction, path: str) -> None:
    if action.type != "exec":
        if not action.source or not action.target:
            raise SandboxError(f"{path}: {action.type} needs `source` and `target`")
        await runtime.upload(Path(action.source), action.target)
        return
    if not action.command:
        raise SandboxError(f"{path}: exec needs `command`")
    result = await runtime.exec(action.command, cwd=action.cwd, env=action.env)
    if not result.ok:
        raise SandboxError(f"{path}: {action.command!r} ended with {result.exit_code}: {_tail(result)}")


def _tail(result: ExecResult, characters: int = 2000) -> str:
    return result.text[-characters:].strip()
