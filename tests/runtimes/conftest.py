"""Tests that need Apptainer, or Docker, say so where it is missing."""

from __future__ import annotations

import pytest

from . import apptainer, engines


@pytest.fixture(autouse=True)
def _apptainer_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("apptainer") and (reason := apptainer.missing()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _docker_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("docker") and (reason := engines.missing()):
        pytest.skip(reason)
