"""Conversations over Anthropic Messages with a real tokenizer and renderer: one chain, exact counts, true overflows."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import anyio
import pytest
from transformers import AutoTokenizer

from polar_plugin.engine.base import Renderer
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.server import Proxy
from polar_plugin.proxy.session import Session
from polar_plugin.records import BreakReason, Completion, SamplingParams

from .anthropic_client import client_of
from .anthropic_replies import ECHOES, Echo

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}}
BASH = {"name": "bash", "description": "Run a command.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Fix it."}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@functools.cache
def renderer_of(directory: Path) -> Renderer:
    return load_renderer(directory)


@dataclass
class Harness:
    """A client that keeps its history in the API's own words, and the session that it talks to."""

    api: anthropic.AsyncAnthropic
    session: Session
    engine: ScriptedEngine
    history: list[Any]
    tools: Sequence[Any] = (BASH,)
    system: Any = "You work in a shell."

    async def turn(self, *new: Any, echo: Echo = ECHOES[0], **more: Any) -> list[dict[str, Any]]:
        """The reply's blocks; they are said back as `echo` has it."""
        self.history += new
        async with self.api.messages.stream(**self.body(**more)) as events:
            message = await events.get_final_message()
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        self.history += echo(blocks)
        return blocks

    def body(self, **more: Any) -> dict[str, Any]:
        body = {"model": "any", "max_tokens": 4000, "system": self.system, "tools": self.tools}
        return body | {"messages": self.history} | more

    @property
    def completions(self) -> tuple[Completion, ...]:
        return self.session.completions

    @property
    def breaks(self) -> list[BreakReason | None]:
        return [completion.break_reason for completion in self.completions]


@asynccontextmanager
async def harness(tiny: Path, replies: Any, *, context_length: int = 16384) -> AsyncGenerator[Harness]:
    engine = ScriptedEngine(replies, AutoTokenizer.from_pretrained(str(tiny)), context_length=context_length)
    policy = Policy(engine, renderer_of(tiny), SamplingParams(max_tokens=2000), context_length)
    with anyio.fail_after(120):
        async with (
            Proxy().serving() as proxy,
            proxy.session("s", Conversation(policy, "s")) as session,
            client_of(proxy.url, session.key) as api,
        ):
            yield Harness(api, session, engine, [])


def call(command: str, **more: Any) -> str:
    arguments = json.dumps({"command": command, **more}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


def results(blocks: list[dict[str, Any]], *contents: Any) -> dict[str, Any]:
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    pairs = zip(ids, contents, strict=True)
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": c} for i, c in pairs]}


SCRIPT = [
    "<think>\nI look first.\n</think>\n\nLet me look.\n" + call("ls -la", timeout=1.0),
    "<think>\ntwo at once\n</think>\n\n" + call("wc -l é😀.txt") + "\n" + call("head -1 a"),
    "<think>\nhmm\n</think>\n\n" + call("exit 3"),
    "Done: é😀.",
    "Bye.",
]


async def work(agent: Harness, echo: Echo) -> None:
    """A task with thinking, parallel calls, a failing one, a reminder and a second question."""
    first = await agent.turn(USER, {"role": "system", "content": "# Environment"}, echo=echo)
    second = await agent.turn(results(first, "a\nb"), echo=echo)
    third = await agent.turn(results(second, [{"type": "text", "text": "3 a"}], "line one"), echo=echo)
    failed = results(third, "Exit code 3")
    failed["content"][0]["is_error"] = True
    failed["content"].append({"type": "text", "text": "Be careful."})
    await agent.turn(failed, echo=echo)
    await agent.turn({"role": "user", "content": "Thanks."}, echo=echo)


@pytest.mark.parametrize("echo", ECHOES, ids=lambda echo: echo.__name__)
async def test_a_tool_conversation_is_one_chain_however_the_client_says_replies_back(tiny: Path, echo: Echo) -> None:
    async with harness(tiny, SCRIPT) as agent:
        await work(agent, echo)
        assert agent.breaks == [BreakReason.FIRST_CALL, None, None, None, None]
        for parent, child in itertools.pairwise(agent.completions):
            assert child.parent == parent.id
            said = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist()]
            assert child.prompt_ids.tolist()[: len(said)] == said
        assert [len(completion.reply.tool_calls) for completion in agent.completions] == [1, 2, 1, 0, 0]


async def test_control_a_reply_said_back_in_another_meaning_breaks_the_chain(tiny: Path) -> None:
    def rewritten(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "something else"}]

    async with harness(tiny, ["one", "two"]) as agent:
        await agent.turn(USER, echo=rewritten)
        await agent.turn(USER)
        assert agent.breaks == [BreakReason.FIRST_CALL, BreakReason.ASSISTANT_REWRITTEN]


async def test_case_67_a_billing_line_that_changes_keeps_one_chain(tiny: Path) -> None:
    async with harness(tiny, ["one", "two", "three"]) as agent:
        for i in range(3):
            line = f"x-anthropic-billing-header: cc_version=2.1.{i}; cch={i:05x};"
            agent.system = f"{line}\n{TEXT['text']}" if i == 1 else [{"type": "text", "text": line}, TEXT]
            await agent.turn({"role": "user", "content": str(i)})
        assert agent.breaks == [BreakReason.FIRST_CALL, None, None]


TEXT = {"type": "text", "text": "You work in a shell."}


async def test_a_message_that_is_a_text_in_one_request_and_blocks_in_the_next_keeps_one_chain(tiny: Path) -> None:
    """Claude Code does so with the messages that carried its cache mark."""
    cached = {"type": "text", "text": "Fix it.", "cache_control": {"type": "ephemeral"}}
    async with harness(tiny, ["one", "two"]) as agent:
        await agent.turn({"role": "user", "content": [cached]}, {"role": "system", "content": [cached]})
        agent.history[:2] = [USER, {"role": "system", "content": "Fix it."}]
        await agent.turn({"role": "user", "content": [cached]})
        assert agent.breaks == [BreakReason.FIRST_CALL, None]


async def test_case_82_results_in_another_order_are_one_chain_and_each_has_its_calls_name(tiny: Path) -> None:
    calls = "\n".join(call(f"cat {i}") for i in range(6))
    async with harness(tiny, [calls, "Done.", "Bye."]) as agent:
        blocks = await agent.turn(USER)
        answer = results(blocks, *(f"of {i}" for i in range(6)))
        answer["content"] = answer["content"][::2] + answer["content"][1::2]
        await agent.turn(answer)
        await agent.turn({"role": "user", "content": "Thanks."})
        assert agent.breaks == [BreakReason.FIRST_CALL, None, None]
        told = [m for m in agent.completions[1].request.messages if m.role == "tool"]
        assert [m.content for m in told] == [f"of {i}" for i in (0, 2, 4, 1, 3, 5)]
        ids = {c.id: f"of {json.loads(c.arguments)['command'][-1]}" for c in agent.completions[0].reply.tool_calls}
        assert {m.tool_call_id: m.content for m in told} == ids
        assert {m.name for m in told} == {"bash"}


async def test_a_tool_that_a_result_loads_does_not_break_the_chain(tiny: Path) -> None:
    fetch = BASH | {"name": "fetch", "defer_loading": True}
    async with harness(tiny, [call("search"), "Done."]) as agent:
        blocks = await agent.turn(USER)
        agent.tools = [BASH, fetch]
        await agent.turn(results(blocks, [{"type": "tool_reference", "tool_name": "fetch"}]))
        assert agent.breaks == [BreakReason.FIRST_CALL, None]
        prompt = AutoTokenizer.from_pretrained(str(tiny)).decode(agent.engine.calls[1].prompt_ids.tolist())
        assert '"name": "fetch"' in prompt


async def test_case_83_any_model_name_is_served_and_recorded(tiny: Path) -> None:
    async with harness(tiny, ["one", "two"]) as agent:
        await agent.turn(USER)
        await agent.turn(USER, model="claude-haiku-4-5-20251001", extra_headers={"x-claude-code-agent-id": "a1"})
        main, sub = (completion.request for completion in agent.completions)
    assert (main.model, main.thread) == ("any", "")
    assert (sub.model, sub.thread) == ("claude-haiku-4-5-20251001", "a1")


async def test_case_78_a_reply_of_only_a_call_has_no_text_block(tiny: Path) -> None:
    async with harness(tiny, ["\n\n" + call("ls"), "Done."]) as agent:
        blocks = await agent.turn(USER)
        assert [block["type"] for block in blocks] == ["tool_use"]
        await agent.turn(results(blocks, "a"))
        assert agent.breaks == [BreakReason.FIRST_CALL, None]


# --- counts and limits -----------------------------------------------------------------------------------------------


def many_tools(count: int) -> list[dict[str, Any]]:
    return [
        {
            "name": f"tool_{i}",
            "description": f"Do thing {i}. " * 20,
            "input_schema": {"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(6)}},
        }
        for i in range(count)
    ]


async def count(agent: Harness) -> int:
    body = agent.body()
    del body["max_tokens"]
    return (await agent.api.messages.count_tokens(**body)).input_tokens


async def test_case_75_a_count_of_tokens_and_the_usage_are_the_length_of_the_true_prompt(tiny: Path) -> None:
    async with harness(tiny, [call("ls"), "Done."]) as agent:
        agent.tools = [BASH, *many_tools(5)]
        agent.history = [USER]
        for _ in range(2):
            counted = await count(agent)
            message = await agent.api.messages.create(**agent.body())
            last = agent.completions[-1]
            assert counted == len(last.prompt_ids) == message.usage.input_tokens
            assert message.usage.output_tokens == len(last.generation.output_ids)
            blocks = [block.model_dump(exclude_none=True) for block in message.content]
            agent.history += [{"role": "assistant", "content": blocks}]
            agent.history += [results(blocks, *["a é😀"] * ("tool_use" in {block["type"] for block in blocks}))]
        assert agent.breaks == [BreakReason.FIRST_CALL, None], "what is counted is what is sent: the rest of the chain"
    assert len(agent.engine.calls) == 2, "counting samples nothing"


async def test_case_84_a_full_tool_list_is_counted_exactly_within_the_context(tiny: Path) -> None:
    tools = many_tools(40)
    async with harness(tiny, ["x"], context_length=10**6) as agent:
        agent.tools, agent.history = tools, [USER]
        full = await count(agent)
        agent.tools = ()
        assert full > 40 * 100 + await count(agent)
    async with harness(tiny, [Reply("x")], context_length=full + 1) as agent:
        agent.tools = tools
        await agent.turn(USER)
        assert agent.engine.calls[0].sampling.max_tokens == 1
    async with harness(tiny, [], context_length=full) as agent:
        agent.tools = tools
        with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {full} tokens > {full} maximum"):
            await agent.turn(USER)


async def test_case_76_an_overflow_keeps_nothing_and_the_compacted_conversation_goes_on(tiny: Path) -> None:
    async with harness(tiny, ["one", "two"], context_length=2000) as agent:
        await agent.turn(USER)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2000 maximum"):
            await agent.turn({"role": "user", "content": "long " * 4000})
        agent.history = [{"role": "user", "content": "A summary."}]
        await agent.turn()
        assert len(agent.completions) == 2


async def test_a_turn_that_the_context_cuts_says_so(tiny: Path) -> None:
    async with harness(tiny, ["word " * 500]) as agent:
        reply = await agent.api.messages.create(**agent.body(messages=[USER], max_tokens=5))
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 5)
