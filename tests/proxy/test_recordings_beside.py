"""Every request that eight real agent programs sent, whole, over HTTP to the proxy: answered, and nothing is lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from polar_plugin.errors import EngineBusy
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.records import ChatRequest
from tests.recorded.replay import PATIENCE, Recorded, headers_of, message_of, recordings

from .recorded_runs import LOSSES, runs
from .scripted import Scripted, say

PROGRAMS = sorted({name.split("/")[0] for name in recordings()})
_SPOKEN = ("system", "messages", "instructions", "input", "systemInstruction", "contents", "tools")
_UNSAID = {
    "cache_control", "encrypted_content", "id", "role", "signature", "status", "summary", "thoughtSignature", "type",
}  # fmt: skip
"""Of no meaning here: opaque fields, ids of what is no call, a summary of reasoning that is opaque and not ours."""


def texts(value: Any) -> Iterator[str]:
    """What a request has a model read; of tools those that are offered at once."""
    if isinstance(value, str):
        if not value.startswith("x-anthropic-billing-header"):
            yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict) and not value.get("defer_loading") and value.get("type") != "tool_search":
        for name, item in value.items():
            if name not in _UNSAID or (name == "id" and ("function" in value or "input" in value)):
                yield from texts(item)


def told(request: ChatRequest) -> Iterator[str]:
    for message in request.messages:
        yield from (message.content, message.reasoning, message.tool_call_id or "", message.name or "")
        for call in message.tool_calls:
            yield from (call.name, call.id, *values(call.arguments))
    for tool in request.tools:
        yield from (tool.name, tool.description, *texts(tool.parameters))


def values(text: str) -> Iterable[str]:
    """The strings in JSON, in whatever spelling; a text that is none is one value."""
    try:
        return list(texts(json.loads(text)))
    except ValueError:
        return [text]


def lost(body: dict[str, Any], request: ChatRequest) -> list[str]:
    """What the request's conversation and tools say more often than what became of it."""
    all_told = "\n".join(told(request))
    said = Counter(text.strip() for field in _SPOKEN for text in texts(body.get(field)))
    return [
        text
        for text, times in said.items()
        if any(all_told.count(one) < times for one in ([text] if text in all_told else values(text)))
    ]


async def answered(exchanges: list[Recorded]) -> tuple[list[int], list[ChatRequest]]:
    """Statuses, and the requests as they were read. Where the program got no answer it gets none of ours."""
    replies = iter(exchanges)

    async def fail_as_recorded(_: ChatRequest) -> None:
        if next(replies).reply is None:
            raise EngineBusy("as recorded: no answer", retry_after=1.0)

    engine = Scripted([say() if one.reply is None else message_of(one.reply) for one in exchanges])
    engine.before = fail_as_recorded
    statuses: list[int] = []
    async with (
        Proxy(ProxyConfig(header_grace_seconds=PATIENCE)).serving() as proxy,
        aiohttp.ClientSession() as http,
        proxy.session("s", engine) as session,
    ):
        for one in exchanges:
            url = f"{proxy.url}/s/{session.key}{one.path}"
            async with http.request(one.method, url, headers=headers_of(one), json=one.body) as response:
                await response.read()
                statuses.append(response.status)
    return statuses, engine.requests


@pytest.mark.anyio
@pytest.mark.parametrize("program", PROGRAMS)
async def test_every_whole_request_of_a_program_is_answered_and_nothing_of_it_is_lost(
    program: str, beside: dict[str, list[Recorded]]
) -> None:
    found = [exchanges for name, exchanges in beside.items() if name.startswith(f"{program}/")]
    assert found
    for exchanges in found:
        statuses, requests = await answered(exchanges)
        assert statuses == [503 if one.reply is None else 200 for one in exchanges]
        for one, request in zip(exchanges, requests, strict=True):
            assert set(request.ignored) <= LOSSES[request.api]
            assert lost(one.body, request) == []


def test_the_check_finds_what_is_left_out() -> None:
    asked = runs(OpenAIChat(), "/chat/completions")["pi-1.6.0/long"][-1]
    assert lost(asked.body, asked.request) == []
    for number in range(len(asked.request.messages)):
        kept = (*asked.request.messages[:number], *asked.request.messages[number + 1 :])
        assert lost(asked.body, replace(asked.request, messages=kept))
    assert lost(asked.body, replace(asked.request, tools=asked.request.tools[1:]))
