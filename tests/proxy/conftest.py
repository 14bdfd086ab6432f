"""Fixtures of this folder."""

from __future__ import annotations

import pytest

from tests.recorded.replay import Recorded
from tests.recorded.unredacted import ABSENT, unredacted


@pytest.fixture(scope="session")
def beside() -> dict[str, list[Recorded]]:
    """The recordings kept beside the checkout, by name; without them the test is skipped."""
    return unredacted() or pytest.skip(ABSENT)
