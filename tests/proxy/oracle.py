"""What an SDK's own models say of a JSON text, without their leniency: no coercion, no unknown field anywhere."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Set
from typing import Any

from pydantic import BaseModel, TypeAdapter


def exactly(model: Any, data: bytes | str) -> Any:
    """`data` as the SDK's `model`. Raises ValueError where a field is wrong, missing or not the API's."""
    return exactly_but(frozenset(), model, data)


def exactly_but(known: Set[str], model: Any, data: bytes | str) -> Any:
    """As `exactly`; `known` are paths of fields that clients read beside the API's."""
    value = _adapter(model).validate_json(_without_lone_surrogates(data), strict=True)
    unknown = sorted(set(unknown_fields(value)) - known)
    if unknown:
        raise ValueError(f"fields that the API does not have: {unknown}")
    return value


@functools.cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _without_lone_surrogates(data: bytes | str) -> str:
    """JSON can carry them, but no parser in Rust takes them: the SDK itself reads with Python's."""
    text = json.dumps(json.loads(data), ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def unknown_fields(value: Any, path: str = "") -> Iterator[str]:
    """The SDK keeps what it does not know beside its models: its paths."""
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from unknown_fields(item, f"{path}.{i}")
