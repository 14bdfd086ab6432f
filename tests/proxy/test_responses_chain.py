"""A conversation through Responses is one chain of tokens, however its client carries its history along."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from transformers import AutoTokenizer

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.proxy.server import Proxy
from polar_plugin.proxy.session import Session
from polar_plugin.records import BreakReason, Role, SamplingParams

from .responses_stream import check, parse
from .responses_wire import PATH, TOOLS, Wire
from .test_responses_echo import codex, easy, renamed

pytestmark = pytest.mark.anyio


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAID = [
    "<think>\nLook first. é\n</think>\n\nLooking.\n" + calling("bash", '{"command":  "ls", "n": 1.0}'),
    "<think>\nTwo at once.\n</think>\n\n"
    + calling("apply_patch", '{"input": "*** Begin\\n+\\u00e9\\n*** End"}')
    + calling("agents__spawn", '{"command": "count"}'),
    calling("apply_patch", '{"patch": "not what was asked for"}'),
    "<think>\nNow the shell.\n</think>\n\n" + calling("local_shell", '{"command": ["ls", "-l"], "env": {}}'),
    "   Done: é 😀.\n",
    "<think>\nonly thought\n</think>",
    "Bye.",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def session_over(
    tiny: Path, said: list[str], *, max_tokens: int = 1000, context_length: int = 16384
) -> AsyncGenerator[tuple[Session, aiohttp.ClientSession]]:
    engine = ScriptedEngine(said, AutoTokenizer.from_pretrained(str(tiny)), context_length=context_length)
    policy = Policy(engine, load_renderer(tiny), SamplingParams(max_tokens=max_tokens), context_length)
    with anyio.fail_after(120):
        async with (
            Proxy().serving() as proxy,
            proxy.session("s", Conversation(policy, "s")) as session,
            aiohttp.ClientSession(proxy.url, headers={"Authorization": f"Bearer {session.key}"}) as http,
        ):
            yield session, http


@dataclass
class Harness:
    """A client that answers every call, and carries its history along in its own way."""

    http: aiohttp.ClientSession
    carry: Callable[[Wire], list[Wire]]
    stream: bool
    by_id: bool = False
    """Name the earlier response, and send only what is new."""
    history: list[Wire] = field(default_factory=list)
    latest: str | None = None

    async def turn(self, *new: Wire, **more: Any) -> list[Wire]:
        """The results of the turn's calls: what the next one begins with."""
        self.history += new
        body: Wire = {
            "model": "policy", "instructions": "Work in a shell.", "tools": TOOLS, "stream": self.stream, **more,
        }  # fmt: skip
        body |= {"input": list(new), "previous_response_id": self.latest} if self.by_id else {"input": self.history}
        async with self.http.post(PATH, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        response = check(parse(text.split("\n"))) if self.stream else json.loads(text)
        self.latest = response["id"]
        self.history += self.carry(response)
        return [
            {"type": item["type"] + "_output", "call_id": item["call_id"], "output": f"result of {item['type']}"}
            for item in response["output"]
            if item["type"].endswith("_call")
        ]


def echoing(change: Callable[[Wire], Wire]) -> Callable[[Wire], list[Wire]]:
    return lambda response: [change(item) for item in response["output"]]


CARRIED: dict[str, Callable[[Wire], list[Wire]]] = {
    "word for word": echoing(lambda item: item),
    "as Codex writes it": echoing(codex),
    "messages in short": echoing(easy),
    "by reference": echoing(lambda item: {"type": "item_reference", "id": item["id"]}),
    "without opaque content": echoing(lambda item: {k: v for k, v in item.items() if k != "encrypted_content"}),
}


def one_chain(session: Session) -> None:
    """Every completion goes on from the one before it, to the token."""
    first, *rest = session.completions
    assert (first.parent, first.break_reason) == (None, BreakReason.FIRST_CALL)
    for before, after in zip(session.completions, rest, strict=False):
        assert (after.parent, after.break_reason) == (before.id, None)
        told = [*before.prompt_ids.tolist(), *before.generation.output_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(told)] == told
    ledger = session.seal()
    (trace,) = PrefixMerging().build(ledger)
    assert trace.trained == sum(len(one.generation.output_ids) for one in ledger.completions)


async def converse(harness: Harness) -> None:
    new: list[Wire] = [{"role": "user", "content": "Fix it."}]
    for _ in SAID:
        new = await harness.turn(*new) or [{"role": "user", "content": "Go on."}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("carry", CARRIED.values(), ids=CARRIED.keys())
async def test_a_conversation_of_text_calls_and_reasoning_is_one_chain(
    tiny: Path, carry: Callable[[Wire], list[Wire]], stream: bool
) -> None:
    async with session_over(tiny, SAID) as (session, http):
        await converse(Harness(http, carry, stream))
        one_chain(session)
        assert len(session.completions) == len(SAID)
        kinds = [[call.name for call in one.reply.tool_calls] for one in session.completions]
        assert kinds[:4] == [["bash"], ["apply_patch", "agents__spawn"], ["apply_patch"], ["local_shell"]]
        assert [bool(one.reply.reasoning) for one in session.completions] == [
            True,
            True,
            False,
            True,
            False,
            True,
            False,
        ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_case_99_a_conversation_by_previous_response_id_is_one_chain(tiny: Path, stream: bool) -> None:
    async with session_over(tiny, SAID) as (session, http):
        await converse(Harness(http, lambda _: [], stream, by_id=True))
        one_chain(session)
        assert len(session.completions) == len(SAID)


async def test_a_conversation_whose_client_rewrites_all_ids_is_one_chain(tiny: Path) -> None:
    """But for calls that only their ids can tell apart from what they say."""
    said = [text for text in SAID if 'patch": "not' not in text and "env" not in text]
    async with session_over(tiny, said) as (session, http):
        harness = Harness(http, echoing(renamed), stream=True)
        new: list[Wire] = [{"role": "user", "content": "Fix it."}]
        for _ in said:
            results = await harness.turn(*new)
            new = [one | {"call_id": f"y{one['call_id']}"} for one in results] or [
                {"role": "user", "content": "Go on."}
            ]
        one_chain(session)


async def test_case_98_a_compaction_is_a_call_of_its_own_and_what_follows_begins_anew(tiny: Path) -> None:
    async with session_over(tiny, ["Half done.", "The user wants it fixed; half of it is.", "Done."]) as (
        session,
        http,
    ):
        harness = Harness(http, echoing(lambda item: item), stream=True)
        await harness.turn({"role": "user", "content": "Fix it."})
        async with http.post(f"{PATH}/compact", json={"model": "policy", "input": harness.history}) as answer:
            compacted = await answer.json()
        harness.history = compacted["output"]
        await harness.turn({"role": "user", "content": "Go on."})
        roles = [one.role for one in session.completions]
        assert roles == [Role.MAIN, Role.COMPACTION, Role.MAIN]
        assert [message.content for message in session.completions[2].request.messages[:2]] == [
            "Work in a shell.",
            "Fix it.",
        ]
        assert "half of it is" in session.completions[2].request.messages[2].content


async def test_the_count_of_input_tokens_is_that_of_the_next_turn(tiny: Path) -> None:
    async with session_over(tiny, SAID) as (session, http):
        harness = Harness(http, echoing(codex), stream=False)
        results = await harness.turn({"role": "user", "content": "Fix it."})
        body = {
            "model": "policy",
            "instructions": "Work in a shell.",
            "tools": TOOLS,
            "input": harness.history + results,
        }
        async with http.post(f"{PATH}/input_tokens", json=body) as answer:
            counted = await answer.json()
        await harness.turn(*results)
        assert counted == {"object": "response.input_tokens", "input_tokens": len(session.completions[1].prompt_ids)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_beyond_the_context_overflows_in_the_apis_words_and_a_cut_call_is_no_call(
    tiny: Path, stream: bool
) -> None:
    async with session_over(tiny, [SAID[1]] * 2, context_length=2500, max_tokens=60) as (session, http):
        harness = Harness(http, echoing(lambda item: item), stream)
        assert await harness.turn({"role": "user", "content": "Fix it."}) == []
        (completion,) = session.completions
        assert completion.generation.finish_reason == "length"
        body = {"model": "policy", "input": "word " * 4000, "stream": stream}
        async with http.post(PATH, json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        assert "exceeds the context window" in error["message"]
        assert len(session.completions) == 1
