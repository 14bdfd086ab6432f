"""The scripted engine says what it was told, the same way every time, and remembers what it saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from polar_plugin.engine.scripted import Call, Reply, ScriptedEngine
from polar_plugin.errors import EngineBusy, EngineError
from polar_plugin.records import FinishReason, Generation, SamplingParams, VersionSpan, token_ids

pytestmark = pytest.mark.anyio
END = 300


def by_byte(text: str) -> Sequence[int]:
    return list(text.encode())


def text(generation: Generation) -> str:
    return bytes(i for i in generation.output_ids if i != END).decode()


async def call(
    engine: ScriptedEngine, *ids: int, session: str = "s", request: str = "r", **sampling: Any
) -> Generation:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    with anyio.fail_after(5):
        return await engine.generate(
            token_ids(ids or (1, 2)), params, request_id=request, session_id=session, stop_ids=[END, 301]
        )


async def test_replies_come_in_call_order_and_end_with_the_stop_id() -> None:
    engine = ScriptedEngine(["one", "two"], by_byte)
    first, second = await call(engine), await call(engine)
    assert [text(first), text(second)] == ["one", "two"]
    assert first.output_ids.tolist() == [*b"one", END]
    assert (first.finish_reason, first.versions) == (FinishReason.STOP, (VersionSpan("0", 4),))
    with pytest.raises(EngineError, match="2 replies, and this is call number 3"):
        await call(engine)


async def test_a_function_sees_the_session_and_which_of_its_calls_this_is() -> None:
    engine = ScriptedEngine(lambda seen: f"{seen.session_id}{seen.index}", by_byte)
    replies = [text(await call(engine, session=session)) for session in "abba"]
    assert replies == ["a0", "b0", "b1", "a1"]


async def test_logprobs_repeat_for_equal_context_and_differ_for_another() -> None:
    engine = ScriptedEngine(lambda _: "same", by_byte)
    first, again, other = await call(engine, 1, 2), await call(engine, 1, 2), await call(engine, 1, 3)
    assert first.logprobs.tolist() == again.logprobs.tolist()
    assert not set(first.logprobs.tolist()) & set(other.logprobs.tolist())
    assert len(set(first.logprobs.tolist())) == len(first.logprobs)
    assert (first.logprobs < 0).all()


async def test_a_reply_beyond_max_tokens_or_the_context_is_cut_by_length() -> None:
    engine = ScriptedEngine(lambda _: "abcdef", by_byte, context_length=10)
    for prompt, limit, expected in ((2, 3, "abc"), (6, 100, "abcd")):
        generation = await call(engine, *range(1, prompt + 1), max_tokens=limit)
        assert (text(generation), generation.finish_reason) == (expected, FinishReason.LENGTH)
    with pytest.raises(EngineError, match="no room in 10"):
        await call(engine, *range(10))


async def test_a_reply_can_be_cut_raise_or_be_given_as_ids() -> None:
    busy = EngineBusy("later")
    engine = ScriptedEngine(
        [Reply("cut", finish_reason=FinishReason.LENGTH), Reply(raises=busy), Reply(ids=(7, 8))], by_byte
    )
    cut = await call(engine)
    assert (cut.output_ids.tolist(), cut.finish_reason) == ([*b"cut"], FinishReason.LENGTH)
    with pytest.raises(EngineBusy) as raised:
        await call(engine)
    assert raised.value is busy
    assert (await call(engine)).output_ids.tolist() == [7, 8]


async def test_a_hanging_reply_waits_for_its_event_and_a_cancelled_one_is_told() -> None:
    release = anyio.Event()
    engine = ScriptedEngine(lambda _: Reply("late", until=release), by_byte)
    replies: list[str] = []

    async def one(request: str) -> None:
        replies.append(text(await call(engine, request=request)))

    async with anyio.create_task_group() as group:
        group.start_soon(one, "kept")
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(one, "dropped")
                await anyio.wait_all_tasks_blocked()
                assert engine.active == {"kept", "dropped"}
                scope.cancel()
        assert (engine.aborted, engine.active, replies) == (["dropped"], {"kept"}, [])
        release.set()
    assert (replies, engine.active, len(engine.calls)) == (["late"], set(), 2)


async def test_the_delay_hook_runs_before_each_answer_and_new_versions_show() -> None:
    seen: list[Call] = []

    async def delay(seen_call: Call) -> None:
        seen.append(seen_call)
        engine.version = "1"

    engine = ScriptedEngine(["a"], by_byte, delay=delay)
    generation = await call(engine, 5, 6, temperature=0.5, request="x")
    assert generation.versions == (VersionSpan("1", 2),)
    (made,) = seen
    assert (made.request_id, made.prompt_ids.tolist(), made.stop_ids) == ("x", [5, 6], (END, 301))
    assert made.sampling.temperature == 0.5
    assert (await engine.probe()).weight_version == "1"


async def test_a_hugging_face_tokenizer_serves_as_the_encoder(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    from polar_plugin.engine.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", tmp_path))
    engine = ScriptedEngine(["<tool_call>hi</tool_call>"], tokenizer)
    generation = await call(engine)
    assert tokenizer.decode(generation.output_ids[:-1].tolist()) == "<tool_call>hi</tool_call>"
