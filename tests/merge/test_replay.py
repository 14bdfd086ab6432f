"""Experts and choices of tokens: kept beside what was sampled, merged along, recorded, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from transformers import AutoTokenizer

from polar_plugin.config import load_config
from polar_plugin.engine.scripted import ScriptedEngine, made_up_experts, made_up_nucleus
from polar_plugin.errors import ConfigError, MergeError
from polar_plugin.merge.builders import PerRequest, PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.recording import load, redact
from polar_plugin.records import Nucleus, Routing, TokenIds, Trace, Trajectory, token_ids
from polar_plugin.service import RolloutService

from ..test_service import WRITE, agent_py, attempt, renderer_of, tiny
from .build import Ledger

__all__ = ["tiny"]


def routed(ledger: Ledger) -> Ledger:
    """Each completion with the experts of what is new in it, as an engine tells them, and choices of tokens."""
    ends: dict[str, int] = {}
    for at, one in enumerate(ledger.completions):
        ids, start = np.concatenate((one.prompt_ids, one.generation.output_ids)), ends.get(one.parent or "", 0)
        routing = Routing(made_up_experts(ids)[start:], start)
        generation = replace(one.generation, routing=routing, nucleus=made_up_nucleus(one.generation.output_ids))
        ledger.completions[at] = replace(one, generation=generation)
        ends[one.id] = routing.end
    return ledger


def tokens(trace: Trace) -> TokenIds:
    return np.concatenate((trace.prompt_ids, trace.response_ids))


def choices(trace: Trace) -> list[list[int]]:
    assert trace.nucleus is not None
    offsets = trace.nucleus.offsets.tolist()
    return [trace.nucleus.ids[begin:end].tolist() for begin, end in pairwise(offsets)]


def assert_replayable(trace: Trace) -> None:
    assert trace.routing is not None
    assert trace.routing.tolist() == made_up_experts(tokens(trace)).tolist()
    for token, trained, choice in zip(trace.response_ids, trace.loss_mask, choices(trace), strict=True):
        assert choice == (list(range(token, token + 1 + token % 3)) if trained else [])


def branches() -> Ledger:
    ledger = Ledger()
    a = ledger.say([1, 20], [2, 3])
    b = ledger.say([1, 20, 2, 3, 4], [5, 6, 7], after=a)
    ledger.say([1, 20, 2, 3, 9], [8], after=a)
    ledger.say([1, 20, 2, 3, 4, 5, 6, 7, 10, 11], [12], after=b)
    ledger.say([30, 31], [32])
    return routed(ledger)


@pytest.mark.parametrize("builder", [PrefixMerging(), PerRequest()])
def test_every_trace_has_the_experts_of_all_its_tokens_but_the_last(builder: PrefixMerging | PerRequest) -> None:
    session = branches().sealed()
    traces = builder.build(session)
    check(traces, session, builder.policy)
    for trace in traces:
        assert_replayable(trace)
    assert counts(session, traces)["unroutable_traces"] == 0


def test_a_trace_that_is_split_has_those_of_the_tokens_that_are_left() -> None:
    builder = PrefixMerging(7, overlong="split")
    session = branches().sealed()
    traces = builder.build(session)
    check(traces, session, builder.policy)
    assert len(tokens(traces[0])) == 7
    for trace in traces:
        assert_replayable(trace)


def test_where_a_row_is_unknown_a_trace_has_none_and_is_counted() -> None:
    ledger = branches()
    first = ledger.completions[0]
    ledger.completions[0] = replace(first, generation=replace(first.generation, routing=None, nucleus=None))
    session = ledger.sealed()
    traces = PrefixMerging().build(session)
    check(traces, session)
    assert [trace.routing is None for trace in traces] == [True, True, False]
    assert [trace.nucleus is None for trace in traces] == [True, False, False]
    assert counts(session, traces)["unroutable_traces"] == 2


def test_a_parent_that_the_tokens_refute_leaves_its_child_without() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 7, 4], [5], after=a)
    session = routed(ledger).sealed()
    traces = PrefixMerging().build(session)
    check(traces, session)
    assert [trace.routing is None for trace in traces] == [False, True]


def change_an_expert(trace: Trace) -> Trace:
    assert trace.routing is not None
    changed = trace.routing.copy()
    changed[3, 1] += 1
    return replace(trace, routing=changed)


def change_a_choice(trace: Trace) -> Trace:
    assert trace.nucleus is not None
    return replace(trace, nucleus=Nucleus(token_ids(trace.nucleus.ids + 1), trace.nucleus.offsets))


def shift_choices(trace: Trace) -> Trace:
    assert trace.nucleus is not None
    offsets = trace.nucleus.offsets
    return replace(trace, nucleus=Nucleus(trace.nucleus.ids, token_ids([0, *offsets[2:], offsets[-1]])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_an_expert, "the experts of tokens 3 to 7 are not those told"),
        (lambda trace: replace(trace, routing=trace.routing[:-1]), "has 9 rows of experts, but 10 are right"),
        (lambda trace: replace(trace, routing=None), "has no rows of experts, but 10 are right"),
        (change_a_choice, "choice of tokens, counted from the first, at response token 0"),
        (shift_choices, "end of the choices at response token 0"),
        (lambda trace: replace(trace, nucleus=None), "choices of tokens are missing"),
    ],
)
def test_check_finds_replay_data_that_were_not_recorded(change: Callable[[Trace], Trace], message: str) -> None:
    session = branches().sealed()
    traces = PrefixMerging().build(session)
    with pytest.raises(MergeError, match=message):
        check([change(traces[0]), *traces[1:]], session)


def test_choices_that_do_not_fit_the_output_are_refused() -> None:
    with pytest.raises(ValueError, match="offsets must begin with 0 and end with the number of ids, 2"):
        Nucleus(token_ids([1, 2]), token_ids([0, 1]))
    first = branches().completions[0].generation
    with pytest.raises(ValueError, match="2 output ids but 4 offsets of choices"):
        replace(first, nucleus=made_up_nucleus(token_ids([1, 2, 3])))


# --- from the service ------------------------------------------------------------------------------------------------


def configured(replay: Sequence[str], **more: Any) -> Any:
    return load_config({"verify": "all", "retries": 0, "engine": {"kind": "scripted", "replay": list(replay)}, **more})


async def ran(tiny: Path, replay: Sequence[str], **more: Any) -> tuple[Trajectory, ScriptedEngine]:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny))
    engine = ScriptedEngine([WRITE, "Done."], tokenizer, context_length=8192, replay=replay)
    with anyio.fail_after(120):
        async with RolloutService(configured(replay, **more), engine=engine, renderer=renderer_of(tiny)) as service:
            (trajectory,) = await service.run([attempt(agent_py())])
    return trajectory, engine


@pytest.mark.anyio
async def test_what_the_engine_tells_reaches_trace_and_recording_and_each_turn_tells_what_is_new(
    tiny: Path, tmp_path: Path
) -> None:
    recorded = {"recording": {"directory": str(tmp_path), "suffix": ".jsonl.gz"}}
    trajectory, _ = await ran(tiny, ["routed_experts", "top_p"], **recorded)
    assert trajectory.failure is None
    (only,) = trajectory.traces
    assert_replayable(only)
    assert trajectory.session is not None
    first, second = trajectory.session.completions
    assert first.generation.routing is not None
    assert second.generation.routing is not None
    assert second.generation.routing.start == first.generation.routing.end == first.length - 1
    read = load(tmp_path / "s0.jsonl.gz").session
    (again,) = PrefixMerging().build(read)
    assert_replayable(again)
    assert tokens(again).tolist() == tokens(only).tolist()
    assert len(PrefixMerging(prompts="rerendered").build(read)) == 1  # the recording tells what ends a turn
    redact(tmp_path / "s0.jsonl.gz", tmp_path / "shared.jsonl", renumber_ids=True)
    shared = load(tmp_path / "shared.jsonl").session
    (public,) = PrefixMerging().build(shared)
    check((public,), shared)
    assert len(choices(public)) == len(choices(only))
    for sampled, mask, choice in zip(public.response_ids, public.loss_mask, choices(public), strict=True):
        assert sampled in choice or not mask


@pytest.mark.anyio
async def test_without_replay_nothing_of_it_is_asked_or_kept(tiny: Path) -> None:
    trajectory, _ = await ran(tiny, [])
    (only,) = trajectory.traces
    assert (only.routing, only.nucleus) == (None, None)
    assert "unroutable_traces" not in trajectory.counts


@pytest.mark.anyio
async def test_an_engine_that_does_not_tell_what_the_config_asks_for_fails_the_start(tiny: Path) -> None:
    engine = ScriptedEngine([], AutoTokenizer.from_pretrained(str(tiny)), replay=["top_p"])
    told = configured(["routed_experts", "top_p"])
    with pytest.raises(ConfigError, match=r"engine.replay asks for routed_experts, which the engine 'scripted' does"):
        async with RolloutService(told, engine=engine, renderer=renderer_of(tiny)):
            pass
