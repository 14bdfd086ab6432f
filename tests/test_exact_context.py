"""The claim of the library: log-probabilities recomputed over a trace are the recorded ones, for every trained token.

Black box in, trace out: a client talks each of the four model APIs to the proxy over real tokenizers and chat
templates; a small float32 model with random weights samples (or is made to say what a case needs); then the whole trace
is scored at once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from polar_plugin.config import load_config
from polar_plugin.engine.base import Renderer
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.engine.turn import Conversation
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.records import CompletionSession, Trace, token_ids
from polar_plugin.service import RolloutService

from . import tokenizers
from .speakers import SPEAKERS, Answer, Speaker

pytestmark = pytest.mark.anyio
LIMIT = 1e-4


@dataclass(frozen=True)
class Family:
    """A tokenizer with its chat template, and how its model writes a tool call."""

    tokenizer: str
    kind: str = "auto"
    call: str = '<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


FAMILIES = {
    "Qwen3, the renderers package": Family("qwen3"),
    "Qwen3, its chat template": Family("qwen3", "template"),
    "Llama 3.1": Family("llama3_1"),
    "DeepSeek V3": Family("deepseek_v3", "template"),
    "ChatML over bytes": Family("tiny"),
}


@functools.cache
def model_of(tokenizer: str, cache: Path) -> tuple[Path, Any]:
    """The tokenizer's directory and a tiny model over its vocabulary, with random weights."""
    if tokenizer == "tiny":
        directory = resolve_model("tiny", cache)
        return directory, Qwen3ForCausalLM.from_pretrained(directory).eval()
    directory = tokenizers.load(tokenizer)
    renderer = load_renderer(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=renderer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=8192,
        tie_word_embeddings=True, initializer_range=0.2, eos_token_id=renderer.stop_ids[0], bos_token_id=None,
    )  # fmt: skip
    return directory, Qwen3ForCausalLM(config).eval()


@dataclass
class Client:
    """A harness: it keeps a history and asks for the next turn, which is sampled unless `says` tells what it is."""

    http: aiohttp.ClientSession
    base: str
    says: list[str | None]
    speaker: Speaker
    history: list[dict[str, Any]]

    async def turn(self, *new: dict[str, Any], says: str | None = None, max_tokens: int = 16) -> Answer:
        self.says.append(says)
        self.history += new
        body = self.speaker.body(self.history, max_tokens)
        async with self.http.post(self.base + self.speaker.path, json=body) as response:
            assert response.status == 200, await response.text()
            answer = self.speaker.read(await response.json())
        self.history += answer.echo
        return answer

    def user(self, text: str) -> dict[str, Any]:
        return self.speaker.user(text)

    def results(self, answer: Answer, *texts: str) -> list[dict[str, Any]]:
        assert len(answer.calls) == len(texts), "the scripted calls were not parsed"
        return self.speaker.results(answer, *texts)


Opened = tuple[RolloutService, Client, Callable[[], CompletionSession]]


@asynccontextmanager
async def sessions(family: Family, cache: Path, api: str = "openai_chat") -> AsyncGenerator[Opened]:
    directory, model = model_of(family.tokenizer, cache)
    says: list[str | None] = []

    def script(session_id: str, turn: int, prompt: str) -> str | None:
        return says[turn] if session_id == "s" else None

    engine = TransformersEngine(model, tokenizer=tokenizer_of(directory), script=script)
    config = load_config({"sampling": {"max_tokens": 400}})
    with anyio.fail_after(240):
        async with (
            RolloutService(config, engine=engine, renderer=renderer_of(directory, family.kind)) as service,
            aiohttp.ClientSession() as http,
            service.proxy.session("s", Conversation(service.policy, "s")) as session,
        ):
            base, speaker = f"{service.proxy.url}/s/{session.key}", SPEAKERS[api]
            yield service, Client(http, base, says, speaker, [speaker.system("You work in a shell.")]), session.seal


@functools.cache
def tokenizer_of(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(directory))


@functools.cache
def renderer_of(directory: Path, kind: str) -> Renderer:
    return load_renderer(directory, kind=kind)


def call(family: Family, *commands: str) -> str:
    return "\n".join(family.call.format(arguments=json.dumps({"command": command})) for command in commands)


async def plain(client: Client, family: Family) -> None:
    await client.turn(client.user("hello"))
    await client.turn(client.user("go on"))
    await client.turn(client.user("and on"))


async def tool_calls(client: Client, family: Family) -> None:
    first = await client.turn(client.user("list"), says="I look.\n" + call(family, "ls"), max_tokens=400)
    second = await client.turn(*client.results(first, "a.py\nb.py"), says=call(family, "cat a.py"), max_tokens=400)
    await client.turn(*client.results(second, "print(1)"))


async def parallel_calls(client: Client, family: Family) -> None:
    first = await client.turn(client.user("both"), says=call(family, "ls", "pwd"), max_tokens=400)
    await client.turn(*client.results(first, "a.py", "/workspace"))
    await client.turn(client.user("thanks"))


async def reasoning(client: Client, family: Family) -> None:
    await client.turn(client.user("think"), says="<think>\nhmm, well\n</think>\n\nDone.", max_tokens=400)
    await client.turn(client.user("again"), says="<think>\nmore\n</think>\n\nDone again.", max_tokens=400)
    await client.turn(client.user("last"))


async def cut_by_length(client: Client, family: Family) -> None:
    await client.turn(
        client.user("long"), says="This answer is cut somewhere in its middle, before it ends.", max_tokens=5
    )
    cut = await client.turn(client.user("and a call"), says=call(family, "ls -la /somewhere/far"), max_tokens=9)
    assert not cut.calls
    await client.turn(client.user("go on"))


async def reminder_in_the_middle(client: Client, family: Family) -> None:
    await client.turn(client.user("hello"))
    await client.turn(client.speaker.system("Remember: be brief."), client.user("go on"))
    await client.turn(client.user("and on"))


async def unicode(client: Client, family: Family) -> None:
    await client.turn(client.user("名前は? 👩‍🚀 \u0000 e\u0301"), says="Ünïcödé — 🤷🏽‍♀️ ﷽ \ufeff.", max_tokens=400)
    first = await client.turn(client.user("run"), says=call(family, "echo 'é👍\t\"\\'"), max_tokens=400)
    await client.turn(*client.results(first, "é👍\r\n\x1b[0m"))


CASES = [plain, tool_calls, parallel_calls, reasoning, cut_by_length, reminder_in_the_middle, unicode]


async def worst_difference(service: RolloutService, traces: Sequence[Trace]) -> float:
    engine = service.engine
    assert isinstance(engine, TransformersEngine)
    worst = 0.0
    for trace in traces:
        again = await engine.score(np.concatenate((trace.prompt_ids, trace.response_ids)))
        gap = np.abs(again[len(trace.prompt_ids) - 1 :] - trace.response_logprobs)[trace.loss_mask]
        worst = max(worst, float(gap.max()))
    return worst


FAMILIES_AND_APIS = [
    *((name, "openai_chat") for name in FAMILIES),
    *(
        (name, api)
        for name in ("Qwen3, the renderers package", "ChatML over bytes")
        for api in SPEAKERS
        if api != "openai_chat"
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("name", "api"), FAMILIES_AND_APIS)
async def test_every_trained_token_has_the_log_probability_it_was_sampled_with(
    name: str, api: str, case: Callable[[Client, Family], Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = FAMILIES[name]
    async with sessions(family, cache_of(tmp_path_factory), api) as (service, client, seal):
        await case(client, family)
        session = seal()
        traces = PrefixMerging().build(session)
        check(traces, session)
        told = counts(session, traces)
        assert told["sampled_tokens"] == told["trained_tokens"] > 0
        assert len(traces) == 1, [c.break_reason for c in session.completions]
        assert await worst_difference(service, traces) <= LIMIT


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_same_check_finds_the_drift_of_rerendered_prompts(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The control: over prompts that are rendered anew from text, the recorded log-probabilities are wrong."""
    family = FAMILIES[name]
    async with sessions(family, cache_of(tmp_path_factory)) as (service, client, seal):
        for _ in range(4):
            await client.turn(client.user("go on"), max_tokens=32)
        worst, engine = 0.0, service.engine
        assert isinstance(engine, TransformersEngine)
        for completion in seal().completions[1:]:
            request, output = completion.request, completion.generation.output_ids
            anew = service.policy.renderer.render(request.messages, request.tools)
            scored = await engine.score(token_ids(np.concatenate((anew, output))))
            worst = max(worst, float(np.abs(scored[len(anew) - 1 :] - completion.generation.logprobs).max()))
        assert worst > 10 * LIMIT


@functools.cache
def _cache(base: Path) -> Path:
    return base


def cache_of(factory: pytest.TempPathFactory) -> Path:
    return _cache(factory.getbasetemp() / "models")
