"""What a session said so far, indexed so that a request finds the completion it continues.

Agent programs echo a turn in other words but the same meaning: arguments re-serialised, text trimmed, reasoning
dropped, ids rewritten. Messages are therefore compared by a digest of what they mean (`meaning`), and found by a chain
of digests (`tree`). Only what the latest requests did not tell in the same words is digested: a turn costs its delta.
Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..harnesses import noise, roles
from ..records import BreakReason, ChatRequest, Completion, Message, Role, Tool
from . import breaks
from .meaning import Meaning, Unit, alike, merged, said, tools_digest
from .ties import Step, told_apart
from .tree import Key, Line, Node

_LINES = 32  # requests kept to compare with: conversations that go on side by side
_BETWEEN = ("", "\n", "\n\n", " ")  # what programs put between the texts of two assistant messages that they join


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands in its session."""

    request: ChatRequest
    """The request, with what was told before as the very objects that told it: a session keeps each text once."""
    role: Role
    parent: Completion | None = None
    """The deepest completion whose messages and reply begin the request."""
    new: tuple[Message, ...] = ()
    """What follows them; all messages where there is no parent."""
    reason: BreakReason | None = None
    """Why there is no parent."""
    again: Completion | None = None
    """A completion that was asked with the same messages at the same place: the prompt is its prompt, and so are
    parent and reason."""


class History:
    """The completions of one session. Mutable: it grows by `add`.

    `delivered` tells by id whether the program got an answer.
    """

    def __init__(self, delivered: Callable[[str], bool] = lambda _: True) -> None:
        self._delivered = delivered
        self._meaning = Meaning()
        self._roots: dict[Key, Node] = {}
        self._lines: list[Line] = []
        self._completions: dict[str, Completion] = {}
        self._continued: dict[str, str] = {}
        """By completion id the one that it continues by its messages, though the tokens may not; "" for none."""
        self._latest: dict[str, Completion] = {}
        """By thread, the latest completion that is no side call."""
        self._summaries: dict[str, list[Completion]] = {}
        """By thread, its compaction calls."""
        self._main = False

    def find(self, request: ChatRequest) -> Place:
        """Where `request` stands. Nothing is kept of it but what makes the next look-up cheap."""
        line = self._line(request.messages, request.tools)
        request = replace(request, messages=line.messages, tools=line.tools)
        for position in range(len(line.path) - 1, -1, -1):
            if candidates := self._candidates(line, position):
                return self._continuing(request, line, candidates, position)
        if again := self._asked(line, ""):
            role = roles.told(request) or roles.thread_role(request) or again.role
            return Place(request, role, None, request.messages, again.break_reason, again)
        return self._beginning(request, line)

    def add(self, completion: Completion, place: Place | None = None) -> None:
        """Remember a completion, and the place at which its request was found; None: behind the parent it tells."""
        request, reply = completion.request, completion.reply
        line = self._line(request.messages, request.tools)
        self._meaning.learn(reply)
        self._record(line).asked.append(completion)
        for node in self._ends(line, reply, place.new if place else request.messages):
            node.said.append(completion)
        parent = place.parent.id if place and place.parent else completion.parent
        self._completions[completion.id] = completion
        self._continued[completion.id] = parent or ""
        self._main |= completion.role is Role.MAIN
        if completion.role is not Role.SIDE:
            self._latest[request.thread] = completion
        if completion.role is Role.COMPACTION:
            self._summaries.setdefault(request.thread, []).append(completion)

    # --- what a request continues -------------------------------------------------------------------------------------

    def _candidates(self, line: Line, position: int) -> list[Completion]:
        """The completions whose messages and reply the line's units up to `position` tell."""
        unit, node, following = line.units[position], line.path[position], line.units[position + 1 :][:1]
        empty = [one for one in node.said if not said(one.reply)]
        if unit.assistant and not unit.digest:
            return empty if following else []
        if following and not following[0].assistant and (left_out := [c for c in empty if self._delivered(c.id)]):
            return left_out  # a reply that says nothing may be left out: there was nothing to tell
        return [one for one in node.said if said(one.reply)] if unit.assistant else []

    def _continuing(self, request: ChatRequest, line: Line, candidates: list[Completion], position: int) -> Place:
        parent = told_apart(candidates, self._steps(line, candidates, position), request.thread, self._delivered)
        role = self._role_behind(request, parent or candidates[-1])
        if parent is None:
            place = Place(request, role, None, request.messages, BreakReason.BOUNDARY_UNKNOWN)
        else:
            place = Place(request, role, parent, request.messages[line.units[position].stop :])
        return replace(place, again=self._asked(line, parent.id if parent else ""))

    def _steps(self, line: Line, candidates: list[Completion], position: int) -> Iterator[Step]:
        """How the line tells the candidates, then the turns that each of them continues."""
        behind: dict[str, Completion | None] = {one.id: one for one in candidates}
        for at in range(position, -1, -1):
            unit, node = line.units[at], line.path[at]
            here = {name: one for name, one in behind.items() if one and one in node.said}
            if here and unit.assistant:
                yield line.messages[unit.start : unit.stop], here
                behind |= {name: self._completions.get(self._continued[one.id]) for name, one in here.items()}

    def _asked(self, line: Line, parent: str) -> Completion | None:
        """A completion that was asked with the line's messages, behind the same parent."""
        node = line.end
        asked = node.asked if node else ()
        return next((one for one in asked if self._continued[one.id] == parent), None)

    # --- why it continues none ----------------------------------------------------------------------------------------

    def _beginning(self, request: ChatRequest, line: Line) -> Place:
        told = roles.told(request)
        if not self._completions:
            role = told or roles.thread_role(request) or Role.MAIN
            return Place(request, role, None, request.messages, BreakReason.FIRST_CALL)
        if told is Role.COMPACTION:
            return Place(request, told, None, request.messages, BreakReason.COMPACTION)
        if told in (None, Role.SUB_AGENT) and (summary := self._summarised(request, line)):
            role = self._role_behind(request, summary)
            return Place(request, role, None, request.messages, BreakReason.COMPACTION)
        threads = [breaks.Thread(key, [root, *root.path(line.units[1:])]) for key, root in self._roots.items()]
        found = breaks.nearest(line, threads)
        reason = breaks.why(line, found, request.thread in ("", *self._latest), self._delivered)
        role = told or roles.thread_role(request) or self._role_of(reason, found)
        return Place(request, role, None, request.messages, reason)

    def _summarised(self, request: ChatRequest, line: Line) -> Completion | None:
        summaries, root = self._summaries.get(request.thread, ()), self._roots.get(line.key)
        known = root is not None and any(_is_thread(one) for one in _below(root))
        return breaks.restarts(line, summaries, self._latest.get(request.thread), known) if summaries else None

    # --- roles --------------------------------------------------------------------------------------------------------

    def _role_behind(self, request: ChatRequest, parent: Completion) -> Role:
        """A turn has the role of the one it continues; behind a summary, of the one that was summarised."""
        if told := roles.told(request):
            return told
        before: Completion | None = parent
        while before and before.role is Role.COMPACTION:
            before = self._completions.get(self._continued[before.id])
        if before is None or (request.thread and request.thread != before.request.thread):
            return roles.thread_role(request) or Role.MAIN
        return before.role

    def _role_of(self, reason: BreakReason, found: breaks.Thread) -> Role:
        if reason is BreakReason.NEW_THREAD:
            return Role.SUB_AGENT if self._main else Role.MAIN
        along = (one for node in reversed(found.path) for one in (*node.said, *node.asked) if _is_thread(one))
        first = next(along, None) or next((one for one in _below(found.path[0]) if _is_thread(one)), None)
        return first.role if first else Role.MAIN

    # --- the request in the tree --------------------------------------------------------------------------------------

    def _line(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Line:
        """The digests of a request and the nodes they lead to; those of the most similar request as far as it goes."""
        best, shared = None, 0
        for line in self._lines:
            if line.messages is messages and line.tools is tools:
                line.path = self._walk(line, line.path)
                return line
            if (count := _shared(line.messages, messages)) > shared:
                best, shared = line, count
        messages = (*best.messages[:shared], *messages[shared:]) if best else messages
        units = _kept(best, messages, shared) if best else []
        known = len(units)
        units += self._meaning.units(messages, units[-1].stop if units else 0)
        described = next((line for line in self._lines if line.tools == tools), None)
        tools = described.tools if described else tools
        key = (described.key[0] if described else tools_digest(tools), units[0].digest)
        line = Line(messages, tools, units, key, [])
        line.path = self._walk(line, best.path[:known] if best and best.key == key else [])
        extended = best if best and shared == len(best.messages) else None
        self._lines = [line, *(one for one in self._lines if one is not extended)][:_LINES]
        return line

    def _walk(self, line: Line, path: list[Node]) -> list[Node]:
        if not path and (root := self._roots.get(line.key)):
            path = [root]
        return [*path, *path[-1].path(line.units[len(path) :])] if path else path

    def _record(self, line: Line) -> Node:
        """The node at which the line ends, made where it is not there."""
        line.path = line.path or [self._roots.setdefault(line.key, Node())]
        for unit in line.units[len(line.path) :]:
            line.path.append(line.path[-1].child(unit.digest))
        return line.path[-1]

    def _ends(self, line: Line, reply: Message, new: Sequence[Message]) -> Iterable[Node]:
        """Each node at which a request that repeats the reply will look for it."""
        told = line.messages
        ends = [self._reach(line, [*told, reply], len(told))]
        if told and told[-1].role == "assistant" and told[-1].content.strip() and reply.content.strip():
            joined = (merged((told[-1], reply), between) for between in _BETWEEN)
            ends += [self._reach(line, [*told[:-1], one], len(told) - 1) for one in joined]
        begin = len(told) - len(new)
        if (lasting := _lasting(new)) is not None:
            ends.append(self._reach(line, [*told[:begin], *lasting, reply], begin))
        return dict.fromkeys(ends)

    def _reach(self, line: Line, messages: Sequence[Message], shared: int) -> Node:
        """The node of `messages`, of which `shared` are the line's, made where it is not there."""
        units = _kept(line, messages, shared)
        rest = self._meaning.units(messages, units[-1].stop if units else 0)
        node = line.path[len(units) - 1] if units else self._roots.setdefault((line.key[0], next(rest).digest), Node())
        for unit in rest:
            node = node.child(unit.digest)
        return node


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages two requests begin with in the same words."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine is not theirs and not alike(mine, theirs):
            break
        count += 1
    return count


def _kept(line: Line, messages: Sequence[Message], shared: int) -> list[Unit]:
    """The line's units that are units of `messages` too, of which the first `shared` are the line's."""
    if not shared:
        return []
    units = line.units[: bisect_right(line.units, shared, key=lambda unit: unit.stop)]
    stop = units[-1].stop if units else 0
    if 0 < stop < len(messages) and messages[stop].role == messages[stop - 1].role:
        units.pop()  # it may go on there
    return units


def _lasting(new: Sequence[Message]) -> list[Message] | None:
    """The new messages as the program will repeat them; None where it repeats all of them."""
    told = [replace(one, content=noise.lasting(one.role, one.content)) for one in new]
    if all(one.content == other.content for one, other in zip(told, new, strict=True)):
        return None
    return [one for one, other in zip(told, new, strict=True) if one.content == other.content or one.content]


def _below(node: Node) -> Iterator[Completion]:
    """What was asked at a node and below it."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        yield from node.asked
        nodes.extend(node.children.values())


def _is_thread(completion: Completion) -> bool:
    """Whether it is a turn of a conversation, rather than a call about one."""
    return completion.role in (Role.MAIN, Role.SUB_AGENT)
