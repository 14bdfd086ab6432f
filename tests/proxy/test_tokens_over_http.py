"""Harness on one side, tokens on the other: what retries, hang-ups, cuts and images do."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest

from polar_plugin.engine.base import Engine, Parsed
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.errors import EngineBusy
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Session
from polar_plugin.records import IMAGE, BreakReason, CompletionSession, Delivery, FinishReason, Message, SamplingParams
from tests.engine.fake_server import listening
from tests.engine.fake_sglang import FakeSGLang, aborted, sampled

from .scripted import CHAT, raw_post, receive_until, until

pytestmark = pytest.mark.anyio

HASTY = ProxyConfig(header_grace_seconds=0, keepalive_seconds=0.01)
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"<a>\\" && ls"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_renderer(resolve_model("tiny", tmp_path_factory.mktemp("models")))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), "stream": True, **more}


@asynccontextmanager
async def talking(
    renderer: Any, engine: Engine, config: ProxyConfig | None = None, **policy: Any
) -> AsyncGenerator[tuple[Proxy, Session, aiohttp.ClientSession]]:
    conversation = Conversation(Policy(engine, renderer, SamplingParams(max_tokens=500), 8192, **policy), "s1")
    async with (
        Proxy(config).serving() as proxy,
        proxy.session("s1", conversation) as session,
        aiohttp.ClientSession(proxy.url, headers={"x-api-key": session.key}) as http,
    ):
        yield proxy, session, http


async def reply(http: aiohttp.ClientSession, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The assistant message of a whole answer, as a harness would echo it."""
    async with http.post(CHAT, json=body | {"stream": False}, headers=headers) as response:
        told = await response.json()
        assert response.status == 200, told
    return told["choices"][0]["message"]


def trained(session: CompletionSession) -> list[tuple[str, ...]]:
    """The completions of each trace, the invariants checked."""
    traces = PrefixMerging().build(session)
    check(traces, session)
    return [trace.completion_ids for trace in traces]


async def test_case_26_a_turn_that_timed_out_at_its_client_and_was_sent_again_is_one_turn(tiny: Any) -> None:
    """The client gives up before the answer is there: it never was a turn, and the next one goes on as if."""
    never = anyio.Event()
    script = [Reply("lost", until=never), "first", "second"]
    engine = ScriptedEngine(script, tiny.tokenizer.encode)
    async with talking(tiny, engine) as (proxy, session, http):
        body = asked(user("hi"))
        async with await raw_post(proxy, session, body):
            await until(lambda: len(engine.active) == 1)
        await until(lambda: len(engine.aborted) == 1)
        said = await reply(http, body, **{"x-stainless-retry-count": "1"})
        await reply(http, asked(user("hi"), said, user("and")))
        ledger = session.seal()
    assert [completion.break_reason for completion in ledger.completions] == [BreakReason.FIRST_CALL, None]
    assert trained(ledger) == [tuple(completion.id for completion in ledger.completions)]
    assert ledger.counts["hangups"] == ledger.counts["retries"] == 1


@pytest.mark.parametrize("cuts", [1, 3])
async def test_case_28_an_answer_cut_in_its_middle_and_asked_again_leaves_one_trained_completion(
    tiny: Any, cuts: int
) -> None:
    long = "x" * (24 << 20)
    texts = iter([*[long] * cuts, "short", "next"])
    engine = ScriptedEngine(lambda _: Reply(ids=(120,)), tiny.tokenizer.encode)
    renderer = Saying(tiny, lambda: next(texts))
    async with talking(renderer, engine) as (proxy, session, http):
        body = asked(user("hi"))
        for number in range(cuts):
            async with await raw_post(proxy, session, body) as stream:
                await receive_until(stream, b"xxxx")  # under way, and far from its end
            await until(lambda: list(session.delivery.values()).count(Delivery.UNDELIVERED) == number + 1)  # noqa: B023
        said = await reply(http, body, **{"x-stainless-retry-count": str(cuts)})
        await reply(http, asked(user("hi"), said, user("and")))
        ledger = session.seal()
    assert len(ledger.completions) == cuts + 2
    assert trained(ledger) == [tuple(completion.id for completion in ledger.completions[cuts:])]
    told = counts(ledger, PrefixMerging().build(ledger))
    assert told["untrained_superseded"] == cuts


class Saying:
    """A renderer whose turns read as told, so that an answer can be long without as many tokens."""

    def __init__(self, renderer: Any, says: Callable[[], str]) -> None:
        self._renderer, self._says = renderer, says

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def parse(self, *args: Any) -> Any:
        return Parsed(Message("assistant", self._says()))


async def test_case_32_a_client_gone_in_mid_answer_leaves_no_turn_and_one_abort(tiny: Any) -> None:
    never = anyio.Event()
    engine = ScriptedEngine(["one", Reply("ghost", until=never), "two"], tiny.tokenizer.encode)
    async with talking(tiny, engine, HASTY) as (proxy, session, http):
        said = await reply(http, asked(user("hi")))
        async with await raw_post(proxy, session, asked(user("hi"), said, user("ghost?"))) as stream:
            await receive_until(stream, b": keep-alive")
        with anyio.fail_after(2):
            await until(lambda: not engine.active)
        await reply(http, asked(user("hi"), said, user("no ghost")))
        ledger = session.seal()
    assert len(engine.aborted) == 1
    assert len(ledger.completions) == 2
    assert trained(ledger) == [tuple(completion.id for completion in ledger.completions)]


@pytest.mark.parametrize("stream", [True, False])
async def test_case_33_a_hang_up_reaches_the_inference_server_as_an_abort_of_that_call(tiny: Any, stream: bool) -> None:
    fake = FakeSGLang()
    fake.answers.append(fake.hold)
    async with listening(fake.app()) as url, SGLangEngine(url) as engine, talking(tiny, engine) as (proxy, session, _):
        async with await raw_post(proxy, session, asked(user("hi")) | {"stream": stream}):
            await fake.started.wait()
        with anyio.fail_after(2):
            await fake.was_aborted.wait()
            await fake.hung_up.wait()
        assert fake.aborts == [fake.bodies[0]["rid"]]
        assert session.completions == ()


async def test_case_33_control_while_another_caller_waits_the_inference_server_is_left_alone(tiny: Any) -> None:
    fake, release = FakeSGLang(), anyio.Event()
    ids = [*tiny.tokenizer.encode("whole"), tiny.stop_ids[0]]

    async def later(body: dict[str, Any]) -> Any:
        fake.started.set()
        await release.wait()
        return aiohttp.web.json_response(sampled(body, ids, finish={"type": "stop", "matched": ids[-1]}))

    fake.answers.append(later)
    async with listening(fake.app()) as url, SGLangEngine(url) as engine, talking(tiny, engine) as (proxy, session, _):
        first = await raw_post(proxy, session, asked(user("hi")))
        await fake.started.wait()
        async with await raw_post(proxy, session, asked(user("hi"))) as second:
            await until(lambda: session.counts["joined"] == 1)
            await first.aclose()
            await until(lambda: session.counts["hangups"] == 1)
            release.set()
            with anyio.fail_after(5):
                assert b"whole" in await receive_until(second, b"[DONE]\n\n")
    assert fake.aborts == []
    assert len(fake.bodies) == 1


@pytest.mark.parametrize("aborts", [1, 3])
async def test_cases_29_and_30_a_generation_aborted_for_a_weight_update_is_a_normal_answer(
    tiny: Any, aborts: int
) -> None:
    fake = FakeSGLang()
    part, rest = tiny.tokenizer.encode("part "), [*tiny.tokenizer.encode("and rest"), tiny.stop_ids[0]]
    for _ in range(aborts):
        fake.answers.append(lambda body: aborted(body, part))
    fake.answers.append(lambda body: sampled(body, rest, finish={"type": "stop", "matched": rest[-1]}))
    async with listening(fake.app()) as url, SGLangEngine(url) as engine, talking(tiny, engine) as (_, session, http):
        said = await reply(http, asked(user("hi")))
    assert said["content"] == "part " * aborts + "and rest"
    (completion,) = session.completions
    assert completion.generation.output_ids.tolist() == [*part * aborts, *rest]


async def test_case_29_an_engine_that_gives_up_is_a_retryable_error_and_no_turn(tiny: Any) -> None:
    engine = ScriptedEngine([Reply(raises=EngineBusy("updating", retry_after=3)), "ok"], tiny.tokenizer.encode)
    async with talking(tiny, engine) as (_, session, http):
        async with http.post(CHAT, json=asked(user("hi"))) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "3"
        assert session.completions == ()
        assert (await reply(http, asked(user("hi"))))["content"] == "ok"


async def test_case_37_many_turns_of_many_sessions_take_no_more_sockets_than_there_are_sessions(tiny: Any) -> None:
    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode)
    policy, opened = Policy(engine, tiny, SamplingParams(max_tokens=50), 100_000), 0

    async def count(*_: object) -> None:
        nonlocal opened
        opened += 1

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    async with Proxy().serving() as proxy:

        async def one(number: int) -> None:
            name = f"s{number}"
            async with (
                proxy.session(name, Conversation(policy, name)) as session,
                aiohttp.ClientSession(proxy.url, headers={"x-api-key": session.key}, trace_configs=[trace]) as http,
            ):
                messages: list[dict[str, Any]] = []
                for turn in range(10):
                    messages.append(user(str(turn)))
                    messages.append(await reply(http, asked(*messages)))
                assert len(session.completions) == 10
                assert session.seal().counts == {"calls": 10, "recorded": 10}

        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                for number in range(60):
                    group.start_soon(one, number)
    assert opened == 60


async def test_case_41_a_call_open_at_the_end_is_not_in_the_trace_and_its_answer_is_ignored(tiny: Any) -> None:
    never = anyio.Event()
    engine = ScriptedEngine(["one", Reply("late", until=never)], tiny.tokenizer.encode)
    async with talking(tiny, engine) as (proxy, session, http):
        said = await reply(http, asked(user("hi")))
        async with await raw_post(proxy, session, asked(user("hi"), said, user("more"))) as stream:
            await until(lambda: len(engine.active) == 1)
            ledger = session.seal()
            never.set()
            with anyio.fail_after(5):
                assert b"session_sealed" in await receive_until(stream, b"}}")
        async with http.post(CHAT, json=asked(user("straggler"))) as response:
            assert response.status == 409
        assert session.seal() is ledger
    assert len(ledger.completions) == 1
    assert len(trained(ledger)) == 1
    assert len(engine.calls) == 2


# --- numbers and cuts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_case_114_a_turn_cut_at_any_token_never_has_half_a_tool_call(tiny: Any, stream: bool) -> None:
    """Before the tag, in it, in the name, the key, the string, the closing tag: each in a session of its own."""
    text = f"I look.\n{CALL}"
    ids = tiny.tokenizer.encode(text)
    engine = ScriptedEngine(
        lambda call: Reply(ids=tuple(ids[: call.sampling.max_tokens]), finish_reason=FinishReason.LENGTH),
        tiny.tokenizer.encode,
    )
    whole = 0
    for size in range(1, len(ids) + 1):
        async with talking(tiny, engine) as (_, session, http):
            body = asked(user(f"go {size}"), tools=[BASH], max_tokens=size)
            finish, content, calls = await message_of(http, body, stream=stream)
            assert finish == "length"
            for call in calls:
                assert json.loads(call["arguments"]) == {"command": 'echo "<a>" && ls'}
            whole += bool(calls)
            # what was cut is told as text, so that the echoed turn is the sampled one and the chain goes on
            if not calls:
                assert text.startswith(content)
            (completion,) = session.completions
            assert completion.generation.output_ids.tolist() == ids[:size]
            echo = {"role": "assistant", "content": content, "tool_calls": [called(call) for call in calls] or None}
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in calls]
            await message_of(http, asked(user(f"go {size}"), echo, *results, user("on"), tools=[BASH]), stream=stream)
            assert [c.break_reason for c in session.completions] == [BreakReason.FIRST_CALL, None]
    assert whole == 1


def called(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


async def message_of(
    http: aiohttp.ClientSession, body: dict[str, Any], *, stream: bool
) -> tuple[str, str, list[dict[str, Any]]]:
    """Finish reason, text, calls (id, name, arguments), however it was sent."""
    async with http.post(CHAT, json=body | {"stream": stream}) as response:
        raw = await response.text()
        assert response.status == 200, raw
    if not stream:
        choice = json.loads(raw)["choices"][0]
        said = choice["message"]
        calls = [{"id": call["id"], **call["function"]} for call in said.get("tool_calls") or ()]
        return choice["finish_reason"], said["content"] or "", calls
    chunks = [json.loads(line[6:])["choices"][0] for line in raw.splitlines() if line.startswith("data: {")]
    calls: list[dict[str, Any]] = []
    for piece in (piece for chunk in chunks for piece in chunk["delta"].get("tool_calls") or ()):
        if "id" in piece:
            calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
        calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    return chunks[-1]["finish_reason"], content, calls


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_case_117_a_prompt_near_the_end_of_the_context_is_clamped_in_later_turns_too(
    tiny: Any, room: int
) -> None:
    engine = ScriptedEngine(lambda call: "y" * 10, tiny.tokenizer.encode)
    async with talking(tiny, engine) as (_, session, http):
        said = await reply(http, asked(user("hi")))
        history = [user("hi"), said]
        counted = await session.count(request_of(session, [*history, user("")]))
        await reply(http, asked(*history, user("x" * (8192 - counted - room)), max_tokens=4096))
        async with http.post(CHAT, json=asked(*history, user("x" * (8192 - counted)))) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert error["code"] == "context_length_exceeded"
        assert "8192 tokens" in error["message"]
        assert len(session.completions) == 2
    assert (len(engine.calls[-1].prompt_ids), engine.calls[-1].sampling.max_tokens) == (8192 - room, room)


def request_of(session: Session, messages: list[dict[str, Any]]) -> Any:
    return OpenAIChat().decode(Incoming(CHAT, {}, {}, asked(*messages)))


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_the_number_of_ids_sent_and_sampled(tiny: Any, stream: bool) -> None:
    engine = ScriptedEngine(["a", CALL, "c"], tiny.tokenizer.encode)
    async with talking(tiny, engine) as (_, session, http):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append(user(f"turn {turn}"))
            body = asked(*messages, tools=[BASH], stream_options={"include_usage": True})
            async with http.post(CHAT, json=body | {"stream": stream}) as response:
                raw = await response.text()
            lines = [line[6:] for line in raw.splitlines() if line.startswith("data: {")] if stream else [raw]
            usage = json.loads(lines[-1])["usage"]
            completion = session.completions[-1]
            assert usage["prompt_tokens"] == len(engine.calls[-1].prompt_ids) == len(completion.prompt_ids)
            assert usage["completion_tokens"] == len(completion.generation.output_ids)
            messages.append({"role": "assistant", "content": completion.reply.content or None} | echoed(completion))


def echoed(completion: Any) -> dict[str, Any]:
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in completion.reply.tool_calls]
    return {"tool_calls": [called(call) for call in calls]} if calls else {}


# --- images ----------------------------------------------------------------------------------------------------------


def picture(data: str = "AAAA") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def seen(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}


async def test_an_image_is_a_text_to_a_model_that_sees_none_and_is_counted_once(tiny: Any) -> None:
    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode)
    async with talking(tiny, engine) as (_, session, http):
        said = await reply(http, asked(seen(picture(), picture("BBBB"))))
        assert tiny.decode(engine.calls[0].prompt_ids).count(IMAGE) == 2
        assert session.counts["images_omitted"] == 2
        await reply(http, asked(seen(picture(), picture("BBBB")), said, seen(picture("CCCC"))))
        assert session.seal().counts["images_omitted"] == 3
    assert [completion.break_reason for completion in session.completions] == [BreakReason.FIRST_CALL, None]


async def test_another_image_in_the_history_is_another_history(tiny: Any) -> None:
    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode)
    async with talking(tiny, engine) as (_, session, http):
        said = await reply(http, asked(seen(picture())))
        await reply(http, asked(seen(picture("BBBB")), said, user("and")))
    assert [completion.parent is None for completion in session.completions] == [True, True]


async def test_images_are_refused_with_their_place_where_the_policy_says_so(tiny: Any) -> None:
    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode)
    async with talking(tiny, engine, images="reject") as (_, session, http):
        said = await reply(http, asked(user("text is fine")))
        for _ in range(2):
            async with http.post(CHAT, json=asked(user("text is fine"), said, seen(picture()))) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "messages.2")
            assert "renderer.images" in error["message"]
        await reply(http, asked(user("text is fine"), said, user("sorry")))
    assert len(engine.calls) == 2
    assert session.completions[1].parent == session.completions[0].id


async def test_a_renderer_that_sees_images_gets_them(tiny: Any) -> None:
    """It says them as ids of its own; nothing is omitted, and nothing is refused."""
    got: list[Any] = []

    class Seeing(Saying):
        multimodal = True

        def render(self, messages: Any, tools: Any) -> Any:
            got.extend(messages)
            return self._renderer.render(messages, tools)

    engine = ScriptedEngine(lambda _: "ok", tiny.tokenizer.encode)
    async with talking(Seeing(tiny, lambda: "ok"), engine, images="reject") as (_, session, http):
        await reply(http, asked(seen(picture())))
        assert session.counts["images_omitted"] == 0
    assert [part if isinstance(part, str) else part.data for part in got[0].parts] == ["look", "AAAA"]
