"""What an Anthropic Messages request says, as a ChatRequest.

As in the API, turns of one role that follow one another are one turn, and tools whose loading is deferred are none
until a result refers to them. A request that ends with an assistant's turn (prefill) is refused: a reply that the
client began cannot be sampled as a turn of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, Self, cast

from ..errors import BadRequest
from ..records import IMAGE, ChatRequest, Image, JSONObject, Message, Role, SamplingParams, Tool, ToolCall
from . import fields
from .anthropic_events import tool_arguments, unsealed
from .codec import Incoming
from .memory import Memory
from .parts import Part, joined

_READ = frozenset({
    "model", "messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k",
    "stop_sequences", "stream",
})  # fmt: skip
_READ_OF_TOOL = frozenset({"type", "name", "description", "input_schema"})
_READ_OF_BLOCK: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
    "tool_reference": frozenset({"type", "tool_name"}),
    "tool_addition": frozenset({"type", "tool"}),
    "document": frozenset({"type", "source"}),
    "search_result": frozenset({"type", "source", "content"}),
}
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\r\n]*(?:\r?\n)*", re.MULTILINE | re.IGNORECASE)
"""A line of Claude Code's (seen in 2.1.332) that changes from call to call and means nothing to a model."""
_ERROR = "[error]"
"""The line that a failed call's result begins with: `is_error`, as the model sees it."""

_RoleName = Literal["system", "user", "assistant"]
_Block = tuple[str, JSONObject]
"""A content block, and the path to it."""


@dataclass(slots=True)
class _Reading:
    """What reading a request's messages needs and gathers. Mutable."""

    tools: Mapping[str, Tool]
    """All of them, the deferred ones too, by name."""
    elsewhere: set[str] = field(default_factory=set[str])
    """The names of those that the provider would run."""
    names: dict[str, str] = field(default_factory=dict[str, str])
    """The function of each call so far, by the call's id."""
    dropped: set[str] = field(default_factory=set[str])
    messages: list[Message] = field(default_factory=list[Message])
    _role: _RoleName = "user"
    _turn: list[_Block] | None = None
    """The blocks of the turn that is being read; None between two turns."""

    def take(self, item: JSONObject, path: str) -> None:
        """The next message; it goes on with the turn of its role, save that system messages stay apart."""
        role = fields.text(item, "role", path)
        if role not in ("system", "user", "assistant"):
            raise BadRequest(f"unknown role {role!r}; use user, assistant or system", path=f"{path}.role")
        self.drop_all_but(frozenset({"role", "content"}), item, path)
        if role != self._role or role == "system":
            self.close()
        self._role, self._turn = role, [*(self._turn or ()), *_blocks(item, path)]

    def close(self) -> None:
        """The end of a turn, if one is being read."""
        if self._turn is None:
            return
        if self._role == "system":
            self.messages += _system(self._turn, self)
        elif self._role == "user":
            self.messages += _user(self._turn, self)
        else:
            self.messages.append(_assistant(self._turn, self))
        self._turn = None

    def copy(self) -> Self:
        return replace(self, names={**self.names}, dropped={*self.dropped}, messages=[*self.messages])

    def drop(self, path: str, value: Any = True) -> None:
        """Note what is dropped, if it says anything; positions are left out, so that it can be counted."""
        if value not in (None, "", [], {}):
            self.dropped.add(re.sub(r"\.\d+(?=\.|$)", ".*", path))

    def drop_all_but(self, known: frozenset[str], holder: JSONObject, path: str = "") -> None:
        for key in holder.keys() - known:
            self.drop(fields.at(path, key), holder[key])


def chat_request(incoming: Incoming, api: str) -> ChatRequest:
    """Raises BadRequest with the path of what is wrong."""
    body, thread = incoming.body, incoming.headers.get("x-claude-code-agent-id", "")
    tools, told = incoming.memory.once("tools", body.get("tools"), lambda: _tools(body))
    reading = told.copy()
    reading.drop_all_but(_READ, body)
    return ChatRequest(
        messages=_messages(body, reading, incoming.memory),
        tools=tools,
        tool_choice=_tool_choice(body, reading),
        sampling=_sampling(body),
        stream=fields.flag(body, "stream"),
        model=fields.text(body, "model"),
        api=api,
        role=Role.SUB_AGENT if thread else Role.MAIN,
        thread=thread,
        retry=incoming.headers.get("x-stainless-retry-count", "") not in ("", "0"),
        ignored=tuple(sorted(reading.dropped)),
    )


def _messages(body: JSONObject, reading: _Reading, memory: Memory) -> tuple[Message, ...]:
    messages = list(_system(_blocks(body, ""), reading)) if "system" in body else []
    raw = fields.objects(body, "messages")
    if not raw:
        raise BadRequest("expected at least one message", path="messages")
    told = memory.read(_Reading(reading.tools), raw, "messages", reading.tools)
    told.close()
    reading.dropped |= told.dropped
    messages += told.messages
    if messages and messages[-1].role == "assistant":
        _refuse_prefill(messages.pop(), len(body["messages"]) - 1)
        reading.drop("messages.*.empty")
    if not messages:
        raise BadRequest("expected a message that says something", path="messages")
    return tuple(messages)


def _refuse_prefill(last: Message, position: int) -> None:
    if last.content or last.tool_calls:
        raise BadRequest(
            "the conversation must end with a user's message or a tool's result; beginning the reply (prefill) is not"
            " supported",
            path=f"messages.{position}",
        )


def _blocks(holder: JSONObject, path: str) -> list[_Block]:
    """Of a message, of a tool's result, or of the request's `system` (no path)."""
    key = "content" if path else "system"
    value, path = holder.get(key), fields.at(path, key)
    if value is None:
        return []
    if isinstance(value, str):
        return [(path, {"type": "text", "text": value})]
    if not isinstance(value, list):
        raise BadRequest("expected a string or a list of content blocks", path=path)
    return [_block(block, f"{path}.{i}") for i, block in enumerate(cast("list[Any]", value))]


def _block(value: Any, path: str) -> _Block:
    return path, {"type": "text", "text": value} if isinstance(value, str) else fields.as_object(value, path)


def _kind(block: JSONObject, path: str, reading: _Reading) -> str:
    """The block's type; the rest of its fields that mean nothing here are noted as dropped."""
    kind = fields.text(block, "type", path) or "block"
    if kind in _READ_OF_BLOCK:
        reading.drop_all_but(_READ_OF_BLOCK[kind], block, path)
    else:
        reading.drop(f"{path}.{kind}")
    return kind


def _system(blocks: Sequence[_Block], reading: _Reading) -> list[Message]:
    """At most one message: none where nothing is left to say."""
    pieces: list[Part] = []
    for path, block in blocks:
        piece = _part(path, block, reading)
        if isinstance(piece, str) and (said := _BILLING.sub("", piece)) != piece:
            reading.drop("system.*.x-anthropic-billing-header")
            piece = said
        pieces += [piece] if piece else []
    content, parts = joined(pieces, "\n")
    return [Message("system", content, parts=parts)] if content else []


def _user(blocks: Sequence[_Block], reading: _Reading) -> Iterator[Message]:
    """Tool results as messages of their own, and what stands before, between and behind them, in that order."""
    for is_result, run in groupby(blocks, lambda one: one[1].get("type") == "tool_result"):
        if is_result:
            yield from (_result(path, block, reading) for path, block in run)
        else:
            content, parts = joined([_part(path, block, reading) for path, block in run], "\n")
            yield Message("user", content, parts=parts)
    if not blocks:
        yield Message("user")


def _result(path: str, block: JSONObject, reading: _Reading) -> Message:
    _kind(block, path, reading)
    call_id = fields.text(block, "tool_use_id", path)
    pieces = [_part(at, one, reading) for at, one in _blocks(block, path)]
    if fields.flag(block, "is_error", path):
        pieces.insert(0, _ERROR)
    content, parts = joined(pieces, "\n")
    return Message("tool", content, tool_call_id=call_id, name=reading.names.get(call_id, ""), parts=parts)


def _assistant(blocks: Sequence[_Block], reading: _Reading) -> Message:
    """One message, in whatever order its blocks came: clients move text before calls and drop blank text."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for path, block in blocks:
        if block.get("type") == "tool_use":
            calls.append(_call(path, block, reading))
        elif block.get("type") in ("thinking", "redacted_thinking"):
            thoughts.append(_thought(path, block, reading))
        else:
            piece = _part(path, block, reading)
            texts.append(IMAGE if isinstance(piece, Image) else piece)
    text = "".join(text for text in texts if text.strip())
    return Message("assistant", text, "\n".join(filter(None, thoughts)), tuple(calls))


def _call(path: str, block: JSONObject, reading: _Reading) -> ToolCall:
    _kind(block, path, reading)
    call_id, name = fields.text(block, "id", path), _name(block, path)
    if call_id:
        reading.names[call_id] = name
    return ToolCall(name, tool_arguments(fields.mapping(block, "input", path)), id=call_id)


def _thought(path: str, block: JSONObject, reading: _Reading) -> str:
    """Reasoning as it is told, or as its signature restores it. What another provider redacted is lost, and counted."""
    if _kind(block, path, reading) == "thinking":
        return fields.text(block, "thinking", path) or unsealed(fields.text(block, "signature", path)) or ""
    thought = unsealed(fields.text(block, "data", path))
    if thought is None:
        reading.drop(f"{path}.redacted_thinking")
    return thought or ""


def _part(path: str, block: JSONObject, reading: _Reading) -> Part:
    """Text or image. What can be said as neither leaves a placeholder, and is counted."""
    kind = _kind(block, path, reading)
    if kind == "text":
        return fields.text(block, "text", path)
    if kind == "image":
        return _image(fields.mapping(block, "source", path), f"{path}.source")
    if kind == "tool_reference":
        return _definition(fields.text(block, "tool_name", path), reading)
    if kind == "tool_addition":
        return _definition(fields.text(fields.mapping(block, "tool", path), "name", f"{path}.tool"), reading)
    if kind in ("document", "search_result") and (written := _written(kind, block, path, reading)):
        return written
    reading.drop(f"{path}.{kind}")  # also what a turn of this role cannot hold
    return f"[{kind} omitted]"


def _written(kind: str, block: JSONObject, path: str, reading: _Reading) -> str:
    """What a document or the result of a search says, where it is told as text or as blocks; "" elsewhere."""
    if kind == "document":
        block, path = fields.mapping(block, "source", path), f"{path}.source"
        if block.get("type") == "text":
            return fields.text(block, "data", path)
    return joined([_part(at, one, reading) for at, one in _blocks(block, path)], "\n")[0]


def _image(source: JSONObject, path: str) -> Part:
    media_type, data = fields.text(source, "media_type", path), fields.text(source, "data", path)
    url = fields.text(source, "url", path)
    return Image(media_type, data, url) if data or url else IMAGE


def _definition(name: str, reading: _Reading) -> str:
    """A tool that the conversation loads: its definition, as models are told it."""
    tool = reading.tools.get(name)
    if tool is None:
        return f"[tool {name} omitted]"
    definition = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps(definition, ensure_ascii=False)


def _tools(body: JSONObject) -> tuple[tuple[Tool, ...], _Reading]:
    """Those of the first prompt, and a reading that knows all tools."""
    tools: dict[str, Tool] = {}
    reading = _Reading(tools)
    deferred: set[str] = set()
    for i, raw in enumerate(fields.objects(body, "tools")):
        path = f"tools.{i}"
        kind = fields.text(raw, "type", path) or "custom"
        if kind != "custom" and "input_schema" not in raw:  # the provider runs it, or defines it
            reading.drop(f"tools.*.{kind}")
            reading.elsewhere.add(fields.text(raw, "name", path))
            continue
        reading.drop_all_but(_READ_OF_TOOL, raw, path)
        tool = Tool(_name(raw, path), fields.text(raw, "description", path), fields.mapping(raw, "input_schema", path))
        tools[tool.name] = tool
        if fields.flag(raw, "defer_loading", path):
            deferred.add(tool.name)
    return tuple(tool for name, tool in tools.items() if name not in deferred), reading


def _name(holder: JSONObject, path: str) -> str:
    name = fields.text(holder, "name", path)
    if not name:
        raise BadRequest("expected the tool's name", path=f"{path}.name")
    return name


def _tool_choice(body: JSONObject, reading: _Reading) -> str:
    """One call at a time is a wish that no sampler here knows: it is counted as dropped."""
    choice = fields.mapping(body, "tool_choice")
    kind = fields.text(choice, "type", "tool_choice") or "auto"
    if fields.flag(choice, "disable_parallel_tool_use", "tool_choice"):
        reading.drop("tool_choice.disable_parallel_tool_use")
    if kind in _CHOICES:
        return _CHOICES[kind]
    if kind != "tool":
        raise BadRequest(f"unknown tool choice {kind!r}; use auto, any, tool or none", path="tool_choice.type")
    name = _name(choice, "tool_choice")
    if name in reading.elsewhere - reading.tools.keys():
        reading.drop("tool_choice.name")
        return "auto"
    if name not in reading.tools:
        raise BadRequest(f"no tool is called {name!r}", path="tool_choice.name")
    return name


def _sampling(body: JSONObject) -> SamplingParams:
    temperature, top_p = fields.number(body, "temperature"), fields.number(body, "top_p")
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=fields.integer(body, "top_k") or -1,
        max_tokens=fields.integer(body, "max_tokens", least=1),
        stop=_stop(body),
    )


def _stop(body: JSONObject) -> tuple[str, ...]:
    """An empty string would end each reply at once: no client means that."""
    values = fields.items(body, "stop_sequences")
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise BadRequest("expected a string", path=f"stop_sequences.{i}")
    return tuple(value for value in values if value)
