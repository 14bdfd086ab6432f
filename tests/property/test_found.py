"""Sessions that random ones found, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from polar_plugin.engine.scripted import Reply
from polar_plugin.records import BreakReason, ChatRequest, Completion, Message, Tool, ToolCall

from .letters import MARK, sampled
from .world import World

SYSTEM, LOOK = Message("system", "You look."), Tool("look", "Looks.")
OK = Message("assistant", "ok")


class Program:
    """An agent program that tells what it was told; the model spells each answer as it is told to."""

    def __init__(self) -> None:
        self.world = World()

    def ask(self, *messages: Message, says: Message = OK, other: bool = False, thread: str = "") -> Completion:
        """`other`: the answer in other tokens for the same words."""
        request = ChatRequest((SYSTEM, *messages), (LOOK,), thread=thread)
        return self.world.answer(request, Reply(ids=(*sampled(says, [other]), MARK["end"])))


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    program.world.close()


def user(text: str) -> Message:
    return Message("user", text)


def test_a_turn_that_broke_off_is_not_passed_over_for_its_twin_whose_tokens_reach_further_back(
    program: Program,
) -> None:
    call = program.ask(user("go"), says=Message("assistant", "", "", (ToolCall("look", "{}"),))).reply
    told = (user("go"), call, Message("tool", "a.py", tool_call_id=call.tool_calls[0].id), user("and?"))
    program.ask(*told)
    program.ask(*told, other=True, thread="other")
    reaching = program.ask(*told, OK, user("more?"))
    broken = program.ask(*told, OK, user("more?"), other=True, thread="new")
    assert (reaching.break_reason, broken.break_reason) == (None, BreakReason.BOUNDARY_UNKNOWN)
    assert program.ask(*told, OK, user("more?"), OK, user("on"), thread="new").parent == broken.id
    assert program.ask(*told, OK, user("more?"), OK, user("on")).parent == reaching.id
