"""Typed reading of untyped JSON. Each reader returns the value, or raises BadRequest with the path of what is wrong.

JSON null counts as absent: SDKs write it for what the user did not set.
"""

from __future__ import annotations

import math
from typing import Any, cast

from ..errors import BadRequest
from ..records import JSONObject

_KINDS: dict[type[object], str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}


def at(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def text(holder: JSONObject, key: str, path: str = "") -> str:
    """A string; absent is ""."""
    value = holder.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"expected a string, got {_kind(value)}", path=at(path, key))
    return value


def flag(holder: JSONObject, key: str, path: str = "") -> bool:
    """A boolean; absent is False."""
    value = holder.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"expected true or false, got {_kind(value)}", path=at(path, key))
    return bool(value)


def number(holder: JSONObject, key: str, path: str = "") -> float | None:
    """A finite number."""
    value = holder.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value):
        raise BadRequest(f"expected a number, got {_kind(value)}", path=at(path, key))
    return value


def integer(holder: JSONObject, key: str, path: str = "", *, least: int | None = None) -> int | None:
    """A whole number (4096.0 passes for one), `least` or more."""
    value = number(holder, key, path)
    if value is None:
        return None
    if value != int(value):
        raise BadRequest(f"expected a whole number, got {value}", path=at(path, key))
    if least is not None and value < least:
        raise BadRequest(f"expected {least} or more, got {value}", path=at(path, key))
    return int(value)


def mapping(holder: JSONObject, key: str, path: str = "") -> JSONObject:
    """An object; absent is {}."""
    value = holder.get(key)
    return {} if value is None else as_object(value, at(path, key))


def objects(holder: JSONObject, key: str, path: str = "") -> list[JSONObject]:
    """A list of objects; absent is []."""
    found = items(holder, key, path)
    if (other := next((i for i, item in enumerate(found) if not isinstance(item, dict)), None)) is not None:
        as_object(found[other], at(at(path, key), other))
    return found


def items(holder: JSONObject, key: str, path: str = "") -> list[Any]:
    """A list; absent is []."""
    value = holder.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"expected a list, got {_kind(value)}", path=at(path, key))
    return cast("list[Any]", value)


def as_object(value: Any, path: str) -> JSONObject:
    if not isinstance(value, dict):
        raise BadRequest(f"expected an object, got {_kind(value)}", path=path)
    return cast("JSONObject", value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a double
        return False


def _kind(value: Any) -> str:
    return _KINDS.get(cast("type[object]", type(value)), f"{value!r:.40}")
