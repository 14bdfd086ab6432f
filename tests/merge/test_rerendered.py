"""Recordings of servers that render the history anew for each call: split where it came back changed, and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_plugin.errors import ConfigError
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.records import CompletionSession, Trace

from .build import Ledger

END, OTHER_END, USER, ASSISTANT, THINK = 9, 8, 70, 71, 60


def split(session: CompletionSession, **config: Any) -> tuple[tuple[Trace, ...], Counter[str]]:
    """The traces, checked, and how many completions broke off, by reason."""
    builder = PrefixMerging(prompts="rerendered", **{"end_of_turn": END, **config})
    traces = builder.build(session)
    check(traces, session, builder.policy)
    told = counts(session, traces, builder.policy)
    assert told["trained_tokens"] == told["sampled_tokens"] - told.get("untrained_undelivered", 0)
    assert all(tokens(trace)[: len(context)] == context for trace in traces for context in contexts(trace, session))
    return traces, Counter({name: count for name, count in told.items() if name.startswith("breaks_")})


def contexts(trace: Trace, session: CompletionSession) -> list[list[int]]:
    """What each of a trace's completions was sampled behind, with what was sampled."""
    by_id = {one.id: one for one in session.completions}
    trained = [by_id[name] for name in trace.completion_ids]
    return [[*one.prompt_ids.tolist(), *one.generation.output_ids.tolist()] for one in trained]


def tokens(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


def two_turns(sampled: list[int], rendered: list[int]) -> CompletionSession:
    """A second call whose prompt holds `rendered` where `sampled` was."""
    ledger = Ledger(parents=False)
    ledger.say([USER, 1, ASSISTANT], sampled)
    ledger.say([USER, 1, ASSISTANT, *rendered, USER, 2, ASSISTANT], [3, END])
    return ledger.sealed()


def test_a_turn_that_came_back_as_it_was_sampled_is_continued() -> None:
    traces, breaks = split(two_turns([5, 6, END], [5, 6, END]))
    (only,) = traces
    assert tokens(only) == [USER, 1, ASSISTANT, 5, 6, END, USER, 2, ASSISTANT, 3, END]
    assert only.response_ids[only.loss_mask].tolist() == [5, 6, END, 3, END]
    assert breaks == {"breaks_first_call": 1}


def test_a_turn_cut_by_length_is_closed_by_the_template_which_is_context() -> None:
    (only,), _ = split(two_turns([5, 6], [5, 6, END]))
    assert only.loss_mask.tolist() == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("sampled", "rendered", "reason"),
    [
        ([53122, 316, END], [393, 30002, END], "assistant_rewritten"),  # other ids for the same text
        ([5, 6, 7, END], [5, 6, END], "assistant_rewritten"),  # a trailing blank that the template trims
        ([THINK, 4, THINK, 5, 6, END], [5, 6, END], "template_rewrite"),  # reasoning that the template drops
        ([5, 6, OTHER_END], [5, 6, END], "template_rewrite"),  # ended by another stop token than the template's
        ([5, 6, END], [5, 7], "boundary_unknown"),
    ],
)
def test_a_turn_that_came_back_changed_starts_a_trace_and_is_counted_by_reason(
    sampled: list[int], rendered: list[int], reason: str
) -> None:
    session = two_turns(sampled, rendered)
    (first, second), breaks = split(session, end_of_turn=[END, OTHER_END])
    assert first.response_ids.tolist() == sampled
    assert tokens(second) == [USER, 1, ASSISTANT, *rendered, USER, 2, ASSISTANT, 3, END]
    assert second.response_ids.tolist() == [3, END]
    assert breaks == {"breaks_first_call": 1, f"breaks_{reason}": 1}
    assert second.metadata["break_reason"] == reason


def test_where_any_of_several_ends_closes_a_turn_the_turn_goes_to_the_first() -> None:
    session = two_turns([5, 6, OTHER_END], [7, OTHER_END, 5, END])
    _, breaks = split(session, end_of_turn=[END, OTHER_END])
    assert breaks["breaks_assistant_rewritten"] == 1


def test_the_end_of_a_turn_is_not_guessed_from_what_was_sampled_last() -> None:
    """The first completion stopped at a stop string, so its last token ends no turn in the template."""
    session = two_turns([5, 6], [5, 7, 6, END])
    _, breaks = split(session)
    assert breaks["breaks_assistant_rewritten"] == 1


def test_what_is_told_of_parents_is_not_relied_on() -> None:
    ledger = Ledger()
    a = ledger.say([USER, 1, ASSISTANT], [5, END])
    ledger.say([USER, 1, ASSISTANT, 6, END, USER, 2, ASSISTANT], [3, END], after=a)
    traces, breaks = split(ledger.sealed())
    assert (len(traces), breaks["breaks_assistant_rewritten"]) == (2, 1)


def test_a_turn_dropped_far_back_splits_once_and_the_thread_goes_on() -> None:
    """A template that keeps reasoning until the next question: the prompt of turn 3 repeats 1 and 2 without theirs."""
    ledger = Ledger(parents=False)
    first = [USER, 1, ASSISTANT]
    ledger.say(first, [THINK, 5, END])
    second = [*first, THINK, 5, END, 50, ASSISTANT]
    ledger.say(second, [THINK, 6, END])
    third = [*first, 5, END, 50, ASSISTANT, 6, END, USER, 2, ASSISTANT]
    ledger.say(third, [THINK, 7, END])
    ledger.say([*third, THINK, 7, END, 51, ASSISTANT], [8, END])
    (one, two), breaks = split(ledger.sealed())
    assert (one.completion_ids, two.completion_ids) == (("c0", "c1"), ("c2", "c3"))
    assert breaks == {"breaks_first_call": 1, "breaks_template_rewrite": 1}


def test_an_empty_turn_came_back_as_it_was_and_breaks_nothing() -> None:
    ledger = Ledger(parents=False)
    ledger.say([USER, 1, ASSISTANT], [5, END])
    ledger.say([USER, 1, ASSISTANT, 5, END, USER, 2, ASSISTANT], [])
    ledger.say([USER, 1, ASSISTANT, 5, END, USER, 2, ASSISTANT, END, USER, 3, ASSISTANT], [6, END])
    traces, breaks = split(ledger.sealed())
    assert [trace.completion_ids for trace in traces] == [("c0", "c2")]
    assert breaks == {"breaks_first_call": 1}


def test_another_conversation_is_a_new_thread() -> None:
    ledger = Ledger(parents=False)
    ledger.say([USER, 1, ASSISTANT], [5, END])
    ledger.say([USER, 4, ASSISTANT], [6, END])
    _, breaks = split(ledger.sealed())
    assert breaks == {"breaks_first_call": 1, "breaks_new_thread": 1}


def test_of_two_answers_to_one_prompt_the_one_that_came_back_is_continued() -> None:
    ledger = Ledger(parents=False)
    ledger.say([USER, 1, ASSISTANT], [5, END])
    ledger.say([USER, 1, ASSISTANT], [6, END])
    ledger.say([USER, 1, ASSISTANT, 5, END, USER, 2, ASSISTANT], [7, END])
    traces, breaks = split(ledger.sealed())
    assert [trace.completion_ids for trace in traces] == [("c0", "c2"), ("c1",)]
    assert breaks == {"breaks_first_call": 2}


def test_without_the_end_of_a_turn_the_error_says_what_to_set() -> None:
    session = two_turns([5, END], [5, END])
    builder = PrefixMerging(prompts="rerendered")
    with pytest.raises(ConfigError, match=r"builder.config.end_of_turn is not set: .* those of session s do not"):
        builder.build(session)
    assert len(builder.build(replace(session, metadata={"end_of_turn": [END]}))) == 1


@st.composite
def conversations(draw: st.DrawFn) -> tuple[CompletionSession, int]:
    """A conversation each of whose turns comes back as it was or changed, and how many were changed."""
    ledger, prompt, changed = Ledger(parents=False), [USER, 1, ASSISTANT], 0
    for turn in range(draw(st.integers(1, 8))):
        said = [*draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)), END]
        ledger.say(prompt, said)
        if draw(st.booleans()):
            said, changed = [6, *said], changed + 1
        prompt = [*prompt, *said, USER, turn, ASSISTANT]
    ledger.say(prompt, [3, END])
    return ledger.sealed(), changed


@given(conversations())
def test_there_is_one_trace_more_for_each_turn_that_came_back_changed(made: tuple[CompletionSession, int]) -> None:
    session, changed = made
    traces, breaks = split(session)
    assert len(traces) == changed + 1
    assert breaks["breaks_assistant_rewritten"] == changed
    sampled = sum(len(one.generation.output_ids) for one in session.completions)
    assert sum(int(np.count_nonzero(trace.loss_mask)) for trace in traces) == sampled
