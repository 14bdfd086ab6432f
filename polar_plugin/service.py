"""RolloutService: owns the engine, the proxy and the stages. Enter it, run attempts, get one Trajectory for each."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import orjson

from . import plugins
from .admin import Admin
from .config import RolloutConfig
from .engine.base import Engine, EngineInfo, Renderer
from .engine.turn import Policy
from .errors import ConfigError, PolarError
from .evaluators.base import Evaluator
from .execution import Execution
from .harnesses.base import Harness, LaunchContext
from .harnesses.packages import PACKAGES
from .merge.builders import Builder
from .merge.check import check
from .merge.traces import counts
from .merge.untrained import Policy as TrainingPolicy
from .proxy.server import Proxy, ProxyConfig
from .records import (
    AgentSpec,
    Attempt,
    CompletionSession,
    SamplingParams,
    Trace,
    Trajectory,
)
from .runtimes.base import Runtime
from .stages.batch import Batch
from .stages.groups import Groups
from .stages.parts import Parts, Stages
from .stages.status import stage_counts, status
from .wiring import check_replay, group_policy, make_engine, make_renderer

_status_log = logging.getLogger("polar_plugin.status")
_VERIFY_EVERY = {"all": 1, "sample": 8, "off": 0}


class RolloutService:
    """One per trainer process. An async context manager; everything it starts ends with its block."""

    engine: Engine
    info: EngineInfo
    policy: Policy
    proxy: Proxy
    stages: Stages
    admin: Admin

    def __init__(
        self, config: RolloutConfig, *, engine: Engine | None = None, renderer: Renderer | None = None
    ) -> None:
        """`engine` (not yet entered) and `renderer` replace what `config` names."""
        self.config = config
        self.counts: Counter[str] = Counter()
        """Totals since the start: attempts by status, and each trajectory's own counts."""
        self._given_engine = engine
        self._given_renderer = renderer
        self._stack = AsyncExitStack()
        self._resolved = 0
        self._batches: list[Batch] = []
        self._ended = anyio.Event()
        """Set, and replaced, when a batch ends."""
        self._shut = False

    async def __aenter__(self) -> RolloutService:
        async with AsyncExitStack() as stack:
            renderer = self._given_renderer or await anyio.to_thread.run_sync(make_renderer, self.config)
            engine = self._given_engine or make_engine(self.config, vocab_size=renderer.vocab_size)
            check_replay(self.config, engine)
            self.engine = await stack.enter_async_context(engine)
            self.info = await self.engine.probe()
            length = min(self.config.engine.context_length or self.info.context_length, self.info.context_length)
            sampling, images = self.config.sampling.params(), self.config.renderer.images
            self.policy = Policy(self.engine, renderer, sampling, length, images, bool(self.config.engine.replay))
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-"))
            self.proxy = Proxy(ProxyConfig(unix_socket=Path(sockets) / "proxy.sock", **self.config.proxy.model_dump()))
            await stack.enter_async_context(self.proxy.serving())
            self.stages = Stages.sized(**self.config.stages.model_dump())
            self.admin = await stack.enter_async_context(Admin(self.config.admin, self.status).serving())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """What another task still runs is aborted, and ends, before what it runs on does."""
        with anyio.CancelScope(shield=True):
            await self.shutdown()
        await self._stack.aclose()

    async def run(
        self,
        attempts: Sequence[Attempt],
        *,
        on_done: Callable[[Trajectory], None] | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[Trajectory]:
        """Run attempts side by side; exactly one Trajectory each, in input order. `on_done` sees each as it ends.

        `sampling` replaces the configured one for these attempts: a trainer may evaluate with other parameters.
        Attempts that share a `group_index` are a group: what the infrastructure took is refilled, and stragglers are
        ended, as `config.groups` says. Raises ConfigError, before anything starts, where a task names what does not
        exist or cannot be, PolarError after `shutdown`.
        """
        if self._shut:
            raise PolarError("the rollout service is shut down: start another one")
        parts = {attempt.session_id: self._parts(attempt) for attempt in attempts}
        send, receive = anyio.create_memory_object_stream[Trajectory](0)
        done: dict[str, Trajectory] = {}
        policy = self.policy if sampling is None else replace(self.policy, sampling=sampling)
        batch = Batch(
            lambda attempt: Execution(self, attempt, parts[attempt.session_id], policy),
            admitted=max(1, len(attempts)),
            retries=self.config.retries,
            groups=Groups(attempts, group_policy(self.config)),
        )
        with self._known(batch):
            async with anyio.create_task_group() as group, receive:
                group.start_soon(batch.run, attempts, send)
                group.start_soon(self._logging)
                async for trajectory in receive:
                    done[trajectory.attempt.session_id] = trajectory
                    self._count(trajectory)
                    if on_done:
                        on_done(trajectory)
                group.cancel_scope.cancel()
        self._log_status()
        for name, value in stage_counts(self.stages).items():
            self.counts[name] = value
        return [done[attempt.session_id] for attempt in attempts]

    def abort(self, session_id: str) -> None:
        """End one attempt now: its Trajectory has status ABORTED. No effect where it is over, or unknown."""
        for batch in self._batches:
            batch.abort(session_id)

    def abort_task(self, task_id: str) -> None:
        """End all attempts at one task now."""
        for batch in self._batches:
            batch.abort_task(task_id)

    def abort_all(self) -> None:
        """End all attempts now; each still gives its one Trajectory."""
        for batch in self._batches:
            batch.abort_all()

    async def shutdown(self, grace: float = 0.0) -> None:
        """Start nothing more, and return when no attempt is under way; `run` is refused from now on.

        What has a sandbox may run on for `grace` seconds (`math.inf`: to its end) and is aborted then. Each attempt
        still gives its one Trajectory to whoever runs it.
        """
        self._shut = True
        for batch in self._batches:
            batch.stop()
        with anyio.move_on_after(grace):
            await self._idle()
        self.abort_all()
        await self._idle()

    async def _idle(self) -> None:
        while self._batches:
            await self._ended.wait()

    @contextmanager
    def _known(self, batch: Batch) -> Generator[None]:
        self._batches.append(batch)
        try:
            yield
        finally:
            self._batches.remove(batch)
            self._ended.set()
            self._ended = anyio.Event()

    def status(self) -> dict[str, Any]:
        """What goes on at this moment, as JSON; see `stages.status.status`. Also `GET /status` (`config.admin`)."""
        return status(self.stages, self._batches, self.counts)

    async def _logging(self) -> None:
        while self.config.admin.log_seconds is not None:
            await anyio.sleep(self.config.admin.log_seconds)
            self._log_status()

    def _log_status(self) -> None:
        if self.config.admin.log_seconds is not None:
            _status_log.info("%s", orjson.dumps(self.status()).decode())

    def _count(self, trajectory: Trajectory) -> None:
        self.counts[f"attempts_{trajectory.status}"] += 1
        self.counts.update(trajectory.counts)

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Within it new model calls are held, for a weight update; it always reopens. Calls under way go on."""
        return self.proxy.paused()

    def _parts(self, attempt: Attempt) -> Parts:
        """What the attempt's task names."""
        task = attempt.task
        if not task.evaluator.refresh_runtime and task.evaluator.strategy == "test_on_output":
            raise ConfigError(
                "task.evaluator.refresh_runtime: test_on_output grades in a fresh sandbox only; set it to true"
            )
        harness = plugins.create(task.agent.plugin, plugins.HARNESSES, "harness", {})
        evaluator = plugins.create(task.evaluator.strategy, plugins.EVALUATORS, "evaluator", task.evaluator.config)
        builder = plugins.create(task.builder.strategy, plugins.BUILDERS, "builder", task.builder.config)
        policy = cast("TrainingPolicy | None", getattr(builder, "policy", None))
        return Parts(
            harness=cast("Harness", harness),
            evaluator=cast("Evaluator", evaluator),
            builder=cast("Builder", builder),
            runtime=functools.partial(self._runtime, attempt),
            launch_context=functools.partial(self._launch_context, attempt),
            count=functools.partial(counts, policy=policy),
            check=self._check(policy),
        )

    def _runtime(self, attempt: Attempt, purpose: str) -> Runtime:
        """An evaluator's sandbox has no way to the model."""
        spec = attempt.task.runtime
        if purpose == "evaluation":
            spec = replace(spec, network="none")
        config = {
            "spec": spec,
            "proxy": self.proxy.endpoint,
            "labels": {"session": attempt.session_id, "purpose": purpose},
        }
        return cast("Runtime", plugins.create(spec.plugin, plugins.RUNTIMES, "runtime", config))

    def _launch_context(self, attempt: Attempt, runtime: Runtime, key: str) -> LaunchContext:
        return LaunchContext(
            agent=_with_root(attempt.task.agent, attempt.task.runtime.harness_root),
            instruction=attempt.task.instruction,
            base_url=runtime.proxy_url,
            session_key=key,
            context_length=self.policy.context_length,
            max_tokens=self.policy.sampling.max_tokens or self.policy.context_length,
            workdir=runtime.workdir,
            home=runtime.home,
        )

    def _check(self, policy: TrainingPolicy | None) -> Callable[[Sequence[Trace], CompletionSession], None] | None:
        """The merge invariants, for as many attempts as the config says."""
        every = _VERIFY_EVERY[self.config.verify]
        self._resolved += 1
        if not every or self._resolved % every:
            return None
        return functools.partial(check, policy=policy, decode=self.policy.renderer.decode)


def _with_root(agent: AgentSpec, root: str | None) -> AgentSpec:
    """The preset's program is in the harness root, where it says nothing else."""
    if root is None or agent.harness not in PACKAGES or "root" in agent.settings:
        return agent
    return replace(agent, settings={**agent.settings, "root": f"{root}/{agent.harness}"})
