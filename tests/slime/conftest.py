from __future__ import annotations

import os

import pytest

from tests.slime_contract import Restated, Slime

from .real_slime import load


@pytest.fixture(params=["restated", pytest.param("real", marks=pytest.mark.slime)])
def slime(request: pytest.FixtureRequest) -> Slime:
    """slime's side: its rules as restated, and its own code where SLIME_HOME names a checkout."""
    if request.param == "restated":
        return Restated()
    home = os.environ.get("SLIME_HOME")
    if not home:
        pytest.skip("SLIME_HOME is not set")
    return load(home)
