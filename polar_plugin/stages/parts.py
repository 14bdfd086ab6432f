"""What an attempt is made of and bounded by: budgets, stages, an open session, and the plugins of its task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..evaluators.base import Evaluator
from ..harnesses.base import Harness, LaunchContext
from ..merge.builders import Builder
from ..records import Attempt, CompletionSession, Trace
from ..runtimes.base import Runtime
from .stage import Stage


@dataclass(frozen=True, slots=True)
class Budgets:
    """Seconds each stage may take; none spends another's."""

    init: float = 600.0
    agent: float | None = None
    """None: the task's own `timeout_seconds`."""
    build: float = 120.0
    evaluation: float = 1800.0
    """For extracting, and again for grading."""
    cleanup: float = 30.0
    """For closing one thing, and for the program to come back after its deadline."""
    first_call: float | None = None
    """No model call within this time after the program's start: it did not start. None: not watched."""
    linger: float | None = None
    """From the program's result, and from its last model call after it, until it is ended. None: not watched."""
    idle: float | None = None
    """Without a model call or output after a failed call, until the program is ended. None: not watched."""
    soft_deadline: float | None = None
    """Before the end of the agent's time, the program is told (`deadline`). None: it is not."""
    prewarm_lead: float | None = None
    """Before the end of the agent's time, an evaluation sandbox is made ready. None: when it is asked for."""
    overall: float | None = None
    """For all of an attempt's own work, waits for slots excepted. None: the sum of the others, see `guard`."""

    def guard(self, agent: float) -> float:
        """`overall`, or so long that it strikes only where no other budget did; `agent` is the agent's."""
        if self.overall is not None:
            return self.overall
        return self.init + agent + self.build + 2 * self.evaluation + 4 * self.cleanup


@dataclass(frozen=True, slots=True)
class Stages:
    """Acquired in the order live, init, run, postrun: so nobody waits for what another waiter holds."""

    live: Stage
    """Started sandboxes of agents: INIT + READY + RUNNING, and those being closed."""
    init: Stage
    run: Stage
    postrun: Stage
    prewarm: Stage
    """Evaluation sandboxes made ready early. Nobody waits for it."""

    @classmethod
    def sized(cls, *, init: int, ready: int, run: int, postrun: int, prewarm: int = 0) -> Stages:
        """`ready` is how many sandboxes may be under way to, or wait for, a run slot while all of those are taken."""
        slots = {"live": run + ready, "init": init, "run": run, "postrun": postrun, "prewarm": prewarm}
        return cls(**{name: Stage(name, count) for name, count in slots.items()})

    def __iter__(self) -> Iterator[Stage]:
        """In the order of acquisition."""
        return iter((self.live, self.init, self.run, self.postrun, self.prewarm))


class OpenSession(Protocol):
    """An open ledger, as the script needs it."""

    @property
    def key(self) -> str: ...

    @property
    def calls(self) -> int:
        """Model calls that arrived so far, answered or not."""
        ...

    @property
    def last_error(self) -> Exception | None:
        """What the latest model call failed with, or was refused for; None again once one succeeds."""
        ...

    async def first_call(self) -> None:
        """Returns when the first model call has arrived."""
        ...

    async def stirred(self) -> None:
        """Returns when a model call next begins, ends or is refused."""
        ...

    async def quiet(self, seconds: float) -> None:
        """Returns once none has begun, ended, been refused or been under way for `seconds` on end."""
        ...

    def seal(self) -> CompletionSession:
        """End it: nothing more is recorded. Idempotent."""
        ...


class Sessions(Protocol):
    def open(self, attempt: Attempt) -> AbstractAsyncContextManager[OpenSession]:
        """A new session under a new key, which is worth nothing after the block.

        In memory: entering and leaving wait for nothing outside, as no budget covers them.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """An evaluator that must see the agent's sandbox before the agent does: the commit it starts from, say."""

    async def before(self, runtime: Runtime) -> None:
        """Called in INIT, after the prepare actions and before the harness's files are there. Raises SandboxError."""
        ...


@runtime_checkable
class Prewarmed(Protocol):
    """An evaluator that grades in a fresh sandbox, which may be made ready before it asks for it."""

    @property
    def prewarm(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What one attempt is made of; resolved from its task before anything starts."""

    harness: Harness
    evaluator: Evaluator
    builder: Builder
    runtime: Callable[[str], Runtime]
    """Makes a sandbox, not started; the argument is its purpose, "agent" or "evaluation"."""
    launch_context: Callable[[Runtime, str], LaunchContext]
    """From the started runtime and the session's key."""
    count: Callable[[CompletionSession, Sequence[Trace]], Mapping[str, int]]
    check: Callable[[Sequence[Trace], CompletionSession], None] | None = None
