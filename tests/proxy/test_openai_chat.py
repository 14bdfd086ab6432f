"""The OpenAI Chat dialect as a pure codec."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_plugin.proxy import sse
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.records import IMAGE, ChatRequest, FinishReason, Image, Message, SamplingParams, Tool, ToolCall

from .openai_stream import StreamReader, check_whole, read
from .scripted import HELLO, completion_of, say

DIALECT = OpenAIChat()
USER = {"role": "user", "content": "hi"}


def decode(headers: dict[str, str] | None = None, **body: Any) -> ChatRequest:
    return DIALECT.decode(Incoming("/v1/chat/completions", headers or {}, {}, {"messages": [USER], **body}))


def messages(*raw: dict[str, Any]) -> tuple[Message, ...]:
    return decode(messages=list(raw)).messages


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- requests --------------------------------------------------------------------------------------------------------


def test_case_113_developer_and_system_turns_are_system_messages_where_they_stand() -> None:
    got = messages({"role": "developer", "content": "a"}, USER, {"role": "system", "content": "b"})
    assert got == (Message("system", "a"), Message("user", "hi"), Message("system", "b"))


def test_parts_are_lines_of_a_user_but_pieces_of_an_assistant() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    got = messages({"role": "user", "content": parts}, {"role": "assistant", "content": parts})
    assert got == (Message("user", "one\ntwo"), Message("assistant", "onetwo"))


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "hi"}], ["hi"]], ids=["text", "part", "bare"])
def test_a_text_and_a_list_of_one_text_are_the_same_message(content: Any) -> None:
    assert messages({"role": "user", "content": content}) == (Message("user", "hi"),)


@pytest.mark.parametrize(
    ("part", "placeholder", "path"),
    [
        ({"type": "image_url", "image_url": {"url": ""}}, "[image omitted]", "messages.*.content.*.image_url"),
        ({"type": "image_url", "image_url": None}, "[image omitted]", "messages.*.content.*.image_url"),
        ({"type": "input_audio", "input_audio": {}}, "[audio omitted]", "messages.*.content.*.input_audio"),
        ({"type": "file", "file": {}}, "[file omitted]", "messages.*.content.*.file"),
        ({"odd": 1}, "[part omitted]", "messages.*.content.*.part"),
    ],
)
def test_a_part_that_is_no_text_leaves_a_placeholder_and_is_counted(part: Any, placeholder: str, path: str) -> None:
    got = decode(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])
    assert got.messages == (Message("user", f"see\n{placeholder}"),)
    assert got.ignored == (path,)


@pytest.mark.parametrize(
    ("url", "image"),
    [
        ("data:image/png;base64,AAAA", Image("image/png", "AAAA")),
        ("https://host/a.png", Image(url="https://host/a.png")),
        ("data:", Image(url="data:")),
    ],
)
def test_case_80_an_image_is_a_part_and_not_dropped(url: str, image: Image) -> None:
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    got = decode(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])
    assert got.messages == (Message("user", f"see\n{IMAGE}", parts=("see", image)),)
    assert got.ignored == ()


def test_a_tool_result_is_told_the_function_that_its_call_named() -> None:
    got = messages(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("bash", "{}", "a"), call("read", "{}", "b")]},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "A"}], "name": "sh"},
        {"role": "tool", "tool_call_id": "z", "content": None, "name": "lost"},
    )
    assert [(m.name, m.content, m.tool_call_id) for m in got[2:]] == [
        ("read", "B", "b"),
        ("bash", "A", "a"),
        ("lost", "", "z"),
    ]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a":  1}', '{"a":  1}'), ("", "{}"), (None, "{}"), ({"a": "é"}, '{"a": "é"}'), ("no json", "no json")],
)
def test_arguments_are_kept_as_written(arguments: Any, read: str) -> None:
    (message,) = messages({"role": "assistant", "tool_calls": [call("f", arguments)]})
    assert message.tool_calls[0].arguments == read


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_under_both_of_its_names(field: str) -> None:
    got = decode(messages=[{"role": "assistant", "content": "4", field: "2+2"}])
    assert got.messages == (Message("assistant", "4", "2+2"),)
    assert got.ignored == ()


def test_tools_are_read_in_both_forms_and_other_kinds_are_counted() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    got = decode(
        tools=[
            {"type": "function", "function": {"name": "f", "description": "F", "parameters": schema, "strict": None}},
            {"type": "function", "name": "g"},
            {"type": "custom", "custom": {"name": "h"}},
        ]
    )
    assert got.tools == (Tool("f", "F", schema), Tool("g"))
    assert got.ignored == ("tools.*.custom",)


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, "f"),
        ({"type": "allowed_tools", "allowed_tools": {}}, "auto"),
    ],
)
def test_tool_choice(choice: Any, read: str) -> None:
    assert decode(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=choice).tool_choice == read


def test_what_the_harness_asked_of_sampling_is_recorded() -> None:
    got = decode(temperature=0, top_p=0.9, top_k=20, max_tokens=9, stop="END", seed=7, n=1, stream=True, model="m")
    assert got.sampling == SamplingParams(0.0, 0.9, 20, 9, ("END",), 7)
    assert (got.stream, got.model, got.api, got.ignored) == (True, "m", "openai_chat", ())


def test_what_is_not_asked_is_left_at_its_default() -> None:
    unset = dict.fromkeys(
        ["temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "stream"]
    )
    assert decode(**unset) == decode(stop=[""]) == ChatRequest((Message("user", "hi"),), api="openai_chat")


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert decode(max_tokens=5, max_completion_tokens=6.0).sampling.max_tokens == 6


@pytest.mark.parametrize(("header", "retry"), [("0", False), ("1", True), ("2", True)])
def test_the_sdks_retry_header_marks_a_retry(header: str, retry: bool) -> None:
    assert decode({"x-stainless-retry-count": header}).retry is retry


def test_case_113_unknown_fields_are_dropped_and_named_once() -> None:
    got = decode(
        store=False,
        reasoning_effort="high",
        functions=[{"name": "legacy"}],
        metadata={},
        response_format={"type": "json_object"},
        messages=[{**USER, "name": "bob", "weight": 1}, {**USER, "weight": 0, "refusal": None}],
    )
    assert got.ignored == ("functions", "messages.*.weight", "reasoning_effort", "response_format", "store")
    assert len(got.messages) == 2


def test_decoding_changes_nothing_in_the_body() -> None:
    body = {"messages": [{"role": "assistant", "tool_calls": [call("f", {"a": 1})]}], "tools": [], "stop": ["x", ""]}
    before = json.dumps(body)
    DIALECT.decode(Incoming("", {}, {}, body))
    assert json.dumps(body) == before


# --- replies: a strict state machine over any of them ----------------------------------------------------------------

any_text = st.text(st.characters(exclude_categories=())).flatmap(
    lambda text: st.sampled_from([1, 1, 1, 900]).map(lambda times: text * times)
)
any_call = st.builds(
    ToolCall,
    name=st.text(min_size=1),
    arguments=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(json.dumps)
    | st.just(""),
    id=st.uuids().map(str),
)
any_reply = st.builds(
    Message, role=st.just("assistant"), content=any_text, reasoning=any_text, tool_calls=st.lists(any_call).map(tuple)
)


def as_read(text: str) -> str:
    """As any JSON reader gets it: the two halves of a surrogate pair, side by side, are one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def streamed(reply: Message, *, usage: bool = False, **more: Any) -> bytes:
    incoming = Incoming("", {}, {}, HELLO | {"stream_options": {"include_usage": usage}} | more.pop("body", {}))
    completion = completion_of(reply, DIALECT.decode(incoming), **more)
    return DIALECT.framing(incoming).encode(DIALECT.events(completion, incoming))


@settings(deadline=None)
@given(any_reply, st.booleans(), st.booleans(), st.sampled_from(FinishReason))
def test_any_reply_streams_in_the_order_of_the_api_and_adds_up_to_itself(
    reply: Message, usage: bool, logprobs: bool, finish: FinishReason
) -> None:
    incoming = Incoming("", {}, {}, HELLO | {"stream_options": {"include_usage": usage}, "logprobs": logprobs})
    completion = completion_of(reply, DIALECT.decode(incoming), finish=finish)
    got = read(sse.SSE.encode(DIALECT.events(completion, incoming)), usage=usage)
    assert (as_read(got.content), as_read(got.reasoning)) == (as_read(reply.content), as_read(reply.reasoning))
    assert [(as_read(c["name"]), c["arguments"], c["id"]) for c in got.calls] == [
        (as_read(c.name), c.arguments or "{}", c.id) for c in reply.tool_calls
    ]
    assert got.starts_empty == bool(reply.tool_calls and not reply.content)
    whole = json.loads(sse.to_json(DIALECT.encode(completion, incoming)))
    check_whole(whole)
    assert got.finish == whole["choices"][0]["finish_reason"]
    assert got.logprobs == ((whole["choices"][0]["logprobs"] or {}).get("content") or [])
    assert len(got.logprobs) == (3 if logprobs else 0)
    assert got.usage == (whole["usage"] if usage else None)


@settings(deadline=None, max_examples=60)
@given(any_reply, st.data())
def test_a_stream_reads_the_same_however_the_network_cuts_it(reply: Message, data: st.DataObject) -> None:
    sent = streamed(reply, usage=True)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sent)), max_size=20)))
    reader = StreamReader(usage=True)
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        reader.feed(sent[start:end])
    assert reader.finish() == read(sent, usage=True)


def test_a_stream_may_be_cut_at_each_of_its_bytes() -> None:
    sent = streamed(say("é😀", "思考", ToolCall("f", '{"a": "é"}', "1")), body={"logprobs": True})
    wanted = read(sent)
    for cut in range(len(sent)):
        reader = StreamReader(usage=False)
        reader.feed(sent[:cut])
        with pytest.raises(AssertionError):
            reader.finish()
        reader.feed(sent[cut:])
        assert reader.finish() == wanted


@settings(deadline=None)
@given(any_reply)
def test_the_whole_reply_read_back_is_the_reply(reply: Message) -> None:
    incoming = Incoming("", {}, {}, HELLO)
    completion = completion_of(reply, DIALECT.decode(incoming))
    wire = json.loads(sse.to_json(DIALECT.encode(completion, incoming)))["choices"][0]["message"]
    (echoed,) = messages(wire)
    assert as_read(echoed.content) == as_read(reply.content)
    assert as_read(echoed.reasoning) == as_read(reply.reasoning)
    assert [c.arguments for c in echoed.tool_calls] == [c.arguments or "{}" for c in reply.tool_calls]
    assert [c.id for c in echoed.tool_calls] == [c.id for c in reply.tool_calls]


def changed(frames: list[bytes], at: int, old: bytes, new: bytes) -> list[bytes]:
    assert old in frames[at]
    return [*frames[:at], frames[at].replace(old, new, 1), *frames[at + 1 :]]


SPOILED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "no end": lambda f: f[:-1],
    "no beginning": lambda f: f[1:],
    "two beginnings": lambda f: [f[0], *f],
    "two ends": lambda f: [*f, f[-1]],
    "something behind the end": lambda f: [*f, f[2]],
    "another order": lambda f: [f[0], f[2], f[1], *f[3:]],
    "calls before text": lambda f: [*f[:2], *f[3:5], f[2], *f[5:]],
    "a piece of a call before its head": lambda f: [*f[:3], f[4], f[3], *f[5:]],
    "a gap in the calls": lambda f: [*f[:3], *f[5:]],
    "a call without arguments": lambda f: [*f[:4], *f[5:]],
    "finished early": lambda f: [f[0], f[-3], *f[1:]],
    "not finished": lambda f: [*f[:-3], *f[-2:]],
    "finished twice": lambda f: [*f[:-2], *f[-3:]],
    "no usage": lambda f: [*f[:-2], f[-1]],
    "two usages": lambda f: [*f[:-1], *f[-2:]],
    "usage before the end": lambda f: [*f[:2], f[-2], *f[2:]],
    "an unknown reason": lambda f: changed(f, -3, b'"tool_calls"', b'"done"'),
    "an unknown field": lambda f: changed(f, 2, b'"created"', b'"novelty":1,"created"'),
    "an unknown field within a delta": lambda f: changed(f, 2, b'"content"', b'"novelty":1,"content"'),
    "an empty text": lambda f: changed(f, 2, b'"text"', b'""'),
    "an index as text": lambda f: changed(f, 2, b'"index":0', b'"index":"0"'),
    "another reply's chunk": lambda f: changed(f, 2, b"chatcmpl-c1", b"chatcmpl-c2"),
    "a comment": lambda f: [*f[:2], b": keep-alive\n\n", *f[2:]],
    "half a surrogate pair as bytes": lambda f: changed(f, 2, b"text", b"\xf0\x9f"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_control_the_state_machine_rejects_a_spoiled_stream(spoil: Any) -> None:
    reply = say("text", "thought", ToolCall("f", '{"a": 1}', "1"), ToolCall("g", "{}", "2"))
    sent = streamed(reply, usage=True)
    read(sent, usage=True)
    frames = [frame + b"\n\n" for frame in sent.split(b"\n\n")[:-1]]
    with pytest.raises((AssertionError, ValueError, TypeError)):
        read(b"".join(spoil(frames)), usage=True)


@pytest.mark.parametrize(
    "spoil",
    [lambda r: r.update(novelty=1), lambda r: r["choices"][0]["message"].update(novelty=1),
     lambda r: r["choices"][0]["message"].update(content=7), lambda r: r["usage"].update(prompt_tokens="8"),
     lambda r: r["choices"][0].update(finish_reason="done"), lambda r: r.pop("id"), lambda r: r.update(created=1.5)],
)  # fmt: skip
def test_control_the_oracle_rejects_a_spoiled_reply(spoil: Any) -> None:
    incoming = Incoming("", {}, {}, HELLO)
    whole = DIALECT.encode(completion_of(say("text"), DIALECT.decode(incoming)), incoming)
    check_whole(whole)
    spoil(whole)
    with pytest.raises(ValueError):
        check_whole(whole)


def test_a_reply_id_carries_the_apis_prefix_once() -> None:
    incoming = Incoming("", {}, {}, HELLO)
    completion = completion_of(say("x"), DIALECT.decode(incoming))
    assert DIALECT.encode(completion, incoming)["id"] == "chatcmpl-c1"
