"""Fixtures that every suite shares."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

_FIGURES = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="module")
def _kept_is_not_collected() -> None:
    """What earlier modules keep, vocabularies above all, is not gone through in each full collection of later ones."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def figure(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Call with a title and a line: what was measured, told at the end of the run."""
    figures = pytestconfig.stash.setdefault(_FIGURES, {})
    return lambda title, line: figures.setdefault(title, []).append(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash.get(_FIGURES, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conformance", action="store_true", help="keep what the CLI suite sees in tests/cli/results.json"
    )
    parser.addoption("--sessions", type=int, default=2_000, help="how many random sessions the property tests make")
