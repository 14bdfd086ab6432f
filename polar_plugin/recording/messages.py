"""Messages and tools as the JSON objects of a recording, and back. Pure."""

from __future__ import annotations

from typing import Any, cast

from ..merge.traces import message_json as chat_json
from ..records import Image, JSONObject, Message, Tool, ToolCall
from .fields import known, shallow, typed

_ROLES = ("system", "user", "assistant", "tool")


def message_json(message: Message) -> JSONObject:
    """OpenAI Chat's form, and `parts` where there are images."""
    told = chat_json(message)
    if message.parts:
        told["parts"] = [part if isinstance(part, str) else shallow(part) for part in message.parts]
    return told


def message_of(told: Any) -> Message:
    """Raises ValueError on what is no message."""
    if not isinstance(told, dict):
        raise ValueError(f"a message must be an object, got {told!r:.60}")
    told = cast("JSONObject", told)
    if told["role"] not in _ROLES:
        raise ValueError(f"`role` must be one of {', '.join(_ROLES)}, got {told['role']!r:.60}")
    return Message(
        role=told["role"],
        content=typed(told, "content", str) or "",
        reasoning=typed(told, "reasoning_content", str) or "",
        tool_calls=tuple(_call(call) for call in typed(told, "tool_calls", list) or ()),
        tool_call_id=typed(told, "tool_call_id", str) or "",
        name=typed(told, "name", str) or "",
        parts=tuple(_part(part) for part in typed(told, "parts", list) or ()),
    )


def tool_of(told: JSONObject) -> Tool:
    return Tool(**known(Tool, told["function"]))


def _call(told: JSONObject) -> ToolCall:
    function = told["function"]
    for key in ("name", "arguments"):
        typed(function, key, str)
    return ToolCall(function["name"], function["arguments"], typed(told, "id", str) or "")


def _part(told: Any) -> str | Image:
    if isinstance(told, str):
        return told
    if not isinstance(told, dict):
        raise ValueError(f"`parts` must be texts and images, got {told!r:.60}")
    image = known(Image, cast("JSONObject", told))
    return Image(**{key: typed(image, key, str) or "" for key in image})
