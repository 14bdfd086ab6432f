"""Chains become traces: every sampled token trained once, in the context it was sampled in, or counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_plugin.errors import ConfigError, MergeError
from polar_plugin.merge.builders import PerRequest, PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts, trace_json, trace_text
from polar_plugin.merge.untrained import Policy
from polar_plugin.records import (
    CompletionSession,
    FinishReason,
    Generation,
    Trace,
    VersionSpan,
    log_probs,
    mask,
    token_ids,
)

from .build import Ledger


def merged(ledger: Ledger, **config: int) -> tuple[Trace, ...]:
    """The traces, checked."""
    session = ledger.sealed()
    traces = PrefixMerging(**config).build(session)
    check(traces, session, Policy.of(**config))
    told = counts(session, traces)
    untrained = sum(count for name, count in told.items() if name.startswith("untrained_"))
    assert told["sampled_tokens"] == told["trained_tokens"] + untrained
    assert told["trained_tokens"] == sum(trace.trained for trace in traces)
    return traces


def tokens(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


def trained(trace: Trace) -> list[int]:
    return trace.response_ids[trace.loss_mask].tolist()


@pytest.mark.parametrize("parents", [True, False], ids=["parents told", "parents found by tokens"])
def test_case_5_a_chain_of_four_turns_equals_its_last_prompt_and_output(parents: bool) -> None:
    ledger = Ledger(parents)
    a = ledger.say([1, 2], [3])
    b = ledger.say([1, 2, 3, 4], [5, 6], after=a)
    c = ledger.say([1, 2, 3, 4, 5, 6, 7], [8], after=b)
    ledger.say([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], after=c)
    (only,) = merged(ledger)
    assert tokens(only) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert trained(only) == [3, 5, 6, 8, 10, 11]
    assert only.response_logprobs.tolist() == [-0.125, 0, -0.125, -0.25, 0, -0.125, 0, -0.125, -0.25]


def test_case_2_sampled_ids_are_kept_where_another_spelling_has_the_same_text() -> None:
    ledger = Ledger()
    a = ledger.say([1], [53122, 316])
    ledger.say([1, 53122, 316, 7], [9], after=a)
    (only,) = merged(ledger)
    assert trained(only) == [53122, 316, 9]


def test_case_2_a_server_that_rerendered_the_history_is_split_not_trained_under_a_wrong_context() -> None:
    ledger = Ledger(parents=False)
    ledger.say([1], [53122, 316])
    ledger.say([1, 393, 30002, 7], [9])
    first, second = merged(ledger)
    assert trained(first) == [53122, 316]
    assert tokens(second) == [1, 393, 30002, 7, 9]
    assert trained(second) == [9]


@pytest.mark.parametrize("parents", [True, False])
def test_case_6_interleaved_sub_agents_give_one_trace_each(parents: bool) -> None:
    ledger = Ledger(parents)
    a, b = ledger.say([1, 10], [11]), ledger.say([2, 20], [21])
    a, b = ledger.say([1, 10, 11, 12], [13], after=a), ledger.say([2, 20, 21, 22], [23], after=b)
    ledger.say([1, 10, 11, 12, 13, 14], [15], after=a)
    ledger.say([2, 20, 21, 22, 23, 24], [25], after=b)
    main, sub = merged(ledger)
    assert trained(main) == [11, 13, 15]
    assert trained(sub) == [21, 23, 25]


def test_case_14_an_end_token_that_was_not_sampled_is_context() -> None:
    ledger = Ledger()
    a = ledger.say([1], [5])
    ledger.say([1, 5, 2, 6], [7, 2], after=a)
    (only,) = merged(ledger)
    assert tokens(only) == [1, 5, 2, 6, 7, 2]
    assert only.loss_mask.tolist() == [True, False, False, True, True]


def test_case_15_lengths_of_ids_and_logprobs_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 output ids but 3 log-probabilities"):
        Generation(token_ids([1, 2]), log_probs([0, 0, 0]), FinishReason.STOP)


def test_case_21_an_empty_completion_gives_no_row_and_the_chain_goes_on() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    b = ledger.say([1, 2, 3], [], after=a)
    ledger.say([1, 2, 3, 4], [5], after=b)
    (only,) = merged(ledger)
    assert trained(only) == [2, 5]
    assert merged_counts(ledger)["trained_tokens"] == 2


def merged_counts(ledger: Ledger) -> dict[str, int]:
    session = ledger.sealed()
    return counts(session, PrefixMerging().build(session))


def test_an_empty_completion_alone_gives_no_trace() -> None:
    ledger = Ledger()
    ledger.say([1], [])
    assert merged(ledger) == ()


@pytest.mark.parametrize("lost_first", [True, False])
def test_case_28_a_cut_answer_that_was_asked_again_is_not_trained(lost_first: bool) -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    order = [(7, False), (8, True)] if lost_first else [(8, True), (7, False)]
    for token, delivered in order:
        ledger.say([1, 2, 3], [token], after=a, delivered=delivered)
    (only,) = merged(ledger)
    assert trained(only) == [2, 8]
    assert merged_counts(ledger)["untrained_superseded"] == 1


def test_case_23_of_two_delivered_answers_that_nobody_extended_both_are_trained_each_in_its_context() -> None:
    ledger = Ledger()
    ledger.say([1, 2], [3])
    ledger.say([1, 2], [4])
    first, second = merged(ledger)
    assert (trained(first), trained(second)) == ([3], [4])


def test_an_undelivered_last_answer_is_not_trained_but_counted() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4, 5], after=a, delivered=False)
    (only,) = merged(ledger)
    assert trained(only) == [2]
    assert merged_counts(ledger)["untrained_undelivered"] == 2


def test_an_undelivered_answer_that_the_harness_extended_did_arrive() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2], delivered=False)
    ledger.say([1, 2, 3], [4], after=a)
    (only,) = merged(ledger)
    assert trained(only) == [2, 4]


def test_case_24_a_branch_repeats_the_shared_part_as_context_only() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    b = ledger.say([1, 2, 3], [4], after=a)
    ledger.say([1, 2, 9], [8], after=a)
    ledger.say([1, 2, 3, 4, 5], [6], after=b)
    main, side = merged(ledger)
    assert (tokens(main), trained(main)) == ([1, 2, 3, 4, 5, 6], [2, 4, 6])
    assert (tokens(side), trained(side)) == ([1, 2, 9, 8], [8])


def test_a_break_starts_a_new_trace_and_drops_nothing() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([9, 9], [4])
    ledger.say([1, 2, 3], [5], after=a)
    assert [trained(trace) for trace in merged(ledger)] == [[2, 5], [4]]


def test_a_parent_whose_tokens_do_not_begin_the_prompt_is_not_believed() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 3, 4], [5], after=a)
    assert [tokens(trace) for trace in merged(ledger)] == [[1, 2], [1, 3, 4, 5]]


def test_a_trace_over_the_limit_is_cut_at_a_completions_end_and_the_rest_is_counted() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4, 5], after=a)
    (only,) = merged(ledger, max_trace_tokens=4)
    assert tokens(only) == [1, 2]
    session = ledger.sealed()
    assert counts(session, (only,), Policy(max_trace_tokens=4))["untrained_over_length"] == 2
    with pytest.raises(ConfigError, match="max_trace_tokens"):
        PrefixMerging(max_trace_tokens=1)


def test_weight_versions_survive_merging() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2, 3], version="7")
    ledger.say([1, 2, 3, 4], [5], after=a, version="8")
    (only,) = merged(ledger)
    assert only.versions == (VersionSpan("7", 2), VersionSpan("", 1), VersionSpan("8", 1))


def test_per_request_gives_one_trace_a_call() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4], after=a)
    session = ledger.sealed()
    traces = PerRequest().build(session)
    check(traces, session)
    assert [tokens(trace) for trace in traces] == [[1, 2], [1, 2, 3, 4]]


def test_the_json_has_the_papers_shape_and_the_text_marks_what_is_trained() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3])
    (only,) = merged(ledger)
    told = trace_json(only)
    assert set(told) == {
        "prompt_ids", "response_ids", "loss_mask", "prompt_messages", "response_messages", "tools", "finish_reason",
        "response_logprobs", "reward", "metadata",
    }  # fmt: skip
    assert told["loss_mask"] == [1, 1]
    assert trace_text(only, lambda ids: "".join(map(str, ids))) == "1⟦23⟧"


def corrupt(change: Callable[[Trace], Trace]) -> tuple[tuple[Trace, ...], CompletionSession]:
    ledger = Ledger()
    a = ledger.say([1], [2, 3], version="7")
    ledger.say([1, 2, 3, 4], [5, 6], after=a, version="8")
    session = ledger.sealed()
    (only,) = PrefixMerging().build(session)
    return (change(only),), session


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: replace(t, loss_mask=mask([1, 1, 1, 1, 1])), "loss mask at response token 2"),
        (lambda t: replace(t, loss_mask=mask([1, 1, 0, 1, 0])), "loss mask at response token 4"),
        (lambda t: replace(t, response_logprobs=log_probs(np.roll(t.response_logprobs, 1))), "log-probability"),
        (lambda t: replace(t, response_ids=token_ids([2, 3, 4, 5, 9])), "tokens differ at position 5"),
        (lambda t: replace(t, prompt_ids=token_ids([9])), "tokens differ at position 0"),
        (lambda t: replace(t, completion_ids=("c1",)), "loss mask"),
        (lambda t: replace(t, completion_ids=("c0", "c9")), "does not have"),
        (lambda t: replace(t, versions=(VersionSpan("8", 5),)), "weight versions"),
        (lambda t: replace(t, versions=(VersionSpan("7", 2),)), "are '7'x2, but '7'x2 ''x1 '8'x2 is right"),
    ],
)
def test_check_finds_every_corruption(change: Callable[[Trace], Trace], message: str) -> None:
    traces, session = corrupt(change)
    with pytest.raises(MergeError, match=message):
        check(traces, session)


def test_check_finds_what_is_trained_twice_or_never() -> None:
    traces, session = corrupt(lambda trace: trace)
    with pytest.raises(MergeError, match="trained in 2 traces"):
        check((*traces, *traces), session)
    with pytest.raises(MergeError, match="is in no trace"):
        check((), session)


@st.composite
def forests(draw: st.DrawFn) -> Ledger:
    """Random sessions: each call starts anew, extends any earlier call, or repeats its prompt; some are lost."""
    ledger = Ledger(draw(st.booleans()))
    token = st.integers(0, 3)  # few, so that prefixes meet by accident too
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.none() | st.integers(0, len(ledger.completions) - 1)) if ledger.completions else None
        output = draw(st.lists(token, max_size=4))
        delivered = draw(st.booleans())
        if earlier is None:
            ledger.say(draw(st.lists(token, min_size=1, max_size=3)), output, delivered=delivered)
            continue
        parent = ledger.completions[earlier]
        if draw(st.booleans()):
            prompt = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist()]
            prompt += draw(st.lists(token, max_size=3))
            ledger.say(prompt, output, after=parent.id, delivered=delivered)
        else:
            ledger.say(parent.prompt_ids.tolist(), output, after=parent.parent, delivered=delivered)
    return ledger


@given(forests())
def test_any_session_is_merged_exactly(ledger: Ledger) -> None:
    session = ledger.sealed()
    traces = merged(ledger)
    by_id = {completion.id: completion for completion in session.completions}
    for trace in traces:
        sequence = tokens(trace)
        expected = [False] * len(sequence)
        for name in trace.completion_ids:
            completion = by_id[name]
            begin, end = len(completion.prompt_ids), completion.length
            assert sequence[:end] == [*completion.prompt_ids.tolist(), *completion.generation.output_ids.tolist()]
            expected[begin:end] = [True] * (end - begin)
        assert trace.loss_mask.tolist() == expected[len(trace.prompt_ids) :]
    names = [name for trace in traces for name in trace.completion_ids]
    assert len(names) == len(set(names))
    for completion in session.completions:
        if session.delivered(completion) and len(completion.generation.output_ids):
            assert completion.id in names
