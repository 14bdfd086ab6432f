"""RolloutService: owns the engine, the proxy and the stages. Enter it, run attempts, get one Trajectory for each."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

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
from .merge.untrained import Policy as TrainingPolicy
from .proxy.server import Proxy, ProxyConfig
from .proxy.session import Session
from .records import Attempt, ChatRequest, Completion, CompletionSession, Trace, Trajectory
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
        """Run attempts side by side; exactly one Trajectory each, in input order. `on_done` sees each as it ends.

        Raises ConfigError, before anything starts, where a task names what does not exist.
        """
        send, receive = anyio.create_memory_object_stream[Trajectory](0)
        done: dict[str, Trajectory] = {}
        parts = {attempt.session_id: self._parts(attempt) for attempt in attempts}
        batch = Batch(
            lambda attempt: self._attempt(attempt, parts[attempt.session_id]),
            admitted=max(1, len(attempts)),
            retries=self.config.retries,
        )
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
        """A session of the proxy for one attempt, recorded as its calls come where the config says so."""
        conversation = Conversation(self.policy, attempt.session_id)
        model = attempt.task.agent.model_name
        metadata = {"task_id": attempt.task.task_id, "model": model, **attempt.task.metadata}
        async with AsyncExitStack() as stack:
            recorder = None

            async def reply(request: ChatRequest) -> Completion:
                completion = await conversation(request)
                if recorder:
                    recorder.write(completion)
                return completion

            session = await stack.enter_async_context(self.proxy.session(attempt.session_id, reply, **metadata))
            yield session

    async def _attempt(self, attempt: Attempt, parts: Parts) -> Trajectory:
        budgets = Budgets(**self.config.budgets.model_dump())
        return await run_attempt(attempt, parts=parts, sessions=self, stages=self.stages, budgets=budgets)

    def _parts(self, attempt: Attempt) -> Parts:
        """What the attempt's task names. Raises ConfigError, before anything starts."""
        task = attempt.task
        harness = cast("Harness", plugins.create(task.agent.plugin, plugins.HARNESSES, "harness", {}))
        evaluator = plugins.create(task.evaluator.strategy, plugins.EVALUATORS, "evaluator", task.evaluator.config)
        builder = plugins.create(task.builder.strategy, plugins.BUILDERS, "builder", task.builder.config)
        policy = getattr(builder, "policy", None)
        return Parts(
            harness=harness,
            evaluator=cast("Evaluator", evaluator),
            builder=cast("Builder", builder),
            runtime=functools.partial(self._runtime, attempt),
            launch_context=functools.partial(self._launch_context, attempt),
            count=functools.partial(counts, policy=policy),
            check=self._check(policy),
        )

    def _runtime(self, attempt: Attempt, purpose: str) -> Runtime:
        spec = attempt.task.runtime
        if purpose == "evaluation":
            spec = replace(spec, network="none")
        factory = plugins.resolve(spec.backend, plugins.RUNTIMES, "runtime")
        labels = {"session": attempt.session_id, "purpose": purpose}
        return cast("Runtime", factory(spec, proxy=self.proxy.endpoint, labels=labels))

    def _launch_context(self, attempt: Attempt, runtime: Runtime, key: str) -> LaunchContext:
        return LaunchContext(
            agent=attempt.task.agent,
            instruction=attempt.task.instruction,
            base_url=runtime.proxy_url,
            session_key=key,
            context_length=self.policy.context_length,
            max_tokens=self.policy.sampling.max_tokens or self.policy.context_length,
            workdir=runtime.workdir,
            home=runtime.home,
        )

    def _check(self, policy: TrainingPolicy | None) -> Callable[[Sequence[Trace], CompletionSession], None] | None:
        """The merge invariants, for as many trajectories as the config says."""
        every = _VERIFY_EVERY[self.config.verify]
        self._built += 1
        if not every or self._built % every:
            return None
        return functools.partial(check, policy=policy, decode=self.policy.renderer.decode)

    def _count(self, trajectory: Trajectory) -> None:
        self.counts[f"attempts_{trajectory.status}"] += 1
        self.counts.update(trajectory.counts)


def make_engine(config: RolloutConfig) -> Engine:
    """The engine that `config.engine` names, not yet entered. Raises ConfigError."""
    engine = config.engine
    options = dict(engine.options)
    if engine.kind in ("sglang", "vllm"):
        if not engine.url:
            raise ConfigError(f"engine.url is not set: the {engine.kind} engine needs the address of its server")
        options["url"] = engine.url
    if engine.kind == "transformers":
        options["model"] = model_directory(config)
        options.setdefault("context_length", engine.context_length)
    elif engine.model is not None:
        options["model"] = engine.model
    return cast("Engine", plugins.create(engine.kind, plugins.ENGINES, "engine", options))


def model_directory(config: RolloutConfig) -> Path:
    """The directory of the embedded engine's model; fetched or made where it is one of ours. Raises ConfigError."""
    from .engine.models import resolve_model

    if not config.engine.model:
        raise ConfigError("engine.model is not set: a Hugging Face directory, `smollm2` or `tiny`")
    return resolve_model(config.engine.model, cache_directory())


def make_renderer(config: RolloutConfig) -> Renderer:
    """The renderer for `config`, over the tokenizer it names. Raises ConfigError."""
    renderer, embedded = config.renderer, config.engine.kind == "transformers"
    tokenizer = renderer.tokenizer or (str(model_directory(config)) if embedded else config.engine.model)
    if not tokenizer:
        raise ConfigError("renderer.tokenizer is not set: the tokenizer's Hugging Face directory or name")
    return load_renderer(
        tokenizer,
        kind=renderer.kind,
        history=renderer.history,
        tool_parser=renderer.tool_parser,
        reasoning_parser=renderer.reasoning_parser,
        chat_template_kwargs=renderer.chat_template_kwargs,
    )


def _proxy_config(config: RolloutConfig, socket: Path) -> ProxyConfig:
    return ProxyConfig(unix_socket=socket, **config.proxy.model_dump())


def _stages(config: RolloutConfig) -> Stages:
    told = config.stages
    return Stages(
        live=Stage("live", told.run + told.ready),
        init=Stage("init", told.init),
        run=Stage("run", told.run),
        postrun=Stage("postrun", told.postrun),
    )
