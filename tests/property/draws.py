"""What random sessions draw: what the model says, and how a program tells it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

from hypothesis import strategies as st

from polar_plugin.engine.scripted import Reply
from polar_plugin.records import FinishReason, Message, Tool, ToolCall

from .letters import MARK, sampled
from .telling import HABITS

SYSTEMS = ("You work in a shell.\nBe brief.", "You search.\nOnly that.")
SHELL = (Tool("bash", "Runs a command."), Tool("look", "Looks."))
TOOLS = (SHELL, SHELL[:1], ())
CALLS = tuple(
    ToolCall(name, text)
    for name, text in (
        ("bash", '{"command": "ls  -la", "timeout": 1.0}'), ("bash", '{"timeout":2,"command":"caf\\u00e9"}'),
        ("look", "{}"), ("look", '{"command": "ls'), ("bash", '{"deep": [1, {"x": 2.50}]}'),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Sampled:
    """What the model says."""

    message: Message
    spelling: tuple[bool, ...]
    ends: bool = True
    """Whether it samples the end token itself."""
    cut: float = 1.0
    """How much of it there is; below 1 it is cut by length."""

    def reply(self) -> Reply:
        ids = sampled(self.message, self.spelling)
        if self.cut < 1:
            return Reply(ids=tuple(ids[: int(self.cut * len(ids))]), finish_reason=FinishReason.LENGTH)
        return Reply(ids=(*ids, *([MARK["end"]] if self.ends else [])))


EACH = [
    Sampled(Message("assistant", text, thought, calls), spelling, ends, cut)
    for cut, ends, spelling, thought, text, calls in product(
        (1.0, 0.5, 0.8, 0.0), (True, False), ((True,), (True, False), (False, True, True)), ("", "hmm", "why\n"),
        ("ok", "", " Look é\n", "It is done, all of it."),
        [(), *((call,) for call in CALLS), *product(CALLS, CALLS)],
    )
]  # fmt: skip
TURNS = [*(turn for turn in EACH if turn.cut == 1 for _ in range(3)), *EACH]
DICE = random.Random(0)
WAYS = [
    (frozenset[str](), 0),
    *((frozenset((habit,)), 2**16 - 1) for habit in HABITS),
    *((frozenset(DICE.sample(HABITS, DICE.randint(0, 5))), DICE.getrandbits(16)) for _ in range(4096)),
]
SAYS = st.integers(0, len(TURNS) - 1).map(lambda index: TURNS[index])
CUT = st.sampled_from([turn for turn in EACH if 0 < turn.cut < 1 and len(turn.message.content) > 2])
HABIT = st.integers(0, len(WAYS) - 1).map(lambda index: WAYS[index])
AT = st.integers(0, 7)
