"""One execution of an attempt in a service: its script, over a session of the proxy, recorded as it goes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from .config import RolloutConfig
from .engine.base import EngineInfo
from .engine.turn import Conversation, Policy
from .proxy.server import Proxy
from .proxy.session import Ready, Session
from .recording import End, Header, Recorder
from .records import Attempt, ChatRequest, Completion, CompletionSession, Failure, Status, Trajectory
from .stages.attempt import Script
from .stages.parts import Budgets, Parts, Stages
from .wiring import tokenizer_of


class Service(Protocol):
    """What it runs in; `service.RolloutService` is one."""

    @property
    def config(self) -> RolloutConfig: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def proxy(self) -> Proxy: ...

    @property
    def stages(self) -> Stages: ...


class Ledger:
    """A proxy's session as the stages see it (`stages.parts.OpenSession`)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def key(self) -> str:
        return self._session.key

    @property
    def calls(self) -> int:
        return self._session.counts["calls"]

    @property
    def last_error(self) -> Exception | None:
        return self._session.last_error

    async def first_call(self) -> None:
        await self._session.called.wait()

    async def stirred(self) -> None:
        await self._session.stirred()

    async def quiet(self, seconds: float) -> None:
        await self._session.quiet(seconds)

    def seal(self) -> CompletionSession:
        return self._session.seal()


class _Recorded:
    """A conversation whose completions are written to a file as they come."""

    session: Session

    def __init__(self, conversation: Conversation, recorder: Recorder) -> None:
        self._conversation = conversation
        self._recorder = recorder

    async def __call__(self, request: ChatRequest, ready: Ready) -> Completion:
        completion = await self._conversation(request, ready)
        if not self.session.sealed:  # one that comes too late is on no ledger
            self._recorder.completion(completion)
        return completion

    async def count(self, request: ChatRequest) -> int:
        return await self._conversation.count(request)


class Execution:
    """One run of an attempt's script (`stages.batch.Run`), recorded as it goes where the config says so."""

    def __init__(self, service: Service, attempt: Attempt, parts: Parts, policy: Policy) -> None:
        self._service = service
        self._policy = policy
        self._attempt = attempt
        self._recorder: Recorder | None = None
        budgets = Budgets(**service.config.budgets.model_dump())
        self._script = Script(attempt, parts=parts, sessions=self, stages=service.stages, budgets=budgets)

    @property
    def state(self) -> str:
        return self._script.state

    def cut_short(self, status: Status, failure: Failure) -> Trajectory:
        return self._script.cut_short(status, failure)

    async def run(self) -> Trajectory:
        directory = self._service.config.recording.directory
        if directory is None:
            return await self._script.run()
        with Recorder(self._path(directory), self._header()) as recorder:
            self._recorder = recorder
            try:
                trajectory = await self._script.run()
            except BaseException:  # cancelled: the recording tells that it was, and so does the Trajectory
                recorder.end(End(status=Status.ABORTED))
                raise
            self._write_end(recorder, trajectory)
        return trajectory

    @asynccontextmanager
    async def open(self, attempt: Attempt) -> AsyncGenerator[Ledger]:
        """A session of the proxy, for the script. What the recorder holds is on disk before the harness has it."""
        conversation = Conversation(self._policy, attempt.session_id, delivered=lambda name: session.delivered(name))
        reply = _Recorded(conversation, self._recorder) if self._recorder else conversation
        task = attempt.task
        metadata = {**task.metadata, "task_id": task.task_id, "model": task.agent.model_name}
        async with self._service.proxy.session(attempt.session_id, reply, **metadata) as session:
            if isinstance(reply, _Recorded):
                reply.session = session
            yield Ledger(session)

    def _path(self, directory: Path) -> Path:
        """A run after an infrastructure error gets a file of its own beside the first one's."""
        name, suffix = self._attempt.session_id, self._service.config.recording.suffix
        path, again = directory / f"{name}{suffix}", 1
        while path.exists():
            path, again = directory / f"{name}.again{again}{suffix}", again + 1
        return path

    def _header(self) -> Header:
        attempt, service = self._attempt, self._service
        renderer = self._policy.renderer
        return Header(
            session_id=attempt.session_id,
            task_id=attempt.task.task_id,
            harness=attempt.task.agent.plugin,
            model=service.info.model,
            tokenizer={
                "name": tokenizer_of(service.config),
                "renderer": renderer.name,
                "vocab_size": renderer.vocab_size,
            },
            end_of_turn=renderer.stop_ids,
            metadata=attempt.task.metadata,
        )

    @staticmethod
    def _write_end(recorder: Recorder, trajectory: Trajectory) -> None:
        session = trajectory.session
        if session:
            for completion_id, delivery in session.delivery.items():
                recorder.delivery(completion_id, delivery)
        recorder.end(
            End(
                status=trajectory.status,
                evaluation=trajectory.evaluation,
                failure=trajectory.failure,
                counts=trajectory.counts,
                session_counts=session.counts if session else {},
            )
        )
