"""The script of one attempt: INIT -> READY -> RUNNING -> POSTRUN.

How it ends. The first row that applies counts; a later failure of the infrastructure replaces a status of the agent's.
`traces`: what the session recorded is built; `graded`: `Trajectory.evaluation` is there, and each trace has a reward.

| what happened                                                   | status      | failure.kind    | traces | graded |
|-----------------------------------------------------------------|-------------|-----------------|--------|--------|
| `Batch.abort` (the session is kept, its tokens counted)         | ABORTED     | aborted         | no     | no     |
| a sandbox failed, or anything raised that is not the agent's    | INFRA_ERROR | the class       | yes    | no     |
| HarnessError (or another error with `infrastructure` False)     | FAILED      | the class       | yes    | no     |
| a budget other than the agent's ran out                         | INFRA_ERROR | STAGE_timeout   | yes    | no     |
| the guard over all of it struck                                 | INFRA_ERROR | attempt_timeout | yes    | no     |
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
| the evaluator's report has the reason `empty_patch`             | FAILED      | empty_patch     | yes    | yes    |
| none of these                                                   | COMPLETED   | -               | yes    | yes    |

A program that printed its result and did not exit is ended after `linger`; its exit code, which nobody knows, is None
and counts for nothing.

Whatever the agent did is graded as its workspace stands: status, exit code and reward are independent facts. Where
traces break an invariant (MergeError) there are none: they are never shown, let alone trained.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TypeVar, cast

import anyio
import anyio.to_thread

from ..errors import ConfigError, MergeError, PolarError
from ..evaluators.base import Finished
from ..harnesses.base import Launch
from ..merge.traces import unbuilt
from ..records import Attempt, CompletionSession, Failure, Status, Trace, Trajectory
from ..runtimes.base import ExecResult, Runtime
from .deadline import alarms, deadline_env, tell
from .outcome import SoFar, rewarded
from .parts import Budgets, Observer, OpenSession, Parts, Prewarmed, Sessions, Stages
from .prepare import prepare
from .prewarm import Prewarm
from .stage import Priority, closing, failure_of
from .stopwatch import OverBudget, Stopwatch
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


class Script:
    """One execution of an attempt, run once: what `Batch` starts for each try."""

    def __init__(self, attempt: Attempt, *, parts: Parts, sessions: Sessions, stages: Stages, budgets: Budgets) -> None:
        self.attempt = attempt
        self._parts = parts
        self._sessions = sessions
        self._stages = stages
        self._budgets = budgets
        self._agent_seconds = attempt.task.timeout_seconds if budgets.agent is None else budgets.agent
        self._so_far = SoFar()
        self._watch = Stopwatch(Priority.of(attempt), budgets.guard(self._agent_seconds))
        self._prewarm = Prewarm(self._fresh, stages.prewarm, budgets.init, self._so_far.counts)

    @property
    def state(self) -> str:
        """ "queued", "init", "ready", "agent", "extract", "close", "postrun_queued", "build", "evaluation", "done".

        Also the keys of `Trajectory.timings` (with "total" for "done"): seconds spent in each.
        """
        return self._watch.state

    @property
    def began(self) -> float:
        """When it was made, on anyio's clock."""
        return self._watch.began

    async def run(self) -> Trajectory:
        """Run to the end; see `run_attempt`."""
        try:
            async with self._prewarm.running():
                with self._blamed(), self._watch.guarded():
                    async with self._watch.slot(self._stages.live, "queued"):
                        await self._sandboxed()
                with self._blamed(), self._watch.guarded(self._budgets.build):
                    await self._postrun()
        finally:
            self._watch.stop()
        return self._so_far.trajectory(self.attempt, self._watch.timings)

    def cut_short(self, status: Status, failure: Failure) -> Trajectory:
        """What there was when it was cancelled; tokens that were sampled are counted as `untrained_STATUS`."""
        return self._so_far.cut(self.attempt, self._watch.timings, status, failure)

    # --- INIT, READY, RUNNING: within the life of the sandbox and of the session

    async def _sandboxed(self) -> None:
        self._watch.state = "init"
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
            with self._watch.timed("extract", self._budgets.evaluation):
                self._so_far.artifact = await self._parts.evaluator.extract(runtime)

    async def _agent(self, runtime: Runtime, session: OpenSession) -> None:
        async with self._watch.slot(self._stages.init, "queued"):
            with self._watch.timed("init", self._budgets.init):
                launch = await self._initialised(runtime, session)
        async with self._watch.slot(self._stages.run, "ready"):
            watchdog = Watchdog(session, self._budgets, launch.finished)
            with self._watch.timed("agent", None):
                result = await self._within_budget(runtime, launch, watchdog)
            self._judge(result, session, launch, watchdog.stopped)

    async def _initialised(self, runtime: Runtime, session: OpenSession) -> Launch:
        await runtime.start()
        await prepare(runtime, self.attempt.task.runtime.prepare)
        if isinstance(self._parts.evaluator, Observer):
            await self._parts.evaluator.before(runtime)
        context = replace(self._parts.launch_context(runtime, session.key), seconds=self._agent_seconds)
        launch = self._parts.harness.launch(context)
        for path, content in launch.files.items():
            await runtime.upload(content, path)
        self._so_far.counts.update(await doubts(runtime, launch))
        if self._budgets.soft_deadline is None:
            return launch
        return replace(launch, env={**deadline_env(runtime, self._agent_seconds), **launch.env})

    async def _within_budget(self, runtime: Runtime, launch: Launch, watchdog: Watchdog) -> ExecResult | Failure:
        """`exec` keeps the deadline itself, as it can keep the output; one that does not come back is given up."""
        seconds = self._agent_seconds
        with anyio.move_on_after(seconds + self._budgets.cleanup):
            async with alarms(*self._alarms(runtime)):
                return await runtime.exec(
                    launch.command, env=launch.env, stdin=launch.stdin, timeout=seconds, watch=watchdog
                )
        text = f"the program did not come back {self._budgets.cleanup:g} s after its deadline of {seconds:g} s"
        return Failure("agent", "agent_overran", text)

    def _alarms(self, runtime: Runtime) -> Iterator[tuple[float, Callable[[], Awaitable[None]]]]:
        """What is to be done late in the agent's run; a lead longer than the whole run means at its beginning."""
        soft, lead = self._budgets.soft_deadline, self._budgets.prewarm_lead
        if soft is not None:
            left = min(soft, self._agent_seconds)
            yield self._agent_seconds - left, lambda: tell(runtime, left, self._so_far.counts)
        evaluator = self._parts.evaluator
        if lead is not None and isinstance(evaluator, Prewarmed) and evaluator.prewarm:
            yield max(0.0, self._agent_seconds - lead), self._prewarm.start

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
        self._so_far.tokens = unbuilt(session, "build_failed")
        async with self._watch.slot(self._stages.postrun, "postrun_queued"):
            await self._build(session)
            if artifact is not None:
                await self._evaluate(session, artifact)

    async def _build(self, session: CompletionSession) -> None:
        """Until it is done, and where it fails, all that was sampled is untrained for that reason."""
        large = sum(completion.length for completion in session.completions) >= _LARGE
        with self._watch.timed("build", self._budgets.build):
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
        with self._watch.timed("evaluation", self._budgets.evaluation):
            so_far.graded(await self._parts.evaluator.evaluate(finished))

    @asynccontextmanager
    async def _fresh_runtime(self) -> AsyncGenerator[Runtime]:
        """The one that was made ready early, else one that is made now."""
        async with self._prewarm.taken() as ready:
            if ready is not None:
                yield ready
                return
        async with self._fresh() as runtime:
            yield runtime

    @asynccontextmanager
    async def _fresh(self) -> AsyncGenerator[Runtime]:
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

    # --- clean-up, blame

    @asynccontextmanager
    async def _closing(self, runtime: Runtime) -> AsyncGenerator[None]:
        async def close() -> None:
            with self._watch.timed("close", None):
                await runtime.stop()

        name = f"sandbox of {self.attempt.session_id}"
        async with closing(close, grace=self._budgets.cleanup, name=name, counts=self._so_far.counts):
            yield

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
        if not isinstance(error, PolarError | OverBudget):
            _log.error("a fault of a plugin, or of ours", exc_info=error)
        if self._so_far.status is Status.INFRA_ERROR:
            return
        agents_own = self.state in ("init", "agent") and not infrastructure(error)
        self._so_far.status = Status.FAILED if agents_own else Status.INFRA_ERROR
        self._so_far.failure = failure_of(error.what if isinstance(error, OverBudget) else self.state, error)


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
