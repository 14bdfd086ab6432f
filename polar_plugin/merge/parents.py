"""Which completion each one continues: the one whose prompt ‖ output begins its prompt, token for token. Pure.

That is the whole condition for a token to be trained behind another: it was sampled behind exactly those. Where a
server rendered the history again instead, the same condition splits the trace; `rerendered_breaks` says what differs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MergeError
from ..records import BreakReason, Completion, CompletionSession, TokenIds

Parents = Mapping[str, Completion | None]

_SMALL = 8_192  # tokens: below it, comparing bytes costs less than numpy's set-up
_TAIL = 64  # tokens that tell candidates apart before all of them are compared


def parents_of(session: CompletionSession, *, told: bool = True) -> Parents:
    """Each completion's parent: the one it tells, where the tokens agree; where none tells any, by tokens.

    `told` False: by tokens, whatever is told. Raises MergeError where two completions share an id.
    """
    told = told and any(completion.parent for completion in session.completions)
    parents = _told_parents(session.completions) if told else _parents_by_tokens(session)
    if len(parents) != len(session.completions):
        raise MergeError(f"session {session.session_id}: completions share an id")
    return parents


def _told_parents(completions: Sequence[Completion]) -> Parents:
    earlier: dict[str | None, tuple[Completion, TokenIds, int]] = {}
    parents: dict[str, Completion | None] = {}
    for completion in completions:
        prompt, known = completion.prompt_ids, earlier.get(completion.parent)
        first, size = prompt[:1], prompt.size
        parents[completion.id] = known[0] if known and _extends(prompt, first, *known) else None
        earlier[completion.id] = completion, first, size
    return parents


def extends(prompt: TokenIds, parent: Completion) -> bool:
    """Whether `prompt` begins with the parent's prompt ‖ output, token for token."""
    return _extends(prompt, prompt[:1], parent, parent.prompt_ids[:1], parent.prompt_ids.size)


def _extends(prompt: TokenIds, first: TokenIds, parent: Completion, parent_first: TokenIds, begin: int) -> bool:
    """`first` and `parent_first` are the prompts' first tokens, `begin` is the length of the parent's prompt."""
    output = parent.generation.output_ids
    end = begin + output.size
    if end > prompt.size or not same(prompt[begin:end], output):
        return False
    # views of one buffer begin at one address: no need to look at the history
    in_place = np.may_share_memory(first, parent_first) and prompt.strides == parent.prompt_ids.strides
    return in_place or same(prompt[:begin], parent.prompt_ids)


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether two arrays hold the same tokens, or other numbers of one type."""
    if left.size != right.size:
        return False
    if left.size < _SMALL:
        return left.tobytes() == right.tobytes()
    return not np.count_nonzero(left != right)


# --- by tokens -------------------------------------------------------------------------------------------------------


class _Beginnings:
    """Token sequences, to find those that a prompt begins with, the longest first. Mutable."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._by_tail: dict[tuple[int, bytes], list[Completion]] = {}

    def add(self, length: int, tail: TokenIds, completion: Completion) -> None:
        """`tail` is the end of the sequence, `_TAIL` tokens where it has as many."""
        at = bisect_left(self._lengths, length)
        if at == len(self._lengths) or self._lengths[at] != length:
            self._lengths.insert(at, length)
        self._by_tail.setdefault((length, tail[-_TAIL:].tobytes()), []).append(completion)

    def of(self, prompt: TokenIds) -> Iterator[list[Completion]]:
        """Those of one length whose last tokens agree, by falling length; the rest is still to be compared."""
        for at in range(bisect_right(self._lengths, len(prompt)) - 1, -1, -1):
            length = self._lengths[at]
            found = self._by_tail.get((length, prompt[max(0, length - _TAIL) : length].tobytes()))
            if found:
                yield found


def _parents_by_tokens(session: CompletionSession) -> Parents:
    """The longest token prefix among what came before; of equal ones one that arrived, then the latest."""
    parents: dict[str, Completion | None] = {}
    known = _Beginnings()
    for completion in session.completions:
        matches = ([c for c in some if extends(completion.prompt_ids, c)] for some in known.of(completion.prompt_ids))
        found = next(filter(None, matches), None)
        parents[completion.id] = max(reversed(found), key=session.delivered) if found else None
        output = completion.generation.output_ids
        if len(output):
            known.add(completion.length, np.concatenate((completion.prompt_ids[-_TAIL:], output[-_TAIL:])), completion)
    return parents


# --- what a server that renders the history again made of it ---------------------------------------------------------


def rerendered_breaks(
    session: CompletionSession, parents: Parents, end_of_turn: Collection[int]
) -> Mapping[str, BreakReason]:
    """Why completions do not continue the turn before them, for prompts that a server rendered anew each time.

    The turn before is the longest earlier prompt that begins this one. What follows it up to the first id of
    `end_of_turn` is the assistant's turn as it was rendered again. Where that is not what was sampled, in this order:

    * BOUNDARY_UNKNOWN: none of `end_of_turn` follows;
    * TEMPLATE_REWRITE: the beginning is gone (a template that drops reasoning), or another end of turn is behind it;
    * ASSISTANT_REWRITTEN: anything else: other ids for the same text, or other text.

    NEW_THREAD: no earlier prompt begins this one; FIRST_CALL: there was none. Completions without a reason have their
    parent in `parents`. Costs a comparison with the prompt before, and the length of the turn.
    """
    reasons: dict[str, BreakReason] = {}
    known = _Beginnings()
    ends = np.fromiter(end_of_turn, np.int32)
    for completion in session.completions:
        prompt = completion.prompt_ids
        if again := _begun_by(prompt, known, len(prompt)):  # the same prompt, answered once more
            reason = reasons.get(again[0].id)
        elif before := _begun_by(prompt[:-1], known):
            turn = max(reversed(before), key=session.delivered)
            empty = not turn.generation.output_ids.size  # it cannot come back changed
            continued = empty or any(parents[completion.id] is one for one in before)
            reason = None if continued else _difference(prompt[len(turn.prompt_ids) :], turn, ends)
        else:
            reason = BreakReason.NEW_THREAD if reasons else BreakReason.FIRST_CALL
        if reason is not None:
            reasons[completion.id] = reason
        known.add(len(prompt), prompt, completion)
    return reasons


def _begun_by(prompt: TokenIds, known: _Beginnings, shortest: int = 0) -> list[Completion]:
    """Those of the longest prompt, not below `shortest`, that begins this one."""
    for some in known.of(prompt):
        if len(some[0].prompt_ids) < shortest:
            break
        if found := [one for one in some if same(prompt[: len(one.prompt_ids)], one.prompt_ids)]:
            return found
    return []


def _difference(rest: TokenIds, turn: Completion, ends: TokenIds) -> BreakReason:
    """`rest` is what was rendered behind the turn's prompt."""
    closed = np.flatnonzero(np.isin(rest, ends))
    if not len(closed):
        return BreakReason.BOUNDARY_UNKNOWN
    rendered, sampled = rest[: closed[0]], turn.generation.output_ids
    if len(sampled) and sampled[-1] in ends:
        sampled = sampled[:-1]
    left = len(sampled) - len(rendered)
    if left >= 0 and same(sampled[left:], rendered):
        return BreakReason.TEMPLATE_REWRITE
    return BreakReason.ASSISTANT_REWRITTEN
