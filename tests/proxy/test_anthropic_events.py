"""Anthropic replies: a strict state machine over any of them, and what their echoes mean."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import BetaErrorResponse
from anthropic.types import Message as AnthropicMessage
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar_plugin.engine.meaning import message_digest
from polar_plugin.errors import (
    BadRequest,
    ContextOverflow,
    EngineBusy,
    EngineError,
    PolarError,
    SessionSealed,
    UnknownSession,
)
from polar_plugin.proxy import sse
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.body import parse
from polar_plugin.proxy.codec import Event, Incoming
from polar_plugin.records import Completion, FinishReason, Message, SamplingParams, ToolCall

from .anthropic_replies import ECHOES, HELLO, LIST, NOTHING, READ, REPLIES, Echo, replies
from .anthropic_stream import StreamReader, read
from .oracle import exactly
from .scripted import completion_of, say

DIALECT = AnthropicMessages()
INCOMING = Incoming("/v1/messages", {}, {}, HELLO)
USER = {"role": "user", "content": "go on"}
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda i: st.lists(i) | st.dictionaries(st.text(), i),
)
any_arguments = any_json.map(json.dumps) | st.text() | st.sampled_from(["", "{", "null", '{"a": 1e999}', '{"a":1}{}'])


def completion(reply: Message, finish: FinishReason = FinishReason.STOP) -> Completion:
    return completion_of(reply, DIALECT.decode(INCOMING), finish=finish)


def whole(reply: Message, finish: FinishReason = FinishReason.STOP) -> Any:
    """As a client parses it; checked against the SDK's models."""
    data = sse.to_json(DIALECT.encode(completion(reply, finish), INCOMING))
    exactly(AnthropicMessage, data)
    return json.loads(data)


def stream(reply: Message, finish: FinishReason = FinishReason.STOP) -> bytes:
    return DIALECT.framing(INCOMING).encode(DIALECT.events(completion(reply, finish), INCOMING))


def decoded(*said: dict[str, Any]) -> Message:
    """What an echo means, read from its bytes."""
    body = parse(json.dumps(HELLO | {"messages": [*HELLO["messages"], *said, USER]}).encode())
    _, *turns, _ = DIALECT.decode(Incoming("/v1/messages", {}, {}, body)).messages
    (message,) = turns
    return message


# --- streams ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(replies(surrogates=True, arguments=any_arguments), st.sampled_from(FinishReason))
@example(say("\ud83d", "\ude00", ToolCall("f", '{"a": "\\ud83d"}', id="1")), FinishReason.STOP)
@example(say(), FinishReason.STOP)
def test_case_70_any_reply_streams_in_the_order_of_the_api_and_adds_up_to_the_whole_one(
    reply: Message, finish: FinishReason
) -> None:
    assert read(stream(reply, finish)) == as_read(whole(reply, finish))


def as_read(value: Any) -> Any:
    """Both halves of a surrogate pair in one string, however it was cut up, are one character."""
    return json.loads(json.dumps(value))


@settings(deadline=None, max_examples=60)
@given(replies(surrogates=True), st.data())
def test_case_89_a_stream_reads_the_same_however_the_network_cuts_it(reply: Message, data: st.DataObject) -> None:
    sent = stream(reply)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sent)), max_size=20)))
    reader = StreamReader()
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        reader.feed(sent[start:end])
    assert reader.finish() == read(sent)


def test_case_89_a_stream_may_be_cut_at_each_of_its_bytes() -> None:
    reply = say("é😀", "思考", LIST, READ)
    sent = stream(reply)
    assert "😀".encode() not in sent  # escaped, so that no cut damages a character
    for cut in range(len(sent)):
        reader = StreamReader()
        reader.feed(sent[:cut])
        assert not reader.stopped
        reader.feed(sent[cut:])
        assert reader.finish()["content"][1]["text"] == "é😀"


def test_case_71_parallel_calls_have_contiguous_indexes_and_each_starts_and_stops_once() -> None:
    calls = tuple(replace(LIST, id=f"call_{i}") for i in range(8))
    events = [event.data for event in DIALECT.events(completion(say("", "", *calls)), INCOMING)]
    for kind in ("content_block_start", "content_block_stop"):
        assert [e["index"] for e in events if isinstance(e, dict) and e["type"] == kind] == list(range(8))


def test_case_78_no_block_is_empty_or_blank() -> None:
    assert [block["type"] for block in whole(REPLIES["empty text with calls"])["content"]] == [
        "thinking",
        "tool_use",
        "tool_use",
    ]
    assert [block["type"] for block in whole(REPLIES["blank text with calls"])["content"]] == ["thinking", "tool_use"]
    assert whole(say(" \n", "\t"))["content"] == whole(say())["content"] == []


def swapped(events: list[Event], a: int, b: int) -> list[Event]:
    out = list(events)
    out[a], out[b] = out[b], out[a]
    return out


def changed(events: list[Event], at: int, **more: Any) -> list[Event]:
    data = events[at].data
    assert isinstance(data, dict)
    return [*events[:at], Event(data | more, name=events[at].name), *events[at + 1 :]]


SPOILED = {
    "no end": lambda e: e[:-1],
    "no beginning": lambda e: e[1:],
    "two beginnings": lambda e: [e[0], *e],
    "two ends": lambda e: [*e, e[-1]],
    "something behind the end": lambda e: [*e, e[3]],
    "no message_delta": lambda e: [*e[:-2], e[-1]],
    "two message_deltas": lambda e: [*e[:-1], *e[-2:]],
    "a block that does not start": lambda e: [e[0], *e[2:]],
    "a block that does not stop": lambda e: [*e[:4], *e[5:]],
    "a block that stops twice": lambda e: [*e[:5], e[4], *e[5:]],
    "a gap in the indexes": lambda e: [*e[:5], *e[8:]],
    "a delta of another kind": lambda e: swapped(e, 2, 6),
    "a signature before its reasoning": lambda e: swapped(e, 2, 3),
    "no signature": lambda e: [*e[:3], *e[4:]],
    "two signatures": lambda e: [*e[:4], e[3], *e[4:]],
    "an empty text": lambda e: [*e[:6], *e[7:]],
    "calls before text": lambda e: [*e[:5], *e[8:11], *e[5:8], *e[11:]],
    "an unknown field": lambda e: changed(e, 6, novelty=1),
    "a name that is not the type": lambda e: [*e[:-1], Event(e[-1].data, name="message_end")],
    "an index as text": lambda e: changed(e, 6, index="1"),
    "half an object": lambda e: changed(e, 9, delta={"type": "input_json_delta", "partial_json": '{"a'}),
    "an unknown reason": lambda e: changed(e, -2, delta={"stop_reason": "stop", "stop_sequence": None}),
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_control_the_state_machine_rejects_a_spoiled_stream(spoil: Any) -> None:
    events = list(DIALECT.events(completion(say("text", "thought", LIST, NOTHING)), INCOMING))
    encode = DIALECT.framing(INCOMING).encode
    read(encode(events))
    with pytest.raises((AssertionError, ValueError, TypeError)):
        read(encode(spoil(events)))


@pytest.mark.parametrize(
    "spoil",
    [lambda m: m.pop("usage"), lambda m: m.update(novelty=1), lambda m: m["content"][0].update(text=7),
     lambda m: m["usage"].update(input_tokens="8"), lambda m: m["content"][1].pop("input"), lambda m: m.pop("id"),
     lambda m: m.update(stop_reason="stop"), lambda m: m["content"][1].update(novelty=None)],
)  # fmt: skip
def test_control_the_oracle_rejects_a_spoiled_message(spoil: Any) -> None:
    message = whole(say("text", "", LIST))
    spoil(message)
    with pytest.raises(ValueError):
        exactly(AnthropicMessage, json.dumps(message))


# --- how a turn ended ------------------------------------------------------------------------------------------------


def ended(reply: Message, *, asked: tuple[str, ...] = (), stop: str | None = None, finish: str = "stop") -> Any:
    one = completion(reply, FinishReason(finish))
    one = replace(
        one,
        request=replace(one.request, sampling=SamplingParams(stop=asked)),
        generation=replace(one.generation, stop=stop),
    )
    told = DIALECT.encode(one, INCOMING)
    final = [event.data for event in DIALECT.events(one, INCOMING)][-2]
    assert isinstance(final, dict)
    assert final["delta"] == {"stop_reason": told["stop_reason"], "stop_sequence": told["stop_sequence"]}
    return told["stop_reason"], told["stop_sequence"]


def test_the_reason_why_a_turn_ended_is_told() -> None:
    assert ended(say("x")) == ("end_turn", None)
    assert ended(say("x", "", LIST)) == ("tool_use", None)
    assert ended(say("x"), finish="length") == ("max_tokens", None)
    assert ended(say("x"), asked=("END",), stop="END") == ("stop_sequence", "END")


def test_a_cut_turn_says_so_even_with_calls_and_calls_are_to_be_run_even_behind_a_stop_string() -> None:
    assert ended(say("x", "", LIST), finish="length") == ("max_tokens", None)
    assert ended(say("x", "", LIST), asked=("END",), stop="END") == ("tool_use", None)


def test_a_stop_string_of_the_trainers_own_is_not_told_to_the_client() -> None:
    assert ended(say("x"), asked=("END",), stop="<|user|>") == ("end_turn", None)


def test_case_75_usage_is_the_number_of_true_ids() -> None:
    one = completion(say("x"))
    usage = DIALECT.encode(one, INCOMING)["usage"]
    assert usage["input_tokens"] == len(one.prompt_ids)
    assert usage["output_tokens"] == len(one.generation.output_ids)
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)


def test_a_reply_id_carries_the_apis_prefix_once_and_calls_without_an_id_get_one() -> None:
    message = whole(say("", "", ToolCall("f", "{}"), ToolCall("g", "{}")))
    assert message["id"] == "msg_c1"
    assert [block["id"] for block in message["content"]] == ["toolu_c1_0", "toolu_c1_1"]
    assert DIALECT.encode(replace(completion(say("x")), id="msg_7"), INCOMING)["id"] == "msg_7"


# --- echoes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("echo", ECHOES, ids=lambda echo: echo.__name__)
@settings(deadline=None, max_examples=40)
@given(reply=replies())
@example(reply=REPLIES["text, reasoning and several calls"])
@example(reply=REPLIES["unicode"])
def test_however_a_client_says_a_reply_back_it_is_known_again(echo: Echo, reply: Message) -> None:
    got = decoded(*echo(whole(reply)["content"]))
    assert message_digest(got) == message_digest(reply)
    assert [call.id for call in got.tool_calls] == [call.id for call in reply.tool_calls]


@settings(deadline=None, max_examples=60)
@given(replies(surrogates=True, arguments=any_arguments))
@example(say("", "", ToolCall("f", "[" * 200 + "]" * 200, id="1")))
@example(say("", "", ToolCall("f", '{"a":' * 150 + "1" + "}" * 150, id="1")))
@example(say("", "", ToolCall("f", '{"a": ' + "9" * 5000 + "}", id="1")))
@example(say("", "", ToolCall("f", '{"a": NaN, "b": Infinity}', id="1")))
def test_arguments_that_are_no_json_object_arrive_as_one_and_come_back_as_they_were(reply: Message) -> None:
    content = whole(reply)["content"]
    assert read(stream(reply))["content"] == as_read(content)
    assert message_digest(decoded({"role": "assistant", "content": content})) == message_digest(as_text(reply))


def as_text(reply: Message) -> Message:
    """Surrogate pairs joined, as any JSON reader does."""
    calls = tuple(
        replace(call, name=as_read(call.name), arguments=as_read(call.arguments)) for call in reply.tool_calls
    )
    return replace(reply, content=as_read(reply.content), tool_calls=calls)


@pytest.mark.parametrize("reasoning", ["two and two", "思考 😀 \ud83d", "x" * 24 * 1024])
def test_case_73_our_signature_is_stable_and_restores_the_reasoning(reasoning: str) -> None:
    (first,), (again,) = whole(say("", reasoning))["content"], whole(say("", reasoning))["content"]
    assert first == again
    assert whole(say("", reasoning + "."))["content"][0]["signature"] != first["signature"]
    text = {"type": "text", "text": "4"}
    for block in (first, first | {"thinking": ""}, {"type": "redacted_thinking", "data": first["signature"]}):
        assert decoded({"role": "assistant", "content": [block, text]}) == say("4", reasoning)


def test_case_73_the_signature_of_long_reasoning_stays_short() -> None:
    (block,) = whole(say("", "é" * 100_000))["content"]
    assert len(block["signature"]) < 100
    assert decoded({"role": "assistant", "content": [block]}).reasoning == "é" * 100_000
    assert max(map(len, stream(say("", "é" * 12_288)).split(b"\n"))) < 2**16


# --- errors and small answers ----------------------------------------------------------------------------------------


class Odd(PolarError):
    def __init__(self, status: int) -> None:
        super().__init__("odd")
        self.status = status  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("odd", path="messages.0"), "invalid_request_error"),
        (ContextOverflow(9, 8), "invalid_request_error"),
        (UnknownSession("who"), "authentication_error"),
        (SessionSealed("over"), "invalid_request_error"),
        (EngineError("no ids"), "api_error"),
        (EngineBusy("full"), "overloaded_error"),
        (Odd(403), "permission_error"),
        (Odd(404), "not_found_error"),
        (Odd(429), "rate_limit_error"),
        (Odd(500), "api_error"),
        (Odd(504), "timeout_error"),
        (Odd(529), "overloaded_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__} {value.status}",
)
def test_errors_have_the_apis_shape_and_type(error: PolarError, kind: str) -> None:
    body = DIALECT.error(error)
    exactly(BetaErrorResponse, sse.to_json(body))
    assert body["error"] == {"type": kind, "message": str(error)}
    assert DIALECT.error_event(error) == Event(body, name="error")


def test_a_body_that_is_too_large_has_an_error_type_of_its_own() -> None:
    assert DIALECT.error(Odd(413))["error"]["type"] == "request_too_large"


def test_case_76_an_overflow_is_worded_as_clients_know_it() -> None:
    assert DIALECT.error(ContextOverflow(8193, 8192))["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 8193 tokens > 8192 maximum",
    }


def test_the_sign_of_life_is_the_apis_ping() -> None:
    assert DIALECT.framing(INCOMING).keepalive == b'event: ping\ndata: {"type":"ping"}\n\n'
