"""Who made a request differ from what was said before it: the harness, or the chat template. Pure.

Messages are compared by what they mean (`engine.meaning`): where a request tells the whole earlier conversation, only
the way it is told can have changed the tokens, and that is the template's doing; where it does not, the harness changed
what is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from ..engine.meaning import Meaning, Unit, alike, canonical_arguments, said, tools_digest
from ..harnesses import noise
from ..records import Completion, Message, Tool

Author = Literal["harness", "template"]
_AROUND = 24  # characters shown on either side of a difference
_NAMED = 5  # tools named in one message


@dataclass(frozen=True, slots=True)
class Change:
    """What differs between a completion's conversation (its messages and its reply) and a later request's."""

    by: Author
    message: int | None
    """Index into the later request's messages of the first that differs; None where none does."""
    field: str
    """"tools", "role", "content", "tool_calls", "tool_call_id", "left_out" or "inserted"; "" where messages agree."""
    what: str
    """The same in words."""


def learned(completions: Iterable[Completion]) -> Meaning:
    """The meaning of a session's messages, for `change`."""
    meaning = Meaning()
    for completion in completions:
        meaning.learn(completion.reply)
    return meaning


def change(
    before: Completion, after: Completion, meaning: Meaning, ancestors: Iterable[Completion] = ()
) -> tuple[Change, Completion | None]:
    """What `after` tells otherwise than `before` and its reply; and whose conversation it tells in full, if any.

    That is `before`, or the first of `ancestors` (those that `before` extends, the latest first).
    """
    old, new = (*before.request.messages, before.reply), after.request.messages
    tools = _tools(before.request.tools, after.request.tools)
    differing = _first_differing(old, new, meaning)
    told = len(old) if differing is None else differing[0].start
    if tools and differing is None:
        return Change("harness", None, "tools", tools), None
    whole = () if tools else (before, *ancestors)
    for one in whole:
        if len(one.request.messages) < told:
            return _as_told((*one.request.messages, one.reply), new), one
    assert differing is not None
    return _differing(old, new, *differing, tools), None


def _first_differing(
    old: Sequence[Message], new: Sequence[Message], meaning: Meaning
) -> tuple[Unit, Unit | None] | None:
    """The first units that do not mean the same (a new one None: it ends before); None where `new` tells all of `old`.

    A reply that says nothing may be left out, but no other one stands in its place.
    """
    start = _alike(old, new)
    for theirs, ours in zip_longest(_telling(meaning, old, start), _telling(meaning, new, start)):
        if theirs is None:
            answered = ours is not None and ours.assistant and not said(old[-1])
            return (Unit(b"", len(old) - 1, len(old)), ours) if answered else None
        if ours is None or theirs.digest != ours.digest:
            return theirs, ours
    return None


def _telling(meaning: Meaning, messages: Sequence[Message], start: int) -> Iterable[Unit]:
    return (unit for unit in meaning.units(messages, start) if unit.digest)


def _alike(old: Sequence[Message], new: Sequence[Message]) -> int:
    """Where to begin to compare meanings: everything before is told in the same words, and a unit ends there."""
    start = 0
    for left, right in zip(old, new, strict=False):
        if left is not right and not alike(left, right):
            break
        start += 1
    roles = {messages[start].role for messages in (old, new) if start < len(messages)}
    while start and new[start - 1].role in roles:
        start -= 1
    return start


def _differing(old: Sequence[Message], new: Sequence[Message], theirs: Unit, ours: Unit | None, tools: str) -> Change:
    also = f"; {tools}" if tools else ""
    left = old[theirs.start : theirs.stop]
    if ours is None:
        return Change("harness", None, "left_out", f"it ends before {_name(left, theirs.start)}{also}")
    right = new[ours.start : ours.stop]
    if not left or not right:  # one of the conversations has no system prompt
        kind, whole = ("inserted", right) if right else ("left_out", left)
        told = "begins with" if right else "leaves out"
        return Change("harness", ours.start, kind, f"it {told} {_name(whole, 0)}{also}")
    for one, other in zip(left, right, strict=False):
        if (field := _field(one, other)) is not None:
            name, words = field
            return Change("harness", ours.start, name, f"message {ours.start} ({right[0].role}): {words}{also}")
    if len(left) == len(right):
        return Change("harness", ours.start, "tool_call_id", f"message {ours.start}: results of other calls{also}")
    kind = "inserted" if len(right) > len(left) else "left_out"
    words = f"{len(right)} {right[0].role} messages in a row, where {len(left)} stood"
    return Change("harness", ours.start, kind, f"message {ours.start}: {words}{also}")


def _name(messages: Sequence[Message], index: int) -> str:
    first = messages[0]
    text = first.content or ", ".join(call.name for call in first.tool_calls)
    return f"message {index} ({first.role}, {_cut(text, 0)!r})"


def _field(old: Message, new: Message) -> tuple[str, str] | None:
    """The first field that says something else, and how."""
    if old.role != new.role:
        return "role", f"role {old.role} became {new.role}"
    left, right = (noise.meaningful(one.role, one.content) for one in (old, new))
    if old.role == "assistant":
        left, right = left.strip(), right.strip()
    for name, theirs, ours in (("content", left, right), ("tool_calls", _calls(old), _calls(new))):
        if theirs != ours:
            return name, f"{name} differs: {_excerpts(theirs, ours)}"
    return ("content", "an image differs") if old.parts != new.parts else None


def _calls(message: Message) -> str:
    return " ".join(f"{call.name}({canonical_arguments(call.arguments)})" for call in message.tool_calls)


def _excerpts(left: str, right: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return f"{_cut(left, at)!r} became {_cut(right, at)!r}"


def _cut(text: str, at: int) -> str:
    begin, end = max(0, at - _AROUND), at + _AROUND
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"


def _tools(old: Sequence[Tool], new: Sequence[Tool]) -> str:
    """How the tools differ, in words; "" where the model is told of the same."""
    if old is new or tools_digest(old) == tools_digest(new):
        return ""
    before, after = {tool.name: tool for tool in old}, {tool.name: tool for tool in new}
    changed = [name for name in before if name in after and tools_digest([before[name]]) != tools_digest([after[name]])]
    told = [
        f"tools {verb}: {', '.join(names[:_NAMED])}{', …' if len(names) > _NAMED else ''}"
        for verb, names in (
            ("added", [name for name in after if name not in before]),
            ("removed", [name for name in before if name not in after]),
            ("changed", changed),
        )
        if names
    ]
    return "; ".join(told) or "tools are in another order"


def _as_told(old: Sequence[Message], new: Sequence[Message]) -> Change:
    """The messages mean the same: whether the harness told one of them in other words, which a full render shows."""
    for index, (left, right) in enumerate(zip(old, new, strict=False)):
        if left is right or alike(left, right):
            continue
        if left.reasoning and not right.reasoning:
            return Change("template", index, "", f"the messages mean the same; message {index} lacks its reasoning")
        return Change("template", index, "", f"the messages mean the same; message {index} is in other words")
    return Change("template", None, "", "the messages are the same: the template writes them otherwise")
