"""RolloutService: owns the engine, the proxy and the stages. Enter it, run attempts, get one Trajectory for each."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread

from . import plugins
from .config import RolloutConfig, cache_directory
from .engine.base import Engine, EngineInfo, Renderer
from .engine.render import load_renderer
from .engine.turn import Conversation, Policy
from .errors import ConfigError
from .evaluators.base import Evaluator
from .harnesses.base import Harness, LaunchContext
from .merge.builders import Builder
from .merge.check import check
from .merge.traces import counts
from .proxy.server import Proxy, ProxyConfig
from .proxy.session import Session
from .records import Attempt, ChatRequest, Completion, CompletionSession, RuntimeSpec, Trace, Trajectory
from .recording import Recorder
from .runtimes.base import Runtime
from .stages.attempt import Budgets, Parts, Stages, run_attempt
from .stages.batch import Batch
from .stages.stage import Stage

_VERIFY_EVERY = {"all": 1, "sample": 8, "off": 0}


class RolloutService:
    """One per trainer process. An async context manager; everything it starts ends with its block."""

    engine: Engine
    info: EngineInfo
    policy: Policy
    proxy: Proxy
    stages: Stages

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
        self._built = 0

    async def __aenter__(self) -> RolloutService:
        async with AsyncExitStack() as stack:
            engine = self._given_engine or await anyio.to_thread.run_sync(make_engine, self.config)
            self.engine = await stack.enter_async_context(engine)
            self.info = await self.engine.probe()
            renderer = self._given_renderer or await anyio.to_thread.run_sync(make_renderer, self.config)
            length = min(self.config.engine.context_length or self.info.context_length, self.info.context_length)
            self.policy = Policy(self.engine, renderer, self.config.sampling.params(), length)
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-"))
            self.proxy = Proxy(_proxy_config(self.config, Path(sockets) / "proxy.sock"))
            await stack.enter_async_context(self.proxy.serving())
            self.stages = _stages(self.config)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def run(
        self, attempts: Sequence[Attempt], *, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run attempts side by side; exactly one Trajectory each, in input order. `on_done` sees each as it ends."""
        send, receive = anyio.create_memory_object_stream[Trajectory](0)
        done: dict[str, Trajectory] = {}
        batch = Batch(self._attempt, admitted=max(1, len(attempts)), retries=self.config.retries)
        async with anyio.create_task_group() as group, receive:
            group.start_soon(batch.run, attempts, send)
            async for trajectory in receive:
                done[trajectory.attempt.session_id] = trajectory
                self._count(trajectory)
                if on_done:
                    on_done(trajectory)
        self.counts.update(batch.counts)
        return [done[attempt.session_id] for attempt in attempts]

    @asynccontextmanager
    async def open(self, attempt: Attempt) -> AsyncGenerator[Session]:
        """A session of the proxy for one attempt; its model calls are recorded as they come where the config says so."""
        conversation = Conversation(self.policy, attempt.session_id)
        model = attempt.task.agent.model_name
        metadata = {"task_id": attempt.task.task_id, "model": model, **attempt.task.metadata}
        async with AsyncExitStack() as stack:
            recorder = stack.enter_context(self._recorder(attempt)) if self.config.recording.directory else None

            async def reply(request: ChatRequest) -> Completion:
                completion = await conversation(request)
                if recorder:
                    recorder.write(completion)
                return completion

            session = await stack.enter_async_context(self.proxy.session(attempt.session_id, reply, **metadata))
            yield session

    async def _attempt(self, attempt: Attempt) -> Trajectory:
        parts = self._parts(attempt)
        budgets = self.config.budgets
        return await run_attempt(
            attempt,
            parts=parts,
            sessions=self,
            stages=self.stages,
            budgets=Budgets(budgets.init, budgets.build, budgets.evaluation, budgets.cleanup, budgets.first_call),
        )

    def _parts(self, attempt: Attempt) -> Parts:
        """What the attempt's task names. Raises ConfigError, before anything starts."""
        task = attempt.task
        harness = cast("Harness", plugins.create(task.agent.plugin, plugins.HARNESSES, "harness", {}))
        evaluator = plugins.create(task.evaluator.strategy, plugins.EVALUATORS, "evaluator", task.evaluator.config)
        builder = plugins.create(task.builder.strategy, plugins.BUILDERS, "builder", task.builder.config)
        return Parts(
            harness=harness,
            evaluator=cast("Evaluator", evaluator),
            builder=cast("Builder", builder),
            runtime=functools.partial(self._runtime, attempt),
            launch_context=functools.partial(self._launch_context, attempt),
            count=counts,
            check=self._check(task.builder.config.get("max_trace_tokens")),
        )
