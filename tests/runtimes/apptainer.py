"""The Apptainer and the image that tests run: on PATH, or made by `tests/runtimes/apptainer.sh`."""

from __future__ import annotations

import shutil
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "apptainer"
IMAGE = CACHE / "image"


def program() -> str | None:
    own = CACHE / "prefix" / "usr" / "bin" / "apptainer"
    return str(own) if own.exists() else shutil.which("apptainer")


def missing() -> str:
    """Why no sandbox of Apptainer can be run here; "" where one can."""
    if program() is None:
        return "Apptainer is not installed: make test-apptainer"
    return "" if IMAGE.is_dir() else f"there is no image in {IMAGE}: make test-apptainer"
