"""A chat reply comes back as each client spells it, and still means the reply that was sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from polar_plugin.engine.meaning import message_digest
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.records import Message, ToolCall

from .anthropic_replies import replies
from .scripted import HELLO, completion_of, say

DIALECT = OpenAIChat()
Wire = dict[str, Any]

REPLIES = {
    "text": say("Done.\n"),
    "reasoning and text": say("Four. ", "two and two\n"),
    "calls": say("", "", ToolCall("bash", '{"command": "ls -l",  "timeout": 1.0}', "a"), ToolCall("look", "{}", "b")),
    "all": say("\nlook:", "\nhmm ", ToolCall("write", '{"path":"\\u00e9.txt","text":"a\\nb","n":[1,2.50]}', "a")),
}


def call_functions(message: Wire) -> list[Wire]:
    return [call["function"] for call in message.get("tool_calls", ())]


def rewritten(message: Wire, change: Callable[[Any], str]) -> Wire:
    for function in call_functions(message):
        function["arguments"] = change(json.loads(function["arguments"]))
    return message


def with_parts(message: Wire) -> Wire:
    text = message["content"]
    return message if text is None else message | {"content": [{"type": "text", "text": text}]}


ECHOES: dict[str, Callable[[Wire], Wire]] = {
    "word for word": lambda m: m,
    "arguments serialised again, without spaces": lambda m: rewritten(
        m, lambda a: json.dumps(a, separators=(",", ":"), ensure_ascii=False)
    ),
    "arguments with their keys in another order": lambda m: rewritten(m, lambda a: json.dumps(a, sort_keys=True)),
    "whole floats as integers": lambda m: rewritten(
        m, lambda a: json.dumps({k: int(v) if v == 1.0 else v for k, v in a.items()})
    ),
    "arguments as an object": lambda m: rewritten(m, lambda a: a),
    "other ids": lambda m: m | {"tool_calls": [c | {"id": f"x{c['id']}"} for c in m.get("tool_calls", ())]},
    "no reasoning": lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
    "trimmed reasoning": lambda m: m | {"reasoning_content": m.get("reasoning_content", "").strip()},
    "reasoning under its other name": lambda m: (
        {k: v for k, v in m.items() if k != "reasoning_content"} | {"reasoning": m.get("reasoning_content")}
    ),
    "trimmed text": lambda m: m | {"content": (m["content"] or "").strip()},
    "a text of nothing but white space beside calls": lambda m: m | {"content": m["content"] or "\n"},
    "an empty text for none": lambda m: m | {"content": m["content"] or ""},
    "none for an empty text": lambda m: m | {"content": m["content"] or None},
    "no content at all beside calls": lambda m: {k: v for k, v in m.items() if k != "content" or v},
    "a list of parts": with_parts,
    "unset fields written as null": lambda m: (
        m | {"audio": None, "function_call": None, "name": None, "tool_calls": m.get("tool_calls")}
    ),
    "fields of the client's own": lambda m: m | {"refusal": None, "annotations": [], "provider_specific_fields": {}},
}


def compact(arguments: Any) -> str:
    return json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)


def by_qwen_code(message: Wire) -> Wire:
    """Reasoning is trimmed, arguments serialised again; no text is null, or "" beside reasoning; texts are parts."""
    reasoning = message.get("reasoning_content", "").strip()
    out = rewritten(message, compact) | {"content": message["content"] or ("" if reasoning else None)}
    return out | {"reasoning_content": reasoning} if reasoning else with_parts(out)


def by_opencode(message: Wire) -> Wire:
    """Arguments are serialised again; a turn without text has an empty one."""
    return rewritten(message, compact) | {"content": message["content"] or ""}


def by_pi(message: Wire) -> Wire:
    """Arguments are serialised again, no text is null, and each call has only the fields that it needs."""
    out = {key: value for key, value in rewritten(message, compact).items() if key != "refusal"}
    return out | {"content": message["content"] or None}


def by_mini_swe_agent(message: Wire) -> Wire:
    """Word for word, as litellm has it: what is null is left out, and fields of its own are added."""
    out = {key: value for key, value in message.items() if value is not None}
    return out | {"provider_specific_fields": {"refusal": None}, "extra": {"cost": 0.0}}


def by_openhands(message: Wire) -> Wire:
    """Reasoning is dropped, and so is a text of white space."""
    out = {key: value for key, value in message.items() if key != "reasoning_content"}
    return out if (out["content"] or "").strip() else out | {"content": None}


PROGRAMS = {
    "Qwen Code": by_qwen_code, "opencode": by_opencode, "Pi": by_pi, "mini-swe-agent": by_mini_swe_agent,
    "OpenHands": by_openhands,
}  # fmt: skip
ECHOES |= PROGRAMS


def wire(reply: Message) -> Wire:
    incoming = Incoming("", {}, {}, HELLO)
    message = DIALECT.encode(completion_of(reply, DIALECT.decode(incoming)), incoming)["choices"][0]["message"]
    return json.loads(json.dumps(message))


def read(*messages: Wire) -> tuple[Message, ...]:
    return DIALECT.decode(Incoming("", {}, {}, {"messages": list(messages)})).messages


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_a_reply_is_known_again_however_its_client_spells_it(reply: Message, echo: Callable[[Wire], Wire]) -> None:
    (echoed,) = read(echo(wire(reply)))
    assert message_digest(echoed) == message_digest(reply)


@pytest.mark.parametrize("echo", PROGRAMS.values(), ids=PROGRAMS.keys())
@settings(deadline=None, max_examples=50)
@given(reply=replies())
def test_any_reply_is_known_again_as_each_program_says_it_back(reply: Message, echo: Callable[[Wire], Wire]) -> None:
    (echoed,) = read(echo(wire(reply)))
    assert message_digest(echoed) == message_digest(reply)
    assert [call.id for call in echoed.tool_calls] == [call.id for call in reply.tool_calls]
    if echo is by_mini_swe_agent:
        assert echoed.reasoning == reply.reasoning


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"content": "Something else."},
        lambda m: m | {"tool_calls": [*m.get("tool_calls", ()), {"id": "z", "function": {"name": "f"}}]},
        lambda m: rewritten(m, lambda a: json.dumps(a | {"more": 1})) if "tool_calls" in m else m | {"content": "?"},
    ],
    ids=["another text", "one call more", "other arguments"],
)
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_control_another_meaning_is_another_message(reply: Message, change: Callable[[Wire], Wire]) -> None:
    (echoed,) = read(change(wire(reply)))
    assert message_digest(echoed) != message_digest(reply)


def test_a_response_format_is_not_enforced_and_counted() -> None:
    body = HELLO | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}
    assert "response_format" in DIALECT.decode(Incoming("", {}, {}, body)).ignored
