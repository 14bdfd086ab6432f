"""Sandboxes for tests: opened, and closed again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes.apptainer import ApptainerRuntime
from polar_plugin.runtimes.base import ProxyEndpoint, Runtime
from polar_plugin.runtimes.docker import DockerRuntime
from polar_plugin.runtimes.local import LocalRuntime

from . import apptainer, engines

ISOLATIONS = [
    "bubblewrap",
    "none",
    pytest.param("instance", marks=pytest.mark.apptainer),
    pytest.param("one_shot", marks=pytest.mark.apptainer),
    pytest.param("docker", marks=pytest.mark.docker),
]
"""Ways to be isolated: two of the local runtime, two of Apptainer, one of Docker."""


@asynccontextmanager
async def sandbox(
    *, proxy: ProxyEndpoint | None = None, isolation: str = "bubblewrap", root: Path | None = None, **spec: Any
) -> AsyncGenerator[Runtime]:
    kwargs = {"root": root and str(root), **spec.pop("kwargs", {})}
    factory: type[Runtime] = LocalRuntime
    if isolation in ("instance", "one_shot"):
        factory, kwargs = ApptainerRuntime, {"mode": isolation, "program": apptainer.program(), **kwargs}
        spec = {"image": str(apptainer.IMAGE), **spec}
    elif isolation == "docker":
        factory, kwargs = DockerRuntime, {name: value for name, value in kwargs.items() if name != "root"}
        spec = {"image": engines.IMAGE, **spec}
    else:
        kwargs = {"isolation": isolation, **kwargs}
    runtime = factory(RuntimeSpec(kwargs=kwargs, **spec), proxy=proxy, labels={"session": str(root or "test")})
    try:
        await runtime.start()
        yield runtime
    finally:
        with anyio.CancelScope(shield=True):
            await runtime.stop()


def remains(isolation: str, root: Path) -> list[Any]:
    """What there is of sandboxes that were opened with this `root`."""
    return engines.containers(f"polar.session={root}") if isolation == "docker" else list(root.iterdir())


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
