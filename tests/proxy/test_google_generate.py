"""The Google dialect's replies, routes and errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_plugin.errors import (
    BadRequest,
    ContextOverflow,
    EngineBusy,
    EngineError,
    PolarError,
    SessionSealed,
    UnknownSession,
)
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.google_request import UNPARSED
from polar_plugin.proxy.google_signature import signature, signed_reasoning
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import ChatRequest, FinishReason, Message, ToolCall

from .google_stream import ArrayReader, SSEReader, Told, check_chunk, follow, read
from .scripted import Scripted, completion_of, forever, say, serving

DIALECT = GoogleGenerate()
BODY: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
THINKING = BODY | {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
PATH = "/v1beta/models/policy:streamGenerateContent"
BASH = ToolCall("bash", '{"command": "ls", "timeout": 1.5}', id="call_1")
LOOK = ToolCall("look", "{}", id="call_2")
READERS: dict[str, Any] = {"sse": SSEReader, "": ArrayReader}
framings = pytest.mark.parametrize("alt", READERS, ids=["events", "array"])


def incoming(body: dict[str, Any] = THINKING, alt: str = "sse") -> Incoming:
    return Incoming(PATH, {}, {"alt": alt} if alt else {}, body, {"model": "policy"})


def streamed(reply: Message, *, finish: FinishReason = FinishReason.STOP, alt: str = "sse", **more: Any) -> bytes:
    request = incoming(alt=alt, **more)
    completion = completion_of(reply, DIALECT.decode(request), finish=finish)
    return DIALECT.framing(request).encode(DIALECT.events(completion, request))


def chunks_of(reply: Message, **more: Any) -> list[dict[str, Any]]:
    return read(streamed(reply, **more), SSEReader())


def whole(reply: Message, body: dict[str, Any] = THINKING, **more: Any) -> dict[str, Any]:
    request = Incoming("/v1beta/models/policy:generateContent", {}, {}, body, {"model": "policy"})
    encoded = DIALECT.encode(completion_of(reply, DIALECT.decode(request), **more), request)
    check_chunk(encoded)
    return json.loads(json.dumps(encoded))


def parts_of(reply: Message, body: dict[str, Any] = THINKING) -> list[dict[str, Any]]:
    return whole(reply, body)["candidates"][0]["content"]["parts"]


def as_read(text: str) -> str:
    """As any JSON reader gets it: the two halves of a surrogate pair, side by side, are one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


# --- any reply -------------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(exclude_categories=())).flatmap(
    lambda text: st.sampled_from([1, 1, 1, 3000]).map(lambda times: text * times)
)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
any_call = st.builds(
    ToolCall,
    name=st.text(min_size=1),
    arguments=st.dictionaries(st.text(), any_json, max_size=3).map(json.dumps) | any_json.map(json.dumps) | st.text(),
    id=st.uuids().map(str),
)
any_reply = st.builds(
    Message,
    role=st.just("assistant"),
    content=any_text,
    reasoning=any_text,
    tool_calls=st.lists(any_call, max_size=8).map(tuple),
)


@framings
@settings(max_examples=150, deadline=None)
@given(reply=any_reply, cut=st.booleans(), thoughts=st.booleans())
def test_case_104_any_reply_is_a_stream_whose_last_chunk_alone_has_reason_and_usage(
    alt: str, reply: Message, cut: bool, thoughts: bool
) -> None:
    body = THINKING if thoughts else BODY
    finish = FinishReason.LENGTH if cut else FinishReason.STOP
    told = follow(read(streamed(reply, finish=finish, alt=alt, body=body), READERS[alt]()))
    assert told.text == as_read(reply.content)
    assert told.reasoning == (as_read(reply.reasoning) if thoughts else "")
    assert told.finish == ("MAX_TOKENS" if cut else "STOP")
    assert [(call["id"], call["name"]) for call in told.calls] == [
        (call.id, as_read(call.name)) for call in reply.tool_calls
    ]
    if told.signature is not None:
        assert signed_reasoning(told.signature) == reply.reasoning
    one = whole(reply, body, finish=finish)
    assert one["usageMetadata"] == told.usage == {
        "promptTokenCount": 8, "candidatesTokenCount": 3, "totalTokenCount": 11,
    }  # fmt: skip


@framings
def test_every_cut_of_the_bytes_reads_the_same(alt: str) -> None:
    data = streamed(say("π 😀 \u2028 \ud83d", "hm\n\nhm", BASH, LOOK), alt=alt)
    wanted = read(data, READERS[alt]())
    for cut in range(len(data) + 1):
        reader = READERS[alt]()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == wanted
        reader.close()
    reader = READERS[alt]()
    assert [chunk for byte in data for chunk in reader.feed(bytes([byte]))] == wanted
    reader.close()


MUTATIONS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "an unknown field": lambda c: c[0].update(extra=1),
    "an unknown field deep within": lambda c: c[-1]["candidates"][0]["content"]["parts"][0]["functionCall"].update(x=1),
    "a field in snake_case": lambda c: c[0].update(response_id=c[0].pop("responseId")),
    "a wrong type": lambda c: c[0]["candidates"][0].update(index="first"),
    "a reason of no such name": lambda c: c[-1]["candidates"][0].update(finishReason="tool_calls"),
    "no reason at the end": lambda c: c[-1]["candidates"][0].pop("finishReason"),
    "a reason before the end": lambda c: c[0]["candidates"][0].update(finishReason="STOP"),
    "no usage at the end": lambda c: c[-1].pop("usageMetadata"),
    "usage that does not add up": lambda c: c[-1]["usageMetadata"].update(totalTokenCount=1),
    "something after the end": lambda c: c.append(copy.deepcopy(c[0])),
    "an end cut off": lambda c: c.pop(),
    "an empty text": lambda c: c[1]["candidates"][0]["content"]["parts"][0].update(text=""),
    "no parts": lambda c: c[1]["candidates"][0]["content"].update(parts=[]),
    "thoughts behind the text": lambda c: c.insert(0, c.pop(1)),
    "arguments as text": lambda c: c[2]["candidates"][0]["content"]["parts"][0]["functionCall"].update(args="{}"),
    "a first call without signature": lambda c: c[2]["candidates"][0]["content"]["parts"][0].pop("thoughtSignature"),
    "a signature within the call": lambda c: c[2]["candidates"][0]["content"]["parts"][0]["functionCall"].update(
        thoughtSignature=c[2]["candidates"][0]["content"]["parts"][0].pop("thoughtSignature")
    ),
    "another id of the response": lambda c: c[1].update(responseId="other"),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_control_a_mutated_stream_is_rejected(mutate: Callable[[list[dict[str, Any]]], Any]) -> None:
    chunks = chunks_of(say("text", "thought", BASH, LOOK))
    follow(copy.deepcopy(chunks))
    mutate(chunks)
    with pytest.raises((AssertionError, ValueError, KeyError, UserWarning)):  # the SDK warns of unknown names
        follow(chunks)


@pytest.mark.parametrize("spoil", [b": keep-alive\n\n", b"event: message\n", b"\n", b"x"], ids=str)
@framings
def test_control_bytes_that_do_not_belong_are_rejected(alt: str, spoil: bytes) -> None:
    if alt == "" and not spoil.strip():
        spoil = b","
    data = streamed(say("hello"), alt=alt)
    for spoiled in (spoil + data, data + spoil):
        with pytest.raises((AssertionError, ValueError)):
            read(spoiled, READERS[alt]())


# --- parts -----------------------------------------------------------------------------------------------------------


def test_a_reply_without_anything_has_no_parts_but_an_end() -> None:
    assert follow(chunks_of(say())) == Told(finish="STOP", usage=whole(say())["usageMetadata"])
    assert parts_of(say()) == []


def test_thoughts_are_shown_only_to_who_asks_and_signed_for_everybody() -> None:
    reply = say("four", "two and two")
    assert parts_of(reply, THINKING)[0] == {"text": "two and two", "thought": True}
    (text,) = parts_of(reply, BODY)
    assert text == {"text": "four", "thoughtSignature": signature("two and two")}
    snake = BODY | {"generation_config": {"thinking_config": {"include_thoughts": True}}}
    assert parts_of(reply, snake)[0] == {"text": "two and two", "thought": True}


def test_case_103_the_signature_is_a_sibling_of_the_first_of_parallel_calls_and_stable() -> None:
    parts = parts_of(say("look:", "hm", BASH, LOOK))
    calls = [part for part in parts if "functionCall" in part]
    assert [part.get("thoughtSignature") for part in calls] == [signature("hm"), None]
    assert all("thoughtSignature" not in part["functionCall"] for part in calls)
    assert "thoughtSignature" not in parts[1], "the text before calls is not signed too"
    assert parts == parts_of(say("look:", "hm", BASH, LOOK))


def test_case_103_a_call_is_signed_even_where_nothing_was_thought() -> None:
    (call,) = parts_of(say("", "", BASH))
    assert call["thoughtSignature"]
    assert signed_reasoning(call["thoughtSignature"]) == ""


@pytest.mark.parametrize(
    "foreign", ["c2lnbmF0dXJl", "skip_thought_signature_validator", "é", "a", "====", "CgQ", "\ud83d"], ids=ascii
)
def test_a_signature_of_somebody_else_is_none_of_ours(foreign: str) -> None:
    assert signed_reasoning(foreign) is None


@pytest.mark.parametrize("arguments", ["[1]", "null", "7", '"text"', "no json", '{"a": NaN}', '{"a": 1e999}', "{", "["])
def test_arguments_that_are_no_object_are_told_as_text(arguments: str) -> None:
    (part,) = parts_of(say("", "", ToolCall("f", arguments, id="c")))
    assert part["functionCall"]["args"] == {UNPARSED: arguments}


@pytest.mark.parametrize("depth", [60, 65, 200, 100_000])
def test_arguments_of_any_depth_come_back_in_a_request_that_can_be_read(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    (part,) = parts_of(say("", "", ToolCall("f", arguments, id="c")))
    assert (set(part["functionCall"]["args"]) == {UNPARSED}) is (depth > 64)


def test_no_arguments_are_an_empty_object() -> None:
    (part,) = parts_of(say("", "", ToolCall("f", "", id="c")))
    assert part["functionCall"] == {"name": "f", "args": {}, "id": "c"}


def test_arguments_keep_the_order_of_their_keys() -> None:
    (part,) = parts_of(say("", "", ToolCall("f", '{"b": 1, "a": 2, "c": 3}', id="c")))
    assert list(part["functionCall"]["args"]) == ["b", "a", "c"]


def test_a_long_text_is_cut_into_parts_that_fit_a_line_buffer() -> None:
    text = "é" * 100_000
    for reply in (say(text, "hm"), say("", text)):
        data = streamed(reply)
        assert max(map(len, data.split(b"\n"))) < 2**16
        told = follow(read(data, SSEReader()))
        assert (told.text, told.reasoning) == (reply.content, reply.reasoning)


# --- framing and errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "content_type"),
    [
        ({"alt": "sse"}, "text/event-stream; charset=utf-8"),
        ({"alt": "SSE", "key": "k"}, "text/event-stream; charset=utf-8"),
        ({"$alt": "sse"}, "text/event-stream; charset=utf-8"),
        ({}, "application/json; charset=utf-8"),
        ({"alt": "json"}, "application/json; charset=utf-8"),
    ],
)
def test_the_query_tells_the_framing_and_neither_is_kept_alive_by_bytes(query: Any, content_type: str) -> None:
    framing = DIALECT.framing(Incoming(PATH, {}, query, BODY))
    assert (framing.content_type, framing.keepalive) == (content_type, b"")


ERRORS: list[tuple[PolarError, int, str]] = [
    (BadRequest("odd", path="contents.0"), 400, "INVALID_ARGUMENT"),
    (ContextOverflow(9, 8), 400, "INVALID_ARGUMENT"),
    (UnknownSession("who"), 401, "UNAUTHENTICATED"),
    (SessionSealed("over"), 409, "FAILED_PRECONDITION"),
    (EngineError("no ids"), 502, "INTERNAL"),
    (EngineBusy("full"), 503, "UNAVAILABLE"),
    (PolarError("a defect"), 500, "INTERNAL"),
]


@framings
@pytest.mark.parametrize(("error", "code", "status"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_has_the_apis_shape_alone_and_within_a_stream(
    error: PolarError, code: int, status: str, alt: str
) -> None:
    body = DIALECT.error(error)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "status"}
    assert (body["error"]["code"], body["error"]["status"]) == (code, status)
    amid = DIALECT.framing(incoming(alt=alt)).encode([DIALECT.error_event(error)])
    assert json.loads(amid) == (body if alt else [body])


def test_an_overflow_is_told_in_the_words_that_clients_know() -> None:
    assert DIALECT.error(ContextOverflow(8193, 8192))["error"]["message"] == (
        "The input token count (8193) exceeds the maximum number of tokens allowed (8192)."
    )


# --- over sockets ----------------------------------------------------------------------------------------------------

GENERATING = [
    "/v1beta/models/policy",
    "/v1/models/policy",
    "/v1alpha/models/policy",
    "/v1beta1/models/policy",
    "/v1beta/models/org/name",
    "/v1beta/models/org%2Fname",
    "/v1beta/models/qwen3:4b",
    "/v1beta/models/models/policy",
    "/v1beta/tunedModels/mine",
    "/v1beta1/publishers/google/models/gemini",
    "/v1/projects/p/locations/l/publishers/google/models/gemini",
]


@pytest.mark.anyio
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("prefix", ["", "/s/KEY"], ids=["header", "URL prefix"])
async def test_a_model_of_any_name_is_served_under_every_version(path: str, prefix: str) -> None:
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        url = prefix.replace("KEY", session.key) + path
        for method in (":generateContent", ":streamGenerateContent", "%3AgenerateContent"):
            async with http.post(f"{url}{method}", json=BODY) as response:
                assert response.status == 200, await response.text()
        async with http.post(f"{url}:countTokens", json=BODY) as response:
            assert await response.json() == {"totalTokens": 8}
    name = path.split("/", 2)[2].replace("%2F", "/").removeprefix("models/")
    assert [request.model for request in engine.requests] == [name] * 3
    assert [request.stream for request in engine.requests] == [False, True, False]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1beta/models/policy:embedContent"),
        ("POST", "/v1beta/models/policy:generateContentX"),
        ("POST", "/v1beta/models/policy:generatecontent"),
        ("POST", "/v1beta/models/policy:generateContent/"),
        ("POST", "/v1beta/models/policy:generateContent:x"),
        ("POST", "/v1beta/models/:generateContent"),
        ("POST", "/v1beta/models:generateContent"),
        ("POST", "/v1beta/models/policy"),
        ("POST", "/v2/models/policy:generateContent"),
        ("POST", "/v1beta/cachedContents"),
        ("GET", "/v1beta/files"),
        ("GET", "/v1beta/"),
        ("POST", "/x/v1beta/models/policy:generateContent"),
    ],
)
async def test_nothing_else_generates_and_the_answer_has_the_apis_shape(method: str, path: str) -> None:
    engine = Scripted()
    async with (
        serving(engine) as (_, session, http),
        http.request(method, path, json=BODY, headers={"x-goog-api-key": session.key}) as response,
    ):
        assert response.status == 404
        error = (await response.json())["error"]
    assert (error["code"], error["status"]) == (404, "NOT_FOUND")
    assert engine.requests == []


@pytest.mark.anyio
async def test_a_listing_under_a_shared_path_speaks_the_dialect_of_who_asks() -> None:
    async with serving(Scripted(), model="policy") as (proxy, session, http):
        mine = {"x-goog-api-key": session.key}
        async with (
            aiohttp.ClientSession(proxy.url) as other,
            other.get("/v1/models", headers=mine) as response,
        ):
            assert (await response.json())["models"][0]["name"] == "models/policy"
        async with http.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        async with http.get("/v1beta/models") as response:
            assert (await response.json())["models"][0]["name"] == "models/policy"


@pytest.mark.anyio
@framings
async def test_the_bytes_on_the_socket_are_the_reply_and_nothing_else(alt: str) -> None:
    reply = say("hello", "hm", BASH, LOOK)
    async with serving(Scripted([reply])) as (_, _, http), http.post(f"{PATH}?alt={alt}", json=THINKING) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream" if alt else "application/json")
        data = await response.read()
    told = follow(read(data, READERS[alt]()))
    assert (told.text, told.reasoning, len(told.calls)) == ("hello", "hm", 2)
    assert follow(read(data, READERS[alt]())) == told


@pytest.mark.anyio
@framings
async def test_a_stream_that_waits_gets_its_headers_and_then_silence(alt: str) -> None:
    """Gemini CLI gives up after 60 s without headers, and a comment amid the events spoils what it reads."""
    release, quick = anyio.Event(), ProxyConfig(header_grace_seconds=0.01, keepalive_seconds=0.01)

    async def held(request: ChatRequest) -> None:
        await release.wait()

    async with serving(Scripted(before=held), quick) as (_, _, http):
        with anyio.fail_after(30):
            async with http.post(f"{PATH}?alt={alt}", json=BODY) as response:
                assert response.status == 200
                with anyio.move_on_after(0.2) as silence:  # twenty times the interval of keep-alives
                    await response.content.readany()
                assert silence.cancelled_caught
                release.set()
                data = await response.read()
    assert follow(read(data, READERS[alt]())).text == "hello"


@pytest.mark.anyio
@framings
async def test_a_failure_after_the_headers_is_told_within_the_stream(alt: str) -> None:
    release = anyio.Event()

    async def fail(request: ChatRequest) -> None:
        await release.wait()
        raise EngineBusy("full")

    async with serving(Scripted(before=fail), ProxyConfig(header_grace_seconds=0.0)) as (_, _, http):
        with anyio.fail_after(30):
            async with http.post(f"{PATH}?alt={alt}", json=BODY) as response:
                release.set()
                told = json.loads(await response.read())
    error = (told if alt else told[0])["error"]
    assert (error["code"], error["status"]) == (503, "UNAVAILABLE")


@pytest.mark.anyio
async def test_a_failure_before_the_headers_has_a_status_and_tells_when_to_ask_again() -> None:
    async def fail(request: ChatRequest) -> None:
        raise EngineBusy("full", retry_after=7)

    async with serving(Scripted(before=fail)) as (_, _, http), http.post(f"{PATH}?alt=sse", json=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        assert (await response.json())["error"]["status"] == "UNAVAILABLE"


@pytest.mark.anyio
async def test_case_107_the_plain_http_address_on_the_loopback_is_what_a_client_takes() -> None:
    """Gemini CLI refuses a base URL that is neither https nor on this machine."""
    async with serving(Scripted()) as (proxy, session, _), aiohttp.ClientSession() as http:
        assert proxy.url.startswith("http://127.0.0.1:")
        for base in (proxy.url, f"{proxy.url}/s/{session.key}", proxy.url.replace("127.0.0.1", "localhost")):
            url = f"{base}/v1beta/models/policy:generateContent"
            async with http.post(url, json=BODY, headers={"x-goog-api-key": session.key}) as response:
                assert response.status == 200


@pytest.mark.anyio
async def test_a_hang_up_while_the_stream_is_silent_cancels_the_turn() -> None:
    engine = Scripted(before=forever)
    async with serving(engine, ProxyConfig(header_grace_seconds=0.0)) as (_, session, http):
        with anyio.fail_after(30):
            async with http.post(f"{PATH}?alt=sse", json=BODY) as response:
                assert response.status == 200
                response.close()
            await engine.cancelled.wait()
    assert session.completions == ()
