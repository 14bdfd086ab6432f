"""Why a request continues no completion, from where it leaves what its session has said. Pure.

The reasons, in the order in which they are looked for:

* `first_call`: nothing was recorded before.
* `compaction`: the request summarises a conversation without continuing it, or begins anew from such a summary.
* `tools_changed`, `system_changed`: a sampled turn stands in its history where it was said, under other tools or
  another system prompt. Under both others it is a `new_thread`.
* `new_thread`: it has a system prompt or tools that no completion had, or belongs to a conversation that its program
  calls by a new name, and repeats no sampled turn.
* `undelivered_parent`: where its history leaves what was said, only answers stood that the program did not get, or it
  tells a part of such an answer.
* `truncated_parent`: an answer that was cut by length stood there, and is told otherwise or left out.
* `assistant_rewritten`: an answer stood there, and an assistant message that means something else stands there now.
* `history_rewritten`: anything else there differs: a user message, a result, an answer that is left out.

`boundary_unknown` and `template_rewrite` come from the renderer, which cannot extend the tokens of what is continued;
`boundary_unknown` also where several completions mean the same and nothing tells which of them is continued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..records import BreakReason, Completion, FinishReason, Message
from .meaning import canonical_arguments, said
from .tree import Key, Line, Node

Delivered = Callable[[str], bool]
_TELLING = 16  # characters of a summary that are no coincidence


@dataclass(frozen=True, slots=True)
class Thread:
    """How far a request goes along the conversations that begin with one system prompt and tools."""

    key: Key
    path: Sequence[Node]

    @property
    def repeats(self) -> bool:
        """Whether a sampled turn is among it."""
        return any(node.said for node in self.path[1:])


def nearest(line: Line, threads: Iterable[Thread]) -> Thread:
    """The conversation that the request has most in common with: sampled turns, then its beginning, then the most."""
    return max(threads, key=lambda thread: (thread.repeats, thread.key == line.key, len(thread.path)))


def why(line: Line, found: Thread, known: bool, delivered: Delivered) -> BreakReason:
    """The reason for a request of a session that has completions, where no compaction is involved.

    `found` is the nearest conversation; `known` tells whether the program gave the request's conversation no new name.
    """
    same_tools, same_system = (found.key[i] == line.key[i] for i in (0, 1))
    if found.repeats and same_tools != same_system:
        return BreakReason.SYSTEM_CHANGED if same_tools else BreakReason.TOOLS_CHANGED
    if not (same_tools and same_system) or not (known or found.repeats):
        return BreakReason.NEW_THREAD
    position = len(found.path)
    differing = line.messages[line.units[position].start] if position < len(line.units) else None
    return _at(found.path[-1], differing, delivered)


def _at(node: Node, differing: Message | None, delivered: Delivered) -> BreakReason:
    """Why a history goes on from `node` with `differing`, which nothing recorded does."""
    answers = [one for one in node.asked if said(one.reply)]
    turn = differing if differing and differing.role == "assistant" else None
    arrived = [one for one in answers if delivered(one.id)]
    if any(_part(turn, one.reply) for one in answers if one not in arrived) or (answers and not arrived):
        return BreakReason.UNDELIVERED_PARENT
    cut = [one for one in arrived if one.generation.finish_reason is FinishReason.LENGTH]
    if any(_part(turn, one.reply) or _goes_on(turn, one.reply) for one in cut) or (cut and len(cut) == len(arrived)):
        return BreakReason.TRUNCATED_PARENT
    return BreakReason.ASSISTANT_REWRITTEN if turn else BreakReason.HISTORY_REWRITTEN


def _part(turn: Message | None, whole: Message) -> bool:
    """Whether an assistant message tells the beginning of another, or some of its calls."""
    if turn is None or not said(turn):
        return False
    calls = [(call.name, canonical_arguments(call.arguments)) for call in whole.tool_calls]
    some = all((call.name, canonical_arguments(call.arguments)) in calls for call in turn.tool_calls)
    return some and whole.content.strip().startswith(turn.content.strip())


def _goes_on(turn: Message | None, cut: Message) -> bool:
    """Whether an assistant message tells another one and more."""
    text = cut.content.strip()
    return turn is not None and bool(text) and turn.content.strip().startswith(text)


def restarts(line: Line, summaries: Sequence[Completion], last: Completion | None, known: bool) -> Completion | None:
    """The compaction call from which the request begins anew, if it does.

    It repeats the summary; or, since some programs cut or wrap that, it is the next call of a `known` conversation
    (`last`: the latest completion of the same thread that is no side call) and repeats nothing of what was summarised.
    """
    for call in reversed(summaries):
        text = call.reply.content.strip()
        if len(text) >= _TELLING and any(text in message.content for message in line.messages):
            return call
    return last if known and last in summaries else None
