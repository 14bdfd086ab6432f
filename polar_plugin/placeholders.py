"""Placeholders in a task template: `{sample.metadata.x}` becomes that sample's value.

* A value that is only a placeholder keeps its type: `"{sample.metadata.limit}"` may become a number or a list.
* `{{` and the `}}` that closes it stand for literal braces. Braces that hold no dotted name are literal anyway, so
  shell, awk and JSON need no care; only `{name}` itself, as in `${HOME}`, is written `${{HOME}}`.
* An unknown name is a ConfigError that lists the names there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .errors import ConfigError

_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def fill(template: Any, values: Mapping[str, Any], *, path: str = "task") -> Any:
    """A copy of `template` (mappings, sequences, scalars) with each placeholder replaced from `values`.

    A dotted name descends through mappings and attributes. Raises ConfigError with `path` of the offending string.
    """
    if isinstance(template, str):
        return _fill_text(template, values, path)
    if isinstance(template, Mapping):
        mapping = cast("Mapping[str, Any]", template)
        return {key: fill(value, values, path=f"{path}.{key}") for key, value in mapping.items()}
    if isinstance(template, Sequence):
        items = cast("Sequence[Any]", template)
        return [fill(value, values, path=f"{path}.{position}") for position, value in enumerate(items)]
    return template


def _fill_text(text: str, values: Mapping[str, Any], path: str) -> Any:
    whole = _TOKEN.fullmatch(text)
    if whole and whole[1]:
        return lookup(whole[1], values, path=path)
    escaped = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal escaped
        if match[1]:
            return str(lookup(match[1], values, path=path))
        if match[0] == "{{":
            escaped += 1
            return "{"
        if not escaped:
            return "}}"
        escaped -= 1
        return "}"

    return _TOKEN.sub(replace, text)


def lookup(name: str, values: Mapping[str, Any], *, path: str) -> Any:
    """The value behind a dotted name; raises ConfigError that lists what the last good part offers."""
    value: Any = values
    seen: list[str] = []
    for part in name.split("."):
        offered = _offered(value)
        if part not in offered:
            known = ", ".join(".".join([*seen, key]) for key in sorted(offered)) or "nothing"
            raise ConfigError(
                f"{path}: unknown placeholder {{{name}}}; known here: {known}. For literal braces write {{{{{name}}}}}"
            )
        value = offered[part]
        seen.append(part)
    return value


def _offered(value: Any) -> dict[str, Any]:
    """What a dotted name may go on with; YAML's keys may be numbers."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in cast("Mapping[Any, Any]", value).items()}
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return {name: item for name, item in attributes.items() if not name.startswith("_")}
