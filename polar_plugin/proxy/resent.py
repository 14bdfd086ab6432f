"""Request bodies of one session as JSON, of which only what is new is parsed. Pure.

Agent programs send the whole conversation with every call, in the same bytes up to its newest items. Where a body
begins with the bytes of an earlier one up to the end of an item, that item and those before it are taken from there,
and the rest is parsed behind the bytes that stand before the first item.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from ..errors import BadRequest
from ..records import JSONObject
from . import body

_KEYS = ("messages", "input", "contents")
_LINES = 3  # conversations that go on side by side
_ENDS = 6  # items at a body's end that the next one may tell otherwise, as moved cache marks do
_SPACE = b" \t\n\r"
_blank = cast("Callable[[str, int], re.Match[str]]", re.compile(r"[ \t\n\r]*").match)  # nothing is blank, too
_scan = json.JSONDecoder(strict=False).raw_decode


@dataclass(frozen=True, slots=True)
class _Line:
    """One body up to its last item."""

    raw: bytes
    key: str
    begin: int
    """Where the first item may stand."""
    ends: list[tuple[int, int]]
    """How many items end at which byte, the last few, the latest last."""
    items: list[Any]


class Resent:
    """Mutable: it keeps the latest bodies."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []

    def parse(self, raw: bytes) -> JSONObject:
        """As `body.parse`; items that earlier bodies told in the same bytes are the very objects they were then."""
        for line in self._lines:
            if known := _known(raw, line):
                parsed = self._continued(raw, replace(line, ends=line.ends[:known]))
                return body.parse(raw) if parsed is None else parsed
        parsed = body.parse(raw)
        self._learn(raw, parsed, raw, 0, None)
        return parsed

    def _continued(self, raw: bytes, line: _Line) -> JSONObject | None:
        """None where only the whole body tells what it is, or what is wrong with it."""
        count, end = line.ends[-1]
        rest = raw[end:].lstrip(_SPACE)
        if rest[:1] == b",":
            rest = rest[1:].lstrip(_SPACE)
            if rest[:1] == b"]":
                return None
        elif rest[:1] != b"]":
            return None
        told = raw[: line.begin] + rest
        try:
            parsed = body.parse(told)
        except BadRequest:
            return None
        known = replace(line, items=line.items[:count])
        return parsed if self._learn(raw, parsed, told, len(raw) - len(rest), known) else None

    def _learn(self, raw: bytes, parsed: JSONObject, scanned: bytes, moved: int, known: _Line | None) -> bool:
        """Keep a body whose conversation is one list; give `parsed`, which is what `scanned` says, the known items.

        `moved`: where in `raw` the bytes stand that follow the list's beginning in `scanned`.
        """
        found = _found(scanned.decode("latin-1"))  # a character a byte: nothing but the structure is read
        if found is None or (known and (known.key, known.begin) != found[:2]):
            return False
        key, begin, ends = found
        before = known.items if known else []
        shift = moved - begin if known else 0
        placed = [(len(before) + number, end + shift) for number, end in enumerate(ends, 1)]
        items = parsed[key] = [*before, *cast("list[Any]", parsed[key])]
        placed = [*(known.ends if known else ()), *placed][-_ENDS:]
        if placed:
            others = [one for one in self._lines if not known or one.raw is not known.raw]
            self._lines = [_Line(raw[: placed[-1][1]], key, begin, placed, items), *others][:_LINES]
        return True


def _known(raw: bytes, line: _Line) -> int:
    """With how many of its ends the line's bytes begin `raw`."""
    if raw.startswith(line.raw):
        return len(line.ends)
    places = range(len(line.ends) - 1, 0, -1) if raw.startswith(line.raw[: line.ends[0][1]]) else ()
    return next((place for place in places if raw.startswith(line.raw[: line.ends[place - 1][1]])), 0)


def _found(text: str) -> tuple[str, int, list[int]] | None:
    """The one key of a JSON object that holds a conversation as a list, where the list begins, where its items end.

    None where there is no such key, or more than one: also one key told twice. Reads good JSON; where it is none that
    begins with its first character, that is None too.
    """
    found: tuple[str, int, list[int]] | None = None
    try:
        at = _past(text, 0, "{")
        while text[at] != "}":
            key, at = _scan(text, at)
            at = _past(text, at, ":")
            if key not in _KEYS:
                at = _scan(text, at)[1]
            elif found or text[at] != "[":
                return None
            else:
                ends = list(_ends(text, at))
                found, at = (key, at + 1, ends), _past(text, ends[-1] if ends else at + 1, "]")
            at = _past(text, at, ",")
    except (ValueError, IndexError, RecursionError):
        return None
    return found


def _ends(text: str, at: int) -> Iterator[int]:
    at = _past(text, at, "[")
    while text[at] != "]":
        yield (end := _scan(text, at)[1])
        at = _past(text, end, ",")


def _past(text: str, at: int, mark: str) -> int:
    """Behind blanks, the mark where it stands there, and more blanks."""
    at = _blank(text, at).end()
    return _blank(text, at + 1).end() if text[at] == mark else at
