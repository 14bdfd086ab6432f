"""What happens at a time of the agent's run: it is told that its time runs out, its evaluation is prepared."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import anyio

from ..errors import SandboxError
from ..harnesses.base import deadline_file
from ..runtimes.base import Runtime

_log = logging.getLogger("polar_plugin.stages")


@asynccontextmanager
async def alarms(*set_for: tuple[float, Callable[[], Awaitable[None]]]) -> AsyncGenerator[None]:
    """Within the block each action is done once its seconds have passed; those still to come never are."""

    async def ring(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        await anyio.sleep(seconds)
        await act()

    async with anyio.create_task_group() as group:
        for seconds, act in set_for:
            group.start_soon(ring, seconds, act)
        yield
        group.cancel_scope.cancel()


def deadline_env(runtime: Runtime, seconds: float) -> Mapping[str, str]:
    """What a program can know of its time when it starts."""
    return {"POLAR_DEADLINE_FILE": deadline_file(runtime.home), "POLAR_TIMEOUT_SECONDS": f"{seconds:g}"}


async def tell(runtime: Runtime, seconds_left: float, counts: Counter[str]) -> None:
    """Write the file that says so; counted as `deadline_told` or, where the sandbox refuses, `deadline_untold`."""
    content = json.dumps({"seconds_left": seconds_left}) + "\n"
    try:
        await runtime.upload(content.encode(), deadline_file(runtime.home))
        counts["deadline_told"] += 1
    except SandboxError as error:
        counts["deadline_untold"] += 1
        _log.warning("a program could not be told that its time runs out: %s", error)
