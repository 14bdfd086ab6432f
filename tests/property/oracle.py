"""What the places of requests in a session and the traces of it have to be: plain lists, everything compared with
everything, and each time from the beginning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from polar_plugin.engine.scripted import made_up_logprobs
from polar_plugin.records import (
    BreakReason,
    Completion,
    CompletionSession,
    Delivery,
    FinishReason,
    Message,
    Role,
    Tool,
    Trace,
    token_ids,
)

from .telling import Entry, Line, last_turn

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Unit:
    """What some entries mean together; `key` is None for assistant entries that say nothing."""

    key: Key | None
    assistant: bool
    start: int
    stop: int


def units(entries: Sequence[Entry], reminders: bool = True) -> list[Unit]:
    """Assistant entries are one unit up to a second text, results of one turn are one unit, all else stands alone."""
    found: list[Unit] = []
    start = 0
    while start < len(entries):
        role, stop = entries[start].role, start + 1
        while stop < len(entries) and entries[stop].role == role == "tool":
            stop += 1
        while stop < len(entries) and entries[stop].role == role == "assistant":
            if sum(bool(one.text.strip()) for one in entries[start : stop + 1]) > 1:
                break
            stop += 1
        found.append(Unit(meaning(entries[start:stop], entries[:start], reminders), role == "assistant", start, stop))
        start = stop
    return found


def meaning(entries: Sequence[Entry], before: Sequence[Entry], reminders: bool) -> Key | None:
    first = entries[0]
    if first.role == "assistant":
        text = "".join(one.text.strip() for one in entries)
        calls = [(call.name, arguments(call.arguments)) for one in entries for call in one.message.tool_calls]
        return ("assistant", text, calls) if text or calls else None
    if first.role == "tool":
        ids = [call.id for one in last_turn(before) for call in one.message.tool_calls]
        names = [one.message.tool_call_id for one in entries]
        slots = [ids.index(name) if name in ids else at for at, name in enumerate(names)]
        return ("tool", sorted(zip(slots, [one.text for one in entries], strict=True)))
    return (first.role, first.text + (first.reminder if reminders else ""))


def arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def keys(found: Sequence[Unit]) -> list[Key]:
    return [unit.key for unit in found if unit.key is not None]


@dataclass(frozen=True)
class Asked:
    """A request: what it means, and its words."""

    system: str
    tools: tuple[Tool, ...]
    entries: tuple[Entry, ...]
    lines: tuple[Line, ...]
    thread: str = ""
    role: Role | None = None
    """What the request itself tells."""

    @property
    def head(self) -> tuple[str, tuple[Tool, ...]]:
        leading: list[str] = []
        for one in self.entries:
            if one.role != "system":
                break
            leading.append(one.text)
        return "\n".join([self.system, *leading]), self.tools

    @property
    def body(self) -> tuple[Entry, ...]:
        """Without the system messages that it begins with."""
        entries = self.entries
        while entries and entries[0].role == "system":
            entries = entries[1:]
        return entries

    @property
    def units(self) -> list[Unit]:
        return units(self.body)

    def new(self, stop: int) -> list[Message]:
        """The words of all but the first `stop` entries of its body."""
        skipped = len(self.entries) - len(self.body) + stop
        return [line.message for line in self.lines if line.stop > skipped]

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(line.message for line in self.lines)


@dataclass(frozen=True)
class Truth:
    """The completion that the program really continues, and whether its words show it."""

    name: str = ""
    shown: bool = False


@dataclass(frozen=True)
class Place:
    """Where a request has to stand: behind one of `parents`, or nowhere for one of `reasons`."""

    parents: list[Record]
    reasons: tuple[BreakReason, ...] = ()
    stop: int = 0
    """How many entries of its body a parent covers."""
    again: list[Record] = field(default_factory=list["Record"])
    """Those that were asked the same."""


@dataclass
class Record:
    asked: Asked
    completion: Completion
    version: str
    delivered: bool = True
    keys: list[Key] = field(init=False)
    ends: list[list[Key]] = field(init=False)
    """What a request may begin with that continues it."""

    def __post_init__(self) -> None:
        body, reply = self.asked.body, Entry(self.completion.reply)
        self.keys = keys(units(body))
        lasting = [one for one in body if one.text or not one.reminder]
        self.ends = [keys(units([*body, reply])), keys(units([*lasting, reply], reminders=False))]

    @property
    def said(self) -> bool:
        reply = self.completion.reply
        return bool(reply.content.strip() or reply.tool_calls)

    @property
    def output(self) -> list[int]:
        return self.completion.generation.output_ids.tolist()

    @property
    def tokens(self) -> list[int]:
        return [*self.completion.prompt_ids.tolist(), *self.output]


@dataclass
class Oracle:
    records: list[Record] = field(default_factory=list[Record])

    # --- parents ------------------------------------------------------------------------------------------------------

    def continued(self, asked: Asked) -> tuple[list[Record], int]:
        """All that the longest beginning of the request continues, and where that ends."""
        same = [one for one in self.records if one.asked.head == asked.head]
        found = asked.units
        for count in range(len(found), 0, -1):
            begins, last, after = keys(found[:count]), found[count - 1], found[count : count + 1]
            silent = [one for one in same if not one.said and begins in one.ends]
            if last.key is None:
                matching = silent if after else []
            elif after and not after[0].assistant and any(one.delivered for one in silent):
                matching = [one for one in silent if one.delivered]
            else:
                matching = [one for one in same if one.said and begins in one.ends] if last.assistant else []
            if matching:
                return matching, last.stop
        return [], 0

    def again(self, asked: Asked) -> list[Record]:
        """Those that were asked the same."""
        said = keys(asked.units)
        return [one for one in self.records if one.asked.head == asked.head and one.keys == said]

    # --- reasons ------------------------------------------------------------------------------------------------------

    def reason(self, asked: Asked) -> BreakReason:
        """Why a request continues nothing."""
        if not self.records:
            return BreakReason.FIRST_CALL
        if asked.role is Role.COMPACTION or (asked.role is None and self.restarts(asked)):
            return BreakReason.COMPACTION
        heads = list(dict.fromkeys(repr(one.asked.head) for one in self.records))
        nearest = max(heads, key=lambda head: (self.repeats(asked, head), head == repr(asked.head),
                                               self.common(asked, head)))  # fmt: skip
        system, tools = next(one.asked.head for one in self.records if repr(one.asked.head) == nearest)
        same_system, same_tools = system == asked.head[0], tools == asked.head[1]
        repeats = self.repeats(asked, nearest)
        if repeats and same_tools != same_system:
            return BreakReason.SYSTEM_CHANGED if same_tools else BreakReason.TOOLS_CHANGED
        threads = {"", *(one.asked.thread for one in self.records if one.completion.role is not Role.SIDE)}
        if not (same_tools and same_system) or not (repeats or asked.thread in threads):
            return BreakReason.NEW_THREAD
        return self.left(asked, self.common(asked, nearest))

    def common(self, asked: Asked, head: str) -> int:
        """How many units of the request some completion of that beginning was asked, or said."""
        told = [one for one in self.records if repr(one.asked.head) == head]
        known = [end for one in told for end in (one.keys, *one.ends)]
        found = asked.units
        counts = range(len(found), 0, -1)
        begins = (count for count in counts if any(k[: len(keys(found[:count]))] == keys(found[:count]) for k in known))
        return next(begins, 0)

    def repeats(self, asked: Asked, head: str) -> bool:
        """Whether a sampled turn of that beginning stands in the request."""
        begins = [keys(asked.units[:count]) for count in range(1, len(asked.units) + 1)]
        told = [one for one in self.records if repr(one.asked.head) == head]
        return any(end in begins for one in told for end in one.ends)

    def left(self, asked: Asked, count: int) -> BreakReason:
        """Why it goes on otherwise than all that begins with its first `count` units."""
        found = asked.units
        begins = keys(found[:count])
        there = [one for one in self.records if one.asked.head == asked.head and one.keys == begins and one.said]
        differing = found[count] if count < len(found) else None
        turn = differing.key if differing and differing.assistant else None
        arrived = [one for one in there if one.delivered]
        if (there and not arrived) or any(part(turn, one) for one in there if not one.delivered):
            return BreakReason.UNDELIVERED_PARENT
        cut = [one for one in arrived if one.completion.generation.finish_reason is FinishReason.LENGTH]
        if (cut and cut == arrived) or any(part(turn, one) or more(turn, one) for one in cut):
            return BreakReason.TRUNCATED_PARENT
        assistant = differing is not None and differing.assistant
        return BreakReason.ASSISTANT_REWRITTEN if assistant else BreakReason.HISTORY_REWRITTEN

    def restarts(self, asked: Asked) -> bool:
        """Whether it begins anew from a summary: it tells it, or is the next call of a known thread."""
        thread = [one for one in self.records if one.asked.thread == asked.thread]
        summaries = [one for one in thread if one.completion.role is Role.COMPACTION]
        texts = [one.completion.reply.content.strip() for one in summaries]
        if any(len(text) >= 16 and any(text in one.content for one in asked.messages) for text in texts):
            return True
        latest = [one for one in thread if one.completion.role is not Role.SIDE][-1:]
        turns = (one for one in self.records if one.completion.role in (Role.MAIN, Role.SUB_AGENT))
        return bool(summaries) and latest == summaries[-1:] and any(one.asked.head == asked.head for one in turns)

    # --- the place ----------------------------------------------------------------------------------------------------

    def place(self, asked: Asked, truth: Truth) -> Place:
        """Of several that mean the same, the true one where the words show it; else that or none, but no other."""
        candidates, stop = self.continued(asked)
        again = self.again(asked)
        if not candidates:
            before = again[0].completion.break_reason if again else None
            return Place([], (before or self.reason(asked),))
        if not asked.new(stop):
            return Place([], (BreakReason.BOUNDARY_UNKNOWN,), stop)
        true = next((one for one in candidates if one.completion.id == truth.name), None)
        certain = one_sequence(candidates) or (true and truth.shown)
        if true and (certain or true.delivered):
            candidates = [one for one in candidates if one.tokens == true.tokens]
        return Place(candidates, () if certain else (BreakReason.BOUNDARY_UNKNOWN,), stop, again)

    # --- traces -------------------------------------------------------------------------------------------------------

    def trained(self, session: CompletionSession) -> list[Record]:
        """What has to be trained by default: nothing of a side call, of what was lost or thrown away."""
        extended = {one.completion.parent for one in self.records}

        def thrown_away(one: Record) -> bool:
            others = [
                other for other in self.records
                if other is not one and other.completion.parent == one.completion.parent
                and other.completion.prompt_ids.tolist() == one.completion.prompt_ids.tolist()
                and (other.completion.id in extended or other.delivered)
                and other.completion.request.thread == one.completion.request.thread
                and other.completion.started >= one.completion.ended
            ]  # fmt: skip
            return bool(others)

        return [
            one
            for one in self.records
            if one.output
            and one.completion.role is not Role.SIDE
            and (one.completion.id in extended or (one.delivered and not thrown_away(one)))
        ]

    def check_traces(self, session: CompletionSession, traces: Sequence[Trace]) -> None:
        trained = self.trained(session)
        assert sorted(name for trace in traces for name in trace.completion_ids) == sorted(
            one.completion.id for one in trained
        )
        by_id = {one.completion.id: one for one in self.records}
        for trace in traces:
            tokens = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
            mask, versions = [False] * len(tokens), [""] * len(tokens)
            logprobs = [0.0] * len(tokens)
            for one in (by_id[name] for name in trace.completion_ids):
                begin = len(one.completion.prompt_ids)
                assert tokens[: begin + len(one.output)] == one.tokens
                for at, value in enumerate(made_up_logprobs(token_ids(tokens[:begin]), token_ids(one.output)), begin):
                    assert not mask[at], "trained once"
                    mask[at], logprobs[at], versions[at] = True, float(value), one.version
            start = len(trace.prompt_ids)
            assert not any(mask[:start])
            assert trace.loss_mask.tolist() == mask[start:]
            assert trace.response_logprobs.tolist() == logprobs[start:]
            assert [span.version for span in trace.versions for _ in range(span.count)] == versions[start:]

    def check_counts(self, session: CompletionSession, told: dict[str, int]) -> None:
        extended = {one.completion.parent for one in self.records}
        arrived = [one for one in self.records if one.delivered or one.completion.id in extended]
        trained = self.trained(session)
        assert told["sampled_tokens"] == sum(len(one.output) for one in self.records)
        assert told["delivered_tokens"] == sum(len(one.output) for one in arrived)
        assert told["trained_tokens"] == sum(len(one.output) for one in trained)
        assert told["sampled_tokens"] == told["trained_tokens"] + sum(
            count for name, count in told.items() if name.startswith("untrained_")
        )
        delivered = {name for name, mark in session.delivery.items() if mark is Delivery.DELIVERED}
        assert delivered == {one.completion.id for one in self.records if one.delivered}


def one_sequence(records: Sequence[Record]) -> bool:
    return all(one.tokens == records[0].tokens for one in records)


def part(turn: Key | None, record: Record) -> bool:
    """Whether an assistant turn tells the beginning of an answer, or some of its calls."""
    reply = record.completion.reply
    calls = [(call.name, arguments(call.arguments)) for call in reply.tool_calls]
    return turn is not None and reply.content.strip().startswith(turn[1]) and all(call in calls for call in turn[2])


def more(turn: Key | None, record: Record) -> bool:
    """Whether an assistant turn tells an answer that was cut, and more."""
    text = record.completion.reply.content.strip()
    return turn is not None and bool(text) and turn[1].startswith(text)
