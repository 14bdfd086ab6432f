"""Agent programs that talk to a session in the words of their API, without HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.records import Completion, Message, ToolCall
from tests.property.letters import MARK, sampled
from tests.property.world import Reply, World

Wire = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}}


def said(text: str = "", *arguments: str, thought: str = "") -> Message:
    return Message("assistant", text, thought, tuple(ToolCall("bash", one) for one in arguments))


@dataclass
class Program:
    """A client of one API, and the session it talks to. The n-th call of a session has the id that `called` tells."""

    api: str

    def __post_init__(self) -> None:
        self.world = World()
        self.dialect = DIALECTS[self.api]

    def ask(
        self,
        messages: Sequence[Wire],
        says: Message | None = None,
        *,
        arrives: bool = True,
        headers: Wire | None = None,
        **more: Any,
    ) -> Completion:
        body, variables = BODIES[self.api](list(messages)) | more, {"model": "m"}
        request = self.dialect.decode(Incoming(PATHS[self.api], headers or {}, variables, json.loads(json.dumps(body))))
        ids = (*sampled(says or said("ok"), (True,)), MARK["end"])
        return self.world.answer(request, Reply(ids=ids), delivered=arrives)


DIALECTS: dict[str, Any] = {
    "anthropic": AnthropicMessages(), "chat": OpenAIChat(), "google": GoogleGenerate(), "responses": OpenAIResponses(),
}  # fmt: skip
PATHS = {
    "anthropic": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses",
    "google": "/v1beta/models/m:generateContent",
}  # fmt: skip
BODIES: dict[str, Any] = {
    "anthropic": lambda messages: {
        "model": "m", "max_tokens": 99, "system": "You work.", "messages": messages,
        "tools": [{"name": "bash", "input_schema": SCHEMA}],
    },
    "chat": lambda messages: {
        "model": "m", "messages": [{"role": "system", "content": "You work."}, *messages],
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
    },
    "google": lambda contents: {
        "systemInstruction": {"parts": [{"text": "You work."}]}, "contents": contents,
        "tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": SCHEMA}]}],
    },
    "responses": lambda items: {
        "model": "m", "instructions": "You work.", "input": items, "store": False,
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    },
}  # fmt: skip


def user(text: Any) -> Wire:
    return {"role": "user", "content": text}
