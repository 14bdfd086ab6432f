"""Canonical messages in the shape that one chat template can say.

Templates differ in what they accept: no system message in the middle, no two user messages in a row, no tools at all,
arguments as an object or as text. `probe_shape` finds out by rendering; `shaped` writes a conversation accordingly,
always the same way, so that a delta and a full render agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

from jinja2.exceptions import TemplateError

from ..records import JSONObject, Message, Tool, ToolCall
from .toolcalls import UNREADABLE, tool_json

TEMPLATE_ERRORS = (TemplateError, *UNREADABLE)
"""What rendering a template may raise: its own refusals, and what Jinja makes of values it did not expect."""

_DEPTH = 128
"""Nesting of a call's arguments that a template is given as an object; the rest it is given as text."""

Render = Callable[[list[JSONObject], list[JSONObject]], str]
"""Messages and tools, both as a template takes them, to text without a generation prompt."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template can say by itself. Where it cannot, `shaped` says it another way."""

    system: bool = True
    """A leading system message; else its text goes into the first user message."""
    mid_system: bool = True
    """A system message later on; else it becomes a user message."""
    user_runs: bool = True
    """Two user messages in a row; else they are joined with a blank line."""
    tools: bool = True
    """Definitions, calls (with and without text beside them) and results; else `describe_tools` and tagged text."""
    arguments_as_text: bool = False
    """Call arguments as JSON text instead of an object."""
    empty_content: str | None = ""
    """What stands for "no text" beside calls."""
    reasoning_key: str = "reasoning_content"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is said another way, in words for the user."""
        told = (
            (self.system, "system text is put into the first user message"),
            (self.mid_system, "system messages in mid-conversation become user messages"),
            (self.user_runs, "user messages in a row are joined"),
            (self.tools, "tools are described in the system message and called by <tool_call> JSON"),
        )
        return tuple(note for native, note in told if not native)


def named(messages: Sequence[Message]) -> list[Message]:
    """The same messages, every call with an id and every tool result with its function's name and call id.

    A result belongs to the call of its id; where no call has it, to the first call that has no result yet.
    """
    out: list[Message] = []
    pending: dict[str, str] = {}
    for message in messages:
        if message.role == "assistant":
            calls = tuple(
                call if call.id else replace(call, id=f"call_{index}") for index, call in enumerate(message.tool_calls)
            )
            pending = {call.id: call.name for call in calls}
            message = replace(message, tool_calls=calls) if calls else message
        elif message.role == "tool":
            key = message.tool_call_id if message.tool_call_id in pending else next(iter(pending), "")
            name = message.name or pending.get(key, "")
            message = replace(message, name=name, tool_call_id=message.tool_call_id or key)
            pending.pop(key, None)
        out.append(message)
    return out


def shaped(messages: Sequence[Message], tools: Sequence[Tool], shape: Shape) -> list[JSONObject]:
    """The conversation as template messages. Tool definitions are part of it only where the template lacks them."""
    told = named(messages)
    if not shape.tools:
        told = _tagged(told, tools)
    told = _systems(told, shape)
    if not shape.user_runs:
        told = _joined(told)
    return [as_json(message, shape) for message in told]


def as_json(message: Message, shape: Shape) -> JSONObject:
    """One message as a template takes it."""
    out: JSONObject = {"role": message.role, "content": message.content}
    if message.reasoning:
        out[shape.reasoning_key] = message.reasoning
    if message.tool_calls:
        out["content"] = message.content or shape.empty_content
        out["tool_calls"] = [_call_json(call, shape) for call in message.tool_calls]
    if message.role == "tool":
        out |= {"name": message.name, "tool_call_id": message.tool_call_id}
    return out


def describe_tools(tools: Sequence[Tool]) -> str:
    """The generic instruction for templates that have no words for tools."""
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tool_json(tools))
    return (
        f"You can call these tools, one JSON definition a line:\n<tools>\n{definitions}\n</tools>\n"
        "To call a tool, write its name and arguments as JSON between tags:\n"
        '<tool_call>\n{"name": "tool-name", "arguments": {"parameter": "value"}}\n</tool_call>\n'
        "A turn may hold several calls. Results come back between <tool_response> tags."
    )


def _call_json(call: ToolCall, shape: Shape) -> JSONObject:
    arguments: Any = call.arguments or "{}"
    if not shape.arguments_as_text:
        try:
            value: Any = json.loads(arguments)
        except UNREADABLE:
            value = arguments  # a harness's own text: many templates print a string as it is
        if isinstance(value, dict) and not _too_deep(cast("JSONObject", value), arguments):
            arguments = cast("Any", value)
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _too_deep(value: JSONObject, text: str) -> bool:
    """Whether a template, which writes values by recursion, might fail on it: models that repeat themselves do that."""
    if text.count("{") + text.count("[") <= _DEPTH:
        return False
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        nodes = (cast("JSONObject", node).values() if isinstance(node, dict) else node for node in level)
        level = [child for node in nodes for child in node if isinstance(child, dict | list)]
    return bool(level)


def _tagged(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Calls and results as tagged text, the definitions in the system message."""
    out: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = "\n".join(f"<tool_response>\n{message.content}\n</tool_response>" for message in run)
            out.append(Message("user", results))
        else:
            out.extend(_call_text(message) for message in run)
    if not tools:
        return out
    said = out[0].content + "\n\n" if out and out[0].role == "system" else ""
    rest = out[1:] if said or (out and out[0].role == "system") else out
    return [Message("system", said + describe_tools(tools)), *rest]


def _call_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = (
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in message.tool_calls
    )
    return replace(message, content="\n".join((*filter(None, [message.content]), *calls)), tool_calls=())


def _systems(messages: Sequence[Message], shape: Shape) -> list[Message]:
    out = list(messages)
    if not shape.mid_system:
        lead = next((index for index, message in enumerate(out) if message.role != "system"), len(out))
        text = "\n\n".join(message.content for message in out[:lead])
        head = [Message("system", text)] if lead else []
        out = head + [Message("user", m.content) if m.role == "system" else m for m in out[lead:]]
    if not shape.system and out and out[0].role == "system":
        if len(out) > 1 and out[1].role == "user":
            return [replace(out[1], content=f"{out[0].content}\n\n{out[1].content}"), *out[2:]]
        return [replace(out[0], role="user"), *out[1:]]
    return out


def _joined(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for role, run in groupby(messages, lambda message: message.role):
        group = list(run)
        out.extend([Message("user", "\n\n".join(m.content for m in group))] if role == "user" else group)
    return out


# --- finding the shape out --------------------------------------------------------------------------------------------

_TOOL = Tool("probetool", "probedescription", {"type": "object", "properties": {"arg": {"type": "string"}}})


def probe_shape(render: Render, template: str) -> Shape:
    """What the template behind `render` can say: each thing is rendered, and its words are looked for in order."""
    keys = ("reasoning_content", "reasoning", "thinking")
    shape = Shape(reasoning_key=next((key for key in keys if key in template), keys[0]))
    shape = replace(shape, system=_says(render, [_system("aa1"), _user("bb2")], shape, "aa1", "bb2"))
    runs = [_user("aa1"), _user("bb2"), _assistant("cc3"), _user("dd4"), _user("ee5")]
    shape = replace(shape, user_runs=_says(render, runs, shape, "aa1", "bb2", "cc3", "dd4", "ee5"))
    middle = ([_system("bb2"), _user("cc3")], [_assistant("bb2"), _system("cc3")])
    shape = replace(
        shape, mid_system=all(_says(render, [_user("aa1"), *m], shape, "aa1", "bb2", "cc3") for m in middle)
    )
    for text, empty in ((False, ""), (False, None), (True, ""), (True, None)):
        candidate = replace(shape, arguments_as_text=text, empty_content=empty)
        if _says_tools(render, candidate):
            return candidate
    return replace(shape, tools=False)


def _says_tools(render: Render, shape: Shape) -> bool:
    """Definitions, one call and two calls, with and without text, and all their results."""

    def call(value: str, index: int) -> ToolCall:
        return ToolCall("probetool", f'{{"arg": "{value}"}}', f"call_probe{index}")

    def result(value: str, index: int) -> Message:
        return Message("tool", value, tool_call_id=f"call_probe{index}")

    one = [_user("aa1"), Message("assistant", tool_calls=(call("bb2", 0),)), result("cc3", 0), _assistant("dd4")]
    two = [
        _user("aa1"),
        Message("assistant", "bb2", tool_calls=(call("cc3", 0), call("dd4", 1))),
        result("ee5", 0),
        result("ff6", 1),
    ]
    described = ("probetool", "probedescription")
    return (
        _says(render, one, shape, *described, "aa1", "probetool", "bb2", "cc3", "dd4", tools=(_TOOL,))
        and _says(render, two, shape, "aa1", "bb2", "cc3", "dd4", "ee5", "ff6", tools=(_TOOL,))
        and _says(render, [_user("aa1")], shape, "probedescription", tools=(_TOOL,))
    )


def _says(render: Render, messages: Sequence[Message], shape: Shape, *words: str, tools: Sequence[Tool] = ()) -> bool:
    try:
        text = render([as_json(message, shape) for message in named(messages)], tool_json(tools))
    except TEMPLATE_ERRORS:
        return False
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0 or text[max(0, at - 8) : at].endswith("{'arg': '"[-8:]):  # Python's own notation is no JSON
            return False
        at += len(word)
    return True


def _system(text: str) -> Message:
    return Message("system", text)


def _user(text: str) -> Message:
    return Message("user", text)


def _assistant(text: str) -> Message:
    return Message("assistant", text)
