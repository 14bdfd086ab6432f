"""Recordings kept beside the checkout, where they are: whole requests, which hold texts that may not be shared."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from .replay import Recorded
from .replies import reply_of

ARCHIVE = Path(__file__).resolve().parents[3] / "shared" / "cases" / "cli_recordings.tar.xz"
FOLDER = os.environ.get("POLAR_CLI_RECORDINGS", "")
"""Another place, unpacked: <program>-<version>/<run>.jsonl."""
ABSENT = f"no recordings are kept beside the checkout ({ARCHIVE}), and POLAR_CLI_RECORDINGS names no folder"


def unredacted() -> dict[str, list[Recorded]]:
    """Each run's exchanges by name, as in "pi-1.6.0/long"; empty where there are none."""
    return {name: [_recorded(line) for line in text.splitlines()] for name, text in sorted(_files())}


def _files() -> Iterator[tuple[str, str]]:
    if FOLDER:
        for path in Path(FOLDER).glob("*/*.jsonl"):
            yield f"{path.parent.name}/{path.stem}", path.read_text()
    elif ARCHIVE.is_file():
        with tarfile.open(ARCHIVE) as archive:
            for member in archive:
                path, file = Path(member.name), archive.extractfile(member)
                if file is not None and path.suffix == ".jsonl":
                    yield f"{path.parent.name}/{path.stem}", file.read().decode()


def _recorded(line: str) -> Recorded:
    one = json.loads(line)
    answer = {"status": one["response"]["status"], "reply": reply_of(one["kind"], one["response"])}
    return Recorded(one["method"], one["path"], one["headers"], one["body"], answer, one["thread"])
