"""The script of one attempt: INIT -> READY -> RUNNING -> POSTRUN.

How it ends. The first row that applies counts; a later failure of the infrastructure replaces a status of the agent's.
`traces`: what the session recorded is built; `graded`: `Trajectory.evaluation` is there, and each trace has a reward.

| what happened                                                   | status      | failure.kind    | traces | graded |
|-----------------------------------------------------------------|-------------|-----------------|--------|--------|
| `Batch.abort` (the session is kept, its tokens counted)         | ABORTED     | aborted         | no     | no     |
| a sandbox failed, or anything raised that is not the agent's    | INFRA_ERROR | the class       | yes    | no     |
| HarnessError (or another error with `infrastructure` False)     | FAILED      | the class       | yes    | no     |
| a budget other than the agent's ran out                         | INFRA_ERROR | STAGE_timeout   | yes    | no     |
| the program did not come back after its deadline                | INFRA_ERROR | agent_overran   | yes    | no     |
| no model call within `first_call`, or within the agent's budget | INFRA_ERROR | no_first_call   | -      | no     |
| the latest model call failed for the engine                     | INFRA_ERROR | the class       | yes    | no     |
| no model call, and exit code 126, 127 or out of memory          | INFRA_ERROR | did_not_start   | -      | no     |
| no model call                                                   | FAILED      | no_model_call   | -      | yes    |
| neither a call nor output for `idle` after a refused call       | FAILED      | hung            | yes    | yes    |
| the agent's budget ran out                                      | TIMED_OUT   | -               | yes    | yes    |
| the sandbox's memory ran out                                    | FAILED      | oom             | yes    | yes    |
| an exit code that the launch does not accept                    | FAILED      | exit_code       | yes    | yes    |
| model calls, and none was answered                              | FAILED      | no_completion   | -      | yes    |
| the main conversation's last answer was cut by length           | TRUNCATED   | -               | yes    | yes    |
| none of these                                                   | COMPLETED   | -               | yes    | yes    |

A program that printed its result and did not exit is ended after `linger`; its exit code, which nobody knows, is None
and counts for nothing.

Whatever the agent did is graded as its workspace stands: status, exit code and reward are independent facts. Where
traces break an invariant (MergeError) there are none: they are never shown, let alone trained.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import anyio
import anyio.to_thread

from ..errors import ConfigError, EvaluationError, MergeError, PolarError
from ..evaluators.base import Finished
from ..harnesses.base import Launch
from ..merge.traces import unbuilt
from ..records import Attempt, CompletionSession, Evaluation, Failure, Status, Trace, Trajectory
from ..runtimes.base import ExecResult, Runtime
from .parts import Budgets, Observer, OpenSession, Parts, Sessions, Stages
from .prepare import prepare
from .stage import Stage, closing, failure_of
from .verdict import Ended, Stopped, infrastructure, verdict
from .versions import doubts
from .watch import Watchdog

__all__ = ["Budgets", "OpenSession", "Parts", "Script", "Sessions", "Stages", "rewarded", "run_attempt"]

T = TypeVar("T")

_log = logging.getLogger("polar_plugin.stages")
_LARGE = 200_000
"""Recorded tokens (a prompt counts each time) from which building is worth a thread: some 2 ms of work."""


async def run_attempt(
    attempt: Attempt, *, parts: Parts, sessions: Sessions, stages: Stages, budgets: Budgets
) -> Trajectory:
    """Run one attempt to its Trajectory. What fails becomes data; only cancellation leaves as an exception."""
    return await Script(attempt, parts=parts, sessions=sessions, stages=stages, budgets=budgets).run()


class _OverBudget(TimeoutError):
    """Our own deadline, told apart from a TimeoutError that something inside raised."""


@dataclass(slots=True)
class _SoFar:
    """What an attempt has come to: wherever it ends, this makes the Trajectory."""

    status: Status = Status.COMPLETED
    failure: Failure | None = None
    exit_code: int | None = None
    session: CompletionSession | None = None
    artifact: bytes | None = None
    """None until the agent's sandbox has given what is to be graded."""
    traces: tuple[Trace, ...] = ()
    evaluation: Evaluation | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])
    counts: Counter[str] = field(default_factory=Counter[str])
    """What went on in the stages; what became of the tokens is in `tokens`."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])

    def trajectory(self, attempt: Attempt) -> Trajectory:
        return Trajectory(
            attempt=attempt,
            status=self.status,
            traces=self.traces,
            evaluation=self.evaluation,
            failure=self.failure,
            exit_code=self.exit_code,
            timings=dict(self.timings),
            counts={**self.tokens, **self.counts},
            session=self.session,
        )


class Script:
    """One execution of an attempt, run once: what `Batch` starts for each try."""

    def __init__(self, attempt: Attempt, *, parts: Parts, sessions: Sessions, stages: Stages, budgets: Budgets) -> None:
        self.attempt = attempt
        self.state = "queued"
        """"queued", "init", "ready", "agent", "extract", "close", "postrun_queued", "build", "evaluation", "done".

        Also the keys of `Trajectory.timings` (with "total" for "done"): seconds spent in each.
        """
        self._parts = parts
        self._sessions = sessions
        self._stages = stages
        self._budgets = budgets
        self._so_far = _SoFar()

    async def run(self) -> Trajectory:
        """Run to the end; see `run_attempt`."""
        started = anyio.current_time()
        try:
            with self._blamed():
                async with self._slot(self._stages.live, "queued"):
                    await self._sandboxed()
            with self._blamed():
                await self._postrun()
        finally:
            self._so_far.timings["total"] = anyio.current_time() - started
            self.state = "done"
        return self._so_far.trajectory(self.attempt)

    def cut_short(self, status: Status, failure: Failure) -> Trajectory:
        """What there was when it was cancelled; tokens that were sampled are counted as `untrained_STATUS`."""
        tokens = unbuilt(self._so_far.session, status.value)
        cut = replace(self._so_far, status=status, failure=failure, traces=(), evaluation=None, tokens=tokens)
        return cut.trajectory(self.attempt)

    # --- INIT, READY, RUNNING: within the life of the sandbox and of the session

    async def _sandboxed(self) -> None:
        self.state = "init"
        runtime = self._parts.runtime("agent")
        async with self._closing(runtime):
            with self._blamed():  # here, so that the blame does not fall on the closing
                await self._recorded(runtime)

    async def _recorded(self, runtime: Runtime) -> None:
        async with self._sessions.open(self.attempt) as session:
            try:
                await self._agent(runtime, session)
            finally:
                self._so_far.session = session.seal()
        if self._so_far.status.gradable:
            with self._timed("extract", self._budgets.evaluation):
                self._so_far.artifact = await self._parts.evaluator.extract(runtime)

    async def _agent(self, runtime: Runtime, session: OpenSession) -> None:
        async with self._slot(self._stages.init, "queued"):
            with self._timed("init", self._budgets.init):
                launch = await self._initialised(runtime, session)
        async with self._slot(self._stages.run, "ready"):
            watchdog = Watchdog(session, self._budgets, launch.finished)
            with self._timed("agent", None):
                result = await self._within_budget(runtime, launch, watchdog)
            self._judge(result, session, launch, watchdog.stopped)

    async def _initialised(self, runtime: Runtime, session: OpenSession) -> Launch:
        await runtime.start()
        await prepare(runtime, self.attempt.task.runtime.prepare)
        if isinstance(self._parts.evaluator, Observer):
            await self._parts.evaluator.before(runtime)
        launch = self._parts.harness.launch(self._parts.launch_context(runtime, session.key))
        for path, content in launch.files.items():
            await runtime.upload(content, path)
        self._so_far.counts.update(await doubts(runtime, launch))
        return launch

    async def _within_budget(self, runtime: Runtime, launch: Launch, watchdog: Watchdog) -> ExecResult | Failure:
        """`exec` keeps the deadline itself, as it can keep the output; one that does not come back is given up."""
        seconds = self.attempt.task.timeout_seconds if self._budgets.agent is None else self._budgets.agent
        with anyio.move_on_after(seconds + self._budgets.cleanup):
            return await runtime.exec(
                launch.command, env=launch.env, stdin=launch.stdin, timeout=seconds, watch=watchdog
            )
        text = f"the program did not come back {self._budgets.cleanup:g} s after its deadline of {seconds:g} s"
        return Failure("agent", "agent_overran", text)

    def _judge(
        self, result: ExecResult | Failure, session: OpenSession, launch: Launch, stopped: Stopped | None
    ) -> None:
        """Seal before anything is extracted or graded, so that a straggler's call counts for nothing."""
        last_error = session.last_error
        sealed = session.seal()
        if isinstance(result, Failure):
            self._so_far.status, self._so_far.failure = Status.INFRA_ERROR, result
            return
        if stopped is not None:
            self._so_far.counts[f"ended_{stopped.name.lower()}"] += 1
        self._so_far.exit_code = None if result.ended else result.exit_code
        ended = Ended(result, launch.ok_exit_codes, sealed, session.calls, last_error, stopped)
        self._so_far.status, self._so_far.failure = verdict(ended)

    # --- POSTRUN

    async def _postrun(self) -> None:
        """Build what was recorded, also where it is only for inspection; grade what was extracted."""
        session, artifact = self._so_far.session, self._so_far.artifact
        if session is None or not (session.completions or artifact is not None):
            return
        async with self._slot(self._stages.postrun, "postrun_queued"):
            await self._build(session)
            if artifact is not None:
                await self._evaluate(session, artifact)

    async def _build(self, session: CompletionSession) -> None:
        """Until it is done, and where it fails, all that was sampled is untrained for that reason."""
        self._so_far.tokens = unbuilt(session, "build_failed")
        large = sum(completion.length for completion in session.completions) >= _LARGE
        with self._timed("build", self._budgets.build):
            try:
                built = await _work(large, lambda: self._parts.builder.build(session))
                traces = tuple(await built if isinstance(built, Awaitable) else built)
                tokens = await _work(large, lambda: self._verified(traces, session))
            except MergeError:
                self._so_far.counts["merge_errors"] += 1
                raise
        self._so_far.traces, self._so_far.tokens = traces, tokens

    def _verified(self, traces: tuple[Trace, ...], session: CompletionSession) -> Mapping[str, int]:
        if self._parts.check:
            self._parts.check(traces, session)
        return self._parts.count(session, traces)

    async def _evaluate(self, session: CompletionSession, artifact: bytes) -> None:
        so_far = self._so_far
        env = self.attempt.task.evaluator.env
        finished = Finished(self.attempt, so_far.status, so_far.exit_code, session, artifact, self._fresh_runtime, env)
        with self._timed("evaluation", self._budgets.evaluation):
            evaluation = await self._parts.evaluator.evaluate(finished)
            so_far.traces = rewarded(so_far.traces, evaluation)
        so_far.evaluation = evaluation

    @asynccontextmanager
    async def _fresh_runtime(self) -> AsyncGenerator[Runtime]:
        if not self.attempt.task.evaluator.refresh_runtime:
            raise ConfigError(
                "evaluator.refresh_runtime: grading in the agent's own sandbox is not offered; write true"
            )
        runtime = self._parts.runtime("evaluation")
        spec = self.attempt.task.runtime
        name = f"evaluation sandbox of {self.attempt.session_id}"
        async with closing(runtime.stop, grace=self._budgets.cleanup, name=name, counts=self._so_far.counts):
            await runtime.start()
            await prepare(runtime, spec.prepare if spec.eval_prepare is None else spec.eval_prepare)
            yield runtime

    # --- slots, deadlines, blame

    @asynccontextmanager
    async def _slot(self, stage: Stage, waiting: str) -> AsyncGenerator[None]:
        """Hold a slot; the wait for it is timed under the name `waiting`."""
        self.state, started = waiting, anyio.current_time()
        async with stage.slot():
            self._took(waiting, started)
            yield

    @asynccontextmanager
    async def _closing(self, runtime: Runtime) -> AsyncGenerator[None]:
        async def close() -> None:
            with self._timed("close", None):
                await runtime.stop()

        name = f"sandbox of {self.attempt.session_id}"
        async with closing(close, grace=self._budgets.cleanup, name=name, counts=self._so_far.counts):
            yield

    @contextmanager
    def _timed(self, state: str, budget: float | None) -> Generator[None]:
        self.state = state
        started = anyio.current_time()
        try:
            with anyio.move_on_after(budget) as scope:
                yield
        finally:
            self._took(state, started)
        if scope.cancelled_caught:
            raise _OverBudget(f"{state} took longer than its budget of {budget:g} s")

    def _took(self, state: str, started: float) -> None:
        timings = self._so_far.timings
        timings[state] = timings.get(state, 0.0) + anyio.current_time() - started

    @contextmanager
    def _blamed(self) -> Generator[None]:
        """The one place where what fails becomes data."""
        try:
            yield
        except Exception as caught:
            self._fail(_alone(caught))

    def _fail(self, error: Exception) -> None:
        """The first failure of the infrastructure stays: what comes after it is its consequence."""
        _log.warning("attempt %s failed in %s: %r", self.attempt.session_id, self.state, error)
        if not isinstance(error, PolarError | _OverBudget):
            _log.error("a fault of a plugin, or of ours", exc_info=error)
        if self._so_far.status is Status.INFRA_ERROR:
            return
        agents_own = self.state in ("init", "agent") and not infrastructure(error)
        self._so_far.status = Status.FAILED if agents_own else Status.INFRA_ERROR
        self._so_far.failure = failure_of(self.state, error)
        if isinstance(error, _OverBudget):
            self._so_far.failure = Failure(self.state, f"{self.state}_timeout", str(error))


async def _work(large: bool, work: Callable[[], T]) -> T:
    """Large work leaves the event loop."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True) if large else work()


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

    Raises EvaluationError where their number does not fit, or one is not finite: a NaN would spoil its whole batch.
    """
    rewards = evaluation.trace_rewards
    if rewards is None:
        rewards = (evaluation.outcome_reward,) * len(traces)
    if not all(map(math.isfinite, (evaluation.outcome_reward, *rewards))):
        raise EvaluationError(f"rewards must be finite, got {evaluation.outcome_reward} and {rewards}")
    if len(rewards) != len(traces):
        raise EvaluationError(f"the evaluator gave {len(rewards)} trace rewards for {len(traces)} traces")
    return tuple(replace(trace, reward=float(reward)) for trace, reward in zip(traces, rewards, strict=True))
