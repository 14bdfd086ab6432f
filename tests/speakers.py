"""One small harness for each model API: what it sends for a conversation, and how it keeps the answers it gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Wire = dict[str, Any]

PARAMETERS: Wire = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Any
    id: str


@dataclass(frozen=True)
class Answer:
    """What a harness reads out of a reply, and the entries that it adds to its history."""

    text: str
    calls: tuple[Call, ...]
    echo: tuple[Wire, ...]


class Speaker(Protocol):
    path: str

    def body(self, history: Sequence[Wire], max_tokens: int) -> Wire: ...

    def system(self, text: str) -> Wire: ...

    def user(self, text: str) -> Wire: ...

    def results(self, answer: Answer, *texts: str) -> list[Wire]: ...

    def read(self, reply: Wire) -> Answer: ...


class Chat:
    path = "/v1/chat/completions"

    def body(self, history: Sequence[Wire], max_tokens: int) -> Wire:
        tool = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
        return {
            "model": "m", "messages": list(history), "max_tokens": max_tokens,
            "tools": [{"type": "function", "function": tool}],
        }  # fmt: skip

    def system(self, text: str) -> Wire:
        return {"role": "system", "content": text}

    def user(self, text: str) -> Wire:
        return {"role": "user", "content": text}

    def results(self, answer: Answer, *texts: str) -> list[Wire]:
        return [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(answer.calls, texts, strict=True)
        ]

    def read(self, reply: Wire) -> Answer:
        message = reply["choices"][0]["message"]
        calls = [
            Call(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
            for call in message.get("tool_calls") or ()
        ]
        echo = {name: value for name, value in message.items() if value is not None}
        return Answer(message.get("content") or "", tuple(calls), (echo,))


class Anthropic:
    """System turns stand in a field of their own, and later ones among the messages."""

    path = "/v1/messages"

    def body(self, history: Sequence[Wire], max_tokens: int) -> Wire:
        first, *rest = history
        tool = {"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}
        return {
            "model": "m", "max_tokens": max_tokens, "system": first["content"], "messages": rest, "tools": [tool],
        }  # fmt: skip

    def system(self, text: str) -> Wire:
        return {"role": "system", "content": [{"type": "text", "text": text}]}

    def user(self, text: str) -> Wire:
        return {"role": "user", "content": text}

    def results(self, answer: Answer, *texts: str) -> list[Wire]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call, text in zip(answer.calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def read(self, reply: Wire) -> Answer:
        blocks = reply["content"]
        calls = [Call(one["name"], one["input"], one["id"]) for one in blocks if one["type"] == "tool_use"]
        text = "".join(one["text"] for one in blocks if one["type"] == "text")
        return Answer(text, tuple(calls), ({"role": "assistant", "content": blocks},))


class Responses:
    path = "/v1/responses"

    def body(self, history: Sequence[Wire], max_tokens: int) -> Wire:
        tool = {"type": "function", "name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
        return {
            "model": "m", "input": list(history), "max_output_tokens": max_tokens, "tools": [tool], "store": False,
            "include": ["reasoning.encrypted_content"],
        }  # fmt: skip

    def system(self, text: str) -> Wire:
        return {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}

    def user(self, text: str) -> Wire:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def results(self, answer: Answer, *texts: str) -> list[Wire]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": text}
            for call, text in zip(answer.calls, texts, strict=True)
        ]

    def read(self, reply: Wire) -> Answer:
        items = reply["output"]
        calls = [
            Call(item["name"], json.loads(item["arguments"]), item["call_id"])
            for item in items
            if item["type"] == "function_call"
        ]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        return Answer("".join(texts), tuple(calls), tuple(items))


class Google:
    """It keeps no thoughts, as the real program does; what it keeps of them is their signature."""

    path = "/v1beta/models/m:generateContent"

    def body(self, history: Sequence[Wire], max_tokens: int) -> Wire:
        first, *rest = history
        tool = {"name": "bash", "description": "Run a command.", "parametersJsonSchema": PARAMETERS}
        return {
            "systemInstruction": {"role": "user", "parts": first["parts"]}, "contents": rest,
            "tools": [{"functionDeclarations": [tool]}], "generationConfig": {"maxOutputTokens": max_tokens},
        }  # fmt: skip

    def system(self, text: str) -> Wire:
        """The API has no system turn but the first: a reminder is a user's."""
        return {"role": "user", "parts": [{"text": text}]}

    def user(self, text: str) -> Wire:
        return {"role": "user", "parts": [{"text": text}]}

    def results(self, answer: Answer, *texts: str) -> list[Wire]:
        parts = [
            {"functionResponse": {"id": call.id, "name": call.name, "response": {"output": text}}}
            for call, text in zip(answer.calls, texts, strict=True)
        ]
        return [{"role": "user", "parts": parts}]

    def read(self, reply: Wire) -> Answer:
        parts = reply["candidates"][0]["content"].get("parts", [])
        calls = [
            Call(part["functionCall"]["name"], part["functionCall"]["args"], part["functionCall"].get("id", ""))
            for part in parts
            if "functionCall" in part
        ]
        text = "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))
        kept = [part for part in parts if not part.get("thought")]
        return Answer(text, tuple(calls), ({"role": "model", "parts": kept},))


SPEAKERS: dict[str, Speaker] = {
    "openai_chat": Chat(), "anthropic_messages": Anthropic(), "openai_responses": Responses(),
    "google_generate": Google(),
}  # fmt: skip
