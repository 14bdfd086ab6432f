"""Which completions follow one another: a session to chains, each of which one trace is made of. Pure.

A completion's parent is the one whose prompt ‖ output begins its prompt. Recordings of systems that do not tell parents
get them from the tokens. A chain is a path down this forest; where a completion has several children, the one that the
session went on with keeps the chain and the others start chains of their own, with the shared part as context. So every
completion stands in exactly one chain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..errors import MergeError
from ..records import Completion, CompletionSession, TokenIds

Chain = tuple[Completion, ...]
Parents = Mapping[str, Completion | None]

ROOTS = ""
_SMALL = 1_024  # tokens: below it, comparing bytes costs less than numpy's set-up
_TAIL = 64  # tokens that tell candidates apart before all of them are compared


def chains(session: CompletionSession, parents: Parents, untrained: Collection[str] = ()) -> list[Chain]:
    """The chains of a session, in the order in which their first completions were recorded.

    `untrained` holds the ids of completions that are not trained: they do not make a branch the heir.
    """
    heirs = _heirs(session, parents, untrained)
    chain_of: dict[str, list[Completion]] = {}
    found: list[list[Completion]] = []
    for completion in session.completions:
        parent = parents[completion.id]
        if parent and heirs.get(parent.id, completion.id) == completion.id:
            chain = chain_of[parent.id]
        else:
            found.append(chain := list[Completion]())
        chain.append(completion)
        chain_of[completion.id] = chain
    return [tuple(chain) for chain in found]


def _heirs(session: CompletionSession, parents: Parents, untrained: Collection[str]) -> Mapping[str, str]:
    """For each parent of several the child that keeps its chain.

    One with trained tokens in or below it that was extended, then the most such tokens, then one that arrived, then the
    first: so there are no more traces than trained completions that no trained one extends.
    """
    families = siblings(session.completions, parents)
    families.pop(ROOTS, None)
    if not families:
        return {}
    below = {c.id: 0 if c.id in untrained else len(c.generation.output_ids) for c in session.completions}
    extended: set[str] = set()
    for completion in reversed(session.completions):
        if parent := parents[completion.id]:
            below[parent.id] += below[completion.id]
            extended.add(parent.id)

    def weight(child: Completion) -> tuple[bool, int, bool]:
        return child.id in extended and below[child.id] > 0, below[child.id], session.delivered(child)

    return {parent: max(children, key=weight).id for parent, children in families.items()}


def siblings(completions: Sequence[Completion], parents: Parents) -> dict[str, list[Completion]]:
    """By parent id (ROOTS: without one), the children of each parent that has several."""
    first: dict[str, Completion] = {}
    several: dict[str, list[Completion]] = {}
    for completion in completions:
        parent = parents[completion.id]
        key = parent.id if parent else ROOTS
        if first.setdefault(key, completion) is not completion:
            several.setdefault(key, [first[key]]).append(completion)
    return several


def parents_of(session: CompletionSession) -> Parents:
    """Each completion's parent: the one it tells, where the tokens agree; where none tells any, by tokens.

    Raises MergeError where two completions share an id.
    """
    told = any(completion.parent for completion in session.completions)
    parents = _told_parents(session.completions) if told else _parents_by_tokens(session)
    if len(parents) != len(session.completions):
        raise MergeError(f"session {session.session_id}: completions share an id")
    return parents


def _told_parents(completions: Sequence[Completion]) -> Parents:
    earlier: dict[str, tuple[Completion, int]] = {}
    parents: dict[str, Completion | None] = {}
    for completion in completions:
        address = _address(completion.prompt_ids)
        parent, parent_address = earlier.get(completion.parent or "", (None, 0))
        if parent and address == parent_address:  # views of one buffer: no need to look at the history
            parents[completion.id] = parent if _repeats_output(completion.prompt_ids, parent) else None
        else:
            parents[completion.id] = parent if parent and extends(completion.prompt_ids, parent) else None
        earlier[completion.id] = completion, address
    return parents


def extends(prompt: TokenIds, parent: Completion) -> bool:
    """Whether `prompt` begins with the parent's prompt ‖ output, token for token."""
    return _repeats_output(prompt, parent) and same(prompt[: len(parent.prompt_ids)], parent.prompt_ids)


def _repeats_output(prompt: TokenIds, parent: Completion) -> bool:
    end = parent.length
    return end <= len(prompt) and same(prompt[len(parent.prompt_ids) : end], parent.generation.output_ids)


def same(left: TokenIds, right: TokenIds) -> bool:
    """Whether two arrays hold the same tokens."""
    if len(left) != len(right):
        return False
    if len(left) < _SMALL:
        return left.tobytes() == right.tobytes()
    return _address(left) == _address(right) or np.array_equal(left, right)


def _address(array: TokenIds) -> int:
    """Where a contiguous array begins; a value of its own (negative) where it has gaps."""
    return array.ctypes.data if array.flags.c_contiguous else -id(array)


def _parents_by_tokens(session: CompletionSession) -> Parents:
    """The longest token prefix among what came before; of equal ones one that arrived, then the latest."""
    parents: dict[str, Completion | None] = {}
    by_tail: dict[tuple[int, bytes], list[Completion]] = {}
    lengths: list[int] = []
    for completion in session.completions:
        found = _longest_prefix(completion, lengths, by_tail)
        parents[completion.id] = max(reversed(found), key=session.delivered) if found else None
        if len(completion.generation.output_ids):
            if completion.length not in lengths[bisect_left(lengths, completion.length) :][:1]:
                insort(lengths, completion.length)
            by_tail.setdefault((completion.length, _tail(completion)), []).append(completion)
    return parents


def _longest_prefix(
    completion: Completion, lengths: Sequence[int], by_tail: Mapping[tuple[int, bytes], list[Completion]]
) -> list[Completion]:
    """All completions of the greatest length whose prompt ‖ output begins the prompt."""
    prompt = completion.prompt_ids
    for at in range(bisect_right(lengths, len(prompt)) - 1, -1, -1):
        length = lengths[at]
        candidates = by_tail.get((length, prompt[max(0, length - _TAIL) : length].tobytes()), ())
        if found := [one for one in candidates if extends(prompt, one)]:
            return found
    return []


def _tail(completion: Completion) -> bytes:
    return np.concatenate((completion.prompt_ids[-_TAIL:], completion.generation.output_ids[-_TAIL:]))[
        -_TAIL:
    ].tobytes()
