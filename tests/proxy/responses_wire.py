"""A Responses client's side: tools of every kind, replies that use them, and the openai SDK around a proxy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openai

from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import ChatRequest, Completion, FinishReason, Message, ToolCall

from .scripted import Scripted, completion_of, say, serving

Wire = dict[str, Any]
PATH = "/v1/responses"
DIALECT = OpenAIResponses()
PARAMETERS: Wire = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION: Wire = {
    "type": "function", "name": "bash", "description": "Run it.", "parameters": PARAMETERS, "strict": False,
}  # fmt: skip
GRAMMAR = 'start: "*** Begin" /.+/ "*** End"'
CUSTOM: Wire = {
    "type": "custom", "name": "apply_patch", "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}  # fmt: skip
NAMESPACE: Wire = {
    "type": "namespace", "name": "agents", "description": "Tools for agents.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Start one.", "parameters": PARAMETERS, "strict": False},
        {"type": "custom", "name": "note", "description": "Note it.", "format": {"type": "text"}},
    ],
}  # fmt: skip
SHELL: Wire = {"type": "local_shell"}
TOOLS = [FUNCTION, CUSTOM, NAMESPACE, SHELL]
BODY: Wire = {"model": "policy", "input": "hi", "tools": TOOLS, "reasoning": {"summary": "auto"}}

RUN = ToolCall("bash", '{"command": "ls  -l", "n": 1.0}', "call_1")
UNICODE = ToolCall("bash", '{"command": "a \\u00e9 \\ud83d\\ude00 π"}', "call_2")
NOTHING = ToolCall("bash", "{}", "call_3")
PATCH = ToolCall("apply_patch", '{"input": "*** Begin\\n+é \\"x\\"\\n*** End"}', "call_4")
SPAWN = ToolCall("agents__spawn", '{"command": "count"}', "call_5")
NOTE = ToolCall("agents__note", '{"input": "remember"}', "call_6")
EXEC = ToolCall("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 1000, "working_directory": "/"}', "call_7")
UNKNOWN = ToolCall("invented", '{"x": [1, {"y": null}]}', "call_8")

REPLIES: dict[str, Message] = {
    "text": say("hello"),
    "reasoning and text": say("four", "two and two\n"),
    "reasoning alone": say("", "hmm"),
    "one call": say("", "", RUN),
    "several calls": say("", "", RUN, UNICODE, NOTHING),
    "a custom call": say("", "", PATCH),
    "namespaced calls": say("", "", SPAWN, NOTE),
    "a shell call": say("", "", EXEC),
    "a tool that nobody offered": say("", "", UNKNOWN),
    "all in one turn": say("look:\n", "\n so ", RUN, PATCH, SPAWN, EXEC, UNICODE, NOTE),
    "nothing at all": say(),
    "unicode": say("π 😀 \u2028 \u0000 \x85 日本語" * 400, "思考 \u2029"),
    "lone surrogates": say("a \ud83d b", "c \udc00", ToolCall("bash", '{"command": "\\ud83d"}', "call_9")),
    "a long text": say("word " * 5000, "why " * 3000),
}


def incoming_of(
    body: Wire, *, path: str = PATH, recall: Callable[[str], Completion | None] = lambda _: None, **headers: str
) -> Incoming:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Incoming(path, named, {}, body, recall=recall)


def decode(body: Wire, **more: Any) -> ChatRequest:
    return DIALECT.decode(incoming_of(body, **more))


def complete(reply: Message, body: Wire = BODY, *, finish: FinishReason = FinishReason.STOP, **more: Any) -> Completion:
    return completion_of(reply, decode(body, **more), finish=finish)


def whole(reply: Message, body: Wire = BODY, **more: Any) -> Wire:
    return DIALECT.encode(complete(reply, body, **more), incoming_of(body, **more))


def client_of(url: str, key: str, **options: Any) -> openai.AsyncOpenAI:
    options = {"_strict_response_validation": True, "max_retries": 0} | options
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)


@asynccontextmanager
async def sdk(reply: Scripted, config: ProxyConfig | None = None, **options: Any) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with serving(reply, config) as (proxy, session, _), client_of(proxy.url, session.key, **options) as client:
        with anyio.fail_after(60):
            yield client
