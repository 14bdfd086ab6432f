"""Reports from the field on drift, merging and half calls, replayed over several families of chat templates."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import aiohttp
import anyio
import pytest

from polar_plugin.config import load_config
from polar_plugin.engine.base import Renderer
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.tokenizer import load_tokenizer
from polar_plugin.engine.turn import Conversation
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.proxy.session import Session
from polar_plugin.records import BreakReason, FinishReason, Trace
from polar_plugin.service import RolloutService

from . import tokenizers
from .speakers import Answer, Chat, Wire

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Family:
    """A tokenizer with its chat template, and how its model writes thoughts, a call, and the end of a turn."""

    tokenizer: str
    kind: str = "auto"
    options: tuple[tuple[str, str], ...] = ()
    call: str = '<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


FAMILIES = {
    "Qwen3": Family("qwen3"),
    "Qwen3 by its template": Family("qwen3", "template"),
    "Qwen3-Coder's calls": Family(
        "qwen3",
        "template",
        (("tool_parser", "qwen3_coder"),),
        "<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>",
    ),
    "Llama 3.1": Family("llama3_1"),
    "DeepSeek V3": Family("deepseek_v3", "template"),
    "ChatML over bytes": Family("tiny"),
}
over_families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
TASK = "Find the bug."


@dataclass
class Harness:
    """A client of OpenAI Chat that keeps its history as agents do; the model says what each turn tells it to."""

    http: aiohttp.ClientSession
    url: str
    engine: ScriptedEngine
    session: Session
    renderer: Renderer
    script: list[Reply]

    async def turn(self, history: list[Wire], *new: Wire, says: str | Reply, tools: bool = True) -> Answer:
        self.script.append(Reply(says) if isinstance(says, str) else says)
        history += new
        body = Chat().body(history, 400)
        if not tools:
            del body["tools"]
        async with self.http.post(self.url, json=body) as response:
            assert response.status == 200, await response.text()
            answer = Chat().read(await response.json())
        history += answer.echo
        return answer

    def encode(self, text: str) -> list[int]:
        return list(self.renderer.encode(text))  # type: ignore[attr-defined]

    def traces(self) -> tuple[Trace, ...]:
        """Checked, and with every sampled token accounted for."""
        session = self.session.seal()
        traces = PrefixMerging().build(session)
        check(traces, session)
        told = counts(session, traces)
        assert told["sampled_tokens"] == told["delivered_tokens"] == told["trained_tokens"]
        return traces


@cache
def loaded(family: Family, models: Path) -> tuple[Renderer, Callable[[str], Sequence[int]]]:
    """A family's renderer and how its model's text becomes tokens: seconds, so once a run."""
    directory = resolve_model("tiny", models) if family.tokenizer == "tiny" else tokenizers.load(family.tokenizer)
    renderer = load_renderer(directory, kind=family.kind, **dict(family.options))  # type: ignore[arg-type]
    return renderer, load_tokenizer(directory).encode


@asynccontextmanager
async def harness(family: Family, directories: pytest.TempPathFactory) -> AsyncGenerator[Harness]:
    renderer, encode = loaded(family, directories.getbasetemp() / "models")
    script: list[Reply] = []
    engine = ScriptedEngine(lambda call: script[-1], encode, context_length=32_768)
    with anyio.fail_after(120):
        async with (
            RolloutService(load_config({"sampling": {"max_tokens": 400}}), engine=engine, renderer=renderer) as service,
            aiohttp.ClientSession() as http,
            service.proxy.session("s", Conversation(service.policy, "s")) as session,
        ):
            url = f"{service.proxy.url}/s/{session.key}{Chat.path}"
            yield Harness(http, url, engine, session, renderer, script)


def opening(text: str = "You work in a shell.") -> list[Wire]:
    return [Chat().system(text)]


def user(text: str) -> Wire:
    return Chat().user(text)


def results(answer: Answer, *texts: str) -> list[Wire]:
    assert len(answer.calls) == len(texts), "the scripted calls were not read"
    return Chat().results(answer, *texts)


def call(family: Family, *commands: str) -> str:
    return "\n".join(family.call.format(arguments=json.dumps({"command": one}), command=one) for one in commands)


def whole(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


@over_families
async def test_case_1_six_turns_of_thoughts_and_calls_are_one_trace(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        history = opening()
        new: Sequence[Wire] = [user(TASK)]
        for turn in range(5):
            answer = await agent.turn(history, *new, says=call(family, f"sed -n {turn}p a.py"))
            new = results(answer, f"line {turn}")
        await agent.turn(history, *new, says="<think>\nI have it.\n</think>\n\nFixed.")
        (trace,) = agent.traces()
    assert trace.trained == sum(len(c.generation.output_ids) for c in agent.session.completions)
    assert len(trace.completion_ids) == 6


@over_families
async def test_case_2_ids_that_no_tokenizer_would_write_stay_as_sampled(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        spelled = [token for letter in " Pantomime is spelled out" for token in agent.encode(letter)]
        ids = (*spelled, agent.renderer.stop_ids[0])
        history = opening()
        await agent.turn(history, user(TASK), says=Reply(ids=ids))
        await agent.turn(history, user("go on"), says="Done.")
        (trace,) = agent.traces()
    assert trace.response_ids[: len(ids)].tolist() == list(ids)
    assert trace.loss_mask[: len(ids)].all()


@over_families
async def test_case_5_a_chain_of_four_turns_is_its_last_prompt_and_output(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        history = opening()
        for turn in range(4):
            await agent.turn(history, user(f"step {turn}"), says=f"Did {turn}.")
        (trace,) = agent.traces()
    last = agent.session.completions[-1]
    assert whole(trace) == [*last.prompt_ids.tolist(), *last.generation.output_ids.tolist()]


@over_families
async def test_case_6_threads_that_take_turns_are_one_trace_each(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        main, other = opening(), opening("You only search.")
        for turn in range(3):
            await agent.turn(main, user(f"main {turn}"), says=f"A{turn}")
            await agent.turn(other, user(f"search {turn}"), says=f"B{turn}")
        traces = agent.traces()
    assert [len(trace.completion_ids) for trace in traces] == [3, 3]


@over_families
async def test_case_9_two_results_are_told_as_the_template_tells_them(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        history = opening()
        answer = await agent.turn(history, user(TASK), says=call(family, "ls", "pwd"))
        await agent.turn(history, *results(answer, "a.py", "/w"), says="Both.")
        first, second = agent.session.completions
        anew = agent.renderer.render(second.request.messages, second.request.tools)
        agent.traces()
    tail = second.prompt_ids[first.length :]
    assert len(tail)
    assert anew[-len(tail) :].tolist() == tail.tolist()


@over_families
async def test_case_14_an_end_of_turn_that_was_not_sampled_is_context_and_stands_there_once(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        with_end, without = opening(), opening()
        await agent.turn(with_end, user(TASK), says="Done.")
        await agent.turn(with_end, user("go on"), says="More.")
        await agent.turn(without, user("Again."), says=Reply(ids=tuple(agent.encode("Done."))))
        await agent.turn(without, user("go on"), says="More.")
        sampled, told = agent.traces()
    end = agent.renderer.stop_ids[0]
    assert (sampled.response_ids == end).sum() == (told.response_ids == end).sum()
    position = len(agent.encode("Done."))
    assert sampled.response_ids[: position + 1].tolist() == told.response_ids[: position + 1].tolist()
    assert (sampled.loss_mask[position], told.loss_mask[position]) == (True, False)


@over_families
async def test_a_stop_string_is_sampled_and_trained_but_neither_told_nor_missed_in_the_echo(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        history = opening()
        stopped = Reply("I look it up.\nObservation:", stop="Observation:")
        answer = await agent.turn(history, user(TASK), says=stopped)
        await agent.turn(history, user("Nothing is there."), says="Done.")
        (trace,) = agent.traces()
        first = agent.session.completions[0]
    assert answer.text.strip() == "I look it up."
    assert first.generation.output_ids.tolist() == agent.encode("I look it up.\nObservation:")
    assert len(trace.completion_ids) == 2


@over_families
async def test_tools_that_were_changed_and_changed_back_go_on_from_where_they_were(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        history = opening()
        await agent.turn(history, user(TASK), says="One.")
        await agent.turn(history, user("Two?"), says="Two.", tools=False)
        await agent.turn(history, user("Three?"), says="Three.")
        one, two, three = agent.session.completions
        traces = agent.traces()
        told = counts(agent.session.seal(), traces)
    assert [trace.completion_ids for trace in traces] == [(one.id, three.id), (two.id,)]
    assert (three.parent, three.break_reason, two.break_reason) == (one.id, None, BreakReason.TOOLS_CHANGED)
    assert sum(count for name, count in told.items() if name.startswith("breaks_")) == len(traces)


@over_families
async def test_case_21_an_empty_completion_is_no_row_and_the_chain_goes_on(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        history = opening()
        await agent.turn(history, user(TASK), says="One.")
        await agent.turn(history, user("go on"), says=Reply(ids=()))
        await agent.turn(history, user("and on"), says="Three.")
        (trace,) = agent.traces()
    assert len(trace.completion_ids) == 2
    assert trace.trained == len(agent.encode("One.")) + len(agent.encode("Three.")) + 2


@over_families
async def test_case_24_a_parent_a_sub_agent_and_the_thread_after_compaction_are_all_trained(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        main, sub = opening(), opening("You are a helper.")
        await agent.turn(main, user(TASK), says="First.")
        await agent.turn(sub, user("look"), says="Seen.")
        await agent.turn(sub, user("look again"), says="Seen again.")
        await agent.turn(main, user("go on"), says="Second.")
        after = [*opening(), user(f"{TASK}\nSo far: First. Second.")]
        await agent.turn(after, says="Third.")
        traces = agent.traces()
    assert [len(trace.completion_ids) for trace in traces] == [2, 2, 1]


@over_families
async def test_case_114_half_a_call_is_neither_a_call_nor_markup_wherever_it_is_cut(
    family: Family, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with harness(family, tmp_path_factory) as agent:
        ids = agent.encode("I look.\n" + call(family, "ls -la /w"))
        for size in range(len(agent.encode("I look.\n")) + 1, len(ids)):
            history = opening()
            half = Reply(ids=tuple(ids[:size]), finish_reason=FinishReason.LENGTH)
            answer = await agent.turn(history, user(f"cut at {size}"), says=half)
            assert not answer.calls
            assert answer.text.strip() in ("I look.", "I look.\n<", "I look.\n<t", "I look.\n<to", "I look.\n<too")
            await agent.turn(history, user("go on"), says="Done.")
        traces = agent.traces()
    assert {len(trace.completion_ids) for trace in traces} == {2}
