"""The fixture of this folder: each test is run over every family."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from .agent import Agent, started
from .chat_formats import FAMILIES


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
async def agent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Agent]:
    async with started(request.param, tmp_path_factory.getbasetemp() / "models") as agent:
        yield agent
