"""Chains become traces: every sampled token trained once, in the context it was sampled in, or counted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from polar_plugin.errors import ConfigError, MergeError
from polar_plugin.merge.builders import PerRequest, PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts, trace_json, trace_text
from polar_plugin.merge.untrained import Policy
from polar_plugin.records import (
    BreakReason,
    ChatRequest,
    FinishReason,
    Generation,
    Message,
    Role,
    Tool,
    ToolCall,
    Trace,
    VersionSpan,
    log_probs,
    token_ids,
)

from .build import Ledger


def merged(ledger: Ledger, **config: Any) -> tuple[Trace, ...]:
    """The traces, checked."""
    session = ledger.sealed()
    traces = PrefixMerging(**config).build(session)
    check(traces, session, Policy.of(**config))
    told = counts(session, traces, Policy.of(**config))
    assert "untrained_unexplained" not in told
    untrained = sum(count for name, count in told.items() if name.startswith("untrained_"))
    assert told["sampled_tokens"] == told["trained_tokens"] + untrained
    assert told["trained_tokens"] == sum(trace.trained for trace in traces)
    return traces


def tokens(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


def trained(trace: Trace) -> list[int]:
    return trace.response_ids[trace.loss_mask].tolist()


def test_case_1_six_turns_with_thinking_and_tools_give_one_trace_with_every_sampled_token_trained() -> None:
    ledger, parent, prompt = Ledger(), None, [1, 2, 3]
    messages: tuple[Message, ...] = (Message("user", "mend it"),)
    for turn in range(6):
        output = [100 + turn, 200 + turn, 9]
        call = ToolCall("bash", f'{{"command": "{turn}"}}', f"call_{turn}")
        reply = Message("assistant", reasoning=f"thought {turn}", tool_calls=(call,))
        parent = ledger.say(prompt, output, after=parent, reply=reply, request=ChatRequest(messages))
        # the harness rewrites the call and drops the thinking; the tokens that were sampled stay
        echo = Message("assistant", tool_calls=(ToolCall("bash", f'{{"command":"{turn}"}}', f"toolu_{turn}"),))
        messages = (*messages, echo, Message("tool", f"result {turn}", tool_call_id=f"toolu_{turn}"))
        prompt = [*prompt, *output, 50 + turn, 60 + turn]
    (only,) = merged(ledger)
    assert trained(only) == [token for turn in range(6) for token in (100 + turn, 200 + turn, 9)]
    assert [message.role for message in only.response_messages] == ["assistant", *["tool", "assistant"] * 5]
    assert [message.reasoning for message in only.response_messages[::2]] == [f"thought {turn}" for turn in range(6)]
    assert only.prompt_messages == (Message("user", "mend it"),)


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


def test_case_23_of_two_delivered_answers_that_nobody_extended_the_later_is_trained_unless_drawn_in_parallel() -> None:
    ledger = Ledger()
    ledger.say([1, 2], [3], at=0)
    ledger.say([1, 2], [4], at=0.5)
    first, second = merged(ledger)
    assert (trained(first), trained(second)) == ([3], [4])
    ledger.say([1, 2], [5], at=2)
    (only,) = merged(ledger)
    assert trained(only) == [5]


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


def test_case_24_a_parent_its_sub_agent_and_the_thread_after_compaction_are_all_trained() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2], break_reason=BreakReason.FIRST_CALL)
    sub = ledger.say([7, 1], [70], role=Role.SUB_AGENT, break_reason=BreakReason.NEW_THREAD)
    ledger.say([7, 1, 70, 3], [71], after=sub, role=Role.SUB_AGENT)
    b = ledger.say([1, 2, 3], [4], after=a)
    ledger.say([1, 2, 3, 4, 99], [50, 51], after=b, role=Role.COMPACTION)
    ledger.say([1, 50, 51, 5], [6], break_reason=BreakReason.COMPACTION)
    main, sub_agent, compacted = merged(ledger)
    assert [trained(trace) for trace in (main, sub_agent, compacted)] == [[2, 4, 50, 51], [70, 71], [6]]
    assert [trace.role for trace in (main, sub_agent, compacted)] == [Role.MAIN, Role.SUB_AGENT, Role.MAIN]
    assert [trace.metadata.get("break_reason") for trace in (main, sub_agent, compacted)] == [
        "first_call",
        "new_thread",
        "compaction",
    ]
    told = merged_counts(ledger)
    assert (told["breaks_compaction"], told["breaks_new_thread"], told["trained_tokens"]) == (1, 1, 7)


def test_case_32_a_turn_cut_by_the_client_is_no_ghost_in_the_trace_that_goes_on_without_it() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4, 5, 6], after=a, delivered=False)
    ledger.say([1, 2, 3, 7], [8], after=a)
    (only,) = merged(ledger)
    assert (tokens(only), trained(only)) == ([1, 2, 3, 7, 8], [2, 8])
    assert merged_counts(ledger)["untrained_undelivered"] == 3


def test_a_branch_that_goes_on_keeps_the_trace_also_where_another_sampled_more() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 9], [8] * 50, after=a)
    b = ledger.say([1, 2, 3], [4], after=a)
    ledger.say([1, 2, 3, 4, 5], [6], after=b)
    main, side = merged(ledger)
    assert (trained(main), trained(side)) == ([2, 4, 6], [8] * 50)
    assert side.metadata["parent"] == "c0"


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


@pytest.mark.parametrize("delivered_first", [True, False])
def test_of_two_equal_answers_the_one_that_arrived_is_the_one_extended(delivered_first: bool) -> None:
    ledger = Ledger(parents=False)
    ledger.say([1], [2], delivered=delivered_first)
    ledger.say([1], [2], delivered=not delivered_first)
    ledger.say([1, 2, 3], [4])
    (only,) = merged(ledger)
    assert only.completion_ids == ("c0" if delivered_first else "c1", "c2")
    assert merged_counts(ledger)["untrained_superseded"] == 1


def test_without_parents_the_longest_prefix_is_continued_not_the_first() -> None:
    ledger = Ledger(parents=False)
    ledger.say([1], [2])
    ledger.say([1, 2, 3], [4])
    ledger.say([1, 2, 3, 4, 5], [6])
    ledger.say([1, 2, 9], [7])
    main, branch = merged(ledger)
    assert (trained(main), trained(branch)) == ([2, 4, 6], [7])


def test_prefixes_are_compared_whole_also_where_lengths_and_last_tokens_agree() -> None:
    long = [5] * 2000
    ledger = Ledger(parents=False)
    ledger.say([1, *long], [2])
    ledger.say([3, *long], [2])
    ledger.say([1, *long, 2, 4], [6])
    assert [trace.completion_ids for trace in merged(ledger)] == [("c0", "c2"), ("c1",)]


def test_completions_that_share_an_id_are_refused() -> None:
    ledger = Ledger()
    ledger.say([1], [2])
    ledger.say([1, 2], [3], after="c0")
    session = replace(ledger.sealed(), completions=(ledger.completions[0],) * 2)
    with pytest.raises(MergeError, match="share an id"):
        PrefixMerging().build(session)


def test_a_prompt_shorter_than_its_told_parents_starts_a_trace_of_its_own() -> None:
    ledger = Ledger()
    a = ledger.say([1, 2, 3], [])
    ledger.say([1, 2], [4], after=a)  # shares the parent's buffer
    assert [tokens(trace) for trace in merged(ledger)] == [[1, 2, 4]]
    assert merged_counts(ledger)["refuted_parents"] == 1


def test_a_told_parent_that_the_tokens_refute_is_counted() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 3, 4], [5], after=a)
    assert merged_counts(ledger)["refuted_parents"] == 1


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


def test_the_limit_cuts_each_branch_for_itself_and_the_trace_says_so() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4, 5, 6], after=a)
    ledger.say([1, 2, 9], [8], after=a)
    (only,) = merged(ledger, max_trace_tokens=4)
    assert (tokens(only), trained(only)) == ([1, 2, 9, 8], [2, 8])
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4, 5, 6], after=a)
    assert merged(ledger, max_trace_tokens=4)[0].metadata["clipped_tokens"] == 3


def test_a_completion_that_crosses_the_limit_may_be_split_and_the_rest_is_counted() -> None:
    def calls() -> Ledger:
        ledger = Ledger()
        a = ledger.say([1], [2], version="7")
        b = ledger.say([1, 2, 3], [4, 5, 6], after=a, version="8")
        ledger.say([1, 2, 3, 4, 5, 6, 7], [8], after=b, version="8")
        return ledger

    (only,) = merged(calls(), max_trace_tokens=5, overlong="split")
    assert (tokens(only), trained(only)) == ([1, 2, 3, 4, 5], [2, 4, 5])  # the context of each is whole
    assert only.response_logprobs.tolist() == [-0.125, 0, -0.125, -0.25]
    assert only.versions == (VersionSpan("7", 1), VersionSpan("", 1), VersionSpan("8", 2))
    assert (only.finish_reason, only.metadata["clipped_tokens"]) == (FinishReason.LENGTH, 2)
    told = counts(calls().sealed(), (only,), Policy(max_trace_tokens=5, overlong="split"))
    assert (told["trained_tokens"], told["untrained_over_length"]) == (3, 2)
    (clipped,) = merged(calls(), max_trace_tokens=5)
    assert (tokens(clipped), clipped.metadata["clipped_tokens"]) == ([1, 2], 4)
    (between,) = merged(calls(), max_trace_tokens=3, overlong="split")  # nothing of the second turn fits
    assert (tokens(between), between.finish_reason) == ([1, 2], FinishReason.STOP)


def test_an_undelivered_answer_is_not_trained_for_being_split() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3, 4], delivered=False)
    assert merged(ledger, max_trace_tokens=3, overlong="split") == ()


def test_an_answer_to_an_empty_prompt_is_counted_and_the_chain_starts_after_it() -> None:
    ledger = Ledger()
    a = ledger.say([], [1, 2])
    ledger.say([1, 2, 3], [4], after=a)
    (only,) = merged(ledger)
    assert (only.prompt_ids.tolist(), trained(only)) == ([1, 2, 3], [4])
    assert merged_counts(ledger)["untrained_no_prompt"] == 2


def test_side_calls_are_dropped_by_default_and_split_no_chain() -> None:
    def calls() -> Ledger:
        ledger = Ledger()
        a = ledger.say([1], [2])
        ledger.say([5], [6, 7], role=Role.SIDE)
        ledger.say([1, 2, 3], [4], after=a)
        return ledger

    (only,) = merged(calls())
    assert trained(only) == [2, 4]
    assert merged_counts(calls())["untrained_side"] == 2
    assert len(merged(calls(), roles={"side": "train"})) == 2
    (side,) = merged(calls(), roles={"side": "train", "main": "drop"})
    assert (trained(side), side.role) == ([6, 7], Role.SIDE)


def test_a_side_call_within_a_chain_is_context() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    b = ledger.say([1, 2, 3], [4], after=a, role=Role.SIDE)
    ledger.say([1, 2, 3, 4, 5], [6], after=b)
    (only,) = merged(ledger)
    assert (tokens(only), trained(only)) == ([1, 2, 3, 4, 5, 6], [2, 6])


def test_an_answer_that_the_harness_got_and_asked_for_again_is_dropped_unless_told() -> None:
    def calls(at: float) -> Ledger:
        ledger = Ledger()
        ledger.say([1], [2, 3], at=0)
        again = ledger.say([1], [4], at=at)
        ledger.say([1, 4, 5], [6], after=again, at=at + 2)
        return ledger

    (only,) = merged(calls(at=1.5))
    assert trained(only) == [4, 6]
    assert merged_counts(calls(at=1.5))["untrained_discarded"] == 2
    assert [trained(trace) for trace in merged(calls(at=1.5), discarded="train")] == [[2, 3], [4, 6]]
    (unanswered,) = merged(Ledger(completions=calls(at=1.5).completions[:2]))  # the last word of its session
    assert trained(unanswered) == [4]
    parallel = merged(calls(at=0.5))  # asked before the first answer was there: two agents, not one that asks again
    assert [trained(trace) for trace in parallel] == [[2, 3], [4, 6]]


def test_another_thread_that_asks_the_same_asks_nothing_again() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3], at=0, request=ChatRequest((), thread="one"))
    ledger.say([1], [4], at=2, request=ChatRequest((), thread="two"))
    assert [trained(trace) for trace in merged(ledger)] == [[2, 3], [4]]


def test_an_answer_that_was_asked_for_again_in_vain_is_trained() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3], at=0)
    ledger.say([1], [4], at=2, delivered=False)
    (only,) = merged(ledger)
    assert trained(only) == [2, 3]


def test_other_prompts_of_the_same_length_are_other_questions() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2], at=0)
    ledger.say([1, 2, 3], [4], after=a, at=2)
    ledger.say([1, 2, 7], [8, 9], after=a, at=4, delivered=False)
    b = ledger.say([1, 2, 5], [6], after=a, at=6)
    ledger.say([1, 2, 5, 6, 7], [8], after=b, at=8)
    assert [trained(trace) for trace in merged(ledger)] == [[2, 6, 8], [4]]
    told = merged_counts(ledger)
    assert (told["untrained_undelivered"], told.get("untrained_superseded", 0)) == (2, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"roles": {"helper": "train"}}, "unknown role 'helper': use one of main, sub_agent, side, compaction"),
        ({"roles": {"side": "maybe"}}, 'config.roles.side must be "train" or "drop"'),
        ({"discarded": "keep"}, 'config.discarded must be "train" or "drop"'),
        ({"overlong": "cut"}, 'config.overlong must be "clip" or "split"'),
        ({"prompts": "whatever"}, 'config.prompts must be "extended" or "rerendered"'),
        ({"end_of_turn": ["<|im_end|>"]}, "config.end_of_turn must be a token id or a list of token ids"),
        ({"end_of_turn": 1.5}, "config.end_of_turn must be a token id or a list of token ids"),
        ({"end_of_turn": None}, "config.end_of_turn must be a token id or a list of token ids"),
        ({"end_of_turn": [True]}, "config.end_of_turn must be a token id or a list of token ids"),
        ({"end_of_turn": 2**40}, "config.end_of_turn must be a token id or a list of token ids"),
        ({"roles": ["side"]}, "config.roles must be a mapping, as in {side: train}, got"),
        ({"max_trace_tokens": "4096"}, "config.max_trace_tokens must be a whole number, at least 2, got '4096'"),
        ({"max_trace_tokens": 3.5}, "config.max_trace_tokens must be a whole number, at least 2, got 3.5"),
        ({"max_trace_tokens": 1}, "config.max_trace_tokens must be a whole number, at least 2, got 1"),
    ],
)
def test_a_builder_refuses_a_setting_that_it_does_not_know(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefixMerging(**config)


def test_of_two_lost_answers_the_later_one_is_undelivered_and_the_earlier_superseded() -> None:
    ledger = Ledger()
    ledger.say([1], [2], delivered=False)
    ledger.say([1], [3, 4], delivered=False)
    told = merged_counts(ledger)
    assert (told["untrained_superseded"], told["untrained_undelivered"], told["delivered_tokens"]) == (1, 2, 0)


def test_the_sessions_own_counts_are_kept() -> None:
    ledger = Ledger()
    ledger.say([1], [2])
    session = replace(ledger.sealed(), counts={"ignored_fields": 3, "traces": 99})
    told = counts(session, PrefixMerging().build(session))
    assert (told["ignored_fields"], told["traces"]) == (3, 1)


def test_weight_versions_survive_merging() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2, 3], version="7")
    ledger.say([1, 2, 3, 4], [5], after=a, version="8")
    (only,) = merged(ledger)
    assert only.versions == (VersionSpan("7", 2), VersionSpan("", 1), VersionSpan("8", 1))


def test_versions_that_differ_are_flagged_and_tokens_that_were_not_sampled_have_none() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2, 3])
    b = ledger.say([1, 2, 3, 4], [5], after=a, version="8")
    ledger.say([1, 2, 3, 4, 5], [6], after=b, version="9")
    (only,) = merged(ledger)
    assert only.versions == (VersionSpan("", 3), VersionSpan("8", 1), VersionSpan("9", 1))
    assert only.metadata["mixed_versions"] is True
    assert merged_counts(ledger)["mixed_version_traces"] == 1


def test_a_version_that_sampled_nothing_mixes_nothing() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3])
    told = Generation(
        token_ids([2, 3]), log_probs([-1, -1]), FinishReason.STOP, (VersionSpan("7", 0), VersionSpan("8", 2))
    )
    ledger.completions[0] = replace(ledger.completions[0], generation=told)
    (only,) = merged(ledger)
    assert (only.versions, only.metadata.get("mixed_versions")) == ((VersionSpan("8", 2),), None)


def test_per_request_gives_one_trace_a_call() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2])
    ledger.say([1, 2, 3], [4], after=a)
    session = ledger.sealed()
    traces = PerRequest().build(session)
    check(traces, session)
    assert [tokens(trace) for trace in traces] == [[1, 2], [1, 2, 3, 4]]


def test_the_json_has_the_papers_shape() -> None:
    ledger = Ledger()
    call = ToolCall("bash", '{"command": "ls"}', "call_1")
    a = ledger.say(
        [1], [2, 3], version="7", reply=Message("assistant", "Look.", "hm", (call,)),
        request=ChatRequest((Message("user", "hi"),), (Tool("bash", "Run", {"type": "object"}),)),
    )  # fmt: skip
    messages = (Message("user", "hi"), Message("assistant"), Message("tool", "a.py", tool_call_id="call_1"))
    ledger.say([1, 2, 3, 4], [5], after=a, reply=Message("assistant", "Done."), request=ChatRequest(messages))
    (only,) = merged(ledger)
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert json.loads(json.dumps(trace_json(replace(only, reward=0.5)))) == {
        "prompt_ids": [1],
        "response_ids": [2, 3, 4, 5],
        "loss_mask": [1, 1, 0, 1],
        "prompt_messages": [{"role": "user", "content": "hi"}],
        "response_messages": [
            {
                "role": "assistant", "content": "Look.", "reasoning_content": "hm",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "a.py", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [
            {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}}}
        ],
        "finish_reason": "stop",
        "response_logprobs": [-0.125, -0.25, 0.0, -0.125],
        "reward": 0.5,
        "metadata": {
            "role": "main", "completion_ids": ["c0", "c1"], "weight_versions": [["7", 2], ["", 2]],
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "echo"),
    [
        ([Message("assistant", "Look.")], [Message("assistant", "Look.")]),
        ([Message("assistant", "Look.")], [Message("assistant", "Lo"), Message("assistant", "ok.")]),
        ([Message("assistant")], []),
    ],
    ids=["as_it_was", "split_in_two", "left_out"],
)
def test_the_messages_between_two_replies_are_those_of_the_program(reply: list[Message], echo: list[Message]) -> None:
    ledger, asked, result = Ledger(), Message("user", "hi"), Message("user", "go on")
    a = ledger.say([1], [2], reply=reply[0], request=ChatRequest((asked,)))
    ledger.say(
        [1, 2, 3], [4], after=a, reply=Message("assistant", "Done."), request=ChatRequest((asked, *echo, result))
    )
    (only,) = merged(ledger)
    assert only.response_messages == (*reply, result, Message("assistant", "Done."))


def test_a_trace_that_was_cut_says_so_also_where_its_reply_holds_a_call() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3, 4], reply=Message("assistant", "", "", (ToolCall("ls", "{}"),)))
    (only,) = merged(ledger, max_trace_tokens=3, overlong="split")
    assert trace_json(only)["finish_reason"] == "length"


def test_what_a_builder_cuts_without_telling_is_counted_as_unexplained() -> None:
    ledger = Ledger()
    ledger.say([1], [2, 3, 4])
    session = ledger.sealed()
    cut = PrefixMerging(max_trace_tokens=3, overlong="split").build(session)
    told = counts(session, cut)
    assert (told["sampled_tokens"], told["trained_tokens"], told["untrained_unexplained"]) == (3, 2, 1)


def test_versions_are_counted_as_mixed_also_where_a_builder_does_not_flag_them() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2], version="7")
    ledger.say([1, 2, 3], [4], after=a, version="8")
    traces = [replace(trace, metadata={}) for trace in merged(ledger)]
    assert counts(ledger.sealed(), traces)["mixed_version_traces"] == 1


def test_a_trace_that_ends_in_a_call_finishes_for_it() -> None:
    ledger = Ledger()
    ledger.say([1], [2], reply=Message("assistant", tool_calls=(ToolCall("bash", "{}"),)))
    assert trace_json(merged(ledger)[0])["finish_reason"] == "tool_calls"


def test_the_text_marks_what_is_trained() -> None:
    ledger = Ledger()
    a = ledger.say([1], [2, 3])
    ledger.say([1, 2, 3, 4], [5], after=a)
    (only,) = merged(ledger)
    assert trace_text(only, lambda ids: "".join(map(str, ids))) == "1⟦23⟧4⟦5⟧"
    assert trace_text(only, lambda ids: "".join(map(str, ids)), ("<", ">")) == "1<23>4<5>"
