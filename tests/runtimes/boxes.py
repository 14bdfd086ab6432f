"""Sandboxes for tests: opened, and closed again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes.base import ProxyEndpoint
from polar_plugin.runtimes.local import LocalRuntime


@asynccontextmanager
async def sandbox(
    *, proxy: ProxyEndpoint | None = None, isolation: str = "bubblewrap", root: Path | None = None, **spec: Any
) -> AsyncGenerator[LocalRuntime]:
    kwargs = {"isolation": isolation, "root": root and str(root), **spec.pop("kwargs", {})}
    runtime = LocalRuntime(RuntimeSpec(kwargs=kwargs, **spec), proxy=proxy, labels={"session": "test"})
    try:
        await runtime.start()
        yield runtime
    finally:
        with anyio.CancelScope(shield=True):
            await runtime.stop()


def processes_with(marker: str) -> list[int]:
    """Processes of this machine that carry a marker in their environment: wherever they have been reparented to."""
    found: list[int] = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if marker.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
    return found
