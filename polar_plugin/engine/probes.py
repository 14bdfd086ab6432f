"""Probe conversations: what templates are proved with, renderers compared with, and the doctor reports on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np

from ..records import ChatRequest, Completion, FinishReason, Generation, Message, TokenIds, Tool, ToolCall, log_probs


@dataclass(frozen=True, slots=True)
class Kind:
    """What an extension looks like, its words aside: extensions of one kind are proved together."""

    calls: int
    """Calls in the parent's reply: 0, 1, or 2 for more."""
    roles: tuple[str, ...]
    """Roles of the new messages; a run of one role counts at most two."""
    tools: bool


TOOLS = (
    Tool("look", "Looks at a thing.", {"type": "object", "properties": {"what": {"type": "string"}}}),
    Tool("stop", "Stops."),
)
REPORTED = {
    "user message": Kind(0, ("user",), False),
    "user message, with tools": Kind(0, ("user",), True),
    "system message in mid-conversation": Kind(0, ("system", "user"), True),
    "tool result": Kind(1, ("tool",), True),
    "several tool results": Kind(2, ("tool", "tool"), True),
    "tool results, then a user message": Kind(2, ("tool", "tool", "user"), True),
    "user message instead of a tool result": Kind(1, ("user",), True),
}
"""The extensions that agents need."""

_USER, _ANSWER = Message("user", "Hello?"), Message("assistant", "Hm.")
_THOUGHT = Message("assistant", "Yes.", "Why?")
_SYSTEM = Message("system", "Be brief.")
_CALLS = tuple(ToolCall("look", '{"what": "it"}', f"call_history{index}") for index in range(2))
_RESULTS = tuple(Message("tool", "a thing", tool_call_id=call.id) for call in _CALLS)
_ONE, _TWO = Message("assistant", tool_calls=_CALLS[:1]), Message("assistant", "Both.", "I see.", _CALLS)
_WORDS = (" leading and trailing \n", "plain", "two\n\nlines", "braces {}", "unicode ünï 你好", "markup <b>&amp;</b>")

PLAIN: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_SYSTEM, _USER, _ANSWER, _USER),
    (_USER, _THOUGHT, _USER, _ANSWER, _USER),
)
CALLING: tuple[tuple[Message, ...], ...] = (
    (_SYSTEM, _USER, _ONE, _RESULTS[0]),
    (_USER, _TWO, *_RESULTS),
    (_USER, _ONE, _RESULTS[0], _ANSWER, _USER),
    (_SYSTEM, _USER, _TWO, *_RESULTS, _THOUGHT, _USER),
)


def cases(kind: Kind) -> Iterator[tuple[list[Message], Message]]:
    """Histories and replies of a kind: short and long, with and without earlier calls, reasoning and system text."""
    made = calls(kind.calls)
    for history in PLAIN + (CALLING if kind.tools or kind.calls or "tool" in kind.roles else ()):
        yield [*history], Message("assistant", "" if made else "Words.", "", made)
        yield [*history], Message("assistant", "Words.", "", made)
        yield [*history], Message("assistant", "Words.", "Thoughts.", made)


def calls(count: int) -> tuple[ToolCall, ...]:
    """Calls of a reply, the arguments different."""
    return tuple(ToolCall("look", f'{{"what": "the {index}th"}}', f"call_reply{index}") for index in range(count))


def new(kind: Kind, reply: Message) -> list[Message]:
    """New messages of a kind, with words that a template may trim or escape, all but the first of each."""
    ids = iter([call.id for call in reply.tool_calls])
    return [
        Message(cast("Any", role), _WORDS[index % len(_WORDS)], tool_call_id=next(ids, "") if role == "tool" else "")
        for index, role in enumerate(kind.roles)
    ]


def kind_of(reply: Message, messages: Sequence[Message], tools: bool) -> Kind:
    """The kind of a real extension."""
    runs = ((role, sum(1 for _ in run)) for role, run in groupby(message.role for message in messages))
    roles = tuple(role for role, length in runs for _ in range(min(length, 2)))
    return Kind(min(len(reply.tool_calls), 2), roles, tools)


def parent(
    history: Sequence[Message], reply: Message, prompt: TokenIds, output: TokenIds, tools: Sequence[Tool]
) -> Completion:
    """A completion that sampled `output` after `prompt`."""
    request = ChatRequest((*history,), (*tools,))
    generation = Generation(output, log_probs(np.zeros(len(output))), FinishReason.STOP)
    return Completion("probe", request, prompt, generation, reply, request.sampling, 0.0, 0.0)


def closing(full: TokenIds, delta: TokenIds, stop_ids: Sequence[int], think_end: TokenIds) -> int | None:
    """How many tokens of `delta` only close an unfinished turn, the rest being the end of `full`; None where it is not.

    A turn that was cut is closed by an end token, inside reasoning by its end too: a full render may do without.
    """
    allowed = {*stop_ids, *think_end.tolist()}
    for size in range(min(len(think_end) + 3, len(delta))):
        rest = delta[size:]
        if len(rest) <= len(full) and np.array_equal(full[len(full) - len(rest) :], rest):
            return size
        if int(delta[size]) not in allowed:
            break
    return None
