"""The openai SDK with strict response validation, over sockets: the exact oracle of what clients accept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletion

from polar_plugin.errors import BadRequest, ContextOverflow, EngineBusy, EngineError
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import ChatRequest, FinishReason, Message, ToolCall

from .openai_stream import StreamReader, check_whole
from .scripted import CHAT, HELLO, Scripted, Stopped, completion_of, say, serving

pytestmark = pytest.mark.anyio

LIST = ToolCall("bash", '{"command": "ls"}', id="call_1")
READ = ToolCall("read", '{"path": "a \\u00e9 \\ud83d\\ude00.py"}', id="call_2")
NOTHING = ToolCall("look_around", "{}", id="call_3")

REPLIES = {
    "text": say("hello"),
    "reasoning": say("four", "two and two"),
    "one call": say("", "", LIST),
    "text, reasoning and several calls": say("look:", "hmm", LIST, READ, NOTHING),
    "empty text with calls": say("", "thought", LIST, READ),
    "a call without arguments": say("", "", NOTHING),
    "nothing at all": say(),
    "unicode": say("π 😀 \u2028 \u0000 \x85 日本語" * 400, "思考"),
    "a long text": say("word " * 5000),
}
streamed_and_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def client_of(url: str, key: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, _strict_response_validation=True, max_retries=0, **options
    )


@asynccontextmanager
async def sdk(reply: Scripted, config: ProxyConfig | None = None) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with serving(reply, config) as (proxy, session, _), client_of(proxy.url, session.key) as client:
        with anyio.fail_after(30):
            yield client


async def ask(client: openai.AsyncOpenAI, *, stream: bool, **more: Any) -> ChatCompletion:
    """The SDK's own accumulation of the stream where `stream`, its plain answer otherwise."""
    if not stream:
        return await client.chat.completions.create(**(HELLO | more))  # type: ignore[no-any-return]
    async with client.chat.completions.stream(**(HELLO | more)) as events:
        return await events.get_final_completion()


@streamed_and_whole
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_the_sdk_gets_the_reply_and_its_echo_continues_the_conversation(reply: Message, stream: bool) -> None:
    engine = Scripted([reply])
    async with sdk(engine) as client:
        got = (await ask(client, stream=stream)).choices[0]
        assert got.message.content == (reply.content or (None if reply.tool_calls else ""))
        assert got.finish_reason == ("tool_calls" if reply.tool_calls else "stop")
        assert [(c.id, c.function.arguments) for c in got.message.tool_calls or ()] == [
            (c.id, c.arguments) for c in reply.tool_calls
        ]
        echo = got.message.model_dump(exclude_none=True, exclude={"parsed"})
        for call in echo.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        await ask(client, stream=stream, messages=[*HELLO["messages"], echo, {"role": "user", "content": "go on"}])
    assert engine.requests[1].messages[1] == reply
    assert [call.id for call in engine.requests[1].messages[1].tool_calls] == [call.id for call in reply.tool_calls]


@streamed_and_whole
async def test_a_cut_turn_ends_in_length(stream: bool) -> None:
    async with sdk(Scripted([say("once upon")], finish=FinishReason.LENGTH)) as client:
        if not stream:
            assert (await ask(client, stream=False)).choices[0].finish_reason == "length"
            return
        chunks = [c async for c in await client.chat.completions.create(**HELLO, stream=True)]
        assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "once upon"


@streamed_and_whole
async def test_a_turn_that_a_stop_sequence_ended_ends_in_stop(stream: bool) -> None:
    engine = Stopped([say("one two")])
    async with sdk(engine) as client:
        got = (await ask(client, stream=stream, stop=["END", "STOP"])).choices[0]
    assert (got.finish_reason, got.message.content) == ("stop", "one two")
    assert engine.requests[0].sampling.stop == ("END", "STOP")


@streamed_and_whole
async def test_usage_counts_the_true_ids(stream: bool) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    async with sdk(Scripted()) as client:
        usage = (await ask(client, stream=stream, **more)).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 3, 11)


@streamed_and_whole
async def test_token_ids_and_log_probabilities_leave_only_when_asked_for(stream: bool) -> None:
    async with sdk(Scripted()) as client:
        silent = await ask(client, stream=stream)
        told = await ask(client, stream=stream, logprobs=True)
    assert silent.choices[0].logprobs is None
    assert "token_id" not in silent.model_dump_json()
    tokens = told.choices[0].logprobs.content  # type: ignore[union-attr]
    assert [(t.token, t.logprob) for t in tokens or ()] == [
        ("token_id:11", -0.5),
        ("token_id:12", -0.25),
        ("token_id:13", -9999.0),
    ]


async def test_case_18_ids_and_log_probabilities_of_a_streamed_call_are_recorded() -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, session, _), client_of(proxy.url, session.key) as client:
        await ask(client, stream=True)
        (recorded,) = session.seal().completions
    assert recorded.request.stream
    assert recorded.generation.output_ids.tolist() == [11, 12, 13]
    assert len(recorded.generation.logprobs) == 3


async def test_case_108_a_call_without_arguments_streams_an_empty_object_after_its_id_and_name() -> None:
    async with sdk(Scripted([say("", "", ToolCall("look_around", "", id="call_9"))])) as client:
        chunks = [c async for c in await client.chat.completions.create(**HELLO, stream=True)]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [  # type: ignore[union-attr]
        ("call_9", "look_around", ""),
        (None, None, "{}"),
    ]


ERRORS = [
    (EngineError("no ids"), openai.InternalServerError, 502, None),
    (EngineBusy("full", retry_after=7), openai.InternalServerError, 503, None),
    (ContextOverflow(8193, 8192), openai.BadRequestError, 400, "context_length_exceeded"),
    (BadRequest("odd", path="messages.0"), openai.BadRequestError, 400, None),
    (ZeroDivisionError("a defect"), openai.InternalServerError, 500, None),
]


def failing(error: Exception) -> Scripted:
    async def fail(request: ChatRequest) -> None:
        raise error

    return Scripted(before=fail)


@streamed_and_whole
@pytest.mark.parametrize(("error", "kind", "status", "code"), ERRORS, ids=lambda v: type(v).__name__)
async def test_a_failure_gets_its_own_status_and_code(
    error: Exception, kind: type[openai.APIStatusError], status: int, code: str | None, stream: bool
) -> None:
    async with sdk(failing(error)) as client:
        with pytest.raises(kind) as caught:
            await ask(client, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers.get("retry-after") == ("7" if status == 503 else None)


@streamed_and_whole
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages.0.content.0.text"),
        ({"logprobs": "yes"}, "logprobs"),
    ],
    ids=["two choices", "a text that is none", "log-probabilities that are no flag"],
)
async def test_a_request_that_cannot_be_read_is_refused_with_its_path_and_nothing_is_asked(
    more: dict[str, Any], param: str, stream: bool
) -> None:
    engine = Scripted()
    async with sdk(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, stream=stream, **more)
    assert caught.value.param == param
    assert caught.value.message
    assert engine.requests == []


@streamed_and_whole
async def test_a_response_format_is_taken_not_enforced_and_counted(stream: bool) -> None:
    async with serving(Scripted()) as (proxy, session, _), client_of(proxy.url, session.key) as client:
        got = await ask(client, stream=stream, response_format={"type": "json_object"})
        assert got.choices[0].message.content == "hello"
        assert session.counts["ignored.response_format"] == 1


async def test_an_unknown_key_is_an_authentication_error() -> None:
    async with serving(Scripted()) as (proxy, _, _), client_of(proxy.url, "nobody") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(client, stream=False)
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_every_chunk_on_the_socket_can_be_read_by_itself(reply: Message) -> None:
    reader = StreamReader(usage=True)
    async with sdk(Scripted([reply])) as client:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.chat.completions.with_raw_response.create(**HELLO, **options)
        assert response.http_response.headers["content-type"].startswith("text/event-stream")
        async for piece in response.http_response.aiter_raw():
            for byte in piece:
                reader.feed(bytes([byte]))
    told = reader.finish()
    assert (told.content, told.reasoning) == (reply.content, reply.reasoning)
    assert [call["id"] for call in told.calls] == [call.id for call in reply.tool_calls]


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_the_raw_answers_hold_nothing_that_the_sdks_models_do_not_know(reply: Message) -> None:
    async with serving(Scripted([reply])) as (_, _, http), http.post(CHAT, json=HELLO) as response:
        check_whole(await response.json())


async def test_an_overflow_is_worded_as_clients_know_it() -> None:
    async with sdk(failing(ContextOverflow(8193, 8192))) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, stream=False)
    assert caught.value.body == {
        "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 8193 "
        "tokens. Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_a_failure_after_the_headers_is_an_error_event_and_no_end_of_the_reply() -> None:
    headers_sent = anyio.Event()

    async def fail_late(request: ChatRequest) -> None:
        await headers_sent.wait()
        raise EngineError("the engine died")

    async with sdk(Scripted(before=fail_late), ProxyConfig(header_grace_seconds=0)) as client:
        stream = await client.chat.completions.create(**HELLO, stream=True)
        headers_sent.set()
        with pytest.raises(openai.APIError, match="the engine died"):
            await anext(stream.__aiter__())  # not one chunk that looks like a reply


async def test_a_sealed_session_is_not_tried_again_by_the_sdk() -> None:
    engine = Scripted()
    async with (
        serving(engine) as (proxy, session, _),
        client_of(proxy.url, session.key).with_options(max_retries=5) as c,
    ):
        session.seal()
        with pytest.raises(openai.ConflictError):
            await ask(c, stream=False)
        assert session.counts["refused_sealed"] == 1
    assert engine.requests == []


async def test_the_sdk_lists_models() -> None:
    async with serving(Scripted(), model="my-policy") as (proxy, session, _), client_of(proxy.url, session.key) as c:
        assert [model.id async for model in c.models.list()] == ["my-policy"]
        assert (await c.models.retrieve("org/any-name")).id == "org/any-name"


MUTATIONS = {
    "no finish reason": lambda body: body["choices"][0].pop("finish_reason"),
    "an unknown finish reason": lambda body: body["choices"][0].update(finish_reason="done"),
    "a message that is a string": lambda body: body["choices"][0].update(message="hello"),
    "created as text": lambda body: body.update(created="yesterday"),
    "half a usage": lambda body: body["usage"].pop("total_tokens"),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
async def test_control_strict_validation_rejects_a_mutated_reply(mutate: Any) -> None:
    incoming = Incoming("", {}, {}, HELLO)
    dialect = OpenAIChat()
    body = dialect.encode(completion_of(say("hello"), dialect.decode(incoming)), incoming)
    mutate(body)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}", "key") as client:
            with pytest.raises(openai.APIResponseValidationError):
                await ask(client, stream=False)
    finally:
        await runner.cleanup()
