"""An evaluator: what an attempt was worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from ..records import Attempt, CompletionSession, Evaluation, Status
from ..runtimes.base import Runtime


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt whose agent has ended and whose session is sealed."""

    attempt: Attempt
    status: Status
    exit_code: int | None
    session: CompletionSession
    artifact: bytes
    """What `extract` returned: a patch, say. b"" where nothing was extracted."""
    fresh_runtime: Callable[[], AbstractAsyncContextManager[Runtime]]
    """Opens a started and prepared sandbox as the agent first saw it; closed on leaving the block."""
    env: Mapping[str, str]


class Evaluator(Protocol):
    """Built with `**EvaluatorSpec.config`."""

    async def extract(self, runtime: Runtime) -> bytes:
        """Take from the agent's own runtime what must be graded, before that runtime goes. Bytes, never decoded."""
        ...

    async def evaluate(self, finished: Finished) -> Evaluation:
        """Raises EvaluationError or SandboxError where grading itself broke; a failing test is a reward."""
        ...
