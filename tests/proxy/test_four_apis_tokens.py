"""Numbers, cuts, aborts and images, from each API's request to the ids that the engine saw."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import anyio
import pytest

from polar_plugin.engine.base import Engine
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.server import Proxy
from polar_plugin.proxy.session import Session
from polar_plugin.records import IMAGE, BreakReason, ChatRequest, FinishReason, Generation, Message, SamplingParams
from tests.engine.fake_server import listening
from tests.engine.fake_sglang import FakeSGLang, status

from .test_four_apis import post, posted
from .wires import COUNTS, WIRES, WireAPI, every_api, streamed_and_whole

pytestmark = pytest.mark.anyio

CONTEXT = 8192
CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls é😀"}}\n</tool_call>'
CUT = {
    "openai_chat": "length",
    "openai_responses": "incomplete",
    "anthropic_messages": "max_tokens",
    "google_generate": "MAX_TOKENS",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_renderer(resolve_model("tiny", tmp_path_factory.mktemp("models")))


@asynccontextmanager
async def talking(
    renderer: Any, engine: Engine, **policy: Any
) -> AsyncGenerator[tuple[Proxy, Session, aiohttp.ClientSession]]:
    conversation = Conversation(Policy(engine, renderer, SamplingParams(max_tokens=500), CONTEXT, **policy), "s1")
    async with (
        Proxy().serving() as proxy,
        proxy.session("s1", conversation) as session,
        aiohttp.ClientSession(proxy.url, headers={"x-api-key": session.key}) as http,
    ):
        yield proxy, session, http


async def count(http: aiohttp.ClientSession, api: WireAPI, body: dict[str, Any]) -> int:
    told = {name: value for name, value in body.items() if name not in ("max_tokens", "max_output_tokens", "stream")}
    code, raw = await post(http, api, told, COUNTS[api.name])
    assert code == 200, raw
    return json.loads(raw)["totalTokens" if api.name == "google_generate" else "input_tokens"]


# --- true numbers ----------------------------------------------------------------------------------------------------


@every_api
@streamed_and_whole
async def test_usage_is_the_number_of_true_ids_and_a_count_is_that_of_the_next_call(
    api: WireAPI, stream: bool, tiny: Any
) -> None:
    engine = ScriptedEngine([CALL, "Done. 😀"], tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (_, session, http):
        history = [api.speaker.user("list é")]
        for turn in range(2):
            body = api.body(*history, stream=stream)
            if stream and api.name == "openai_chat":
                body["stream_options"] = {"include_usage": True}
            counted = await count(http, api, body) if api.name in COUNTS else None
            code, raw = await post(http, api, body, api.path(stream))
            assert code == 200, raw
            completion = session.completions[turn]
            truth = len(engine.calls[turn].prompt_ids), len(completion.generation.output_ids)
            assert api.usage(raw, stream=stream) == truth
            assert counted in (None, truth[0])
            if not stream:
                answer = api.speaker.read(json.loads(raw))
                history += [*answer.echo, *api.speaker.results(answer, *["a"] * len(answer.calls))]
            else:
                history.append(api.speaker.user("and"))
        assert len(engine.calls) == 2, "counting samples nothing"


@pytest.mark.parametrize("api", [api for api in WIRES if api.name in COUNTS], ids=lambda api: api.name)
async def test_case_75_a_count_has_the_tools_in_it(api: WireAPI, tiny: Any) -> None:
    engine = ScriptedEngine(["ok"], tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (_, _, http):
        body = api.asks()
        assert await count(http, api, body) > 50 + await count(http, api, body | {"tools": []})


@every_api
@streamed_and_whole
@pytest.mark.parametrize("room", [1, 2])
async def test_case_117_a_long_answer_is_clamped_to_the_context_and_a_prompt_beyond_it_overflows(
    api: WireAPI, stream: bool, room: int, tiny: Any
) -> None:
    engine = ScriptedEngine(lambda _: "y" * 50, tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (_, session, http):
        await post(http, api, api.asks(""))
        empty = len(session.completions[0].prompt_ids)
        fits, beyond = ("x" * (CONTEXT - empty - left) for left in (room, 0))
        code, raw = await post(http, api, api.asks(fits, stream=stream, max_tokens=4096), api.path(stream))
        assert (code, api.finish(raw, stream=stream)) == (200, CUT[api.name])
        call = engine.calls[-1]
        assert (len(call.prompt_ids), call.sampling.max_tokens) == (CONTEXT - room, room)
        code, raw = await post(http, api, api.asks(beyond, stream=stream), api.path(stream))
        assert code == 400
        assert f"{CONTEXT}" in api.error(raw)["message"]
        assert len(session.completions) == len(engine.calls) == 2


BEGUN: dict[str, dict[str, Any]] = {
    "openai_chat": {"role": "assistant", "content": "I begin"},
    "openai_responses": {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I begin"}],
    },
    "google_generate": {"role": "model", "parts": [{"text": "I begin"}]},
}


@pytest.mark.parametrize("api", [api for api in WIRES if api.name in BEGUN], ids=lambda api: api.name)
async def test_a_conversation_that_ends_with_a_reply_is_answered_by_a_turn_of_its_own(api: WireAPI, tiny: Any) -> None:
    """As these vendors do; only Anthropic's API lets a client begin the reply, and refuses it with newer models."""
    engine = ScriptedEngine(["Go on."], tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (_, session, http):
        code, raw = await post(http, api, api.body(api.speaker.user("hi"), BEGUN[api.name]))
        assert code == 200, raw
        assert api.speaker.read(json.loads(raw)).text == "Go on."
        asked = session.completions[0].request.messages
        expected = tiny.render(asked, session.completions[0].request.tools)
        assert (asked[-1].role, asked[-1].content) == ("assistant", "I begin")
        assert engine.calls[0].prompt_ids.tolist() == expected.tolist()
        assert not tiny.decode(expected).endswith("I begin")


@every_api
@streamed_and_whole
async def test_a_prompt_beyond_the_context_is_refused_by_its_status_while_turns_are_held(
    api: WireAPI, stream: bool, tiny: Any
) -> None:
    """Behind headers that say 200, clients ask again for what they would compact."""
    engine = ScriptedEngine([], tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (proxy, session, http):
        with anyio.fail_after(20):
            async with proxy.paused():
                code, raw = await post(http, api, api.asks("x" * CONTEXT, stream=stream), api.path(stream))
        assert code == 400
        assert f"{CONTEXT}" in api.error(raw)["message"]
        assert (session.in_flight, session.completions) == (0, ())


@every_api
@streamed_and_whole
async def test_case_114_a_turn_cut_anywhere_in_a_call_has_no_call_and_no_empty_text(
    api: WireAPI, stream: bool, tiny: Any
) -> None:
    ids = tiny.tokenizer.encode(CALL)
    engine = ScriptedEngine(
        lambda call: Reply(ids=tuple(ids[: call.sampling.max_tokens]), finish_reason=FinishReason.LENGTH),
        tiny.tokenizer.encode,
        context_length=CONTEXT,
    )
    async with talking(tiny, engine) as (_, session, http):
        for size in range(1, len(ids)):
            code, raw = await post(http, api, api.asks(f"go {size}", stream=stream, max_tokens=size), api.path(stream))
            assert (code, api.finish(raw, stream=stream)) == (200, CUT[api.name])
            assert session.completions[-1].generation.output_ids.tolist() == ids[:size]
            for mark in ('"tool_use"', '"tool_calls":[', '"function_call"', '"functionCall"', "tool_call>"):
                assert mark not in raw, (size, mark)
            assert not blank_texts(json.loads(raw) if not stream else events(raw))


def events(raw: str) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]


def blank_texts(value: Any) -> list[Any]:
    """Whole text blocks and parts without a text; an opening block of a stream is none yet."""
    if isinstance(value, list):
        return [blank for one in value for blank in blank_texts(one)]
    if not isinstance(value, dict) or value.get("type") in ("content_block_start", "response.content_part.added"):
        return []
    here = [value] if "text" in value and value["text"] == "" else []
    return here + blank_texts(list(value.values()))


# --- the engine over HTTP --------------------------------------------------------------------------------------------


@every_api
@streamed_and_whole
async def test_case_33_a_hang_up_is_an_abort_at_the_inference_server_within_two_seconds(
    api: WireAPI, stream: bool, tiny: Any
) -> None:
    fake = FakeSGLang()
    fake.answers.append(fake.hold)
    async with listening(fake.app()) as url, SGLangEngine(url) as engine, talking(tiny, engine) as (proxy, session, _):
        async with posted(proxy, session, api.path(stream), json.dumps(api.asks(stream=stream)).encode()):
            await fake.started.wait()
        with anyio.fail_after(2):
            await fake.was_aborted.wait()
            await fake.hung_up.wait()
        assert fake.aborts == [fake.bodies[0]["rid"]]
        assert session.completions == ()


@every_api
@pytest.mark.parametrize(("code", "told"), [(500, 502), (503, 503), (429, 503), (400, 502)])
async def test_an_inference_server_that_fails_is_told_in_the_apis_shape_and_never_as_the_clients_fault(
    api: WireAPI, code: int, told: int, tiny: Any
) -> None:
    fake = FakeSGLang()
    fake.answers.append(status(code, "out of pages", **({"Retry-After": "9"} if told == 503 else {})))
    async with listening(fake.app()) as url, SGLangEngine(url, retries=0) as engine, talking(tiny, engine) as opened:
        _, session, http = opened
        async with http.post(api.path(), json=api.asks(), headers=api.headers) as response:
            error = api.error(await response.read())
        assert (response.status, response.headers.get("Retry-After")) == (told, "9" if told == 503 else None)
        assert "out of pages" in error["message"]
        assert session.completions == ()


# --- images ----------------------------------------------------------------------------------------------------------


@every_api
async def test_an_image_is_a_text_to_a_model_that_sees_none_and_each_is_counted_once(api: WireAPI, tiny: Any) -> None:
    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (_, session, http):
        history = [api.picture("AAAA")]
        for pictures in (1, 2):
            code, raw = await post(http, api, api.body(*history))
            assert code == 200, raw
            assert tiny.decode(engine.calls[-1].prompt_ids).count(IMAGE) == pictures
            assert session.counts["images_omitted"] == pictures
            history += [*api.speaker.read(json.loads(raw)).echo, api.picture("BBBB")]
    assert [completion.break_reason for completion in session.completions] == [BreakReason.FIRST_CALL, None]


@every_api
@streamed_and_whole
async def test_an_image_is_refused_where_the_policy_says_so_and_changes_nothing(
    api: WireAPI, stream: bool, tiny: Any
) -> None:
    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine, images="reject") as (_, session, http):
        code, raw = await post(http, api, api.body(api.picture("AAAA"), stream=stream), api.path(stream))
        assert code == 400
        assert "sees no images" in api.error(raw)["message"]
        assert session.completions == ()
        assert (await post(http, api, api.asks("text is fine")))[0] == 200
    assert len(engine.calls) == 1


# --- memory ----------------------------------------------------------------------------------------------------------


@every_api
async def test_a_session_holds_each_message_once_however_often_it_is_repeated(api: WireAPI, tiny: Any) -> None:
    engine = ScriptedEngine(lambda _: CALL, tiny.tokenizer.encode, context_length=CONTEXT)
    async with talking(tiny, engine) as (_, session, http):
        history = [api.speaker.user("begin")]
        for turn in range(6):
            code, raw = await post(http, api, api.body(*history))
            assert code == 200, raw
            answer = api.speaker.read(json.loads(raw))
            history += [*answer.echo, *api.speaker.results(answer, f"result {turn}")]
    requests = [completion.request for completion in session.completions]
    assert [completion.break_reason for completion in session.completions] == [BreakReason.FIRST_CALL, *[None] * 5]
    assert len({id(one) for request in requests for one in request.messages}) == len(requests[-1].messages) == 12
    assert len({id(request.tools) for request in requests}) == 1


# --- stop strings ----------------------------------------------------------------------------------------------------


class Stopping(ScriptedEngine):
    """Ends each reply behind the first of the stop strings asked for, whose ids stay, as engines are told to."""

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **more: Any) -> Generation:
        whole = await super().generate(prompt_ids, sampling, **more)
        for size in range(1, len(whole.output_ids) + 1):
            text = self.decode(whole.output_ids[:size])  # type: ignore[attr-defined]
            if stop := next((one for one in sampling.stop if one in text), None):
                cut = Generation(whole.output_ids[:size], whole.logprobs[:size], FinishReason.STOP)
                return replace(cut, stop=stop)
        return whole


STOPS = {
    "openai_chat": lambda stop: {"stop": [stop]},
    "anthropic_messages": lambda stop: {"stop_sequences": [stop]},
    "google_generate": lambda stop: {"generationConfig": {"stopSequences": [stop]}},
}
"""OpenAI Responses has none."""
WRITTEN = 'Thought: I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize("api", [api for api in WIRES if api.name in STOPS], ids=lambda api: api.name)
@pytest.mark.parametrize(
    ("says", "stop", "told"),
    [
        ("one END two", "END", "one "),
        ("one END", "END", "one "),
        ("END", "END", ""),
        ("I look. I act.", ".", "I look"),
        (WRITTEN, '"command"', "Thought: I look."),
        (WRITTEN, "\n", "Thought: I look."),
    ],
)
async def test_a_stop_string_and_what_it_cut_in_two_are_not_told(
    api: WireAPI, says: str, stop: str, told: str, tiny: Any
) -> None:
    """In all APIs the text ends before the stop string; the ids that spell it are sampled, and stay on the record."""
    engine = Stopping([says, "Done."], tiny.tokenizer.encode, context_length=CONTEXT)
    engine.decode = tiny.decode  # type: ignore[attr-defined]
    async with talking(tiny, engine) as (_, session, http):
        code, raw = await post(http, api, api.asks() | STOPS[api.name](stop))
        assert code == 200, raw
        assert api.finish(raw, stream=False) in ("stop", "stop_sequence", "STOP")
        (completion,) = session.completions
        assert (completion.reply.content.strip(), completion.reply.tool_calls) == (told.strip(), ())
        assert stop in tiny.decode(completion.generation.output_ids)
        assert "tool_call>" not in raw


async def test_a_stop_string_of_the_trainers_own_is_not_told_either(tiny: Any) -> None:
    engine = Stopping(["one END"], tiny.tokenizer.encode, context_length=CONTEXT)
    engine.decode = tiny.decode  # type: ignore[attr-defined]
    policy = Policy(engine, tiny, SamplingParams(max_tokens=500, stop=("END",)), CONTEXT)
    got = await Conversation(policy, "s1")(ChatRequest((Message("user", "hi"),)))
    assert got.reply.content == "one "


# --- what a model writes when it repeats itself ----------------------------------------------------------------------


@every_api
@pytest.mark.parametrize("depth", [100, 300, 600, 900, 5000])
async def test_arguments_of_any_depth_are_answered_and_stay_readable_when_the_history_is_told_anew(
    api: WireAPI, depth: int, tiny: Any
) -> None:
    nested = "[" * depth + "]" * depth
    says = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": {nested}}}}}\n</tool_call>'
    engine = ScriptedEngine([says, "Done.", "Done."], tiny.tokenizer.encode, context_length=CONTEXT * 4)
    conversation = Conversation(Policy(engine, tiny, SamplingParams(max_tokens=CONTEXT * 2), CONTEXT * 4), "s1")
    async with (
        Proxy().serving() as proxy,
        proxy.session("s1", conversation) as session,
        aiohttp.ClientSession(proxy.url, headers={"x-api-key": session.key}) as http,
    ):
        code, raw = await post(http, api, api.asks(max_tokens=CONTEXT * 2))
        assert code == 200, raw[:300]
        answer = api.speaker.read(json.loads(raw))
        history = [api.speaker.user("hi"), *answer.echo]
        history += api.speaker.results(answer, "ok") if answer.calls else [api.speaker.user("go on")]
        for first in ([], [api.speaker.user("before all that")]):
            code, raw = await post(http, api, api.body(*first, *history))
            assert code == 200, raw[:300]
        assert session.completions[1].parent == session.completions[0].id
