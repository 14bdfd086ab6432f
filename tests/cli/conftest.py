"""The suite's results, kept where `--conformance` asks for it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from .conformance import Results


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest) -> Generator[Results | None]:
    if not request.config.getoption("--conformance"):
        yield None
        return
    results = Results.load()
    yield results
    results.save()
