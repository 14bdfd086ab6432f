"""Sessions that random ones found, and such as they come to but rarely, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from polar_plugin.engine.scripted import Reply
from polar_plugin.records import BreakReason, ChatRequest, Completion, FinishReason, Message, Tool, ToolCall

from .letters import MARK, sampled
from .world import World

SYSTEM, LOOK = Message("system", "You look."), Tool("look", "Looks.")
OK = Message("assistant", "ok")


class Program:
    """An agent program that tells what it was told; the model spells each answer as it is told to."""

    def __init__(self) -> None:
        self.world = World()

    def ask(
        self, *messages: Message, says: Message = OK, other: bool = False, thread: str = "", arrives: bool = True
    ) -> Completion:
        """`other`: the answer in other tokens for the same words."""
        ids = (*sampled(says, [other]), MARK["end"])
        return self.world.answer(request(messages, thread), Reply(ids=ids), delivered=arrives)

    def cut(self, *messages: Message, says: Message) -> Completion:
        reply = Reply(ids=tuple(sampled(says, [False])), finish_reason=FinishReason.LENGTH)
        return self.world.answer(request(messages), reply)


def request(messages: Sequence[Message], thread: str = "") -> ChatRequest:
    return ChatRequest((SYSTEM, *messages), (LOOK,), thread=thread)


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.world.close()


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", text, reasoning, calls)


def result(call: Message, text: str) -> Message:
    return Message("tool", text, tool_call_id=call.tool_calls[0].id)


# --- which of several that mean the same -----------------------------------------------------------------------------


def test_of_two_answers_that_differ_in_their_thoughts_alone_the_one_whose_thoughts_are_told_is_continued(
    program: Program,
) -> None:
    one, other = (program.ask(user("go"), says=assistant("ok", thought)) for thought in ("this", "that"))
    for parent, thought in ((one, " this\n"), (other, "that")):
        assert program.ask(user("go"), assistant("ok", thought), user(f"on from {thought}")).parent == parent.id
    for thought in ("", "something else"):
        found = program.ask(user("go"), assistant("ok", thought), user(f"on from {thought}"))
        assert found.break_reason is BreakReason.BOUNDARY_UNKNOWN


def test_of_two_answers_that_mean_the_same_the_one_behind_the_call_whose_id_is_told_is_continued(
    program: Program,
) -> None:
    calls = [program.ask(user("go"), says=assistant("", "", ToolCall("look", "{}"))).reply for _ in range(2)]
    told = [(user("go"), call, result(call, "a.py")) for call in calls]
    for call, other in zip(told, (False, True), strict=True):
        parent = program.ask(*call, other=other)
        assert parent.break_reason is None
        assert program.ask(*call, OK, user("on")).parent == parent.id


def test_of_two_answers_that_mean_the_same_the_one_that_arrived_is_continued(program: Program) -> None:
    lost = program.ask(user("go"), arrives=False)
    arrived = program.ask(user("go"), other=True)
    assert program.ask(user("go"), OK, user("on")).parent == arrived.id != lost.id


def test_a_turn_that_broke_off_is_not_passed_over_for_its_twin_whose_tokens_reach_further_back(
    program: Program,
) -> None:
    call = program.ask(user("go"), says=assistant("", "", ToolCall("look", "{}"))).reply
    told = (user("go"), call, result(call, "a.py"), user("and?"))
    program.ask(*told)
    program.ask(*told, other=True, thread="other")
    reaching = program.ask(*told, OK, user("more?"))
    broken = program.ask(*told, OK, user("more?"), other=True, thread="new")
    assert (reaching.break_reason, broken.break_reason) == (None, BreakReason.BOUNDARY_UNKNOWN)
    assert program.ask(*told, OK, user("more?"), OK, user("on"), thread="new").parent == broken.id
    assert program.ask(*told, OK, user("more?"), OK, user("on")).parent == reaching.id


# --- answers that were cut -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [[], [assistant("It is")], [assistant("It is done, and so on")], [assistant("No")]])
def test_a_cut_answer_that_is_left_out_or_told_otherwise_is_a_truncated_parent(
    program: Program, told: list[Message]
) -> None:
    program.cut(user("go"), says=assistant("It is done"))
    assert program.ask(user("go"), *told, user("on")).break_reason is BreakReason.TRUNCATED_PARENT


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([assistant("It is")], BreakReason.TRUNCATED_PARENT),
        ([assistant("It is done, and so on")], BreakReason.TRUNCATED_PARENT),
        ([assistant("No")], BreakReason.ASSISTANT_REWRITTEN),
        ([], BreakReason.HISTORY_REWRITTEN),
    ],
)
def test_beside_a_whole_answer_a_cut_one_is_blamed_where_its_words_are_told(
    program: Program, told: list[Message], reason: BreakReason
) -> None:
    program.cut(user("go"), says=assistant("It is done"))
    program.ask(user("go"), says=assistant("Well done"))
    assert program.ask(user("go"), *told, user("on")).break_reason is reason


# --- a turn that the program began -----------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["", " ", "\n", "\n\n"])
@pytest.mark.parametrize("calls", [(), (ToolCall("look", "{}"),)])
def test_a_turn_that_the_program_began_is_continued_however_it_joins_the_two_texts(
    program: Program, between: str, calls: tuple[ToolCall, ...]
) -> None:
    parent = program.ask(user("go"), assistant("So:"), says=assistant("it works", "", *calls))
    reply = parent.reply
    after = (result(reply, "a.py"),) if calls else (user("on"),)
    joined = assistant(f"So:{between}it works", "", *reply.tool_calls)
    assert program.ask(user("go"), joined, *after).parent == parent.id
    assert program.ask(user("go"), assistant("So:"), reply, *after, user("and on")).parent == parent.id


def test_a_call_that_goes_on_in_the_turn_with_which_a_request_ended_is_told_in_one_message_or_two(
    program: Program,
) -> None:
    parent = program.ask(user("go"), assistant("So:"), says=assistant("", "", ToolCall("look", "{}")))
    call = parent.reply
    next_one = program.ask(user("go"), assistant("So:"), call, result(call, "a.py"))
    assert next_one.parent == parent.id
    again = program.ask(user("go"), assistant("So:", "", *call.tool_calls), result(call, "a.py"), OK, user("on"))
    assert again.parent == next_one.id
