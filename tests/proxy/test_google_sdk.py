"""The google-genai SDK over sockets, and its models as the oracle of what the wire may hold."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio.to_thread
import pydantic
import pytest
from google import genai
from google.genai import errors, types

from polar_plugin.engine.meaning import message_digest
from polar_plugin.errors import BadRequest, ContextOverflow, EngineBusy, EngineError
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Session
from polar_plugin.records import ChatRequest, FinishReason, Message, ToolCall

from .google_stream import check_chunk
from .scripted import Scripted, Stopped, say, serving

pytestmark = [
    pytest.mark.anyio,
    # the SDK derives its own client from one that aiohttp would not have derived from
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning"),
]

LIST = ToolCall("bash", '{"command": "ls"}', id="call_1")
READ = ToolCall("read", '{"path": "a \\u00e9 \\ud83d\\ude00.py", "lines": [1, 2.5, null, true]}', id="call_2")
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
THOUGHTS = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))
Mode = Literal["whole", "streamed"]


@dataclass
class SDK:
    """Both faces of a client under one set of names."""

    client: genai.Client
    synchronous: bool

    async def ask(
        self, mode: Mode, contents: Any = "hi", config: Any = THOUGHTS
    ) -> list[types.GenerateContentResponse]:
        """All that came: one response, or the chunks of a stream."""
        told = {"model": "policy", "contents": contents, "config": config}
        if not self.synchronous:
            models = self.client.aio.models
            if mode == "whole":
                return [await models.generate_content(**told)]
            return [chunk async for chunk in await models.generate_content_stream(**told)]
        if mode == "whole":
            return [await anyio.to_thread.run_sync(lambda: self.client.models.generate_content(**told))]
        return await anyio.to_thread.run_sync(lambda: list(self.client.models.generate_content_stream(**told)))

    async def call(self, method: str, **told: Any) -> Any:
        if self.synchronous:
            return await anyio.to_thread.run_sync(lambda: getattr(self.client.models, method)(**told))
        return await getattr(self.client.aio.models, method)(**told)


def client_of(proxy: Proxy, key: str) -> genai.Client:
    options = types.HttpOptions(base_url=proxy.url, retry_options=types.HttpRetryOptions(attempts=1))
    return genai.Client(api_key=key, http_options=options)


@asynccontextmanager
async def sdk(
    synchronous: bool, reply: Scripted, *, key: str | None = None, config: ProxyConfig | None = None
) -> AsyncGenerator[tuple[SDK, Session]]:
    async with serving(reply, config) as (proxy, session, _):
        client = client_of(proxy, key or session.key)
        try:
            with anyio.fail_after(60):
                yield SDK(client, synchronous), session
        finally:
            await client.aio.aclose()
            client.close()


faces = pytest.mark.parametrize("synchronous", [False, True], ids=["async", "sync"])
modes = pytest.mark.parametrize("mode", ["whole", "streamed"])


def parts_of(chunks: list[types.GenerateContentResponse]) -> list[types.Part]:
    return [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()]  # type: ignore[index, union-attr]


@faces
@modes
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_the_sdk_gets_the_reply_and_its_echo_continues_the_conversation(
    reply: Message, mode: Mode, synchronous: bool
) -> None:
    engine = Scripted([reply])
    async with sdk(synchronous, engine) as (api, _):
        chunks = await api.ask(mode)
        parts = parts_of(chunks)
        assert "".join(part.text or "" for part in parts if not part.thought) == reply.content
        assert "".join(part.text or "" for part in parts if part.thought) == reply.reasoning
        calls = [part.function_call for part in parts if part.function_call]
        assert [(call.id, call.name) for call in calls] == [(call.id, call.name) for call in reply.tool_calls]
        assert chunks[-1].candidates[0].finish_reason is types.FinishReason.STOP  # type: ignore[index]
        echo = [chunk.candidates[0].content for chunk in chunks]  # type: ignore[index]
        answers = [types.Part.from_function_response(name=c.name, response={"result": "ok"}) for c in calls]  # type: ignore[arg-type]
        last = types.Content(role="user", parts=answers or [types.Part(text="go on")])
        await api.ask(mode, [types.Content(role="user", parts=[types.Part(text="hi")]), *echo, last])
    echoed = engine.requests[1].messages[1]
    assert (message_digest(echoed), echoed.reasoning) == (message_digest(reply), reply.reasoning)
    assert [call.id for call in echoed.tool_calls] == [call.id for call in reply.tool_calls]
    results = engine.requests[1].messages[2:]
    assert [one.tool_call_id for one in results if one.role == "tool"] == [call.id for call in reply.tool_calls]


@faces
@modes
async def test_a_cut_turn_ends_in_max_tokens_and_usage_counts_the_true_ids(mode: Mode, synchronous: bool) -> None:
    async with sdk(synchronous, Scripted([say("once upon")], finish=FinishReason.LENGTH)) as (api, _):
        last = (await api.ask(mode))[-1]
    usage = last.usage_metadata
    assert usage is not None
    assert last.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS  # type: ignore[index]
    assert (usage.prompt_token_count, usage.candidates_token_count, usage.total_token_count) == (8, 3, 11)
    assert (last.model_version, last.response_id) == ("policy", "c1")


@faces
@modes
async def test_a_stop_sequence_reaches_the_engine_and_the_turn_ends_in_stop(mode: Mode, synchronous: bool) -> None:
    engine = Stopped([say("one two")])
    config = types.GenerateContentConfig(stop_sequences=["END"], temperature=0, top_p=0.5, top_k=9, seed=3)
    async with sdk(synchronous, engine) as (api, _):
        told = await api.ask(mode, config=config)
    sampling = engine.requests[0].sampling
    assert (sampling.stop, sampling.temperature, sampling.top_p) == (("END",), 0.0, 0.5)
    assert (sampling.top_k, sampling.seed) == (9, 3)
    assert told[-1].candidates[0].finish_reason is types.FinishReason.STOP  # type: ignore[index]
    assert "".join(part.text or "" for part in parts_of(told)) == "one two"


@faces
async def test_the_whole_of_a_request_as_the_sdk_writes_it_is_understood(synchronous: bool) -> None:
    def weather(city: str, days: int = 1) -> str:
        """The weather."""
        return ""

    engine = Scripted()
    declared = types.FunctionDeclaration(name="exact", parameters_json_schema={"type": "object", "properties": {}})
    config = types.GenerateContentConfig(
        system_instruction="Be brief.",
        tools=[weather, types.Tool(function_declarations=[declared])],
        tool_config=types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="ANY")),  # type: ignore[arg-type]
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        max_output_tokens=77,
    )
    image = types.Part.from_bytes(data=b"\xfb\xff\xfe", mime_type="image/png")
    async with sdk(synchronous, engine) as (api, _):
        await api.ask("whole", ["see", image], config)
    (request,) = engine.requests
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.messages[1].content == "see\n[image omitted]"
    assert request.messages[1].parts[1].data == "+//+"  # type: ignore[union-attr]
    assert [tool.name for tool in request.tools] == ["weather", "exact"]
    properties = request.tools[0].parameters["properties"]
    assert (properties["city"]["type"], properties["days"]["type"]) == ("string", "integer")
    assert (request.tool_choice, request.sampling.max_tokens) == ("required", 77)


@faces
async def test_automatic_function_calling_runs_to_its_end(synchronous: bool) -> None:
    asked: list[str] = []

    def weather(city: str) -> str:
        asked.append(city)
        return "sunny"

    engine = Scripted([say("", "hm", ToolCall("weather", '{"city": "Rome"}', id="call_1")), say("It is sunny.")])
    async with sdk(synchronous, engine) as (api, _):
        (response,) = await api.ask("whole", config=types.GenerateContentConfig(tools=[weather]))
    assert (response.text, asked) == ("It is sunny.", ["Rome"])
    assert engine.requests[1].messages[1:] == (
        say("", "hm", ToolCall("weather", '{"city": "Rome"}')),
        Message("tool", "sunny", name="weather"),
    )


@faces
async def test_tokens_are_counted_and_models_listed(synchronous: bool) -> None:
    engine = Scripted()
    async with sdk(synchronous, engine) as (api, session):
        assert (await api.call("count_tokens", model="policy", contents=["a", "b"])).total_tokens == 8
        assert (await api.call("get", model="org/any")).name == "models/org/any"
        listing = await api.call("list")
        names = [m.name async for m in listing] if hasattr(listing, "__aiter__") else [m.name for m in listing]
        assert names == ["models/policy"]
        assert (session.counts["token_counts"], engine.requests) == (1, [])


def failing(error: Exception) -> Scripted:
    async def fail(request: ChatRequest) -> None:
        raise error

    return Scripted(before=fail)


ERRORS: list[tuple[Exception, type[errors.APIError], int, str, str]] = [
    (EngineError("no ids"), errors.ServerError, 502, "INTERNAL", "no ids"),
    (EngineBusy("full"), errors.ServerError, 503, "UNAVAILABLE", "full"),
    (ContextOverflow(8193, 8192), errors.ClientError, 400, "INVALID_ARGUMENT", "(8193) exceeds the maximum"),
    (BadRequest("odd", path="contents.0"), errors.ClientError, 400, "INVALID_ARGUMENT", "contents.0: odd"),
]


@faces
@modes
@pytest.mark.parametrize("grace", [30.0, 0.0], ids=["before the headers", "after them"])
@pytest.mark.parametrize(("error", "kind", "code", "status", "message"), ERRORS, ids=lambda v: type(v).__name__)
async def test_errors_are_the_sdks_own(
    error: Exception, kind: type[errors.APIError], code: int, status: str, message: str,
    mode: Mode, grace: float, synchronous: bool,
) -> None:  # fmt: skip
    async with sdk(synchronous, failing(error), config=ProxyConfig(header_grace_seconds=grace)) as (api, _):
        with pytest.raises(kind) as caught:
            await api.ask(mode)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert message in (caught.value.message or "")


@faces
@modes
async def test_an_unknown_key_and_a_sealed_session_are_client_errors(mode: Mode, synchronous: bool) -> None:
    async with sdk(synchronous, Scripted(), key="nobody") as (api, _):
        with pytest.raises(errors.ClientError) as caught:
            await api.ask(mode)
        assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")
    async with sdk(synchronous, Scripted()) as (api, session):
        session.seal()
        with pytest.raises(errors.ClientError) as caught:
            await api.ask(mode)
        assert (caught.value.code, caught.value.status) == (409, "FAILED_PRECONDITION")


@faces
async def test_what_is_wrong_is_told_with_its_path_and_changes_nothing(synchronous: bool) -> None:
    async with sdk(synchronous, Scripted()) as (api, session):
        with pytest.raises(errors.ClientError) as caught:
            await api.ask("whole", config=types.GenerateContentConfig(candidate_count=2))
        assert "generationConfig.candidateCount" in (caught.value.message or "")
        assert (session.counts["calls"], session.completions) == (0, ())


async def test_case_104_one_stream_is_one_completion_and_its_last_chunk_says_why_and_how_much() -> None:
    async with sdk(False, Scripted([say("a" * 20_000, "b" * 20_000, LIST)])) as (api, session):
        chunks = await api.ask("streamed")
        assert len(chunks) > 5
        assert [chunk.candidates[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)  # type: ignore[index]
        assert [chunk.usage_metadata for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].candidates[0].finish_reason is types.FinishReason.STOP  # type: ignore[index]
        assert chunks[-1].usage_metadata is not None
        assert len(session.completions) == 1


@modes
async def test_the_sdks_own_chat_keeps_a_history_that_continues(mode: Mode) -> None:
    engine = Scripted([say("word " * 4000, "hm " * 4000), say("two", "hm")])
    async with sdk(False, engine) as (api, _):
        chat = api.client.aio.chats.create(model="policy", config=THOUGHTS)
        for text in ("one", "more", "end"):
            if mode == "whole":
                await chat.send_message(text)
            else:
                async for _ in await chat.send_message_stream(text):
                    pass
    assert [message.role for message in engine.requests[2].messages] == ["user", "assistant"] * 2 + ["user"]
    assert engine.requests[2].messages[1] == engine.replies[0]
    assert engine.requests[2].messages[3] == engine.replies[1]


# --- the oracle ------------------------------------------------------------------------------------------------------

BODY: dict[str, Any] = {
    "contents": [{"parts": [{"text": "hi"}]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
async def test_the_raw_replies_hold_nothing_that_the_sdks_models_do_not_know(reply: Message) -> None:
    async with serving(Scripted([reply])) as (_, _, http):
        async with http.post("/v1beta/models/m:generateContent", json=BODY) as response:
            check_chunk(await response.json())
        async with http.post("/v1beta/models/m:streamGenerateContent", json=BODY) as response:
            for chunk in await response.json():
                check_chunk(chunk)
        async with http.post("/v1beta/models/m:countTokens", json=BODY) as response:
            types.CountTokensResponse.model_validate(await response.json(), by_alias=True, by_name=False)


CHANGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda reply: reply.update(id="x"),
    lambda reply: reply["candidates"][0].update(message={}),
    lambda reply: reply["candidates"][0].update(finish_reason=reply["candidates"][0].pop("finishReason")),
    lambda reply: reply["candidates"][0]["content"].update(parts="text"),
    lambda reply: reply["candidates"][0]["content"]["parts"][0].update(type="text"),
    lambda reply: reply["candidates"][0]["content"]["parts"][0]["functionCall"].update(arguments="{}"),
    lambda reply: reply["candidates"][0]["content"]["parts"][0]["functionCall"].update(args="{}"),
    lambda reply: reply["candidates"][0]["content"]["parts"][0].update(thoughtSignature="§"),
    lambda reply: reply["usageMetadata"].update(promptTokenCount="many"),
    lambda reply: reply["usageMetadata"].update(completionTokens=1),
]


@pytest.mark.parametrize("change", CHANGES)
async def test_control_the_oracle_rejects_a_reply_with_one_field_changed(change: Callable[..., Any]) -> None:
    async with (
        serving(Scripted([say("", "", LIST)])) as (_, _, http),
        http.post("/v1beta/models/m:generateContent", json=BODY) as response,
    ):
        reply = await response.json()
    check_chunk(reply)
    change(reply)
    with pytest.raises((pydantic.ValidationError, Warning)):
        check_chunk(reply)
