"""Prepare actions: what makes a started sandbox ready."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio

from ..errors import ConfigError, SandboxError
from ..records import PrepareAction
from ..runtimes.base import Runtime
from .verdict import tail


async def prepare(runtime: Runtime, actions: Sequence[PrepareAction]) -> None:
    """Carry the actions out in order, each tried up to `max_attempts` times with doubling pauses.

    Raises SandboxError where one still fails (a command counts as failed unless it exits with 0), ConfigError where
    one lacks what its type needs; both say which.
    """
    for position, action in enumerate(actions):
        await _tried(runtime, action, f"prepare.{position}")


async def _tried(runtime: Runtime, action: PrepareAction, path: str) -> None:
    for pause in range(action.max_attempts - 1):
        try:
            return await _act(runtime, action, path)
        except SandboxError:
            await anyio.sleep(action.retry_backoff_seconds * 2**pause)
    await _act(runtime, action, path)


async def _act(runtime: Runtime, action: PrepareAction, path: str) -> None:
    if action.type == "exec":
        await _exec(runtime, action, path)
    elif action.source and action.target:
        await runtime.upload(Path(action.source), action.target)
    else:
        raise ConfigError(f"{path}: {action.type} needs `source` and `target`")


async def _exec(runtime: Runtime, action: PrepareAction, path: str) -> None:
    if not action.command:
        raise ConfigError(f"{path}: exec needs `command`")
    result = await runtime.exec(action.command, cwd=action.cwd, env=action.env)
    if not result.ok:
        raise SandboxError(f"{path}: {action.command!r} ended with exit code {result.exit_code}: {tail(result)}")
