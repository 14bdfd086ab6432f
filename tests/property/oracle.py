"""What the places of requests in a session and the traces of it have to be, from what the program did.

Plain lists, everything compared with everything, and each time from the beginning. It sees the history that the program
keeps, not the words in which a request tells it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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

from .telling import Entry, Line

Key = tuple[Any, ...]
LEFT = (BreakReason.HISTORY_REWRITTEN, BreakReason.ASSISTANT_REWRITTEN,
        BreakReason.TRUNCATED_PARENT, BreakReason.UNDELIVERED_PARENT)  # fmt: skip


def key(entry: Entry, reminders: bool = False) -> Key:
    """What tells one entry from all others. Whatever the program writes has a number of its own."""
    if entry.role != "assistant":
        return entry.role, entry.text + (entry.reminder if reminders else "")
    calls = ((call.name, arguments(call.arguments)) for call in entry.message.tool_calls)
    return "assistant", entry.text.strip(), *calls


def keys(entries: Sequence[Entry], reminders: bool = False) -> list[Key]:
    return [key(one, reminders) for one in entries if not silent(one)]


def silent(entry: Entry) -> bool:
    return entry.role == "assistant" and not entry.text.strip() and not entry.message.tool_calls


def arguments(text: str) -> str:
    try:
        return repr(sorted(json.loads(text).items()))
    except ValueError:
        return text


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
    restarts: str = ""
    """The compaction call of which the history consists, where nothing was said since."""

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

    parents: Sequence[tuple[Record, int]]
    """Each with how many entries of the request's body it covers."""
    reasons: frozenset[BreakReason] = frozenset()
    again: Sequence[Record] = ()
    """Those that were asked the same."""


@dataclass
class Record:
    asked: Asked
    completion: Completion
    version: str
    delivered: bool = True
    keys: list[Key] = field(init=False)
    """Of what it was asked."""
    lasting: list[Key] = field(init=False)
    """The same as its program tells it later on."""
    reply: list[Key] = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.lasting = keys(self.asked.body, reminders=True), keys(self.asked.body)
        self.reply = keys([Entry(self.completion.reply)])

    @property
    def said(self) -> bool:
        return bool(self.reply)

    @property
    def output(self) -> list[int]:
        return self.completion.generation.output_ids.tolist()

    @property
    def tokens(self) -> list[int]:
        return [*self.completion.prompt_ids.tolist(), *self.output]

    @property
    def left(self) -> BreakReason | None:
        """Why it is not continued by what goes on otherwise, if that is about itself."""
        if not self.delivered:
            return BreakReason.UNDELIVERED_PARENT
        cut = self.completion.generation.finish_reason is FinishReason.LENGTH
        return BreakReason.TRUNCATED_PARENT if cut else None


@dataclass
class Oracle:
    records: list[Record] = field(default_factory=list[Record])

    # --- parents: what the program put into its history, and left there -----------------------------------------------

    def place(self, asked: Asked, truth: Truth) -> Place:
        again = [one for one in self.records if one.asked.head == asked.head and one.keys == keys(asked.body, True)]
        found: list[tuple[Record, int]] = []
        reasons = set[BreakReason]()
        for stop in range(len(asked.body), 0, -1):
            here, sure = self.continued(asked, stop)
            if not here:
                continue
            if not asked.new(stop):
                return Place(found, frozenset({*reasons, BreakReason.BOUNDARY_UNKNOWN}))
            candidates, certain = told_apart(here, truth, asked.thread)
            found += [(one, stop) for one in candidates]
            reasons |= set() if certain else {BreakReason.BOUNDARY_UNKNOWN}
            if sure:
                return Place(found, frozenset(reasons), again)
        before = {one.completion.break_reason for one in again if one.completion.break_reason}
        return Place(found, frozenset({*reasons, *(before or self.reasons(asked))}), again)

    def continued(self, asked: Asked, stop: int) -> tuple[list[Record], bool]:
        """All whose messages and reply the first `stop` entries tell, and whether nothing blurs where they end."""
        body = asked.body
        last, after, said = body[stop - 1], body[stop] if stop < len(body) else None, keys(body[:stop])
        if after and silent(after):
            return [], True
        same = [one for one in self.records if one.asked.head == asked.head]
        blurred = after is not None and after.role == last.role != "user"
        nothing = [one for one in same if not one.said and one.lasting == said and after]
        if silent(last) and nothing:
            return nothing, not blurred
        if after and after.role != "assistant" and any(one.delivered for one in nothing):
            return [one for one in nothing if one.delivered], not blurred
        whole = [one for one in same if one.said and last.role == "assistant" and one.lasting + one.reply == said]
        return whole, not blurred

    # --- reasons: what the program did --------------------------------------------------------------------------------

    def reasons(self, asked: Asked) -> set[BreakReason]:
        """Why a request continues nothing: all that the program did to it, mostly one thing."""
        if not self.records:
            return {BreakReason.FIRST_CALL}
        if asked.role is Role.COMPACTION:
            return {BreakReason.COMPACTION}
        thread = [one for one in self.records if one.asked.thread == asked.thread and one.asked.role is not Role.SIDE]
        if asked.role or not any(one.asked.role is Role.COMPACTION for one in thread):
            return self.changed(asked)
        turned = any(one.asked.role is None and one.asked.head == asked.head for one in self.records)
        if asked.restarts == thread[-1].completion.id and turned:
            return {BreakReason.COMPACTION}
        return {BreakReason.COMPACTION, *self.changed(asked)}

    def changed(self, asked: Asked) -> set[BreakReason]:
        told = keys(asked.body, reminders=True)
        moved = [one for one in self.records if begins(told, one.lasting + one.reply)]
        found = {head_changed(one.asked.head, asked.head) for one in moved if one.asked.head != asked.head}
        plain = all(one.said and not runs_on(told, len(one.lasting + one.reply)) for one in moved)
        if plain and any(one.asked.head != asked.head for one in moved):
            return found
        names = {"", *(one.asked.thread for one in self.records if one.asked.role is not Role.SIDE)}
        if all(one.asked.head != asked.head for one in self.records) or asked.thread not in names:
            return {*found, BreakReason.NEW_THREAD, *(self.left(asked) if moved else ())}
        return found | self.left(asked)

    def left(self, asked: Asked) -> set[BreakReason]:
        """What became of the place where the request goes on otherwise than all before it."""
        told = keys(asked.body, reminders=True)
        same = [one for one in self.records if one.asked.head == asked.head]
        known = [known for one in same for known in (one.keys, one.lasting + one.reply)]
        count = max((common(told, one) for one in known), default=0)
        rows = {one[0] for one, other in pairwise(told[max(0, count - 1) : count + 2]) if one[0] == other[0]}
        if rows & {"assistant", "tool"}:  # nothing tells where one ends
            return set(LEFT)
        turn = count < len(told) and told[count][0] == "assistant"
        other = BreakReason.ASSISTANT_REWRITTEN if turn else BreakReason.HISTORY_REWRITTEN
        answers = {one.left or other for one in same if one.keys == told[:count] and one.said}
        return answers or {other, BreakReason.HISTORY_REWRITTEN}

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


def told_apart(records: list[Record], truth: Truth, thread: str) -> tuple[list[Record], bool]:
    """Of several that mean the same, the true one where its words, its thread or its arrival show it; else that or
    none, but no other."""
    true = next((one for one in records if one.completion.id == truth.name), None)
    named = [one for one in records if one.asked.thread == thread] or records
    arrived = [one for one in named if one.delivered]
    certain = one_sequence(records) or bool(true and (truth.shown or [true] in (named, arrived)))
    if true and (certain or true.delivered):
        return [one for one in records if one.tokens == true.tokens], certain
    return records, certain


def runs_on(told: list[Key], stop: int) -> bool:
    """Whether nothing tells where the message that ends at `stop` ends: one of the same sort follows."""
    return 0 < stop < len(told) and told[stop][0] == told[stop - 1][0] != "user"


def head_changed(one: tuple[str, tuple[Tool, ...]], other: tuple[str, tuple[Tool, ...]]) -> BreakReason:
    if one[0] == other[0]:
        return BreakReason.TOOLS_CHANGED
    return BreakReason.SYSTEM_CHANGED if one[1] == other[1] else BreakReason.NEW_THREAD


def common(one: list[Key], other: list[Key]) -> int:
    return next((at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs),
                min(len(one), len(other)))  # fmt: skip


def begins(told: list[Key], known: list[Key]) -> bool:
    return told[: len(known)] == known
