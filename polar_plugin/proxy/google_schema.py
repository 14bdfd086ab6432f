"""The functions a Google generateContent request declares, and their schemas as JSON schema. Pure.

The API has two ways to say a function's parameters: `parametersJsonSchema`, which is JSON schema, and `parameters`,
its own dialect of it (upper-case types, `nullable`, numbers as strings). Clients mix them, and write the one under the
name of the other; both are therefore read in the same way, which leaves JSON schema as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ..errors import BadRequest
from ..records import JSONObject, Tool
from . import fields

_READ_OF_FUNCTION = frozenset({"name", "description", "parameters", "parametersJsonSchema"})
_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"})
_MAPS_OF_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_KEYWORDS = _LISTS_OF_SCHEMAS | _SCHEMAS | _MAPS_OF_SCHEMAS | _COUNTS | {"propertyOrdering"}
_WHOLE = re.compile(r"[0-9]{1,18}")
_SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z0-9])")


def camel(raw: JSONObject) -> JSONObject:
    """An object with its own keys in camelCase, which win over snake_case: the API takes both everywhere."""
    if not any("_" in key for key in raw):
        return raw
    return {camel_key(key): value for key, value in raw.items()} | {k: v for k, v in raw.items() if "_" not in k}


def camel_key(key: str) -> str:
    return _SNAKE.sub(lambda found: found[1].upper(), key)


def listed(value: Any) -> list[Any]:
    """A repeated field: clients write one item without its list, and the API takes it."""
    if value is None:
        return []
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def unread(holder: JSONObject, read: frozenset[str], where: str) -> set[str]:
    """The paths of what says something and has no meaning here."""
    return {f"{where}{key}" for key, value in holder.items() if key not in read and value not in (None, "", [], {})}


def functions(body: JSONObject, path: str, ignored: set[str]) -> tuple[Tool, ...]:
    """The functions of all entries of `tools`; what else stands there goes to `ignored`.

    Raises BadRequest with the path of what is wrong.
    """
    tools: list[Tool] = []
    where = fields.at(path, "tools")
    for i, value in enumerate(listed(body.get("tools"))):
        entry = camel(fields.as_object(value, fields.at(where, i)))
        # an empty object switches a built-in tool on, so it says something
        ignored |= {f"tools.*.{key}" for key, of in entry.items() if key != "functionDeclarations" and of is not None}
        for j, raw in enumerate(listed(entry.get("functionDeclarations"))):
            at = f"{where}.{i}.functionDeclarations.{j}"
            tools.append(_function(camel(fields.as_object(raw, at)), at, ignored))
    return tuple(tools)


def _function(raw: JSONObject, path: str, ignored: set[str]) -> Tool:
    name = fields.text(raw, "name", path)
    if not name:
        raise BadRequest("expected the function's name", path=f"{path}.name")
    ignored |= unread(raw, _READ_OF_FUNCTION, "tools.*.functionDeclarations.*.")
    exact = fields.mapping(raw, "parametersJsonSchema", path)
    loose = fields.mapping(raw, "parameters", path)
    if exact and loose:
        ignored.add("tools.*.functionDeclarations.*.parameters")
    return Tool(name, fields.text(raw, "description", path), json_schema(exact or loose))


def json_schema(schema: JSONObject) -> JSONObject:
    """The same schema as JSON schema; JSON schema comes out as it went in."""
    raw = {_keyword(key): value for key, value in schema.items()}
    ordering = raw.pop("propertyOrdering", None)
    told: JSONObject = {}
    for key, value in raw.items():
        if key == "nullable":
            continue
        if key == "type" and value == "TYPE_UNSPECIFIED":
            continue
        told |= _told(key, value)
    if raw.get("nullable") is True:
        told = _nullable(told)
    if isinstance(ordering, list) and isinstance(told.get("properties"), dict):
        told["properties"] = _ordered(told["properties"], cast("list[Any]", ordering))
    return told


def _keyword(key: str) -> str:
    """The keyword that `key` spells, where it spells one of those that are read here."""
    spelled = camel_key(key)
    return _RENAMED.get(key, spelled if spelled in _KEYWORDS else key)


def _told(key: str, value: Any) -> JSONObject:
    if key == "type":
        return {key: _type(value)}
    if key == "example":
        return {"examples": [value]}
    if key == "$ref" and isinstance(value, str):
        return {key: value.replace("#/defs/", "#/$defs/", 1)}
    if key in _COUNTS and isinstance(value, str) and _WHOLE.fullmatch(value):
        return {key: int(value)}
    if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
        return {key: [_inner(one) for one in cast("list[Any]", value)]}
    if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {key: {name: _inner(one) for name, one in cast("JSONObject", value).items()}}
    return {key: _inner(value) if key in _SCHEMAS else value}


def _inner(value: Any) -> Any:
    """`true` and `false` are schemas too."""
    if isinstance(value, list):  # the older form of `prefixItems`
        return [_inner(one) for one in cast("list[Any]", value)]
    return json_schema(cast("JSONObject", value)) if isinstance(value, dict) else value


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return [_type(one) for one in cast("list[Any]", value)]
    return value.lower() if isinstance(value, str) and value in _TYPES else value


def _nullable(schema: JSONObject) -> JSONObject:
    """The schema or null."""
    kinds = listed(schema.get("type"))
    if not kinds:
        return {"anyOf": [schema, {"type": "null"}]} if schema else schema
    told = schema | {"type": kinds if "null" in kinds else [*kinds, "null"]}
    values = schema.get("enum")
    if isinstance(values, list) and None not in values:
        told["enum"] = [*cast("list[Any]", values), None]
    return told


def _ordered(properties: Mapping[str, Any], ordering: list[Any]) -> JSONObject:
    """Properties in the order asked for; those it does not name come last."""
    names: Iterator[str] = (name for name in ordering if isinstance(name, str) and name in properties)
    return {name: properties[name] for name in names} | dict(properties)
