"""Conversations over OpenAI Chat with a real tokenizer and renderer: one chain however a client says replies back."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import pytest

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.server import Proxy
from polar_plugin.proxy.session import Session
from polar_plugin.records import BreakReason, SamplingParams

from . import openai_stream
from .scripted import CHAT
from .test_google_chain import SCRIPT, call
from .test_openai_chat_echo import ECHOES, Wire

pytestmark = pytest.mark.anyio
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Work."}
USER = {"role": "user", "content": "Fix it."}
Echo = Callable[[Wire], Wire]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_renderer(resolve_model("tiny", tmp_path_factory.mktemp("models")))


@dataclass
class Harness:
    """A client that keeps its history, and the session that it talks to."""

    http: aiohttp.ClientSession
    session: Session
    history: list[Wire] = field(default_factory=lambda: [SYSTEM])

    async def turn(self, *new: Wire, echo: Echo, stream: bool) -> Wire:
        """The reply's message; it is said back as `echo` has it."""
        self.history += new
        body = {"model": "m", "messages": self.history, "tools": [BASH], "stream": stream}
        async with self.http.post(CHAT, json=body) as response:
            answer = await response.read()
            assert response.status == 200, answer
        message = _put_together(answer) if stream else json.loads(answer)["choices"][0]["message"]
        self.history.append(echo(json.loads(json.dumps(message))))
        return message


def _put_together(stream: bytes) -> Wire:
    told = openai_stream.read(stream)
    message: Wire = {"role": "assistant", "content": told.content or None if told.calls else told.content}
    if told.reasoning:
        message["reasoning_content"] = told.reasoning
    if told.calls:
        message["tool_calls"] = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in told.calls
        ]
    return message


@asynccontextmanager
async def harness(tiny: Any, replies: Any) -> AsyncGenerator[Harness]:
    policy = Policy(ScriptedEngine(replies, tiny.encode), tiny, SamplingParams(max_tokens=2000), 32768)
    with anyio.fail_after(120):
        async with (
            Proxy().serving() as proxy,
            proxy.session("s", Conversation(policy, "s")) as session,
            aiohttp.ClientSession(proxy.url, headers={"x-api-key": session.key}) as http,
        ):
            yield Harness(http, session)


def results(agent: Harness, *outputs: str) -> list[Wire]:
    """Answers to the calls that were said back, in their order."""
    calls = agent.history[-1].get("tool_calls") or ()
    pairs = zip(calls, outputs, strict=True)
    return [{"role": "tool", "tool_call_id": one["id"], "content": output} for one, output in pairs]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
async def test_a_tool_conversation_is_one_chain_however_the_client_says_replies_back(
    tiny: Any, echo: Echo, stream: bool
) -> None:
    async with harness(tiny, SCRIPT) as agent:
        await agent.turn(USER, echo=echo, stream=stream)
        for outputs in (["a\nb"], ["3 a", "line one"], ["Exit code 3"]):
            await agent.turn(*results(agent, *outputs), echo=echo, stream=stream)
        await agent.turn({"role": "user", "content": "Thanks."}, echo=echo, stream=stream)
        completions = agent.session.completions
        assert [one.break_reason for one in completions] == [BreakReason.FIRST_CALL, None, None, None, None]
        for parent, child in itertools.pairwise(completions):
            assert child.parent == parent.id
            said = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist()]
            assert child.prompt_ids.tolist()[: len(said)] == said


async def test_control_a_reply_said_back_in_another_meaning_breaks_the_chain(tiny: Any) -> None:
    async with harness(tiny, ["one", "two"]) as agent:
        await agent.turn(USER, echo=lambda message: message | {"content": "something else"}, stream=True)
        await agent.turn(USER, echo=lambda message: message, stream=True)
        reasons = [one.break_reason for one in agent.session.completions]
        assert reasons == [BreakReason.FIRST_CALL, BreakReason.ASSISTANT_REWRITTEN]


async def test_a_call_that_a_program_could_not_read_and_says_back_as_another_keeps_the_chain(tiny: Any) -> None:
    """opencode calls it `invalid`, and tells the name within."""

    def renamed(message: Wire) -> Wire:
        for one in message.get("tool_calls", ()):
            told = {"tool": one["function"]["name"], "error": "no such tool"}
            one["function"] = {"name": "invalid", "arguments": json.dumps(told)}
        return message

    async with harness(tiny, [call("ls").replace("bash", "shell"), "done"]) as agent:
        await agent.turn(USER, echo=renamed, stream=True)
        await agent.turn(*results(agent, "no such tool"), echo=renamed, stream=True)
        assert [one.break_reason for one in agent.session.completions] == [BreakReason.FIRST_CALL, None]
