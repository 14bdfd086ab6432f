"""Conversations over Google's API with a real tokenizer and renderer: one chain, exact counts, true overflows."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import pytest
from google.genai import types

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.server import Proxy
from polar_plugin.proxy.session import Session
from polar_plugin.records import BreakReason, SamplingParams

from .google_echoes import CHANGE_IDS, ECHOES, Echo, contents, one_content, results
from .google_stream import SSEReader, check_chunk, read
from .test_google_sdk import client_of

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}, "timeout": {"type": "NUMBER"}}}
TOOLS = [{"functionDeclarations": [{"name": "bash", "description": "Run a command.", "parameters": SCHEMA}]}]
USER = {"role": "user", "parts": [{"text": "Fix it."}]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_renderer(resolve_model("tiny", tmp_path_factory.mktemp("models")))


@dataclass
class Harness:
    """A client that keeps its history in the API's own words, and the session that it talks to."""

    http: aiohttp.ClientSession
    session: Session
    engine: ScriptedEngine
    proxy: Proxy
    history: list[Any] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        return {"systemInstruction": {"parts": [{"text": "Work."}]}, "tools": TOOLS, "contents": self.history}

    async def post(self, method: str, body: Any = None) -> tuple[int, bytes]:
        url = f"/v1beta/models/policy:{method}"
        async with self.http.post(url, json=self.body() if body is None else body) as response:
            return response.status, await response.read()

    async def turn(self, *new: Any, echo: Echo = one_content, stream: bool = True) -> list[dict[str, Any]]:
        """The reply's parts; they are said back as `echo` has it."""
        self.history += new
        status, answer = await self.post("streamGenerateContent?alt=sse" if stream else "generateContent")
        assert status == 200, answer
        chunks = read(answer, SSEReader()) if stream else [json.loads(answer)]
        for chunk in chunks:
            check_chunk(chunk)
        parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
        self.history += echo(parts)
        return parts

    @property
    def breaks(self) -> list[BreakReason | None]:
        return [completion.break_reason for completion in self.session.completions]


@asynccontextmanager
async def harness(tiny: Any, replies: Any, *, context_length: int = 16384) -> AsyncGenerator[Harness]:
    engine = ScriptedEngine(replies, tiny.encode, context_length=context_length)
    policy = Policy(engine, tiny, SamplingParams(max_tokens=2000), context_length)
    with anyio.fail_after(120):
        async with (
            Proxy().serving() as proxy,
            proxy.session("s", Conversation(policy, "s")) as session,
            aiohttp.ClientSession(proxy.url, headers={"x-goog-api-key": session.key}) as http,
        ):
            yield Harness(http, session, engine, proxy)


def call(command: str, **more: Any) -> str:
    arguments = json.dumps({"command": command, **more}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


SCRIPT = [
    "<think>\nI look first.\n</think>\n\nLet me look.\n" + call("ls -la", timeout=1.0),
    "<think>\ntwo at once\n</think>\n\n" + call("wc -l é😀.txt") + "\n" + call("head -1 a"),
    "<think>\nhmm\n</think>\n\n" + call("exit 3"),
    "<think>\nso\n</think>\n\nDone: é😀.",
    "Bye.",
]


async def work(agent: Harness, echo: Echo, *, stream: bool) -> None:
    """A task with thinking, parallel calls, a failing one and a second question."""
    ids = echo not in CHANGE_IDS  # a client that has other ids answers in the order of its calls
    first = await agent.turn(USER, echo=echo, stream=stream)
    second = await agent.turn(results(first, "a\nb", ids=ids), echo=echo, stream=stream)
    third = await agent.turn(results(second, "3 a", "line one", ids=ids), echo=echo, stream=stream)
    failed = results(third, "Exit code 3", ids=ids)
    failed["parts"].append({"text": "Be careful."})
    await agent.turn(failed, echo=echo, stream=stream)
    await agent.turn({"role": "user", "parts": [{"text": "Thanks."}]}, echo=echo, stream=stream)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("echo", ECHOES, ids=lambda echo: echo.__name__)
async def test_a_tool_conversation_is_one_chain_however_the_client_says_replies_back(
    tiny: Any, echo: Echo, stream: bool
) -> None:
    async with harness(tiny, SCRIPT) as agent:
        await work(agent, echo, stream=stream)
        assert agent.breaks == [BreakReason.FIRST_CALL, None, None, None, None]
        for parent, child in itertools.pairwise(agent.session.completions):
            assert child.parent == parent.id
            said = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist()]
            assert child.prompt_ids.tolist()[: len(said)] == said
        assert [len(one.reply.tool_calls) for one in agent.session.completions] == [1, 2, 1, 0, 0]


async def test_control_a_reply_said_back_in_another_meaning_breaks_the_chain(tiny: Any) -> None:
    async with harness(tiny, ["one", "two"]) as agent:
        await agent.turn(USER, echo=lambda parts: contents([{"text": "something else"}]))
        await agent.turn(USER)
        assert agent.breaks == [BreakReason.FIRST_CALL, BreakReason.ASSISTANT_REWRITTEN]


async def test_results_of_parallel_calls_in_another_order_are_one_chain(tiny: Any) -> None:
    async with harness(tiny, [call("one") + call("two"), "done", "bye"]) as agent:
        parts = await agent.turn(USER)
        answers = results(parts, "1", "2")
        await agent.turn({"role": "user", "parts": answers["parts"][::-1]})
        agent.history[-2] = answers  # repeated in the order of the calls
        await agent.turn(USER)
        assert agent.breaks == [BreakReason.FIRST_CALL, None, None]


# the SDK derives its own client from one that aiohttp would not have derived from
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
async def test_the_sdks_own_chat_with_automatic_calls_is_one_chain(tiny: Any) -> None:
    def bash(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    async with harness(tiny, ["<think>\nhm\n</think>\n\n" + call("ls"), "listed", call("pwd"), "there"]) as agent:
        client = client_of(agent.proxy, agent.session.key)
        chat = client.aio.chats.create(model="policy", config=types.GenerateContentConfig(tools=[bash]))
        assert (await chat.send_message("Look.")).text == "listed"
        assert (await chat.send_message("Where?")).text == "there"
        await client.aio.aclose()
        client.close()
        assert agent.breaks == [BreakReason.FIRST_CALL, None, None, None]


async def test_a_count_of_tokens_and_the_usage_are_the_length_of_the_true_prompt(tiny: Any) -> None:
    async with harness(tiny, SCRIPT) as agent:
        agent.history.append(USER)
        for body in (agent.body(), {"generateContentRequest": agent.body()}):
            _, counted = await agent.post("countTokens", body)
            assert agent.session.completions == ()
            assert json.loads(counted)["totalTokens"] == len(tiny.render(*_told(agent)))
        _, answer = await agent.post("generateContent")
        (one,) = agent.session.completions
        assert json.loads(counted)["totalTokens"] == len(one.prompt_ids)
        usage = json.loads(answer)["usageMetadata"]
        told = (usage["promptTokenCount"], usage["candidatesTokenCount"])
        assert told == (len(one.prompt_ids), len(one.generation.output_ids))


def _told(agent: Harness) -> tuple[Any, Any]:
    request = GoogleGenerate().decode(Incoming("/v1beta/models/policy:generateContent", {}, {}, agent.body()))
    return request.messages, request.tools


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent?alt=sse"])
async def test_case_117_a_prompt_beyond_the_context_overflows_in_the_apis_words_and_keeps_nothing(
    tiny: Any, method: str
) -> None:
    async with harness(tiny, ["one", "two"], context_length=400) as agent:
        agent.history.append({"role": "user", "parts": [{"text": "word " * 400}]})
        status, answer = await agent.post(method)
        assert status == 400
        assert "exceeds the maximum number of tokens allowed (400)" in json.loads(answer)["error"]["message"]
        assert agent.session.completions == ()
        agent.history = [USER]
        await agent.turn()
        assert len(agent.session.completions) == 1


async def test_case_114_a_turn_that_the_context_cuts_says_so_and_has_no_half_call(tiny: Any) -> None:
    async with harness(tiny, [Reply("look:\n" + call("x" * 900))], context_length=500) as agent:
        parts = await agent.turn(USER)
        (one,) = agent.session.completions
        assert [set(part) for part in parts] == [{"text"}]
        assert "<tool_call>" not in parts[0]["text"]
        assert one.generation.finish_reason == "length"
