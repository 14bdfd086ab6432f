"""The anthropic SDK with strict response validation, over sockets: the exact oracle of what clients accept."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import anyio
import pytest
from aiohttp import web
from anthropic.types import Message as AnthropicMessage

from polar_plugin.errors import BadRequest, ContextOverflow, EngineBusy, EngineError
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import ChatRequest, FinishReason, Message, SamplingParams

from .anthropic_client import ask, client_of, error_of, post_raw, sdk
from .anthropic_replies import HELLO, LIST, REPLIES
from .anthropic_stream import StreamReader
from .oracle import exactly, unknown_fields
from .scripted import Scripted, Stopped, completion_of, forever, say, serving

pytestmark = pytest.mark.anyio
streamed_and_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
DIALECT = AnthropicMessages()


def expected(reply: Message) -> list[tuple[str, Any]]:
    said = [("thinking", reply.reasoning), ("text", reply.content)]
    return [
        *((kind, text) for kind, text in said if text.strip()),
        *(("tool_use", call.id) for call in reply.tool_calls),
    ]


def content_of(message: AnthropicMessage) -> list[tuple[str, Any]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "id"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


@streamed_and_whole
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_the_sdk_gets_the_reply_and_its_echo_continues_the_conversation(reply: Message, stream: bool) -> None:
    engine = Scripted([reply])
    async with sdk(engine) as client:
        got = await ask(client, stream=stream)
        assert content_of(got) == expected(reply)
        assert got.stop_reason == ("tool_use" if reply.tool_calls else "end_turn")
        assert not list(unknown_fields(got))
        go_on = {"role": "user", "content": "go on"}
        await ask(client, stream=stream, messages=[*HELLO["messages"], AnthropicMessage.to_param(got), go_on])
    echoed = engine.requests[1].messages[1]
    blank = reply.content if reply.content.strip() else ""
    assert (echoed.content, echoed.reasoning) == (blank, reply.reasoning)
    assert [(call.name, call.id) for call in echoed.tool_calls] == [(call.name, call.id) for call in reply.tool_calls]


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_the_raw_events_of_the_sdk_pass_its_strict_validation(reply: Message) -> None:
    async with sdk(Scripted([reply])) as client:
        events = [event async for event in await client.messages.create(**HELLO, stream=True)]
    assert not [field for event in events for field in unknown_fields(event)]
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert starts == [kind for kind, _ in expected(reply)]
    assert [event.type for event in events][-2:] == ["message_delta", "message_stop"]


@streamed_and_whole
async def test_a_cut_turn_ends_in_max_tokens(stream: bool) -> None:
    async with sdk(Scripted([say("once upon")], finish=FinishReason.LENGTH)) as client:
        got = await ask(client, stream=stream)
    assert (got.stop_reason, content_of(got)) == ("max_tokens", [("text", "once upon")])


@streamed_and_whole
async def test_a_stop_sequence_is_told(stream: bool) -> None:
    engine = Stopped([say("one two")])
    async with sdk(engine) as client:
        got = await ask(client, stream=stream, stop_sequences=["END", "STOP"])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", "END")
    assert engine.requests[0].sampling == SamplingParams(max_tokens=1000, stop=("END", "STOP"))


@streamed_and_whole
async def test_case_75_usage_counts_the_true_ids(stream: bool) -> None:
    async with sdk(Scripted()) as client:
        usage = (await ask(client, stream=stream)).usage
    assert (usage.input_tokens, usage.output_tokens) == (8, 3)


async def test_token_ids_and_log_probabilities_stay_here() -> None:
    async with sdk(Scripted()) as client:
        raw = await client.messages.with_raw_response.create(**HELLO)
        assert "token_id" not in raw.http_response.text
        assert "logprob" not in raw.http_response.text


@pytest.mark.parametrize("options", [{}, {"api_key": None, "auth_token": "KEY"}], ids=["x-api-key", "bearer"])
async def test_the_key_is_taken_in_both_places_and_in_the_url(options: dict[str, Any]) -> None:
    async with serving(Scripted()) as (proxy, session, _):
        told = {name: session.key if value else None for name, value in options.items()}
        async with client_of(proxy.url, session.key, **told) as client:
            assert content_of(await ask(client, stream=True)) == [("text", "hello")]
        async with client_of(f"{proxy.url}/s/{session.key}", "placeholder") as client:
            assert content_of(await ask(client, stream=False)) == [("text", "hello")]


# --- errors ----------------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Scripted:
    async def fail(request: ChatRequest) -> None:
        raise error

    return Scripted(before=fail)


ERRORS = [
    (EngineError("no ids"), anthropic.InternalServerError, 502, "api_error"),
    (EngineBusy("full", retry_after=7), anthropic.InternalServerError, 503, "overloaded_error"),
    (ContextOverflow(8193, 8192), anthropic.BadRequestError, 400, "invalid_request_error"),
    (BadRequest("odd", path="messages.0"), anthropic.BadRequestError, 400, "invalid_request_error"),
    (ZeroDivisionError("a defect"), anthropic.InternalServerError, 500, "api_error"),
]


@streamed_and_whole
@pytest.mark.parametrize(("error", "kind", "status", "name"), ERRORS, ids=lambda v: type(v).__name__)
async def test_a_failure_gets_its_own_status_and_type(
    error: Exception, kind: type[anthropic.APIStatusError], status: int, name: str, stream: bool
) -> None:
    async with sdk(failing(error)) as client:
        with pytest.raises(kind) as caught:
            await ask(client, stream=stream)
    assert caught.value.status_code == status
    exactly(anthropic.types.BetaErrorResponse, caught.value.response.text)
    assert error_of(caught.value)["type"] == name
    assert caught.value.response.headers.get("retry-after") == ("7" if status == 503 else None)


@streamed_and_whole
async def test_case_76_an_overflow_is_worded_as_clients_know_it(stream: bool) -> None:
    async with sdk(failing(ContextOverflow(8193, 8192))) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, stream=stream)
    assert error_of(caught.value)["message"] == "prompt is too long: 8193 tokens > 8192 maximum"


@streamed_and_whole
async def test_a_request_that_cannot_be_read_is_refused_with_a_path_and_nothing_is_asked(stream: bool) -> None:
    engine = Scripted()
    async with sdk(engine) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, stream=stream, messages=[{"role": "user", "content": [{"type": "text", "text": 7}]}])
    assert error_of(caught.value)["message"].startswith("messages.0.content.0.text: ")
    assert engine.requests == []


async def test_an_unknown_key_is_an_authentication_error() -> None:
    async with serving(Scripted()) as (proxy, _, _), client_of(proxy.url, "nobody") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await ask(client, stream=False)
    assert error_of(caught.value)["type"] == "authentication_error"


async def test_an_unknown_path_of_the_sdk_is_a_not_found_error_and_no_generation() -> None:
    engine = Scripted()
    async with sdk(engine) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.batches.list()
    assert error_of(caught.value)["type"] == "not_found_error"
    assert engine.requests == []


async def test_a_sealed_session_is_not_tried_again_by_the_sdk() -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, session, _), client_of(proxy.url, session.key, max_retries=5) as client:
        session.seal()
        with pytest.raises(anthropic.ConflictError):
            await ask(client, stream=True)
        assert session.counts["refused_sealed"] == 1
    assert engine.requests == []


async def test_a_retry_of_the_sdk_is_known_as_one() -> None:
    busy = [EngineBusy("full", retry_after=0.001)]

    async def fail_once(request: ChatRequest) -> None:
        if busy:
            raise busy.pop()

    engine = Scripted(before=fail_once)
    async with serving(engine) as (proxy, session, _), client_of(proxy.url, session.key, max_retries=2) as client:
        await ask(client, stream=True)
        assert session.counts["retries"] == 1
    assert [request.retry for request in engine.requests] == [False, True]


async def test_a_failure_after_the_headers_is_an_error_event_and_no_end_of_the_reply() -> None:
    headers_sent = anyio.Event()

    async def fail_late(request: ChatRequest) -> None:
        await headers_sent.wait()
        raise EngineError("the engine died")

    async with sdk(Scripted(before=fail_late), ProxyConfig(header_grace_seconds=0)) as client:
        stream = await client.messages.create(**HELLO, stream=True)
        headers_sent.set()
        with pytest.raises(anthropic.APIStatusError, match="the engine died") as caught:
            await anext(stream.__aiter__())  # not one event that looks like a reply
    assert error_of(caught.value)["type"] == "api_error"


# --- waiting ---------------------------------------------------------------------------------------------------------


async def test_case_77_pings_keep_a_stream_that_waits_for_its_first_token_and_one_call_is_made() -> None:
    release = anyio.Event()

    async def wait(request: ChatRequest) -> None:
        await release.wait()

    engine = Scripted(before=wait)
    accumulated: list[AnthropicMessage] = []
    async with sdk(engine, ProxyConfig(header_grace_seconds=0, keepalive_seconds=0.01)) as client:

        async def accumulate() -> None:
            accumulated.append(await ask(client, stream=True))

        async with anyio.create_task_group() as group:
            group.start_soon(accumulate)
            await engine.started.wait()
            other = HELLO | {"messages": [{"role": "user", "content": "hello"}]}  # the same would be joined
            raw = await client.messages.with_raw_response.create(**other, stream=True)
            reader = StreamReader()
            async for piece in raw.http_response.aiter_raw():
                reader.feed(piece)
                if reader.pings >= 3:  # the stream that began before has had as many
                    release.set()
    assert reader.finish()["content"] == [{"type": "text", "text": "hello"}]
    assert [content_of(message) for message in accumulated] == [[("text", "hello")]]
    assert len(engine.requests) == 2, "one call a stream"


async def test_a_client_that_hangs_up_while_it_waits_cancels_the_turn() -> None:
    engine = Scripted(before=forever)
    async with serving(engine) as (proxy, session, _):
        raw = await post_raw(proxy, session, json.dumps(HELLO | {"stream": True}).encode())
        await engine.started.wait()
        await raw.aclose()
        with anyio.fail_after(5):
            await engine.cancelled.wait()
        assert session.completions == ()


# --- the small endpoints ---------------------------------------------------------------------------------------------


async def test_case_74_the_endpoints_that_clients_probe_are_there() -> None:
    async with serving(Scripted(), model="my-policy") as (proxy, session, http), client_of(proxy.url, session.key) as c:
        for url in ("/", f"/s/{session.key}/"):
            async with http.head(url) as response:
                assert (response.status, await response.read()) == (200, b"")
        assert (await c.messages.count_tokens(messages=HELLO["messages"], model="x")).input_tokens == 8
        listed = [model async for model in c.models.list()]
        assert [model.id for model in listed] == ["my-policy"]
        assert (await c.models.retrieve("org/any-name")).id == "org/any-name"
        assert not [field for model in listed for field in unknown_fields(model)]
        async with http.get("/v1/models") as response:
            assert (await response.json())["object"] == "list", "a client of another API gets that API's shape"
        async with http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
            page = await response.json()
            assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "my-policy", "my-policy")


async def test_counting_tokens_reads_a_request_as_the_call_itself_would() -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, session, _), client_of(proxy.url, session.key) as client:
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.count_tokens(model="x", messages=[])
        session.seal()
        with pytest.raises(anthropic.ConflictError):
            await client.messages.count_tokens(model="x", messages=HELLO["messages"])
    assert engine.requests == []


# --- bytes -----------------------------------------------------------------------------------------------------------


async def test_case_89_an_emoji_split_at_each_byte_between_two_writes_arrives_whole() -> None:
    engine = Scripted()
    said = "smile 😀 é"
    body = b'{"max_tokens":9,"messages":[{"role":"user","content":"' + said.encode() + b'"}],"stream":true,"model":"m"}'
    at = body.index("😀".encode())
    async with serving(engine) as (proxy, session, _):
        for cut in range(at, at + 5):
            raw = await post_raw(proxy, session, body[:cut], body[cut:])
            got = b""
            with anyio.fail_after(10):
                while b"message_stop" not in got:
                    got += await raw.receive()
            await raw.aclose()
    assert [request.messages[0].content for request in engine.requests] == [said] * 5


async def test_every_chunk_on_the_socket_can_be_read_by_itself() -> None:
    reply = say("é😀 " * 3000, "思考" * 900, LIST)
    reader = StreamReader()
    async with sdk(Scripted([reply])) as client:
        response = await client.messages.with_raw_response.create(**HELLO, stream=True)
        assert response.http_response.headers["content-type"].startswith("text/event-stream")
        async for piece in response.http_response.aiter_raw():
            for byte in piece:
                reader.feed(bytes([byte]))
    assert [block.get("text") for block in reader.finish()["content"]] == [None, reply.content, None]


# --- controls --------------------------------------------------------------------------------------------------------

MUTATIONS = {
    "no stop reason that the API has": lambda body: body.update(stop_reason="done"),
    "a role of another API": lambda body: body.update(role="model"),
    "content that is a string": lambda body: body.update(content="hello"),
    "a text block without text": lambda body: body["content"][0].pop("text"),
    "half a usage": lambda body: body["usage"].pop("output_tokens"),
    "no id": lambda body: body.pop("id"),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
async def test_control_strict_validation_rejects_a_mutated_reply(mutate: Any) -> None:
    incoming = Incoming("", {}, {}, HELLO)
    body = DIALECT.encode(completion_of(say("hello"), DIALECT.decode(incoming)), incoming)
    mutate(body)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}", "key") as client:
            with pytest.raises(anthropic.APIResponseValidationError):
                await client.messages.create(**HELLO)
    finally:
        await runner.cleanup()
