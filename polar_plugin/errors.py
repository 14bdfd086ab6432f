"""One exception tree. Each class names the boundary that raises it and the HTTP status a harness would see.

PolarError
├── ConfigError            a setting is wrong; the message has its path and what to write instead
├── BadRequest        400  the harness sent something that cannot be read
│   └── ContextOverflow    the prompt leaves no room in the context; dialects have their own words for it
├── UnknownSession    401  the session key is not one of ours
├── SessionSealed     409  the attempt is over; nothing more is recorded
├── EngineError       502  the inference engine failed or answered nonsense
│   └── EngineBusy    503  the same call may be sent again
├── SandboxError           a runtime could not do what it was asked: infrastructure, never the agent's fault
├── HarnessError           the agent program failed, or never called the model
├── EvaluationError        grading itself broke (a failing test is no error)
├── MergeError             an invariant of the traces does not hold
├── RecordingError         a recording cannot be written or read
└── InstallError           an agent program cannot be installed from its registry
"""

from __future__ import annotations

from typing import ClassVar


class PolarError(Exception):
    """Base of everything this library raises on purpose."""

    boundary: ClassVar[str] = "polar_plugin"
    status: ClassVar[int] = 500
    infrastructure: ClassVar[bool] = True
    """Whether it says nothing about the policy: such attempts leave the baseline and are refilled."""


class ConfigError(PolarError):
    """A setting is wrong. The message names its path and what to write instead."""

    boundary = "config"


class BadRequest(PolarError):
    """A harness's request cannot be read; `path` points into the body, as in "messages.3.content"."""

    boundary = "proxy"
    status = 400
    infrastructure = False

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class ContextOverflow(BadRequest):
    """The prompt has `prompt_tokens` tokens and the context only `limit`, one of which must be left to sample."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"prompt is too long: {prompt_tokens} tokens > {limit} maximum")
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class UnknownSession(PolarError):
    """No session has this key."""

    boundary = "proxy"
    status = 401
    infrastructure = False


class SessionSealed(PolarError):
    """The session is over: no generation is started and none is recorded."""

    boundary = "proxy"
    status = 409
    infrastructure = False


class EngineError(PolarError):
    """The inference engine failed, or its answer breaks the contract (missing ids, lengths that differ)."""

    boundary = "engine"
    status = 502


class EngineBusy(EngineError):
    """The engine could not take the call now; the same call may be sent again after `retry_after` seconds."""

    status = 503

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SandboxError(PolarError):
    """A runtime could not start, run, copy or stop. Never the agent's fault."""

    boundary = "runtime"


class HarnessError(PolarError):
    """The agent program failed in a way that is its own: a bad exit code, no model call, no result."""

    boundary = "agent"
    infrastructure = False


class EvaluationError(PolarError):
    """Grading itself broke. A test that fails is a result, not an error."""

    boundary = "evaluation"


class MergeError(PolarError):
    """Traces do not agree with the completions they were built from; the message has the first differing position."""

    boundary = "build"


class RecordingError(PolarError):
    """A recording cannot be written or read; the message has the file and line."""

    boundary = "recording"


class InstallError(PolarError):
    """An agent program cannot be installed; the message says which, and what the registry's client said."""

    boundary = "harness install"
