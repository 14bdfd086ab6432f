"""A Google reply comes back as each client spells it, and still means the reply that was sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar_plugin.engine.meaning import message_digest
from polar_plugin.proxy import sse
from polar_plugin.proxy.body import parse
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.records import Message, ToolCall

from .anthropic_replies import REPLIES, replies
from .google_echoes import CHANGE_IDS, ECHOES, LOSE_REASONING, Echo, one_content
from .google_stream import SSEReader, read
from .scripted import completion_of, say

DIALECT = GoogleGenerate()
USER = {"role": "user", "parts": [{"text": "hi"}]}
PLAIN: dict[str, Any] = {"contents": [USER]}
THINKING = PLAIN | {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
LIST = ToolCall("bash", '{"command": "ls"}', "call_1")


def parts_of(reply: Message, body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """As a client reads them from the bytes."""
    method = "streamGenerateContent" if stream else "generateContent"
    incoming = Incoming(f"/v1beta/models/m:{method}", {}, {"alt": "sse"}, body, {"model": "m"})
    completion = completion_of(reply, DIALECT.decode(incoming))
    if stream:
        chunks = read(DIALECT.framing(incoming).encode(DIALECT.events(completion, incoming)), SSEReader())
    else:
        chunks = [json.loads(sse.to_json(DIALECT.encode(completion, incoming)))]
    return [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]


def decoded(said: list[dict[str, Any]]) -> Message:
    body = parse(json.dumps({"contents": [USER, *said, USER]}).encode())
    _, *turns, _ = DIALECT.decode(Incoming("/v1beta/models/m:generateContent", {}, {}, body)).messages
    (message,) = turns
    return message


@pytest.mark.parametrize("echo", ECHOES, ids=lambda echo: echo.__name__)
@settings(deadline=None, max_examples=30)
@given(reply=replies(), thoughts=st.booleans(), stream=st.booleans())
@example(reply=REPLIES["text, reasoning and several calls"], thoughts=True, stream=True)
@example(reply=REPLIES["unicode"], thoughts=False, stream=True)
@example(reply=REPLIES["a long text"], thoughts=False, stream=True)
@example(reply=REPLIES["reasoning"], thoughts=False, stream=False)
def test_case_103_however_a_client_says_a_reply_back_it_is_known_again(
    echo: Echo, reply: Message, thoughts: bool, stream: bool
) -> None:
    got = decoded(echo(parts_of(reply, THINKING if thoughts else PLAIN, stream=stream)))
    assert message_digest(got) == message_digest(reply)
    if echo not in CHANGE_IDS:
        assert [call.id for call in got.tool_calls] == [call.id for call in reply.tool_calls]
    if (reply.content or reply.tool_calls) and echo not in LOSE_REASONING:
        assert got.reasoning == reply.reasoning


def test_case_103_reasoning_is_restored_for_who_never_saw_it() -> None:
    reply = say("look:", "two and two", LIST, ToolCall("bash", "{}", "call_2"))
    told = json.dumps(parts_of(reply, PLAIN, stream=True))
    assert "two and two" not in told
    assert decoded(one_content(parts_of(reply, PLAIN, stream=True))).reasoning == "two and two"


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: [*parts, {"text": "more"}],
        lambda parts: parts[:-1],
        lambda parts: [*parts[:-1], {"functionCall": {"name": "bash", "args": {"command": "rm"}, "id": "call_1"}}],
        lambda parts: [*parts[:-1], {"functionCall": {"name": "sh", "args": {"command": "ls"}, "id": "call_1"}}],
    ],
    ids=["more text", "one call less", "other arguments", "another function"],
)
def test_control_another_meaning_is_another_message(change: Any) -> None:
    reply = say("look:", "hm", LIST)
    parts = parts_of(reply, THINKING, stream=True)
    assert message_digest(decoded(one_content(parts))) == message_digest(reply)
    assert message_digest(decoded(one_content(change(parts)))) != message_digest(reply)
