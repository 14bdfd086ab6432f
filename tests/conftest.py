"""Fixtures that every suite shares."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conformance", action="store_true", help="keep what the CLI suite sees in tests/cli/results.json"
    )
    parser.addoption("--sessions", type=int, default=2_000, help="how many random sessions the property tests make")
