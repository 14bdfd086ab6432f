"""Request bodies of one session as JSON, of which only what is new is parsed. Pure.

Agent programs send the whole conversation with every call, in the same bytes up to its newest items. Where a body
begins with the bytes of an earlier one up to the end of an item, that item and those before it are taken from there,
and the rest is parsed behind the bytes that stand before the first item. Where it also ends as the earlier one did
behind its last item, only what is between is parsed: tools, which may be most of what is left, are told by then.
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
_Found = tuple[str, int, list[int]]
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
    tail: bytes
    """What stands behind the last item."""
    beside: JSONObject
    """The body; its list of items may lack some."""


class Resent:
    """Mutable: it keeps the latest bodies. Several threads may use it: what it keeps is replaced, never changed."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []

    def news(self, raw: bytes) -> int:
        """How many bytes of a body `parse` has to read: its cost."""
        ends = (line.ends[known - 1][1] for line in self._lines if (known := _known(raw, line)))
        return len(raw) - max(ends, default=0)

    def parse(self, raw: bytes) -> JSONObject:
        """As `body.parse`; items that earlier bodies told in the same bytes are the very objects they were then.

        So is what stands beside them, where all of it does.
        """
        for line in self._lines:  # this list, whatever is learnt meanwhile
            if known := _known(raw, line):
                parsed = self._continued(raw, replace(line, ends=line.ends[:known]))
                return body.parse(raw) if parsed is None else parsed
        parsed = body.parse(raw)
        if found := _found(raw):
            self._learn(_line(raw, found, 0, parsed, None), None)
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
        same = rest.endswith(line.tail)
        head = b'{"%b":[' % line.key.encode() if same else raw[: line.begin]
        told = head + (rest[: -len(line.tail)] + b"]}" if same else rest)
        try:
            parsed = body.parse(told)
        except BadRequest:
            return None
        found = _found(told)
        if found is None or found[:2] != (line.key, len(head)) or (same and len(parsed) > 1):
            return None
        moved = len(raw) - len(rest) - len(head)
        parsed = line.beside | parsed if same else parsed
        known = replace(line, items=line.items[:count])
        self._learn(_line(raw, found, moved, parsed, known), line)
        return parsed

    def _learn(self, line: _Line | None, instead: _Line | None) -> None:
        if line:
            others = [one for one in self._lines if not instead or one.raw is not instead.raw]
            self._lines = [line, *others][:_LINES]


def _line(raw: bytes, found: _Found, moved: int, parsed: JSONObject, known: _Line | None) -> _Line | None:
    """A body whose conversation is one list, which is given the known items; None where it has no items.

    `found` is of the bytes that `parsed` was read from; `moved`: how much later what follows the known items stands in
    `raw`.
    """
    key, begin, ends = found
    before = known.items if known else []
    placed = [(len(before) + number, end + moved) for number, end in enumerate(ends, 1)]
    items = parsed[key] = [*before, *cast("list[Any]", parsed[key])]
    placed = [*(known.ends if known else ()), *placed][-_ENDS:]
    if not placed:
        return None
    end = placed[-1][1]
    return _Line(raw[:end], key, known.begin if known else begin, placed, items, raw[end:].lstrip(_SPACE), dict(parsed))


def _known(raw: bytes, line: _Line) -> int:
    """With how many of its ends the line's bytes begin `raw`."""
    if raw.startswith(line.raw):
        return len(line.ends)
    places = range(len(line.ends) - 1, 0, -1) if raw.startswith(line.raw[: line.ends[0][1]]) else ()
    return next((place for place in places if raw.startswith(line.raw[: line.ends[place - 1][1]])), 0)


def _found(told: bytes) -> _Found | None:
    """The one key of a JSON object that holds a conversation as a list, where the list begins, where its items end.

    None where there is no such key, or more than one: also one key told twice. Reads good JSON; where it is none that
    begins with its first character, that is None too.
    """
    text = told.decode("latin-1")  # a character a byte: nothing but the structure is read
    found: _Found | None = None
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
