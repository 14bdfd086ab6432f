"""What a session's latest requests told, so that what the next one tells again is not read again. Pure.

Agent programs send the whole conversation with every call. Reading it is a fold over its items: a reader that has taken
the first items of one request goes on from there in the next one, and the messages it has made are the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol, Self, TypeVar

import orjson

from .fields import at

_LINES = 4  # conversations that go on side by side
_STATES = 6  # items at a request's end that its next one may tell otherwise, as moved cache marks do
_KEYS = 8  # paths at which something is read once


class Reader(Protocol):
    """Reads a conversation item by item. Mutable."""

    def take(self, item: Any, path: str) -> None:
        """Raises BadRequest with the path of what is wrong."""
        ...

    def copy(self) -> Self:
        """One that goes on by itself."""
        ...


R = TypeVar("R", bound=Reader)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Line:
    """One request. `states` are readers by the number of items they have taken, the latest last."""

    context: Any
    items: list[Any]
    states: list[tuple[int, Reader]]


class Memory:
    """Mutable: it learns every request that can be read."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._made: dict[Any, tuple[Any, Any]] = {}

    def once(self, key: Any, value: Any, make: Callable[[], T]) -> T:
        """What `make` makes of `value`, the very object of it that was told last under this key or another one."""
        known = self._made.get(key)
        if known is None or known[0] is not value:
            if len(self._made) >= _KEYS:
                self._made.clear()
            known = self._made[key] = (value, make())
        return known[1]

    def read(self, reader: R, items: Sequence[Any], path: str, context: Any = None) -> R:
        """`reader` with all items taken.

        What it makes of an item follows from its type, `context` (compared by equality) and the items up to there.
        """
        line, states = self._resumed(type(reader), items, context)
        start, reader = (states[-1][0], states[-1][1].copy()) if states else (0, reader)  # type: ignore[assignment]
        for position in range(start, len(items)):
            if position > max(start, len(items) - _STATES):
                states.append((position, reader.copy()))
            reader.take(items[position], at(path, position))
        if start < len(items):
            states.append((len(items), reader.copy()))
        extended = line if line and start == len(line.items) else None
        learnt = [_Line(context, list(items), states[-_STATES:])] if states else []
        self._lines = [*learnt, *(one for one in self._lines if one is not extended)][:_LINES]
        return reader

    def _resumed(
        self, kind: type[Reader], items: Sequence[Any], context: Any
    ) -> tuple[_Line | None, list[tuple[int, Reader]]]:
        """The line that tells most of the items, and its states so far."""
        best, states = None, list[tuple[int, Reader]]()
        for line in self._lines:
            if type(line.states[-1][1]) is not kind or line.context != context:
                continue
            count = _shared(line.items, items)
            known = [(taken, state) for taken, state in line.states if taken <= count]
            if known and (not states or known[-1][0] > states[-1][0]):
                best, states = line, known
        if best and not _same(best.items[: states[-1][0]], items[: states[-1][0]]):
            return None, []
        return best, states


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two requests begin with that are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    ends = (position for position, (mine, theirs) in pairs if mine is not theirs and mine != theirs)
    return next(ends, min(len(one), len(other)))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether equal items are also told alike: 1, 1.0 and True are equal, and so are objects in another order."""
    if all(map(is_, one, other)):
        return True
    try:
        return orjson.dumps(one) == orjson.dumps(other)
    except TypeError:  # lone surrogates, or integers beyond 64 bits
        return False
