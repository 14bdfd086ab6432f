"""Each break of a session is explained: what differs first, who changed it, what it costs and what avoids it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_plugin.engine.buffer import TokenBuffer
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.explain import Call, Explanation, as_json, explain
from polar_plugin.merge.explain_html import page
from polar_plugin.merge.explain_text import text
from polar_plugin.merge.nearest import Nearest, tokens_of
from polar_plugin.merge.reasons import REASONS
from polar_plugin.records import (
    BreakReason,
    ChatRequest,
    Completion,
    CompletionSession,
    FinishReason,
    Generation,
    Message,
    Role,
    SamplingParams,
    TokenIds,
    Tool,
    ToolCall,
    log_probs,
    token_ids,
)

from .build import Ledger

SYSTEM, TASK = Message("system", "You are an agent."), Message("user", "Fix the bug.")
LOOK = Message("assistant", "", "Let me see.", (ToolCall("bash", '{"command": "ls"}', "a"),))
RESULT = Message("tool", "main.py", tool_call_id="a")
DONE = Message("assistant", "Done.")
BASH = Tool("bash", "Run a command.")


def words(ids: TokenIds) -> str:
    return "".join(f"<{one}>" for one in ids.tolist())


def explained(ledger: Ledger, builder: PrefixMerging | None = None) -> Explanation:
    session, builder = ledger.sealed(), builder or PrefixMerging()
    return explain(session, builder.build(session), builder.policy, decode=words)


def asked(*messages: Message, tools: Sequence[Tool] = (BASH,), role: Role = Role.MAIN) -> ChatRequest:
    return ChatRequest(messages, tuple(tools), role=role)


def two_turns_then(
    *messages: Message,
    prompt: Sequence[int],
    reason: BreakReason | None,
    tools: Sequence[Tool] = (BASH,),
    delivered: bool = True,
) -> Call:
    """The third call of a session whose first two are one conversation: 1-5 ‖ 6 7 ‖ 8 9 ‖ 10 11."""
    ledger = Ledger()
    first = ledger.say([1, 2, 3, 4, 5], [6, 7], request=asked(SYSTEM, TASK), reply=LOOK)
    ledger.say(
        [1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], after=first, request=asked(SYSTEM, TASK, LOOK, RESULT), reply=DONE,
        delivered=delivered,
    )  # fmt: skip
    ledger.say(prompt, [20], request=asked(*messages, tools=tools), break_reason=reason)
    return next(call for call in explained(ledger).calls if call.number == 3)


def test_a_conversation_without_a_break_starts_once() -> None:
    ledger = Ledger()
    first = ledger.say([1, 2], [3], break_reason=BreakReason.FIRST_CALL)
    ledger.say([1, 2, 3, 4], [5, 6], after=first)
    told = explained(ledger)
    assert [(call.number, call.parent, call.new_tokens, call.trace) for call in told.calls] == [
        (1, None, 2, 0), (2, first, 1, 0),
    ]  # fmt: skip
    assert [call.start.reason if call.start else None for call in told.calls] == ["first_call", None]
    assert (told.breaks, told.delivered_fraction, told.trained_fraction) == ((), 1.0, 1.0)


def test_a_message_that_the_harness_changed_is_named_with_its_field() -> None:
    call = two_turns_then(
        SYSTEM, Message("user", "Fix the bug. Be quick."), LOOK, RESULT,
        prompt=[1, 2, 3, 30, 31, 6, 7, 8, 9], reason=BreakReason.HISTORY_REWRITTEN,
    )  # fmt: skip
    assert call.start is not None
    assert call.start.change is not None
    assert (call.start.change.by, call.start.change.message, call.start.change.field) == ("harness", 1, "content")
    assert "'Fix the bug. Be quick.'" in call.start.change.what
    difference = call.start.difference
    assert difference is not None
    assert (difference.position, difference.before, difference.old[:2], difference.new[:2]) == (
        3, (1, 2, 3), (4, 5), (30, 31),
    )  # fmt: skip
    assert (difference.before_text, difference.new_text) == ("<1><2><3>", "<30><31><6><7><8><9>")
    assert (call.start.common, call.start.left_behind, call.start.lost) == (3, 4, 0)
    assert "masking" in call.start.remedy


def test_the_same_messages_in_other_tokens_are_the_templates_doing() -> None:
    call = two_turns_then(
        SYSTEM, TASK, LOOK, RESULT, DONE, Message("user", "Thanks."),
        prompt=[1, 2, 3, 4, 5, 40, 8, 9, 10, 11, 12], reason=BreakReason.TEMPLATE_REWRITE,
    )  # fmt: skip
    assert call.start is not None
    assert call.start.change is not None
    assert (call.start.change.by, call.start.near, call.start.common) == ("template", "c1", 5)
    assert call.start.remedy == "renderer.history: sampled"


def test_a_turn_told_in_other_words_of_the_same_meaning_is_no_change_by_the_harness() -> None:
    respelled = Message("assistant", "", "", (ToolCall("bash", '{ "command":"ls" }', "other"),))
    call = two_turns_then(
        SYSTEM, TASK, respelled, Message("tool", "main.py", tool_call_id="other"), DONE, Message("user", "Thanks."),
        prompt=[1, 2, 3, 4, 5, 40, 8], reason=BreakReason.TEMPLATE_REWRITE,
    )  # fmt: skip
    assert call.start is not None
    assert call.start.change is not None
    assert (call.start.change.by, call.start.change.message) == ("template", 2)
    assert "lacks its reasoning" in call.start.change.what


def test_a_rewritten_call_is_told_by_its_arguments() -> None:
    other = Message("assistant", "", "", (ToolCall("bash", '{"command": "pwd"}', "a"),))
    call = two_turns_then(
        SYSTEM, TASK, other, RESULT, prompt=[1, 2, 3, 4, 5, 41, 8], reason=BreakReason.ASSISTANT_REWRITTEN
    )
    assert call.start is not None
    assert call.start.change is not None
    assert (call.start.change.by, call.start.change.message, call.start.change.field) == ("harness", 2, "tool_calls")
    assert "pwd" in call.start.change.what


def test_tools_that_came_went_and_changed_are_named() -> None:
    tools = (Tool("bash", "Run it."), Tool("web"))
    call = two_turns_then(
        SYSTEM, TASK, LOOK, RESULT, DONE, TASK, prompt=[1, 50, 51], reason=BreakReason.TOOLS_CHANGED, tools=tools
    )
    assert call.start is not None
    assert call.start.change is not None
    assert (call.start.change.by, call.start.change.field) == ("harness", "tools")
    assert call.start.change.what == "tools added: web; tools changed: bash"


def test_a_request_that_leaves_turns_out_is_the_harness() -> None:
    call = two_turns_then(SYSTEM, prompt=[1, 2, 60], reason=BreakReason.HISTORY_REWRITTEN)
    assert call.start is not None
    assert call.start.change is not None
    assert (call.start.change.by, call.start.change.field) == ("harness", "left_out")
    assert "Fix the bug." in call.start.change.what


def test_what_a_break_costs_counts_sampled_tokens_that_no_trace_trains() -> None:
    call = two_turns_then(
        SYSTEM, TASK, LOOK, Message("tool", "", tool_call_id="a"),
        prompt=[1, 2, 3, 4, 70], reason=BreakReason.UNDELIVERED_PARENT, delivered=False,
    )  # fmt: skip
    assert call.start is not None
    assert (call.start.left_behind, call.start.lost) == (4, 2)


def test_another_conversation_leaves_nothing_behind() -> None:
    call = two_turns_then(Message("system", "Name it."), TASK, prompt=[1, 80], reason=BreakReason.NEW_THREAD)
    assert call.start is not None
    assert (call.start.common, call.start.left_behind, call.start.lost) == (1, 0, 0)


def test_branches_stand_behind_the_call_that_they_continue_and_the_conversation_goes_on() -> None:
    ledger = Ledger()
    root = ledger.say([1, 2], [3])
    left = ledger.say([1, 2, 3, 4], [5], after=root)
    ledger.say([1, 2, 3, 90], [91], after=root)
    ledger.say([1, 2, 3, 4, 5, 6], [7, 8], after=left)
    told = explained(ledger)
    assert [(call.number, call.depth) for call in told.calls] == [(1, 0), (3, 1), (2, 0), (4, 0)]
    branch = told.calls[1].start
    assert branch is not None
    assert (branch.reason, branch.near, branch.common) == ("branch", left, 3)


def test_a_prompt_that_is_asked_again_differs_in_nothing() -> None:
    ledger = Ledger()
    ledger.say([1, 2], [3], at=0)
    second = ledger.say([1, 2], [4], at=2)
    ledger.say([1, 2, 4, 5], [6], after=second, at=4)
    again = explained(ledger).calls
    assert [call.untrained for call in again] == ["discarded", None, None]
    start = again[1].start
    assert start is not None
    assert (start.reason, start.difference, start.lost) == ("asked_again", None, 1)
    assert "discarded: train" in start.remedy


def test_parents_that_the_tokens_refute_and_breaks_that_no_one_recorded_have_names_of_their_own() -> None:
    ledger = Ledger()
    first = ledger.say([1, 2], [3])
    ledger.say([1, 9, 3, 4], [5], after=first)
    ledger.say([7, 8], [5])
    starts = [call.start.reason for call in explained(ledger).calls if call.start]
    assert starts == ["first_call", "tokens_differ", "unrecorded"]


def test_an_answer_that_a_trace_ends_within_tells_how_much_of_it_is_trained() -> None:
    ledger = Ledger()
    ledger.say([1, 2], [3, 4, 5, 6])
    told = explained(ledger, PrefixMerging(max_trace_tokens=4, overlong="split"))
    assert [(call.trained_tokens, call.output_tokens) for call in told.calls] == [(2, 4)]
    assert "its first 2 tokens" in text(told, "")


def test_every_break_reason_has_a_cause_and_says_what_avoids_it() -> None:
    assert {reason.value for reason in BreakReason} <= REASONS.keys()
    assert all(reason.cause for reason in REASONS.values())
    assert [name for name, reason in REASONS.items() if not reason.remedy] == ["first_call"]


# --- the nearest completion ------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12), TOKENS)
def test_the_nearest_completion_is_that_with_the_longest_common_prefix(
    made: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    ledger, nearest = Ledger(), Nearest()
    for number, (before, output) in enumerate(made):
        ledger.say(before, output)
        nearest.add(ledger.completions[-1], None)
        if number % 3 == 0:
            nearest.find(token_ids(before))
    longest = max(_common(tokens_of(one).tolist(), prompt) for one in ledger.completions)
    found = nearest.find(token_ids(prompt))
    assert found is not None
    assert found[1] == longest == _common(tokens_of(found[0]).tolist(), prompt)


def _common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


# --- forms -----------------------------------------------------------------------------------------------------------


def hostile() -> Explanation:
    ledger = Ledger()
    ledger.say([1, 2, 3], [4], request=asked(SYSTEM, Message("user", "<script>alert(1)</script> & more")))
    ledger.say([1, 2, 5], [6], request=asked(SYSTEM, Message("user", '"><img src=x onerror=y>')))
    return explained(ledger)


def test_the_page_escapes_every_text_and_fetches_nothing() -> None:
    told = page({"<b>file</b>.jsonl": hostile()}, "decoded by <i>")
    for bad in ("<script", "<img", "<b>", "<i>", "http:", "https:", " src=x onerror=y>"):
        assert bad not in told, bad
    assert "&lt;1&gt;&lt;2&gt;" in told
    assert told.startswith("<!doctype html>")
    assert told.count("<details") == told.count("</details>") == 2


def test_the_text_shows_both_sides_of_the_first_differing_token() -> None:
    told = text(hostile(), "decoded")
    for line in (
        'both   "<1><2>"',
        'before "<3><4>"',
        'now    "<5>"',
        "changed by:      the harness: message 1 (user)",
    ):
        assert line in told, told


def test_without_a_tokenizer_ids_are_shown() -> None:
    ledger = Ledger()
    ledger.say([1, 2, 3], [4])
    ledger.say([1, 2, 5], [6])
    session = ledger.sealed()
    told = text(explain(session, PrefixMerging().build(session)), "ids")
    assert "before 3 4" in told
    assert "now    5" in told


def test_the_json_form_has_a_version_and_says_all_that_the_text_does() -> None:
    told = json.loads(json.dumps(as_json(hostile())))
    assert told["version"] == 1
    assert told["calls"][1]["start"]["change"]["by"] == "harness"
    assert told["calls"][1]["start"]["difference"]["new"] == [5]
    assert set(told) == {
        "version", "session_id", "task_id", "calls", "traces", "delivered_fraction", "trained_fraction", "counts",
        "torn",
    }  # fmt: skip


def test_a_thousand_turns_of_half_a_million_tokens_are_explained_in_seconds() -> None:
    """A conversation whose history is rewritten every twenty turns: fifty breaks, each with a long common beginning."""
    session = rewritten_conversation(turns=1_000, tokens=500_000, every=20)
    builder = PrefixMerging()
    traces = builder.build(session)
    started = time.process_time()
    told = explain(session, traces, builder.policy)
    spent = time.process_time() - started
    assert len(told.breaks) == 49
    assert spent < 5, spent


def rewritten_conversation(turns: int, tokens: int, every: int) -> CompletionSession:
    half = tokens // turns // 2
    made: list[Completion] = []
    messages: list[Message] = [SYSTEM, TASK]
    buffer, length, parent = TokenBuffer(token_ids([1])), 1, None
    for turn in range(turns):
        if turn and turn % every == 0:  # a result in the middle of the history is masked
            middle = length // 2
            prompt = np.array(buffer.view(length))
            prompt[middle] += 1
            messages[len(messages) // 2] = Message("user", f"masked at {turn}")
            buffer, parent = TokenBuffer(token_ids(prompt)), None
        buffer = buffer.extended(length, token_ids(np.full(half, turn + 2)))
        length += half
        output = token_ids(np.full(half, turn + 3))
        reply = Message("assistant", f"Turn {turn}. " + "word " * half)
        made.append(
            Completion(
                f"c{turn}", ChatRequest(tuple(messages), (BASH,)), buffer.view(length),
                Generation(output, log_probs(np.full(half, -1.0)), FinishReason.STOP), reply, SamplingParams(),
                turn, turn + 0.5, parent, None if parent else BreakReason.HISTORY_REWRITTEN,
            )
        )  # fmt: skip
        parent = made[-1].id
        buffer = buffer.extended(length, output)
        length += half
        messages += [reply, Message("user", f"result {turn} " + "line " * half)]
    return CompletionSession("long", tuple(made))
