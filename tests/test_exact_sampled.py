"""Exact context for text that a real small model samples: four harnesses, one for each model API, talk with it at once.

The control is what servers do that render every request anew: how many tokens then have another log-probability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_plugin.config import load_config
from polar_plugin.engine.base import Renderer
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.engine.turn import Conversation
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.records import CompletionSession
from polar_plugin.service import RolloutService

from . import tokenizers
from .exactness import LIMIT, drift, gaps
from .speakers import SPEAKERS, Speaker

TOPICS = {
    "openai_chat": "Write a limerick about Zürich.",
    "anthropic_messages": "Write a Python function that reverses a list.",
    "openai_responses": "Name five rivers and their lengths in km.",
    "google_generate": "Tell me about the naïve Bayes classifier.",
}
RESULTS = (
    "$ ls -la\n-rw-r--r-- 1 agent agent 1204 Mar 3 Åsas notes.md\n-rwxr-xr-x 1 agent agent 310 Mar 3 run.sh\nGo on.",
    "$ ./run.sh\nrun.sh: line 7: unexpected EOF while looking for matching `\"'\nWhat went wrong?",
)


def asked(name: str, speaker: Speaker) -> list[dict[str, Any]]:
    return [speaker.user(TOPICS[name]), *map(speaker.user, RESULTS)]


async def talk(service: RolloutService, name: str, sessions: dict[str, CompletionSession]) -> None:
    speaker, numbers = SPEAKERS[name], itertools.count()
    conversation = Conversation(service.policy, name, new_id=lambda: f"{name}-{next(numbers)}")
    history = [speaker.system("You work in a shell. Answer in a few words.")]
    async with aiohttp.ClientSession() as http, service.proxy.session(name, conversation) as session:
        for turn in asked(name, speaker):
            history.append(turn)
            url = f"{service.proxy.url}/s/{session.key}{speaker.path}"
            async with http.post(url, json=speaker.body(history, 20)) as response:
                assert response.status == 200, await response.text()
                history += speaker.read(await response.json()).echo
        sessions[name] = session.seal()


async def sampled(model: Any, tokenizer: Any, renderer: Renderer) -> dict[str, CompletionSession]:
    sessions: dict[str, CompletionSession] = {}
    engine = TransformersEngine(model, tokenizer=tokenizer, seed=7)
    config = load_config({"sampling": {"max_tokens": 20, "temperature": 1.0}})
    async with RolloutService(config, engine=engine, renderer=renderer) as service, anyio.create_task_group() as group:
        for name in TOPICS:
            group.start_soon(talk, service, name, sessions)
    return sessions


@pytest.mark.model
@pytest.mark.anyio
async def test_what_a_real_model_samples_is_exact_in_traces_and_drifts_where_prompts_are_rendered_anew(
    figure: Callable[[str, str], None],
) -> None:
    directory = resolve_model("smollm2", tokenizers.CACHE.parent / "models")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    renderer = load_renderer(directory)
    sessions = await sampled(model, AutoTokenizer.from_pretrained(str(directory)), renderer)
    off, drifts = [], []
    for session in sessions.values():
        traces = PrefixMerging().build(session)
        check(traces, session)
        assert len(traces) == 1
        assert len(traces[0].completion_ids) == 1 + len(RESULTS)
        off.append(gaps(model, traces[0]))
        drifts += [drift(model, renderer, one) for one in session.completions[1:]]
    count, later, drifted = sum(map(len, off)), sum(map(len, drifts)), (np.concatenate(drifts) > LIMIT).sum()
    worst = np.concatenate(off).max()
    figure(
        "exact context, text that SmolLM2-135M samples",
        f"{count} trained tokens in {len(sessions)} conversations, off by {worst:.1e} at most; re-rendered prompts:"
        f" {drifted} of the {later} tokens of later turns off by more than {LIMIT} ({drifted / later:.1%})",
    )
    assert count > 150
    assert worst <= LIMIT
    assert drifted > 0
