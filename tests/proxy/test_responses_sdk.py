"""The openai SDK with strict response validation, over sockets: the exact oracle of what Responses clients accept."""

from __future__ import annotations

import copy
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, get_args

import anyio
import brotli
import openai
import pydantic
import pytest
import zstandard
from aiohttp import web
from openai import BaseModel
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent

from polar_plugin.errors import BadRequest, ContextOverflow, EngineBusy, EngineError
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import ChatRequest, FinishReason, Message, Role

from .responses_wire import (
    BODY,
    DIALECT,
    NOTE,
    PATCH,
    PATH,
    REPLIES,
    RUN,
    SPAWN,
    TOOLS,
    Wire,
    client_of,
    complete,
    incoming_of,
    sdk,
    whole,
)
from .scripted import Scripted, Stopped, say, serving

pytestmark = pytest.mark.anyio
streamed_and_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
SENDABLE = {name: reply for name, reply in REPLIES.items() if name != "lone surrogates"}
"""The SDK reads lone surrogates but cannot send them."""
every_reply = pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())


async def ask(client: openai.AsyncOpenAI, *, stream: bool = False, **more: Any) -> Response:
    """The SDK's plain answer, or the response of the last event."""
    if not stream:
        return await client.responses.create(**(BODY | more))
    events = [event async for event in await client.responses.create(**(BODY | more), stream=True)]
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].response


def calls_of(response: Response) -> list[tuple[str, ...]]:
    told: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            told.append((item.call_id, item.namespace or "", item.name, item.arguments))
        elif item.type == "custom_tool_call":
            told.append((item.call_id, item.namespace or "", item.name, item.input))
        elif item.type == "local_shell_call":
            told.append((item.call_id, "", "local_shell", json.dumps(item.action.command)))
    return told


EXPECTED = {
    "call_1": ("call_1", "", "bash", RUN.arguments),
    "call_2": ("call_2", "", "bash", '{"command": "a \\u00e9 \\ud83d\\ude00 π"}'),
    "call_3": ("call_3", "", "bash", "{}"),
    "call_4": ("call_4", "", "apply_patch", '*** Begin\n+é "x"\n*** End'),
    "call_5": ("call_5", "agents", "spawn", SPAWN.arguments),
    "call_6": ("call_6", "agents", "note", "remember"),
    "call_7": ("call_7", "", "local_shell", '["ls", "-l"]'),
    "call_8": ("call_8", "", "invented", '{"x": [1, {"y": null}]}'),
    "call_9": ("call_9", "", "bash", '{"command": "\\ud83d"}'),
}


@streamed_and_whole
@pytest.mark.parametrize("reply", SENDABLE.values(), ids=SENDABLE.keys())
async def test_the_sdk_gets_the_reply_and_its_echo_continues_the_conversation(reply: Message, stream: bool) -> None:
    engine = Scripted([reply])
    async with sdk(engine) as client:
        got = await ask(client, stream=stream)
        assert got.status == "completed"
        assert got.output_text == reply.content
        assert calls_of(got) == [EXPECTED[call.id] for call in reply.tool_calls]
        said = [part.text for item in got.output if item.type == "reasoning" for part in item.summary]
        assert said == ([reply.reasoning] if reply.reasoning else [])
        echo = [item.model_dump(exclude_none=True, mode="json") for item in got.output]
        user = {"role": "user", "content": "go on"}
        await ask(client, stream=stream, input=[{"role": "user", "content": "hi"}, *echo, user])
    _, echoed, last = engine.requests[1].messages
    assert (echoed.content, echoed.reasoning, last.content) == (reply.content, reply.reasoning, "go on")
    assert [(call.name, json.loads(call.arguments), call.id) for call in echoed.tool_calls] == [
        (call.name, json.loads(call.arguments), call.id) for call in reply.tool_calls
    ]


@every_reply
async def test_the_sdks_own_accumulation_of_a_stream_is_the_reply(reply: Message) -> None:
    strict = [tool | ({"strict": True} if tool["type"] == "function" else {}) for tool in TOOLS]
    async with sdk(Scripted([reply])) as client:
        async with client.responses.stream(**(BODY | {"tools": strict})) as events:
            texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
            got = await events.get_final_response()
        assert "".join(texts) == got.output_text == reply.content
        assert calls_of(got) == [EXPECTED[call.id] for call in reply.tool_calls]


@streamed_and_whole
async def test_a_cut_turn_is_incomplete(stream: bool) -> None:
    async with sdk(Scripted([say("once upon", "hm")], finish=FinishReason.LENGTH)) as client:
        got = await ask(client, stream=stream)
    assert got.status == "incomplete"
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in got.output] == ["completed", "incomplete"]  # type: ignore[union-attr]
    assert got.output_text == "once upon"


@streamed_and_whole
async def test_a_cut_turn_with_whole_calls_is_incomplete_and_keeps_them(stream: bool) -> None:
    async with sdk(Scripted([say("", "", RUN, PATCH)], finish=FinishReason.LENGTH)) as client:
        got = await ask(client, stream=stream)
    assert got.status == "incomplete"
    assert [call[0] for call in calls_of(got)] == ["call_1", "call_4"]


@streamed_and_whole
async def test_a_turn_that_a_stop_string_of_the_trainers_ended_is_completed(stream: bool) -> None:
    """The API itself has no stop sequences."""
    async with sdk(Stopped([say("one two")])) as client:
        got = await ask(client, stream=stream)
    assert (got.status, got.incomplete_details, got.output_text) == ("completed", None, "one two")


@streamed_and_whole
async def test_usage_counts_the_true_ids(stream: bool) -> None:
    async with sdk(Scripted()) as client:
        usage = (await ask(client, stream=stream)).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (8, 3, 11)


@streamed_and_whole
async def test_token_ids_and_log_probabilities_leave_only_when_asked_for(stream: bool) -> None:
    async with sdk(Scripted()) as client:
        silent = await ask(client, stream=stream)
        told = await ask(client, stream=stream, include=["message.output_text.logprobs"])
    assert "token_id" not in silent.model_dump_json()
    (message,) = told.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert [(token.token, token.logprob) for token in part.logprobs or ()] == [
        ("token_id:11", -0.5),
        ("token_id:12", -0.25),
        ("token_id:13", -9999.0),
    ]


async def test_what_the_request_says_is_told_back_and_validates() -> None:
    said: Wire = {
        "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 99, "truncation": "auto",
        "metadata": {"a": "b"}, "prompt_cache_key": "k", "parallel_tool_calls": False, "max_tool_calls": 3,
        "tool_choice": {"type": "custom", "name": "apply_patch"}, "text": {"verbosity": "low"},
        "reasoning": {"effort": "high", "summary": "detailed"},
    }  # fmt: skip
    async with sdk(Scripted()) as client:
        got = (await ask(client, **said)).model_dump(exclude_none=True)
    assert {key: got[key] for key in said} == said | {"text": {"format": {"type": "text"}, "verbosity": "low"}}
    assert [tool["type"] for tool in got["tools"]] == ["function", "custom", "namespace", "local_shell"]
    assert got["tools"][0]["parameters"] == TOOLS[0]["parameters"]


SMALL = json.dumps({"model": "policy", "input": "hi there"}).encode()
PACKED = {
    "zstd": zstandard.compress(SMALL),
    "gzip": gzip.compress(SMALL),
    "deflate": zlib.compress(SMALL),
    "br": brotli.compress(SMALL),
    "gzip, zstd": zstandard.compress(gzip.compress(SMALL)),
    "deflate, br, zstd": zstandard.compress(brotli.compress(zlib.compress(SMALL))),
}


@pytest.mark.parametrize("coding", PACKED)
async def test_case_95_a_compressed_request_is_read_and_a_damaged_one_refused(coding: str) -> None:
    engine = Scripted()
    packed = PACKED[coding]
    async with serving(engine) as (_, session, http):
        async with http.post(PATH, data=packed, headers={"Content-Encoding": coding}) as response:
            assert response.status == 200, await response.text()
        for damaged in (packed[:-1], packed[1:], b"\x00" * len(packed), SMALL):
            async with http.post(PATH, data=damaged, headers={"Content-Encoding": coding}) as response:
                assert response.status == 400
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert len(session.completions) == 1
    assert [request.messages[0].content for request in engine.requests] == ["hi there"]


async def test_case_95_a_body_whose_text_can_be_read_though_it_is_compressed_is_decompressed() -> None:
    packed = PACKED["zstd"]
    assert len(packed) < 64
    assert SMALL in packed, "a small frame holds its text as it is"
    async with serving(Scripted()) as (_, _, http):
        async with http.post(PATH, data=packed, headers={"Content-Encoding": "zstd"}) as response:
            assert response.status == 200
        async with http.post(PATH, data=packed) as response:  # not declared
            assert response.status == 400


async def test_case_99_previous_response_id_goes_on_from_the_recorded_turn() -> None:
    engine = Scripted([say("look", "hmm", RUN), say("done"), say("again")])
    async with sdk(engine) as client:
        first = await ask(client, instructions="Be brief.")
        output = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}
        second = await ask(client, instructions="Be brief.", previous_response_id=first.id, input=[output])
        await ask(client, previous_response_id=second.id, input="more", stream=True)
    roles = [[message.role for message in request.messages] for request in engine.requests]
    assert roles[1] == ["system", "user", "assistant", "tool"]
    assert roles[2] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert engine.requests[2].messages[2] == say("look", "hmm", RUN)
    assert engine.requests[1].messages[3].name == "bash"
    assert second.previous_response_id == first.id


async def test_case_99_an_unknown_previous_response_is_refused_with_its_path_and_generates_nothing() -> None:
    engine = Scripted()
    async with sdk(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, previous_response_id="resp_of_somebody_else")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    assert engine.requests == []


async def test_the_sdk_counts_input_tokens() -> None:
    engine = Scripted()
    async with sdk(engine) as client:
        got = await client.responses.input_tokens.count(model="policy", input="hi", tools=TOOLS)  # type: ignore[arg-type]
    assert (got.object, got.input_tokens) == ("response.input_tokens", 8)
    assert engine.requests == []


async def test_case_98_the_sdk_compacts_and_the_output_is_the_input_of_the_next_turn() -> None:
    engine = Scripted([say("The user wants a file; it is half done.", "let me see"), say("on it")])
    history = [
        {"role": "developer", "content": "You are an agent."},
        {"role": "user", "content": "make a file"},
        {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        {"role": "user", "content": "and \u00e9 \u2028"},
    ]
    async with sdk(engine) as client:
        got = await client.responses.compact(model="policy", input=history)  # type: ignore[arg-type]
        assert isinstance(got, CompactedResponse)
        assert got.usage.total_tokens == got.usage.input_tokens + 3
        (item,) = got.output
        assert item.type == "compaction"
        echo = [item.model_dump(exclude_none=True)]
        await ask(
            client,
            input=[{"role": "developer", "content": "You are an agent."}, *echo, {"role": "user", "content": "go"}],
        )
    compacted, after = engine.requests
    assert (compacted.role, compacted.tool_choice, after.role) == (Role.COMPACTION, "none", Role.MAIN)
    assert compacted.messages[-1].role == "user"
    assert [message.role for message in after.messages] == ["system", "user", "user", "user", "user"]
    assert [m.content for m in after.messages[1:3]] == ["make a file", "and \u00e9 \u2028"]
    assert "it is half done" in after.messages[3].content
    assert after.messages[4].content == "go"


async def test_case_98_models_are_listed_for_the_sdk_and_for_codex() -> None:
    async with serving(Scripted(), model="my-policy") as (proxy, session, http):
        for agent in ("codex_exec/0.171.0", "anything"):
            async with client_of(proxy.url, session.key, default_headers={"User-Agent": agent}) as client:
                assert [model.id async for model in client.models.list()] == ["my-policy"]
                assert (await client.models.retrieve("org/any-name")).id == "org/any-name"
        async with http.get("/v1/models?client_version=0.171.0", headers={"originator": "codex_exec"}) as answer:
            assert (await answer.json())["models"] == []


UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "eA==", "Sec-WebSocket-Version": "13"}


@pytest.mark.parametrize("headers", [UPGRADE, {}], ids=["an upgrade", "a plain GET"])
@pytest.mark.parametrize("prefixed", [False, True], ids=["key in a header", "key in the path"])
async def test_case_97_a_websocket_is_declined_at_once_with_426_and_http_goes_on(
    headers: dict[str, str], prefixed: bool
) -> None:
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        prefix = f"/s/{session.key}" if prefixed else ""
        async with http.get(prefix + PATH, headers=headers) as answer:
            assert answer.status == 426
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
        assert engine.requests == []
        async with http.post(prefix + PATH, json=BODY) as answer:
            assert (await answer.json())["status"] == "completed"


@pytest.mark.parametrize("path", ["/resp_1", "/resp_1/cancel", "/resp_1/input_items", "/nonsense/more"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_what_is_not_served_is_404_in_the_apis_shape(method: str, path: str) -> None:
    engine = Scripted()
    async with serving(engine) as (_, _, http), http.request(method, PATH + path, json={}) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"].keys() == {"message", "type", "param", "code"}
    assert engine.requests == []


# --- failures ---------------------------------------------------------------------------------------------------------

ERRORS = [
    (EngineError("no ids"), openai.InternalServerError, 502, None),
    (EngineBusy("full", retry_after=7), openai.InternalServerError, 503, None),
    (ContextOverflow(8193, 8192), openai.BadRequestError, 400, "context_length_exceeded"),
    (BadRequest("odd", path="input.0"), openai.BadRequestError, 400, None),
    (ZeroDivisionError("a defect"), openai.InternalServerError, 500, None),
]


def failing(error: Exception, when: anyio.Event | None = None) -> Scripted:
    async def fail(request: ChatRequest) -> None:
        if when is not None:
            await when.wait()
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
async def test_an_unknown_key_is_401_and_a_sealed_session_409_and_neither_is_tried_again(stream: bool) -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, session, _):
        async with client_of(proxy.url, "nobody's") as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client, stream=stream)
        session.seal()
        async with client_of(proxy.url, session.key, max_retries=5) as client:
            with pytest.raises(openai.ConflictError) as caught:
                await ask(client, stream=stream)
        assert caught.value.code == "session_sealed"
        assert session.counts["refused_sealed"] == 1
    assert engine.requests == []


BROKEN: dict[str, tuple[Wire, str]] = {
    "no input": ({"input": None}, "input"),
    "an input that is a number": ({"input": 7}, "input"),
    "an item that is a string": ({"input": ["hi"]}, "input.0"),
    "an item without a type": ({"input": [{}]}, "input.0.id"),
    "a type that is a number": ({"input": [{"type": 7}]}, "input.0.type"),
    "an unknown role": ({"input": [{"role": "ghost", "content": ""}]}, "input.0.role"),
    "content that is an object": ({"input": [{"role": "user", "content": {}}]}, "input.0.content"),
    "a part that is a number": ({"input": [{"role": "user", "content": [7]}]}, "input.0.content.0"),
    "a text that is a number": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 7}]}]},
        "input.0.content.0.text",
    ),
    "a call without a name": ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input.0.name"),
    "arguments that are a list": (
        {"input": [{"type": "function_call", "name": "f", "arguments": [1]}]},
        "input.0.arguments",
    ),
    "a free-form input that is an object": (
        {"input": [{"type": "custom_tool_call", "name": "f", "input": {}}]},
        "input.0.input",
    ),
    "an action that is a string": ({"input": [{"type": "local_shell_call", "action": "ls"}]}, "input.0.action"),
    "an output that is a number": ({"input": [{"type": "function_call_output", "output": 7}]}, "input.0.output"),
    "a reference to nothing": ({"input": [{"type": "item_reference", "id": "msg_none_0"}]}, "input.0.id"),
    "a blob that is an object": (
        {"input": [{"type": "reasoning", "encrypted_content": {}}]},
        "input.0.encrypted_content",
    ),
    "tools that are an object": ({"tools": {}}, "tools"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools.0.name"),
    "a custom tool without a name": ({"tools": [{"type": "custom"}]}, "tools.0.name"),
    "a namespace without a name": ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.name"),
    "a namespaced tool without a name": (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
        "tools.0.tools.0.name",
    ),
    "an additional tool without a name": (
        {"input": [{"type": "additional_tools", "role": "developer", "tools": [{"type": "custom"}]}]},
        "input.0.tools.0.name",
    ),
    "parameters that are a string": (
        {"tools": [{"type": "function", "name": "f", "parameters": "{}"}]},
        "tools.0.parameters",
    ),
    "an unknown tool choice": ({"tool_choice": "perhaps"}, "tool_choice"),
    "a choice of no tool": ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice.name"),
    "a choice of a tool that is not allowed to be": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
        "tool_choice.tools.0.name",
    ),
    "no room for output": ({"max_output_tokens": 0}, "max_output_tokens"),
    "a temperature that is a string": ({"temperature": "hot"}, "temperature"),
    "a stream that is a string": ({"stream": "yes"}, "stream"),
    "instructions that are a number": ({"instructions": 7}, "instructions"),
    "a stored conversation": ({"conversation": "conv_1"}, "conversation"),
    "a stored prompt": ({"prompt": {"id": "p"}}, "prompt"),
}


@pytest.mark.parametrize(("change", "path"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_request_that_cannot_be_read_gets_400_with_the_path_and_changes_nothing(
    change: Wire, path: str
) -> None:
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        async with http.post(PATH, json=BODY | change) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"], error["type"]) == (400, path, "invalid_request_error")
        assert error["message"].startswith(f"{path}: ")
        assert session.completions == ()
        assert session.counts["calls"] == 0
    assert engine.requests == []


LATE: list[tuple[Exception, str]] = [
    (EngineError("the engine died"), "server_error"),
    (EngineBusy("full"), "server_error"),
    (ZeroDivisionError("a defect"), "server_error"),
    (ContextOverflow(8193, 8192), "context_length_exceeded"),
    (BadRequest("this format has no words for it"), "invalid_prompt"),
]


@pytest.mark.parametrize("accumulated", [False, True], ids=["events", "accumulated"])
@pytest.mark.parametrize(("error", "code"), LATE, ids=lambda v: type(v).__name__)
async def test_case_92_a_failure_after_the_headers_ends_in_response_failed(
    error: Exception, code: str, accumulated: bool
) -> None:
    """The SDK's list of codes lacks the overflow's, which clients look for: only then is it not strict here."""
    headers_sent = anyio.Event()
    strict = code != "context_length_exceeded"
    engine = failing(error, headers_sent)
    async with sdk(engine, ProxyConfig(header_grace_seconds=0), _strict_response_validation=strict) as client:
        events: list[Any] = []
        if accumulated:
            async with client.responses.stream(model="policy", input="hi") as stream:
                headers_sent.set()
                events = [event async for event in stream]
        else:
            got = await client.responses.create(model="policy", input="hi", stream=True)
            headers_sent.set()
            events = [event async for event in got]
    assert [event.type for event in events] == ["response.created", "response.failed"]
    assert events[-1].response.status == "failed"
    assert events[-1].response.model == "policy"
    assert events[-1].response.error.code == code


# --- the oracle -------------------------------------------------------------------------------------------------------


def forbidding(model: Any, seen: dict[Any, Any]) -> Iterator[type[BaseModel]]:
    """Every model that `model`, an annotation, is made of."""
    if isinstance(model, type) and issubclass(model, pydantic.BaseModel):
        if model not in seen:
            seen[model] = model
            yield model  # type: ignore[misc]
            for found in model.model_fields.values():
                yield from forbidding(found.annotation, seen)
        return
    for inner in get_args(getattr(model, "__value__", model)):
        yield from forbidding(inner, seen)


@pytest.fixture(scope="module")
def exact() -> Iterator[Callable[[Any, Any], None]]:
    """The SDK's models with no field beyond theirs and no value converted."""
    models = list(forbidding(Response, seen := {})) + list(forbidding(ResponseStreamEvent, seen))
    before = [copy.copy(model.model_config) for model in models]
    for model in models:
        model.model_config["extra"] = "forbid"
        model.model_config["strict"] = True
        model.model_config["defer_build"] = False
    for model in models:
        model.model_rebuild(force=True)
    yield lambda kind, value: pydantic.TypeAdapter(kind).validate_python(value)
    for model, config in zip(models, before, strict=True):
        model.model_config.clear()
        model.model_config.update(config)
    for model in models:
        model.model_rebuild(force=True)


@every_reply
@pytest.mark.parametrize("finish", FinishReason)
def test_no_field_is_unknown_to_the_sdk_and_none_is_of_another_type(
    reply: Message, finish: FinishReason, exact: Callable[[Any, Any], None]
) -> None:
    body = BODY | {"include": ["message.output_text.logprobs"], "text": {"format": {"type": "json_object"}}}
    completion, incoming = complete(reply, body, finish=finish), incoming_of(body)
    exact(Response, DIALECT.encode(completion, incoming))
    for event in DIALECT.events(completion, incoming):
        exact(ResponseStreamEvent, event.data)


MUTATIONS: dict[str, Callable[[Wire], Any]] = {
    "no status of a message": lambda body: body["output"][0].pop("status"),
    "an unknown item": lambda body: body["output"][0].update(type="thing"),
    "a message that is a string": lambda body: body["output"].append("hello"),
    "created as text": lambda body: body.update(created_at="yesterday"),
    "half a usage": lambda body: body["usage"].pop("total_tokens"),
    "no tools": lambda body: body.pop("tools"),
    "an unknown tool choice": lambda body: body.update(tool_choice="perhaps"),
    "an unknown reason": lambda body: body.update(incomplete_details={"reason": "tired"}),
    "a text without annotations": lambda body: body["output"][0]["content"][0].pop("annotations"),
    "a call without an id": lambda body: body["output"][1].pop("call_id"),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
async def test_control_strict_validation_rejects_a_mutated_reply(mutate: Callable[[Wire], Any]) -> None:
    body = whole(say("hello", "", NOTE, RUN))
    mutate(body)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_post(PATH, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with client_of(f"http://127.0.0.1:{runner.addresses[0][1]}", "key") as client:
            with pytest.raises(openai.APIResponseValidationError):
                await ask(client)
    finally:
        await runner.cleanup()


EVENT_MUTATIONS: dict[str, tuple[str, Callable[[Wire], Any]]] = {
    "no sequence number": ("response.output_text.delta", lambda event: event.pop("sequence_number")),
    "no item id": ("response.output_text.delta", lambda event: event.pop("item_id")),
    "no log-probabilities": ("response.output_text.done", lambda event: event.pop("logprobs")),
    "no output index": ("response.function_call_arguments.delta", lambda event: event.pop("output_index")),
    "a number as text": ("response.content_part.added", lambda event: event.update(content_index="0")),
    "a field of our own": ("response.custom_tool_call_input.done", lambda event: event.update(extra=1)),
    "an unknown event": ("response.completed", lambda event: event.update(type="response.finished")),
}


@pytest.mark.parametrize(("kind", "mutate"), EVENT_MUTATIONS.values(), ids=EVENT_MUTATIONS.keys())
def test_control_the_exact_models_reject_a_mutated_event(
    kind: str, mutate: Callable[[Wire], Any], exact: Callable[[Any, Any], None]
) -> None:
    events = [e.data for e in DIALECT.events(complete(say("hello", "", NOTE, RUN)), incoming_of(BODY))]
    event: Any = next(e for e in events if isinstance(e, dict) and e["type"] == kind)
    exact(ResponseStreamEvent, event)
    mutate(event)
    with pytest.raises(pydantic.ValidationError):
        exact(ResponseStreamEvent, event)
