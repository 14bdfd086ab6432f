"""The tools of a Responses request: what the model is told of them, and how its calls become items and come back.

A model calls functions. Free-form (`custom`) tools, tools within a `namespace` and the `local_shell` are therefore told
as functions, each under one name of its own, and are mapped back by that name. Pure.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, cast

from ..errors import BadRequest
from ..records import JSONObject, Tool
from . import fields
from .codec import Incoming

Kind = Literal["function", "custom", "local_shell"]
Key = tuple[Kind, str, str]
"""Kind, namespace ("" for none) and name: what a client knows a tool by."""

SHELL = "local_shell"
_SHELL_DESCRIPTION = "Runs a command on the local machine and returns its output."
_SHELL_FIELDS: Mapping[str, JSONObject] = {
    "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
    "env": {"type": "object", "additionalProperties": {"type": "string"}, "description": "Variables to set."},
    "timeout_ms": {"type": "integer", "description": "Milliseconds after which the command is ended."},
    "user": {"type": "string", "description": "Whom to run it as."},
    "working_directory": {"type": "string", "description": "Where to run it."},
}
_SHELL_PARAMETERS: JSONObject = {"type": "object", "properties": dict(_SHELL_FIELDS), "required": ["command"]}
_INPUT_PARAMETERS: JSONObject = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
}


@dataclass(frozen=True, slots=True)
class Offer:
    """One tool of a request; `tool` is what the model is told, under a name that no other one has."""

    key: Key
    tool: Tool


@dataclass(frozen=True, slots=True)
class Offers:
    """All tools of a request, those listed among its input items included."""

    offers: tuple[Offer, ...] = ()
    dropped: frozenset[str] = frozenset()
    """Paths, without positions, of tools that have no meaning here: what a provider would run itself."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(offer.tool for offer in self.offers)

    def key(self, name: str) -> Key:
        """What the client knows the tool by that the model calls `name`; a function for a name that nobody offered."""
        return next((offer.key for offer in self.offers if offer.tool.name == name), ("function", "", name))

    def name(self, key: Key) -> str:
        """What the model calls a tool. The tool of an echoed call may be offered no more, or as another kind."""
        named = [offer for offer in self.offers if offer.key[1:] == key[1:]]
        same = [offer for offer in named if offer.key == key]
        return next((offer.tool.name for offer in same + named), flat(key))


def flat(key: Key) -> str:
    """The one name for a tool and its namespace, where no other tool takes it."""
    _, namespace, name = key
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}" if namespace else name


def offers_of(incoming: Incoming) -> Offers:
    """Raises BadRequest with the path of what is wrong."""
    body = incoming.body
    if any(_adds_tools(item) for item in _input(body)):
        return _offers(body)
    return incoming.memory.once("tools", body.get("tools"), lambda: _offers(body))


def _offers(body: JSONObject) -> Offers:
    dropped: set[str] = set()
    found: dict[Key, Tool] = {}
    for key, tool in _listed(body, dropped):
        if key in found:
            dropped.add("tools.*.duplicate")
        found.setdefault(key, tool)
    names = _names(found)
    told = (Offer(key, Tool(names[key], tool.description, tool.parameters)) for key, tool in found.items())
    return Offers(tuple(told), frozenset(dropped))


def choice(body: JSONObject, offers: Offers) -> str:
    """`ChatRequest.tool_choice`. Raises BadRequest."""
    value = body.get("tool_choice")
    if value is None or isinstance(value, str):
        if (value or "auto") not in ("auto", "none", "required"):
            raise BadRequest(f"unknown tool choice {value!r}; use auto, none or required", path="tool_choice")
        return value or "auto"
    told = fields.as_object(value, "tool_choice")
    kind = fields.text(told, "type", "tool_choice")
    if kind == "allowed_tools":
        return _allowed(told, offers)
    if kind not in ("function", "custom", SHELL):
        return "auto"  # a tool that a provider would run: listed as ignored
    return _chosen(told, kind, offers, "tool_choice")


def is_understood(value: Any) -> bool:
    """Whether nothing of a tool choice that `choice` takes is dropped."""
    if not isinstance(value, dict):
        return True
    kind = cast("JSONObject", value).get("type")
    return kind in ("function", "custom", SHELL)


def input_of(arguments: str) -> str:
    """The text of a free-form call; arguments that are no such call go to the client as they are."""
    value = _json(arguments)
    told = cast("JSONObject", value) if isinstance(value, dict) else {}
    text = told.get("input")
    return text if isinstance(text, str) and len(told) == 1 else arguments


def action_of(arguments: str) -> JSONObject | None:
    """The action of a `local_shell` call; None for arguments that are none."""
    value = _json(arguments)
    if not isinstance(value, dict):
        return None
    told = cast("JSONObject", value)
    action: JSONObject = {"type": "exec", "env": {}}
    return action | told if _is_action(told) else None


def arguments_of(action: JSONObject) -> str:
    """The arguments that `action_of` made the action of, as far as it tells them."""
    told = {key: value for key, value in action.items() if key != "type" and value is not None}
    if not told.get("env"):
        told.pop("env", None)
    return json.dumps(told, ensure_ascii=False)


def _listed(body: JSONObject, dropped: set[str]) -> Iterator[tuple[Key, Tool]]:
    yield from _tools(body, "", dropped)
    for i, item in enumerate(_input(body)):
        if _adds_tools(item):
            yield from _tools(item, f"input.{i}", dropped)


def _input(body: JSONObject) -> list[Any]:
    return cast("list[Any]", body["input"]) if isinstance(body.get("input"), list) else []


def _adds_tools(item: Any) -> bool:
    return type(item) is dict and cast("JSONObject", item).get("type") == "additional_tools"


def _tools(holder: JSONObject, path: str, dropped: set[str], namespace: str = "") -> Iterator[tuple[Key, Tool]]:
    for i, raw in enumerate(fields.objects(holder, "tools", path)):
        here = f"{fields.at(path, 'tools')}.{i}"
        kind = fields.text(raw, "type", here) or "function"
        if kind == "function":
            yield _function(raw, here, namespace)
        elif kind == "custom":
            yield _custom(raw, here, namespace)
        elif kind == SHELL and not namespace:
            yield (SHELL, "", SHELL), Tool(SHELL, _SHELL_DESCRIPTION, _SHELL_PARAMETERS)
        elif kind == "namespace" and not namespace:
            yield from _namespace(raw, here, dropped)
        else:
            dropped.add(f"tools.*.{'tools.*.' if namespace else ''}{kind}")


def _namespace(raw: JSONObject, path: str, dropped: set[str]) -> Iterator[tuple[Key, Tool]]:
    """Its own description stands before that of its first tool."""
    about = fields.text(raw, "description", path)
    for key, tool in _tools(raw, path, dropped, _name(raw, path)):
        yield key, Tool(tool.name, "\n\n".join(filter(None, (about, tool.description))), tool.parameters)
        about = ""


def _function(raw: JSONObject, path: str, namespace: str) -> tuple[Key, Tool]:
    inner = fields.mapping(raw, "function", path)  # as OpenAI Chat has it
    raw, path = (inner, f"{path}.function") if inner else (raw, path)
    name, about = _name(raw, path), fields.text(raw, "description", path)
    return ("function", namespace, name), Tool(name, about, fields.mapping(raw, "parameters", path))


def _custom(raw: JSONObject, path: str, namespace: str) -> tuple[Key, Tool]:
    """The grammar is told in the description: nothing here constrains sampling."""
    name, about = _name(raw, path), fields.text(raw, "description", path)
    form = fields.mapping(raw, "format", path)
    grammar = fields.text(form, "definition", f"{path}.format")
    if grammar:
        syntax = fields.text(form, "syntax", f"{path}.format")
        about = f"{about}\n\nThe input follows this grammar ({syntax}):\n{grammar}".lstrip()
    return ("custom", namespace, name), Tool(name, about, _INPUT_PARAMETERS)


def _name(raw: JSONObject, path: str) -> str:
    name = fields.text(raw, "name", path)
    if not name:
        raise BadRequest("expected the tool's name", path=f"{path}.name")
    return name


def _names(keys: Iterable[Key]) -> dict[Key, str]:
    """A name of its own for each tool: of those that want the same one, a plain function keeps it."""
    taken = {flat(key) for key in keys}
    names: dict[Key, str] = {}
    owned: set[str] = set()
    for key in sorted(keys, key=lambda key: (key[1] != "", key[0] != "function")):
        wanted = flat(key)
        names[key] = wanted if wanted not in owned else _free(wanted, taken)
        owned.add(wanted)
        taken.add(names[key])
    return names


def _free(name: str, taken: Set[str]) -> str:
    return next(free for number in itertools.count(2) if (free := f"{name}_{number}") not in taken)


def _allowed(told: JSONObject, offers: Offers) -> str:
    """All tools stay in the prompt, so that the conversation goes on; only the choice of a single one is enforced."""
    mode = fields.text(told, "mode", "tool_choice") or "auto"
    if mode not in ("auto", "required"):
        raise BadRequest(f"unknown mode {mode!r}; use auto or required", path="tool_choice.mode")
    named = [
        _chosen(tool, kind, offers, f"tool_choice.tools.{i}")
        for i, tool in enumerate(fields.objects(told, "tools", "tool_choice"))
        if (kind := tool.get("type", "function")) in ("function", "custom", SHELL)
    ]
    return named[0] if mode == "required" and len(named) == 1 else mode


def _chosen(told: JSONObject, kind: str, offers: Offers, path: str) -> str:
    name = SHELL if kind == SHELL else _name(told, path)
    key = (cast("Kind", kind), fields.text(told, "namespace", path), name)
    if key[1:] not in {offer.key[1:] for offer in offers.offers}:
        raise BadRequest(f"no tool is called {name!r}", path=f"{path}.name")
    return offers.name(key)


def _is_action(told: JSONObject) -> bool:
    command, env, kind = told.get("command"), told.get("env", {}), told.get("type", "exec")
    return (
        told.keys() <= {*_SHELL_FIELDS, "type"}
        and kind == "exec"
        and isinstance(command, list)
        and all(isinstance(word, str) for word in cast("list[Any]", command))
        and isinstance(env, dict)
        and all(isinstance(value, str) for value in cast("JSONObject", env).values())
        and type(told.get("timeout_ms", 0)) in (int, type(None))
        and all(isinstance(told.get(key, ""), str | None) for key in ("user", "working_directory"))
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
