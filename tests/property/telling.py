"""A conversation as an agent program keeps it, and the words in which it may tell it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from polar_plugin.records import Message, ToolCall


@dataclass(frozen=True)
class Entry:
    """One message in its first words. `source` is the completion that said it; "" for what the program wrote."""

    message: Message
    source: str = ""
    reminder: str = ""
    """What stands behind the text in one request only."""
    after: str = ""
    """The text of an assistant message of the program's own that the completion was asked to go on from."""

    @property
    def role(self) -> str:
        return self.message.role

    @property
    def text(self) -> str:
        return self.message.content


@dataclass(frozen=True)
class Line:
    """One message on the wire, and how many entries are told with it."""

    message: Message
    stop: int


def user(text: str) -> Entry:
    return Entry(Message("user", text))


Habits = frozenset[str]
HABITS = (
    "arguments", "spaced", "filled in", "invalid", "unparsed", "emptied", "trimmed", "padded", "no reasoning",
    "bare reasoning", "other ids", "no ids", "permuted", "split", "merged", "billed", "two systems",
)  # fmt: skip


def last_turn(entries: Sequence[Entry]) -> list[Entry]:
    """The assistant entries up to the last one that calls."""
    found: list[Entry] = []
    for one in reversed(entries):
        if found and one.role != "assistant":
            break
        if found or one.message.tool_calls:
            found.insert(0, one)
    return found


def paired(entries: Sequence[Entry]) -> bool:
    """Whether results stand in the order of their calls, none left out, so that no id is needed."""
    for position, entry in enumerate(entries):
        if entry.role == "tool" and (not position or entries[position - 1].role != "tool"):
            calls = [call.id for one in last_turn(entries[:position]) for call in one.message.tool_calls]
            run = [one.message.tool_call_id for one in takewhile(lambda one: one.role == "tool", entries[position:])]
            if calls != run:
                return False
    return True


def tell(
    system: str, entries: Sequence[Entry], habits: Habits, where: int, number: int, joins: str | None
) -> list[Line]:
    """The request of a program with these habits; bit i of `where` says whether it has them at the i-th entry.

    `number` is another one in each request; `joins` is what the program always puts between its own text and what the
    model went on with, None where it tells them apart.
    """
    habits -= frozenset() if paired(entries) else {"no ids", "permuted"}
    lines = [Line(message, 0) for message in _system(system, habits, number)]
    for position, entry in enumerate(entries):
        here = habits if where >> position % 16 & 1 else habits & {"other ids", "no ids"}
        lines += [Line(message, position + 1) for message in _messages(entry, here)]
    if "permuted" in habits and "no ids" not in habits:
        lines = list(_permuted(lines))
    lines = lines if joins is None else _joined(lines, entries, joins)
    return _merged(lines) if "merged" in habits else lines


def _system(text: str, habits: Habits, number: int) -> Iterator[Message]:
    billed = f"x-anthropic-billing-header: cc_version=2.1.332; cch={number:05x};\n" if "billed" in habits else ""
    first, *rest = text.split("\n", 1) if "two systems" in habits else [text]
    yield Message("system", billed + first)
    for piece in rest:
        yield Message("system", piece)


def _messages(entry: Entry, habits: Habits) -> list[Message]:
    message = entry.message
    if message.role == "tool":
        return [replace(message, tool_call_id=_id(message.tool_call_id, habits))]
    if message.role != "assistant":
        return [replace(message, content=message.content + entry.reminder)]
    calls = tuple(_call(call, habits, entry.source) for call in message.tool_calls)
    message = Message("assistant", _text(message.content, habits), _reasoning(message.reasoning, habits), calls)
    if "split" not in habits or len(calls) + bool(message.content.strip()) < 2:
        return [message]
    texts = [replace(message, tool_calls=())] if message.content.strip() else []
    return [*texts, *(Message("assistant", tool_calls=(call,)) for call in calls)]


def _text(text: str, habits: Habits) -> str:
    if "padded" in habits:
        return f"\n{text} "
    return text.strip() if "trimmed" in habits else text


def _reasoning(text: str, habits: Habits) -> str:
    return "" if "no reasoning" in habits else text.strip() if "bare reasoning" in habits else text


def _id(name: str, habits: Habits) -> str:
    return "" if "no ids" in habits else f"other_{name}" if "other ids" in habits else name


def _call(call: ToolCall, habits: Habits, source: str) -> ToolCall:
    spell = next((SPELLINGS[habit] for habit in sorted(habits) if habit in SPELLINGS), lambda call: call)
    told = spell(call)
    if not {"no ids", "other ids"} & habits and source:
        told = next((OF_OUR_IDS[habit] for habit in sorted(habits) if habit in OF_OUR_IDS), lambda call: told)(call)
    return replace(told, id=_id(call.id, habits))


def _written(call: ToolCall, write: Callable[[Any], str]) -> ToolCall:
    return replace(call, arguments=write(json.loads(call.arguments))) if _parses(call) else call


def _as_javascript(value: Any) -> str:
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in value.items()}
    return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _filled_in(call: ToolCall) -> ToolCall:
    return _written(call, lambda value: json.dumps({**value, "timeout_of_the_tool": 120}))


def _invalid(call: ToolCall) -> ToolCall:
    return replace(call, name="invalid", arguments=json.dumps({"tool": call.name, "error": "no such tool"}))


def _unparsed(call: ToolCall) -> ToolCall:
    raw = {"__unparsedToolInput": {"raw": call.arguments, "len": len(call.arguments)}}
    return call if _parses(call) else replace(call, arguments=json.dumps(raw))


def _emptied(call: ToolCall) -> ToolCall:
    return call if _parses(call) else replace(call, arguments="{}")


def _parses(call: ToolCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except ValueError:
        return False


SPELLINGS: dict[str, Callable[[ToolCall], ToolCall]] = {
    "arguments": lambda call: _written(call, _as_javascript),
    "spaced": lambda call: _written(call, lambda value: json.dumps(dict(reversed(value.items())), indent=1)),
}
OF_OUR_IDS: dict[str, Callable[[ToolCall], ToolCall]] = {
    "filled in": _filled_in, "invalid": _invalid, "unparsed": _unparsed, "emptied": _emptied,
}  # fmt: skip


def _permuted(lines: Sequence[Line]) -> Iterator[Line]:
    """Results of parallel calls the other way round."""
    for role, run in groupby(lines, lambda line: line.message.role):
        told = list(run)
        if role == "tool":
            last = told[-1].stop
            told = [Line(line.message, last) for line in reversed(told)]
        yield from told


def _joined(lines: Sequence[Line], entries: Sequence[Entry], between: str) -> list[Line]:
    """A text that the program wrote and the text that the model went on with as one message."""
    found: list[Line] = []
    for line in lines:
        entry, message = entries[line.stop - 1], line.message
        before = found[-1].message if found else None
        own = before and before.role == "assistant" and entry.after.strip() == before.content.strip()
        if before and own and entry.after and message.content.strip():
            text = f"{before.content.strip()}{between}{message.content.strip()}"
            found[-1] = Line(replace(message, content=text), line.stop)
        else:
            found.append(line)
    return found


def _merged(lines: Sequence[Line]) -> list[Line]:
    """A text that the program wrote and the calls that the model went on with as one message."""
    found: list[Line] = []
    for line in lines:
        before = found[-1].message if found else None
        message = line.message
        joins = before and before.role == message.role == "assistant" and not before.tool_calls and message.tool_calls
        if before and joins and not (before.content.strip() and message.content.strip()):
            text = before.content if before.content.strip() else message.content
            found[-1] = Line(replace(message, content=text), line.stop)
        else:
            found.append(line)
    return found
