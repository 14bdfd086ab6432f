"""One attempt's way through an evaluator, with real sandboxes: the agent is a script."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from polar_plugin.evaluators.base import Finished
from polar_plugin.evaluators.test_on_output import TestOnOutput
from polar_plugin.records import AgentSpec, Attempt, CompletionSession, Evaluation, RuntimeSpec, Status, TaskSpec
from polar_plugin.runtimes.base import Runtime
from polar_plugin.runtimes.local import LocalRuntime

from ..runtimes.boxes import sandbox


def finished(
    image: Path, artifact: bytes, *, status: Status = Status.COMPLETED, memory_mb: int | None = None
) -> Finished:
    task = TaskSpec("t", "fix it", AgentSpec("shell"), runtime=RuntimeSpec(image=str(image)))

    @asynccontextmanager
    async def fresh() -> AsyncGenerator[Runtime]:
        async with sandbox(image=str(image), memory_mb=memory_mb) as runtime:
            yield runtime

    return Finished(
        Attempt("s", task, 0, 0), status, 0, CompletionSession("s", ()), artifact, fresh, {"FROM_EVALUATOR": "1"}
    )


async def worked(evaluator: TestOnOutput, image: Path, agent: str, *, noted: bool = True) -> bytes:
    """What `extract` takes after the agent's script; `noted`: whether `before` was called."""
    async with sandbox(image=str(image)) as runtime:
        if noted:
            await evaluator.before(runtime)
        await _run(runtime, agent)
        return await evaluator.extract(runtime)


async def graded(evaluator: TestOnOutput, image: Path, agent: str, *, noted: bool = True) -> Evaluation:
    return await evaluator.evaluate(finished(image, await worked(evaluator, image, agent, noted=noted)))


async def _run(runtime: LocalRuntime, script: str) -> None:
    result = await runtime.exec(script)
    assert result.ok, result.text


def git_repository(directory: Path, files: dict[str, bytes]) -> Path:
    """A repository with one commit of these files."""
    write(directory, files)
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "base")):
        identity = ("-c", "user.name=n", "-c", "user.email=e@x")
        subprocess.run(("git", *identity, "-C", str(directory), *arguments), check=True, capture_output=True)
    return directory


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory
