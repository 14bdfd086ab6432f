"""Responses streams of any reply, checked event by event, and read from sockets cut at every byte."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_plugin.errors import ContextOverflow, EngineError, PolarError
from polar_plugin.proxy import sse
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import FinishReason, Message, ToolCall

from .responses_stream import BrokenStream, check, parse
from .responses_wire import BODY, DIALECT, NOTE, PATCH, PATH, REPLIES, RUN, Wire, complete, incoming_of
from .scripted import Scripted, say, serving

pytestmark = pytest.mark.anyio
bounded = settings(max_examples=150, deadline=None)

WHOLE = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
# Lone surrogates, apart from each other: two halves that meet are one character to every reader of JSON.
SURROGATES = st.lists(
    st.sampled_from(["\ud83d", "\udc00", "a", "é", "\x00", "\u2028", '"', "\\", "\n", "data: x"])
).map(lambda pieces: " ".join(pieces))
ANY_TEXT = WHOLE | SURROGATES | st.sampled_from(["x" * 1023, "x" * 1024, "é" * 1025, "\n" * 3000])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WHOLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WHOLE, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = (
    st.dictionaries(WHOLE, JSON, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False))
    | WHOLE.map(lambda text: json.dumps({"input": text}))
    | st.lists(WHOLE, max_size=3).map(lambda words: json.dumps({"command": words}))
    | JSON.map(json.dumps)
    | ANY_TEXT
)
NAMES = st.sampled_from(["bash", "apply_patch", "agents__spawn", "agents__note", "local_shell", "invented", "agents"])
CALLS = st.lists(st.builds(ToolCall, NAMES, ARGUMENTS), max_size=8).map(
    lambda calls: tuple(ToolCall(call.name, call.arguments, f"call_{i}") for i, call in enumerate(calls))
)
ANY_REPLY = st.builds(Message, st.just("assistant"), ANY_TEXT, ANY_TEXT, CALLS)
BODIES = st.fixed_dictionaries(
    {
        "reasoning": st.sampled_from([None, {"summary": "auto"}, {"effort": "low"}]),
        "include": st.sampled_from([None, ["message.output_text.logprobs"], ["reasoning.encrypted_content"]]),
    }
).map(lambda change: BODY | change)


def events_of(reply: Message, body: Wire = BODY, finish: FinishReason = FinishReason.STOP) -> list[Any]:
    """The data of all events, as a reader of JSON has it."""
    incoming = incoming_of(body)
    lines = sse.SSE.encode(DIALECT.events(complete(reply, body, finish=finish), incoming)).decode("ascii").split("\n")
    return parse(lines)


@bounded
@given(reply=ANY_REPLY, body=BODIES, finish=st.sampled_from(FinishReason))
def test_any_reply_is_a_valid_stream_that_ends_as_the_whole_answer(
    reply: Message, body: Wire, finish: FinishReason
) -> None:
    final = check(events_of(reply, body, finish))
    assert final == json.loads(json.dumps(DIALECT.encode(complete(reply, body, finish=finish), incoming_of(body))))
    texts = [part["text"] for item in final["output"] if item["type"] == "message" for part in item["content"]]
    assert texts == ([reply.content] if reply.content else [])
    calls = [item for item in final["output"] if item["type"].endswith("_call")]
    assert [item["call_id"] for item in calls] == [call.id for call in reply.tool_calls]
    assert len({item["id"] for item in final["output"]}) == len(final["output"]) > 0


@pytest.mark.parametrize("finish", FinishReason)
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_case_92_every_way_to_end_has_one_terminal_event_which_is_the_last(
    reply: Message, finish: FinishReason
) -> None:
    events = events_of(reply, finish=finish)
    terminal = "response.completed" if finish is FinishReason.STOP else "response.incomplete"
    assert check(events)["status"] == terminal.removeprefix("response.")
    ends = ("response.completed", "response.incomplete", "response.failed")
    assert [event["type"] for event in events if event["type"] in ends] == [terminal]


@pytest.mark.parametrize(
    "error", [EngineError("died"), ContextOverflow(9, 8), PolarError("odd")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("body", [BODY, {"input": "hi"}, BODY | {"tools": [{"type": "web_search"}]}])
def test_case_92_a_failure_in_a_stream_is_a_valid_stream_of_its_own(error: PolarError, body: Wire) -> None:
    framing = DIALECT.framing(incoming_of(body))
    final = check(parse(framing.encode([DIALECT.error_event(error)]).decode().split("\n")))
    assert (final["status"], final["output"], final["usage"]) == ("failed", [], None)


def _of(events: list[Wire], kind: str) -> int:
    return next(i for i, event in enumerate(events) if event["type"] == f"response.{kind}")


def _renumbered(events: list[Wire]) -> None:
    for number, event in enumerate(events):
        event["sequence_number"] = number


MUTATIONS: dict[str, Callable[[list[Any]], Any]] = {
    "a missing first event": lambda e: e.pop(0),
    "a missing last event": lambda e: e.pop(),
    "a sequence number twice": lambda e: e[4].update(sequence_number=3),
    "a missing item": lambda e: e.pop(_of(e, "output_item.added")),
    "an unfinished item": lambda e: e.pop(_of(e, "output_item.done")),
    "a missing part": lambda e: e.pop(_of(e, "content_part.added")),
    "an unfinished part": lambda e: e.pop(_of(e, "content_part.done")),
    "a missing delta": lambda e: e.pop(_of(e, "output_text.delta")),
    "a delta twice": lambda e: e.insert(_of(e, "output_text.delta"), copy.deepcopy(e[_of(e, "output_text.delta")])),
    "another text": lambda e: e[_of(e, "output_text.done")].update(text="other"),
    "a missing done": lambda e: e.pop(_of(e, "function_call_arguments.done")),
    "other arguments": lambda e: e[_of(e, "function_call_arguments.delta")].update(delta="{}"),
    "another input": lambda e: e[_of(e, "custom_tool_call_input.done")].update(input="other"),
    "a summary that differs": lambda e: e[_of(e, "reasoning_summary_part.done")]["part"].update(text="other"),
    "an index skipped": lambda e: e[_of(e, "content_part.added")].update(content_index=1),
    "another item's id": lambda e: e[_of(e, "output_text.delta")].update(item_id="msg_other"),
    "another item's index": lambda e: e[_of(e, "output_text.delta")].update(output_index=7),
    "an item that ends as another": lambda e: e[_of(e, "output_item.done")]["item"].update(id="rs_other"),
    "a reply that is not its items": lambda e: e[-1]["response"]["output"].pop(),
    "another response at the end": lambda e: e[-1]["response"].update(id="resp_other"),
    "a status of another event": lambda e: e[-1]["response"].update(status="incomplete"),
    "a terminal event in between": lambda e: e.insert(3, copy.deepcopy(e[-1])),
    "two terminal events": lambda e: e.append(copy.deepcopy(e[-1])),
    "items swapped": lambda e: e.insert(2, e.pop(_of(e, "output_item.done"))),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_control_the_state_machine_refuses_a_mutated_stream(name: str) -> None:
    events = events_of(say("hello " * 300, "thought", RUN, PATCH, NOTE))
    check(events)
    MUTATIONS[name](events)
    if "sequence number" not in name:  # or every change in length would be found by them alone
        _renumbered(events)
    with pytest.raises(BrokenStream):
        check(events)


async def stream_bytes(engine: Scripted) -> bytes:
    """A streamed answer as it came over the socket, without head and chunk marks."""
    async with serving(engine) as (_, _, http), http.post(PATH, json=BODY | {"stream": True}) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return await answer.read()


class Reader:
    """A reader of server-sent events that decodes whatever the network gives it by itself, as careless clients do."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._rest = ""

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk.decode()).split("\n")
        self.lines += lines


async def test_bytes_cut_at_every_boundary_are_the_same_events() -> None:
    payload = await stream_bytes(Scripted([say("é 😀 \u2028\r\nhi \ud83d", "思考", RUN, PATCH)]))
    payload.decode("ascii")
    expected = parse(payload.decode().split("\n"))
    final = check(expected)
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "custom_tool_call"]
    single = Reader()
    for byte in payload:
        single.feed(bytes([byte]))
    assert parse(single.lines) == expected
    for cut in range(1, len(payload)):
        reader = Reader()
        reader.feed(payload[:cut])
        reader.feed(payload[cut:])
        assert reader.lines == single.lines


async def test_a_stream_that_waits_is_kept_alive_by_comments_and_then_valid() -> None:
    go = anyio.Event()

    async def hold(request: Any) -> None:
        await go.wait()

    config = ProxyConfig(header_grace_seconds=0, keepalive_seconds=0.01)
    async with (
        serving(Scripted(before=hold), config) as (_, _, http),
        http.post(PATH, json=BODY | {"stream": True}) as answer,
    ):
        began = await answer.content.readuntil(b"\n\n")
        assert began == b": keep-alive\n\n"
        go.set()
        rest = (await answer.read()).decode()
    assert check(parse(rest.split("\n")))["status"] == "completed"
