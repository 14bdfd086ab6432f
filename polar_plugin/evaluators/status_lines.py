"""Test results as pytest prints them: `STATUS node-id` (from -rA) and `node-id STATUS` (from -v). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
_WORDS = "|".join(STATUSES)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(rf"^({_WORDS})\s+(\S.*?)(?: - .*)?$")
_VERBOSE = re.compile(rf"^(\S.*?)\s+({_WORDS})(?:\s+\[\s*\d+%\])?$")


def parse(output: str) -> dict[str, str]:
    """Node id -> status, the last one told; ids normalised."""
    found: dict[str, str] = {}
    for line in _COLOUR.sub("", output).splitlines():
        if match := _SUMMARY.match(line):
            found[normalised(match[2])] = match[1]
        elif match := _VERBOSE.match(line):
            found[normalised(match[1])] = match[2]
    return found


def normalised(node_id: str) -> str:
    return _COLOUR.sub("", node_id).strip().removeprefix("./")


def compare(expected: Mapping[str, str], actual: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Per expected test (what was expected, what came); "MISSING" where nothing came.

    An expected id without a file ("Class.test") is looked up under the short form of the actual ones.
    """
    short = {".".join(node_id.split("::")[1:]): status for node_id, status in actual.items() if "::" in node_id}
    known = {**short, **actual}
    return {
        node_id: (status.upper(), known.get(normalised(node_id), "MISSING")) for node_id, status in expected.items()
    }
