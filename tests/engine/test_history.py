"""A request finds the completion it continues by what messages mean, not by how a harness spells them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest

from polar_plugin.engine import meaning
from polar_plugin.engine.buffer import TokenBuffer
from polar_plugin.engine.history import History, Place
from polar_plugin.engine.meaning import canonical_arguments
from polar_plugin.records import (
    BreakReason,
    ChatRequest,
    Completion,
    FinishReason,
    Generation,
    Message,
    Role,
    SamplingParams,
    Tool,
    ToolCall,
    log_probs,
    token_ids,
)

SYSTEM, ASK = Message("system", "be brief"), Message("user", "fix it")
CALL = ToolCall("bash", '{"command": "ls", "timeout": 1.0}', "call_1")
REPLY = Message("assistant", "looking", "hmm", (CALL,))
RESULT = Message("tool", "a.py", tool_call_id="call_1")
BASH = Tool("bash", "run", {"type": "object"})


def completion(request: ChatRequest, reply: Message, name: str = "c1") -> Completion:
    generation = Generation(token_ids([2]), log_probs([-0.1]), FinishReason.STOP)
    return Completion(name, request, token_ids([1]), generation, reply, SamplingParams(), 0.0, 1.0)


@pytest.fixture
def history() -> History:
    history = History()
    first = completion(ChatRequest((SYSTEM, ASK), (BASH,)), REPLY)
    history.add(replace(first, break_reason=BreakReason.FIRST_CALL))
    return history


def following(history: History, *messages: Message, tools: tuple[Tool, ...] = (BASH,)) -> Place:
    return history.find(ChatRequest(messages, tools))


@pytest.mark.parametrize(
    "echo",
    [
        REPLY,
        replace(REPLY, reasoning=""),
        replace(REPLY, content=" looking\n"),
        replace(REPLY, tool_calls=(ToolCall("bash", '{"timeout":1,"command":"ls"}', "other_id"),)),
    ],
    ids=["verbatim", "reasoning dropped", "trimmed", "arguments re-serialised, id rewritten"],
)
def test_an_echo_of_equal_meaning_continues_the_turn(history: History, echo: Message) -> None:
    found = following(history, SYSTEM, ASK, echo, RESULT)
    assert found.parent
    assert found.parent.id == "c1"
    assert found.new == (RESULT,)


def test_the_deepest_completion_is_continued(history: History) -> None:
    request = ChatRequest((SYSTEM, ASK, REPLY, RESULT), (BASH,))
    history.add(completion(request, Message("assistant", "done"), "c2"))
    more = Message("user", "thanks")
    found = following(history, SYSTEM, ASK, REPLY, RESULT, Message("assistant", "done"), more)
    assert found.parent
    assert found.parent.id == "c2"
    assert found.new == (more,)


def test_a_harness_authored_turn_behind_ours_is_new_context(history: History) -> None:
    found = following(history, SYSTEM, ASK, REPLY, RESULT, Message("assistant", "interrupted"), ASK)
    assert found.parent
    assert [message.role for message in found.new] == ["tool", "assistant", "user"]


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ((SYSTEM, ASK, replace(REPLY, content="no"), RESULT), (BASH,), BreakReason.ASSISTANT_REWRITTEN),
        ((SYSTEM, Message("user", "other"), REPLY, RESULT), (BASH,), BreakReason.HISTORY_REWRITTEN),
        ((Message("system", "x"), ASK, REPLY, RESULT), (BASH,), BreakReason.SYSTEM_CHANGED),
        ((SYSTEM, ASK, REPLY, RESULT), (), BreakReason.TOOLS_CHANGED),
        ((Message("system", "you are a title writer"), ASK), (), BreakReason.NEW_THREAD),
        ((SYSTEM, ASK), (BASH,), BreakReason.FIRST_CALL),
    ],
)
def test_a_break_is_named(
    history: History, messages: tuple[Message, ...], tools: tuple[Tool, ...], reason: BreakReason
) -> None:
    assert following(history, *messages, tools=tools).reason is reason


def test_the_first_call_of_a_session_is_no_break() -> None:
    assert following(History(), SYSTEM, ASK).reason is BreakReason.FIRST_CALL


@pytest.mark.parametrize("reason", [BreakReason.FIRST_CALL, BreakReason.ASSISTANT_REWRITTEN])
def test_a_prompt_with_a_turn_of_the_harness_asked_again_breaks_for_the_same_reason(reason: BreakReason) -> None:
    history, prompt = History(), (SYSTEM, ASK, Message("assistant", "an example"), ASK)
    history.add(replace(completion(ChatRequest(prompt, (BASH,)), REPLY), break_reason=reason))
    assert following(history, *prompt).reason is reason
    assert following(history, *prompt, tools=()).reason is BreakReason.NEW_THREAD  # no sampled turn is among it


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_json_are_compared_as_text(text: str) -> None:
    assert isinstance(canonical_arguments(text), str)


def test_lone_surrogates_can_be_compared() -> None:
    history = History()
    odd = Message("user", "\ud83d")
    history.add(completion(ChatRequest((odd,), (Tool("\ud83d"),)), REPLY))
    assert history.find(ChatRequest((odd, REPLY, RESULT), (Tool("\ud83d"),))).parent


def anew(messages: list[Message]) -> ChatRequest:
    """The same words in objects of their own, as each request brings them."""
    return ChatRequest(tuple(copy.deepcopy(messages)), (copy.deepcopy(BASH),))


def grown(history: History, turns: int) -> tuple[list[Message], list[int]]:
    """The messages after as many turns, and how much was digested in each."""
    messages, work = [SYSTEM, ASK], list[int]()
    for turn in range(turns):
        call = ToolCall("bash", f'{{"command": "sed -n {turn}p a.py"}}', f"call_{turn}")
        reply = Message("assistant", "looking", "hmm", (call,))
        request = anew(messages)
        with digests() as counted:
            place = history.find(request)
            history.add(completion(place.request, reply, f"c{turn}"), place)
        work.append(len(counted))
        assert (place.parent is None) == (turn == 0)
        messages += [reply, Message("tool", f"line {turn}", tool_call_id=call.id)]
    return messages, work


@contextmanager
def digests() -> Iterator[list[str]]:
    """The calls of `meaning` that digest something."""
    counted: list[str] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename == meaning.__file__ and code.co_name.endswith("digest"):
            counted.append(code.co_name)

    sys.setprofile(seen)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def test_case_20_a_turn_digests_what_is_new_however_long_its_history_is() -> None:
    _, work = grown(History(), 300)
    assert len(set(work[2:])) == 1
    assert work[-1] < 20


def test_a_session_keeps_each_text_once_however_often_it_is_told() -> None:
    history = History()
    messages, _ = grown(history, 30)
    place = history.find(anew(messages))
    assert place.parent
    kept = place.parent.request
    assert all(mine is theirs for mine, theirs in zip(place.request.messages, kept.messages, strict=False))
    assert place.request.tools[0] is kept.tools[0]


def test_words_that_differ_only_in_what_matching_ignores_are_kept_as_they_were_told(history: History) -> None:
    trimmed = replace(REPLY, reasoning="", content=" looking\n")
    (one, other) = (following(history, SYSTEM, ASK, echo, RESULT) for echo in (REPLY, trimmed))
    assert one.parent is other.parent
    assert other.request.messages[2] == trimmed


def test_prompts_of_a_chain_share_memory_and_a_branch_gets_its_own() -> None:
    root = TokenBuffer(token_ids([1, 2, 3]))
    first = root.extended(3, token_ids([4, 5]))
    branch = root.extended(3, token_ids([9]))
    for _ in range(10):
        first = first.extended(5, token_ids([6])) if first._used == 5 else first
    assert first is root
    assert branch is not root
    assert first.view(6).tolist() == [1, 2, 3, 4, 5, 6]
    assert branch.view(4).tolist() == [1, 2, 3, 9]
    assert np.shares_memory(first.view(6), root.view(2))
    with pytest.raises(ValueError):
        first.view(6)[0] = 7


def test_a_named_thread_that_begins_anew_from_its_own_summary_of_the_main_one_is_still_a_sub_agent(
    history: History,
) -> None:
    told, summary = (SYSTEM, ASK, REPLY, RESULT), "A summary of the whole conversation."
    ask = ChatRequest((*told, Message("user", "sum up")), (BASH,), thread="explorer", role=Role.COMPACTION)
    place = history.find(ask)
    compaction = completion(replace(ask, role=place.role), Message("assistant", summary), "c2")
    history.add(compaction, place)
    anew = history.find(ChatRequest((SYSTEM, Message("user", summary)), (BASH,), thread="explorer"))
    assert (place.role, anew.role, anew.reason) == (Role.COMPACTION, Role.SUB_AGENT, BreakReason.COMPACTION)
