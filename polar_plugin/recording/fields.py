"""Fields of records as JSON, and fields of JSON objects that a reader did not write itself. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..records import JSONObject

_KINDS: Mapping[Any, str] = {dict: "an object", list: "a list", str: "a string"}


def shallow(record: Any) -> JSONObject:
    """A record's fields, as they are."""
    return {one.name: getattr(record, one.name) for one in dataclasses.fields(record)}


def known(record: type, told: JSONObject) -> JSONObject:
    """The keys of `told` that `record` has as fields; others are a later writer's."""
    names = {one.name for one in dataclasses.fields(record)}
    return {name: value for name, value in told.items() if name in names}


def typed(told: JSONObject, key: str, kind: type | tuple[type, ...]) -> Any:
    """The value under `key`, None where it is absent or null. Raises ValueError where it is of another kind."""
    value = told.get(key)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"`{key}` must be {_KINDS.get(kind, 'a number')}, got {value!r:.60}")
    return value


def numbers(line: JSONObject, key: str) -> NDArray[Any]:
    """A flat array of what may be token ids or log-probabilities."""
    found = np.asarray(line[key])
    if found.ndim != 1:
        raise ValueError(f"`{key}` must be a list of numbers, got {line[key]!r:.60}")
    return found
