from __future__ import annotations

from pathlib import Path

import pytest

from polar_plugin.engine.models import resolve_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))
