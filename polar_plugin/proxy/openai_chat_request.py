"""What an OpenAI Chat Completions request says, as a ChatRequest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

from ..errors import BadRequest
from ..records import IMAGE, ChatRequest, Image, JSONObject, Message, SamplingParams, Tool, ToolCall
from . import fields
from .codec import Incoming
from .parts import Part, joined

_ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_READ = frozenset({
    "model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
    "seed", "stop", "stream", "stream_options", "logprobs", "n",
})  # fmt: skip
_READ_OF_MESSAGE = frozenset({
    "role", "content", "reasoning_content", "reasoning", "tool_calls", "function_call", "tool_call_id", "name",
})  # fmt: skip
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_PARTS = frozenset({"image_url", "input_image"})


def chat_request(incoming: Incoming, api: str) -> ChatRequest:
    """Raises BadRequest with the path of what is wrong."""
    body = incoming.body
    if fields.integer(body, "n") not in (None, 1):
        raise BadRequest("only one choice a request is sampled; send n=1, several times", path="n")
    fields.flag(body, "logprobs")
    fields.flag(fields.mapping(body, "stream_options"), "include_usage", "stream_options")
    tools = incoming.memory.once("tools", body.get("tools"), lambda: _tools(body))
    raw = fields.objects(body, "messages")
    if not raw:
        raise BadRequest("expected at least one message", path="messages")
    reader = incoming.memory.read(_Reader(), raw, "messages")
    return ChatRequest(
        messages=tuple(reader.messages),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        sampling=_sampling(body),
        stream=fields.flag(body, "stream"),
        model=fields.text(body, "model"),
        api=api,
        thread=_thread(incoming.headers),
        retry=incoming.headers.get("x-stainless-retry-count", "") not in ("", "0"),
        ignored=tuple(sorted(_ignored(body) | reader.ignored)),
    )


def _thread(headers: Mapping[str, str]) -> str:
    """opencode names its conversations; one with a parent is a sub-agent's."""
    return headers.get("x-session-id", "") if headers.get("x-parent-session-id") else ""


@dataclass(slots=True)
class _Reader:
    """Reads the messages of one request."""

    messages: list[Message] = field(default_factory=list[Message])
    ignored: set[str] = field(default_factory=set[str])
    _names: dict[str, str] = field(default_factory=dict[str, str])
    """The function of each call so far, by the call's id, since most clients send no name with a result."""

    def take(self, item: JSONObject, path: str) -> None:
        message = _message(item, path, self._names)
        self._names.update((call.id, call.name) for call in message.tool_calls)
        self.messages.append(message)
        unread = item.keys() - _READ_OF_MESSAGE
        self.ignored |= {f"messages.*.{key}" for key in unread if _says_something(item[key])}
        self.ignored |= {f"messages.*.content.*.{kind}" for kind in _omitted(item.get("content"))}

    def copy(self) -> Self:
        return replace(self, messages=[*self.messages], ignored={*self.ignored}, _names={**self._names})


def _message(raw: JSONObject, path: str, names: Mapping[str, str]) -> Message:
    wire_role = fields.text(raw, "role", path)
    if wire_role not in _ROLES:
        raise BadRequest(f"unknown role {wire_role!r}; use one of {', '.join(_ROLES)}", path=f"{path}.role")
    role = _ROLES[wire_role]
    pieces = _pieces(raw.get("content"), f"{path}.content")
    content, parts = joined(pieces, "" if role == "assistant" else "\n")
    if role == "assistant":
        reasoning = fields.text(raw, "reasoning_content", path) or fields.text(raw, "reasoning", path)
        return Message(role, content, reasoning, _tool_calls(raw, path))
    if role == "tool":
        call_id = fields.text(raw, "tool_call_id", path)
        name = names.get(call_id) or fields.text(raw, "name", path)
        return Message(role, content, tool_call_id=call_id, name=name, parts=parts)
    return Message(role, content, parts=parts)


def _pieces(value: Any, path: str) -> list[Part]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise BadRequest("expected a string or a list of parts", path=path)
    return [_piece(part, f"{path}.{i}") for i, part in enumerate(cast("list[Any]", value))]


def _piece(value: Any, path: str) -> Part:
    if isinstance(value, str):
        return value
    part = fields.as_object(value, path)
    kind = fields.text(part, "type", path)
    if kind in _TEXT_PARTS:
        return fields.text(part, _TEXT_PARTS[kind], path)
    if kind in _IMAGE_PARTS:
        url = _url(part, path)
        return _image(url) if url else IMAGE
    return f"[{kind.removeprefix('input_') or 'part'} omitted]"


def _url(part: JSONObject, path: str = "") -> str:
    """Where an image is, in an object or, with some clients, as a string; "" for a part that tells of none."""
    if part.get("type") not in _IMAGE_PARTS:
        return ""
    if isinstance(part.get("image_url"), str):
        return part["image_url"]
    return fields.text(fields.mapping(part, "image_url", path), "url", f"{path}.image_url")


def _image(url: str) -> Image:
    """By value where the URL is a base64 `data:` one."""
    head, comma, data = url.partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return Image(media_type=head[len("data:") : -len(";base64")], data=data)
    return Image(url=url)


def _tool_calls(raw: JSONObject, path: str) -> tuple[ToolCall, ...]:
    """Also the one call, without an id, of the API's older form."""
    calls = [
        _tool_call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(fields.objects(raw, "tool_calls", path))
    ]
    if raw.get("function_call") is not None:
        calls.append(_call(fields.mapping(raw, "function_call", path), f"{path}.function_call", ""))
    return tuple(calls)


def _tool_call(raw: JSONObject, path: str) -> ToolCall:
    return _call(fields.mapping(raw, "function", path), f"{path}.function", fields.text(raw, "id", path))


def _call(function: JSONObject, path: str, call_id: str) -> ToolCall:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # some clients echo the parsed object
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        arguments = fields.text(function, "arguments", path)
    return ToolCall(_name(function, path), arguments or "{}", id=call_id)


def _name(function: JSONObject, path: str) -> str:
    name = fields.text(function, "name", path)
    if not name:
        raise BadRequest("expected the function's name", path=f"{path}.name")
    return name


def _tools(body: JSONObject) -> tuple[Tool, ...]:
    raw = enumerate(fields.objects(body, "tools"))
    return tuple(_tool(tool, f"tools.{i}") for i, tool in raw if _is_function(tool))


def _is_function(tool: JSONObject) -> bool:
    return tool.get("type", "function") == "function"


def _tool(raw: JSONObject, path: str) -> Tool:
    function = fields.mapping(raw, "function", path) or raw
    path = f"{path}.function" if function is not raw else path
    return Tool(
        _name(function, path),
        fields.text(function, "description", path),
        fields.mapping(function, "parameters", path),
    )


def _tool_choice(body: JSONObject, tools: Sequence[Tool]) -> str:
    choice = body.get("tool_choice")
    if isinstance(choice, str) or choice is None:
        mode = {"any": "required"}.get(choice or "auto", choice or "auto")
        if mode not in ("auto", "none", "required"):
            raise BadRequest(f"unknown tool choice {mode!r}; use auto, none or required", path="tool_choice")
        return mode
    choice = fields.as_object(choice, "tool_choice")
    if not _is_function(choice):
        return "auto"  # `allowed_tools` and `custom`: listed as ignored
    name = _name(fields.mapping(choice, "function", "tool_choice") or choice, "tool_choice.function")
    if name not in {tool.name for tool in tools}:
        raise BadRequest(f"no tool is called {name!r}", path="tool_choice.function.name")
    return name


def _sampling(body: JSONObject) -> SamplingParams:
    temperature, top_p = fields.number(body, "temperature"), fields.number(body, "top_p")
    longest = fields.integer(body, "max_tokens", least=1)
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=fields.integer(body, "top_k") or -1,
        max_tokens=fields.integer(body, "max_completion_tokens", least=1) or longest,
        stop=_stop(body),
        seed=fields.integer(body, "seed"),
    )


def _stop(body: JSONObject) -> tuple[str, ...]:
    """An empty string would end each reply at once: no client means that."""
    if isinstance(body.get("stop"), str):
        return (body["stop"],) if body["stop"] else ()
    values = fields.items(body, "stop")
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise BadRequest("expected a string", path=f"stop.{i}")
    return tuple(value for value in values if value)


def _ignored(body: JSONObject) -> set[str]:
    """Paths of what is dropped beside the messages, positions left out so that they can be counted.

    Reads a body that was found good.
    """
    paths = {key for key, value in body.items() if key not in _READ and _says_something(value)}
    paths |= {f"tools.*.{tool['type']}" for tool in fields.objects(body, "tools") if not _is_function(tool)}
    if isinstance(body.get("tool_choice"), dict) and not _is_function(body["tool_choice"]):
        paths.add("tool_choice")
    return paths


def _omitted(content: Any) -> Iterator[str]:
    """The kinds of the parts that are neither text nor image."""
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    told = (cast("JSONObject", part) for part in parts if isinstance(part, dict))
    return (str(part.get("type") or "part") for part in told if part.get("type") not in _TEXT_PARTS and not _url(part))


def _says_something(value: Any) -> bool:
    return value not in (None, "", [], {})
