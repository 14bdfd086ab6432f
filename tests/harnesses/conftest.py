"""Fixtures for what agent programs say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .programs import Program


@pytest.fixture
def start() -> Iterator[Callable[[str], Program]]:
    programs: list[Program] = []

    def started(api: str) -> Program:
        programs.append(Program(api))
        return programs[-1]

    yield started
    for program in programs:
        program.world.close()
