"""Recorded sessions of real agent programs, a real model behind the proxy: exact context from their HTTP to traces.

What the model said is forced to be what was recorded, token by token, and each token has the log-probability that the
model gave it in that very call. Then each trace is scored anew, in one forward pass that shares no code with the
engine.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest
from transformers import AutoTokenizer, PreTrainedModel

from polar_plugin.engine.base import Renderer
from polar_plugin.engine.render import load_renderer
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.merge.untrained import untrained
from polar_plugin.records import CompletionSession, Role, Trace

from . import tokenizers
from .exactness import LIMIT, drift, gaps, random_model
from .recorded.expected import EXPECTED
from .recorded.forced import Forced
from .recorded.replay import Replayed, recordings, replay

ROLES = {"main": Role.MAIN, "SUBTASK": Role.SUB_AGENT, "side": Role.SIDE}
NO_ECHO_OF_ITS_OWN = ("mini-swe-agent",)
"""Programs that repeat the model's words as they are, so that forced replies show no drift."""


@functools.cache
def parts() -> tuple[Renderer, Any, PreTrainedModel]:
    directory = tokenizers.load("qwen3")
    renderer = load_renderer(directory)
    return renderer, AutoTokenizer.from_pretrained(str(directory)), random_model(renderer)


@functools.cache
def replays(program: str) -> dict[str, Replayed]:
    """All recordings of a program, one after the other through one engine."""
    return anyio.run(_replays, program)


async def _replays(program: str) -> dict[str, Replayed]:
    renderer, tokenizer, model = parts()
    names = [name for name in recordings() if name.startswith(f"{program}/")]
    async with Forced(model, tokenizer) as engine:
        return {name: await replay(name, renderer, tokenizer, engine.saying) for name in names}


def replayed(name: str) -> tuple[CompletionSession, tuple[Trace, ...]]:
    session = replays(name.partition("/")[0])[name].session
    return session, tuple(PrefixMerging().build(session))


@functools.cache
def differences(name: str) -> npt.NDArray[np.float32]:
    """|recomputed - recorded| of each trained token of a recording."""
    model = parts()[2]
    return np.concatenate([np.empty(0, np.float32), *(gaps(model, trace) for trace in replayed(name)[1])])


def told(session: CompletionSession, traces: Iterable[Trace]) -> str:
    """As `EXPECTED` tells it."""
    words = [f"{trace.role} {len(trace.completion_ids)}{_reason(trace)}" for trace in traces]
    words += [f"untrained {reason} {count}" for reason, count in sorted(Counter(untrained(session).values()).items())]
    return ", ".join(words)


def _reason(trace: Trace) -> str:
    reason = trace.metadata["break_reason"]
    return "" if reason == "first_call" else f" {reason}"


@pytest.mark.parametrize("name", recordings())
def test_each_conversation_of_a_recording_is_one_trace_and_its_breaks_are_those_of_the_program(name: str) -> None:
    program, _, run = name.partition("/")
    session, traces = replayed(name)
    check(traces, session)
    assert told(session, traces) == EXPECTED[program][run]
    exchanges = replays(program)[name].exchanges
    assert [one.role for one in session.completions] == [ROLES[exchange.thread] for exchange in exchanges]
    count = counts(session, traces)
    assert count["delivered_tokens"] == count["sampled_tokens"]
    assert count["sampled_tokens"] == count["trained_tokens"] + sum(
        tokens for key, tokens in count.items() if key in ("untrained_side", "untrained_discarded")
    )


@pytest.mark.parametrize("name", recordings())
def test_every_trained_token_of_a_recording_has_the_log_probability_of_its_call(name: str) -> None:
    _, traces = replayed(name)
    off = differences(name)
    assert len(off) == sum(trace.trained for trace in traces)
    assert off.max(initial=0) <= LIMIT


@pytest.mark.parametrize("program", EXPECTED)
def test_the_same_check_finds_the_drift_of_a_programs_rerendered_prompts(
    program: str, figure: Callable[[str, str], None]
) -> None:
    """The control: servers that render each request anew from what the program repeats sample under other contexts."""
    names = [name for name in recordings() if name.startswith(f"{program}/")]
    renderer, _, model = parts()
    exact = np.concatenate([differences(name) for name in names])
    drifts = [np.zeros(0, np.float32)]
    for session, traces in map(replayed, names):
        trained = {name for trace in traces for name in trace.completion_ids}
        drifts += [drift(model, renderer, one) for one in session.completions if one.id in trained and one.parent]
    off = int((np.concatenate(drifts) > LIMIT).sum())
    figure(
        "exact context, recorded programs",
        f"{program}: {len(exact)} trained tokens in {len(names)} recordings, off by {exact.max():.1e} at most;"
        f" re-rendered prompts: {off} off by more than {LIMIT} ({off / len(exact):.1%})",
    )
    assert off > 0 or program.startswith(NO_ECHO_OF_ITS_OWN)
