"""A session: one attempt's ledger of model calls, append-only while open, then sealed for good."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from ..errors import PolarError, SessionSealed, UnknownSession
from ..records import ChatRequest, Completion, CompletionSession, Delivery
from .gate import Gate
from .memory import Memory
from .resent import Resent
from .shared import Shared, Signs, Silence

Ready = Callable[[], Awaitable[None]]
"""Returns once turns may begin."""
Work = Callable[[], Coroutine[Any, Any, None]]
Spawn = Callable[[Work], None]
"""Starts a task of the proxy's own, which outlives the call that asked for it."""
_SILENCE = Silence()


class Reply(Protocol):
    """The token side of one session."""

    async def __call__(self, request: ChatRequest, ready: Ready, /) -> Completion:
        """Cancelling it aborts the engine's call.

        `ready` is awaited before anything is sampled, and behind all that refuses a request for what it asks.
        """
        ...

    async def count(self, request: ChatRequest, /) -> int:
        """How many prompt tokens the request would have. Nothing is sampled or kept."""
        ...


class Session:
    """Mutable: open, then sealed. Lives on one event loop."""

    def __init__(
        self, key: str, session_id: str, reply: Reply, gate: Gate, spawn: Spawn, metadata: Mapping[str, Any]
    ) -> None:
        self.key = key
        self.session_id = session_id
        self.metadata = metadata
        self.counts: Counter[str] = Counter()
        """`calls`, `joined` (calls that waited for the answer to an equal one), `token_counts`, `recorded`, `retries`,
        `hangups`, `undelivered`, `refused_sealed`, `malformed_calls`, `images_omitted`, `errors.<class>`,
        `ignored.<path>`."""
        self.resent, self.memory = Resent(), Memory()
        self.called = anyio.Event()
        """Set at the first model call: `await session.called.wait()` under a deadline shows a harness that hangs."""
        self.first_call: float | None = None
        self.last_activity: float | None = None
        """Unix seconds at which a call last began or ended."""
        self.last_error: Exception | None = None
        """What the latest call failed with, or was refused for; None again once one succeeds."""
        self._reply = reply
        self._gate = gate
        self._spawn = spawn
        self._turns: dict[Shared, None] = {}
        self._stirred: anyio.Event | None = None
        self._stirred_at = anyio.current_time()
        self._completions: list[Completion] = []
        self._delivery: dict[str, Delivery] = {}
        self._ledger: CompletionSession | None = None

    @property
    def completions(self) -> tuple[Completion, ...]:
        """What is recorded so far."""
        return tuple(self._completions)

    @property
    def delivery(self) -> Mapping[str, Delivery]:
        """By completion id."""
        return dict(self._delivery)

    @property
    def sealed(self) -> bool:
        return self._ledger is not None

    @property
    def in_flight(self) -> int:
        """Replies that are being generated, or held at the gate."""
        return len(self._turns)

    async def turn(self, request: ChatRequest, signs: Signs = _SILENCE) -> Completion:
        """Generate a reply and record it, in one step: what this returns is on the ledger, as PENDING.

        An equal request under way is joined instead: both calls return its completion. Raises SessionSealed, also when
        `seal` cancels it under way, and whatever the reply raises. Failed, or cancelled in every call that waits for
        it, it records nothing.
        """
        self._begin(request)
        shared = next((one for one in self._turns if one.answers(request)), None)
        if shared is None:
            shared = self._start(request)
        else:
            self.counts["joined"] += 1
        try:
            completion = await shared.result(signs)
        except anyio.get_cancelled_exc_class():
            if shared.completion is None:
                self.counts["hangups"] += 1
            else:
                self.mark(shared.completion.id, Delivery.UNDELIVERED)
            raise
        finally:
            self._stir()
        if completion is None:
            raise SessionSealed(f"session {self.session_id} was sealed while the call was under way")
        return completion

    def refused(self, error: PolarError) -> None:
        """Note a call that could not even be read. It is on no ledger."""
        self._failed(error)
        self._stir()

    async def stirred(self) -> None:
        """Returns when a model call next begins, ends or is refused."""
        self._stirred = self._stirred or anyio.Event()
        await self._stirred.wait()

    async def quiet(self, seconds: float) -> None:
        """Returns once none has begun, ended, been refused or been under way for `seconds` on end."""
        while True:
            left = self._stirred_at + seconds - anyio.current_time()
            with anyio.move_on_after(None if self._turns else max(left, 0)) as scope:
                await self.stirred()
            if scope.cancelled_caught:
                return

    async def count(self, request: ChatRequest) -> int:
        """The number of prompt tokens that `turn` would send. Raises SessionSealed, and what the reply raises."""
        if self.sealed:
            raise SessionSealed(f"session {self.session_id} is over; start a new attempt")
        self.counts["token_counts"] += 1
        return await self._reply.count(request)

    def recall(self, completion_id: str) -> Completion | None:
        """The recorded completion of that id."""
        return next((one for one in reversed(self._completions) if one.id == completion_id), None)

    def mark(self, completion_id: str, delivery: Delivery) -> None:
        """Note whether the harness got the answer. Once delivered, an answer stays delivered; a sealed ledger stays."""
        if not self.sealed and self._delivery[completion_id] is not Delivery.DELIVERED:
            self._delivery[completion_id] = delivery

    def delivered(self, completion_id: str) -> bool:
        """Whether the harness is known to have got the answer."""
        return self._delivery.get(completion_id) is Delivery.DELIVERED

    def seal(self) -> CompletionSession:
        """End the session: turns in flight are cancelled, answers not yet delivered never will be. Idempotent."""
        if self._ledger is None:
            self._ledger = self._close_ledger()
            for shared in list(self._turns):
                shared.cancel()
        return self._ledger

    def _begin(self, request: ChatRequest) -> None:
        if self.sealed:
            self.counts["refused_sealed"] += 1
            raise SessionSealed(f"session {self.session_id} is over; start a new attempt")
        self._stir()
        self.first_call = self.last_activity if self.first_call is None else self.first_call
        self.called.set()
        self.counts["calls"] += 1
        self.counts["retries"] += request.retry
        self.counts.update(f"ignored.{path}" for path in request.ignored)

    def _start(self, request: ChatRequest) -> Shared:
        shared = Shared(request)
        self._turns[shared] = None
        self._spawn(partial(shared.run, partial(self._generate, shared)))
        return shared

    async def _generate(self, shared: Shared) -> Completion:
        try:
            completion = await self._reply(shared.request, self._gate.passed)
        except Exception as error:
            self._failed(error)
            raise
        finally:
            del self._turns[shared]
            self._stir()
        if self.sealed:
            raise SessionSealed(f"session {self.session_id} was sealed while the call was under way")
        self._record(completion, Delivery.PENDING if shared.wanted else Delivery.UNDELIVERED)
        return completion

    def _record(self, completion: Completion, delivery: Delivery) -> None:
        self.last_error = None
        self.counts["recorded"] += 1
        self.counts["malformed_calls"] += completion.malformed_calls
        self.counts["images_omitted"] += completion.images_omitted
        self._completions.append(completion)
        self._delivery[completion.id] = delivery

    def _failed(self, error: Exception) -> None:
        self.last_error = error
        self.counts[f"errors.{type(error).__name__}"] += 1

    def _stir(self) -> None:
        self.last_activity = time.time()
        self._stirred_at = anyio.current_time()
        if self._stirred is not None:
            self._stirred.set()
            self._stirred = None

    def _close_ledger(self) -> CompletionSession:
        lost = {Delivery.PENDING: Delivery.UNDELIVERED}
        delivery = {key: lost.get(value, value) for key, value in self._delivery.items()}
        self.counts["undelivered"] = sum(value is Delivery.UNDELIVERED for value in delivery.values())
        return CompletionSession(
            session_id=self.session_id,
            completions=self.completions,
            delivery=delivery,
            task_id=str(self.metadata.get("task_id", "")),
            metadata=dict(self.metadata),
            counts={name: count for name, count in self.counts.items() if count},
        )


class SessionTable:
    """The open sessions by key. Keys of closed ones are remembered, so that a straggler is told what happened.

    Calls are answered within `running()`.
    """

    def __init__(self, *, remembered: int = 10_000) -> None:
        self.gate = Gate()
        self._open: dict[str, Session] = {}
        self._closed: dict[str, str] = {}
        self._remembered = remembered
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[SessionTable]:
        """Within it replies can be generated. On exit all sessions are sealed, and nothing is under way."""
        failure: Exception | None = None
        async with anyio.create_task_group() as self._tasks:
            try:
                yield self
            except Exception as error:  # raised again below, so that the group does not wrap it
                failure = error
            finally:
                self.close_all()
            self._tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def open(self, session_id: str, reply: Reply, metadata: Mapping[str, Any] | None = None) -> Session:
        """A new session under a key that nobody can guess."""
        session = Session(secrets.token_urlsafe(24), session_id, reply, self.gate, self._spawn, metadata or {})
        self._open[session.key] = session
        return session

    def get(self, key: str) -> Session:
        """Raises UnknownSession, or SessionSealed where the key was one of ours."""
        session = self._open.get(key)
        if session is not None:
            return session
        if key in self._closed:
            raise SessionSealed(f"session {self._closed[key]} is over; start a new attempt")
        raise UnknownSession(
            "no session has this key; send the session's key as the API key (Authorization: Bearer, x-api-key, "
            "x-goog-api-key, ?key=) or in the URL as /s/KEY/..."
        )

    def find(self, keys: Iterable[str]) -> Session:
        """The session of the first key that is one of ours: harnesses may send a placeholder beside it."""
        candidates = list(keys)
        known = (key for key in candidates if key in self._open or key in self._closed)
        return self.get(next(known, ""))

    def close(self, session: Session) -> CompletionSession:
        """Seal it and forget all but its key. Idempotent."""
        if self._open.pop(session.key, None) is not None:
            self._closed[session.key] = session.session_id
            while len(self._closed) > self._remembered:
                del self._closed[next(iter(self._closed))]
        return session.seal()

    def close_all(self) -> None:
        for session in list(self._open.values()):
            self.close(session)

    def _spawn(self, work: Work) -> None:
        assert self._tasks is not None, "calls are answered within running()"
        self._tasks.start_soon(work)
