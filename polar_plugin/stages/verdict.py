"""How an attempt ended, from how its agent program ended. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

from ..errors import PolarError
from ..records import CompletionSession, Failure, FinishReason, Role, Status
from ..runtimes.base import ExecResult
from .stage import failure_of

NOT_RUN = frozenset({126, 127})
"""A shell's exit codes for a program that is not executable, or not there."""


class Stopped(enum.Enum):
    """Why an agent program was ended that did not end by itself."""

    NO_FIRST_CALL = enum.auto()
    """No model call within `budgets.first_call`."""
    LINGERED = enum.auto()
    """It had printed its result `budgets.linger` ago: it was done."""
    HUNG = enum.auto()
    """Neither a model call nor output for `budgets.idle` after a call that failed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known when the agent program has ended and the session is sealed."""

    result: ExecResult
    ok_exit_codes: Collection[int]
    session: CompletionSession
    calls: int
    """Model calls that arrived, answered or not."""
    last_error: Exception | None
    """What the latest model call failed with, or was refused for; None where it was answered."""
    stopped: Stopped | None = None
    """Why it was ended, where it was."""


def verdict(ended: Ended) -> tuple[Status, Failure | None]:
    """The status and, where the program did not end well, why. The table is in `attempt`."""
    if ended.last_error is not None and infrastructure(ended.last_error):
        return Status.INFRA_ERROR, failure_of("engine", ended.last_error)
    if not ended.calls:
        return _never_called(ended)
    if ended.stopped is Stopped.HUNG:
        text = f"neither a model call nor output after a failed call ({ended.last_error}); it was ended"
        return Status.FAILED, Failure("agent", "hung", _with_output(text, ended.result))
    if ended.result.timed_out:
        return Status.TIMED_OUT, None
    if ended.result.oom:
        text = "the program ran out of the sandbox's memory (runtime.memory_mb)"
        return Status.FAILED, Failure("agent", "oom", _with_output(text, ended.result))
    if ended.stopped is not Stopped.LINGERED and ended.result.exit_code not in ended.ok_exit_codes:
        text = f"exit code {ended.result.exit_code}"
        return Status.FAILED, Failure("agent", "exit_code", _with_output(text, ended.result))
    if not ended.session.completions:
        text = f"{ended.calls} model calls, and none was answered"
        return Status.FAILED, Failure("agent", "no_completion", _with_output(text, ended.result))
    return (Status.TRUNCATED if _cut(ended.session) else Status.COMPLETED), None


def infrastructure(error: Exception) -> bool:
    """Whether it says nothing about the policy. What is not the library's own error is a bug or the machine."""
    return error.infrastructure if isinstance(error, PolarError) else True


def tail(result: ExecResult, characters: int = 2000) -> str:
    """The end of what a command printed, for messages."""
    return result.text[-characters:].strip()


def _never_called(ended: Ended) -> tuple[Status, Failure]:
    """Zero calls: the program's own failure where it ran to an end by itself, else it never got going."""
    result = ended.result
    if result.timed_out or ended.stopped in (Stopped.NO_FIRST_CALL, Stopped.HUNG):
        text = "no model call in time: the program did not start, or cannot reach us"
        if ended.last_error is not None:
            text = f"no model call that could be read; the last one was refused ({ended.last_error})"
        return Status.INFRA_ERROR, Failure("agent", "no_first_call", _with_output(text, result))
    if result.oom or result.exit_code in NOT_RUN:
        text = f"the program did not start (exit code {result.exit_code})"
        return Status.INFRA_ERROR, Failure("agent", "did_not_start", _with_output(text, result))
    text = f"ended with exit code {result.exit_code} without one model call"
    return Status.FAILED, Failure("agent", "no_model_call", _with_output(text, result))


def _cut(session: CompletionSession) -> bool:
    """Whether the last answer of the main conversation was cut by length; a side call's end says nothing."""
    mains = [completion for completion in session.completions if completion.role is Role.MAIN]
    last = (mains or session.completions)[-1]
    return last.generation.finish_reason is FinishReason.LENGTH


def _with_output(text: str, result: ExecResult) -> str:
    output = tail(result)
    return f"{text}: {output}" if output else text
