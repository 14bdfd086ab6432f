"""Which completions follow one another: a session to chains, each of which one trace is made of. Pure.

A completion's parent is the one whose prompt ‖ output begins its prompt. Recordings of systems that do not tell parents
get them from the tokens. A chain is a path down this forest; where a completion has several children, the one that the
session went on with keeps the chain and the others start chains of their own, with the shared part as context. So every
completion stands in exactly one chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..records import Completion, CompletionSession, TokenIds

Chain = tuple[Completion, ...]


def chains(session: CompletionSession) -> list[Chain]:
    """The chains of a session, in the order in which their first completions were recorded."""
    parents = parents_of(session.completions)
    children: dict[str, list[Completion]] = {}
    for completion in session.completions:
        if parent := parents[completion.id]:
            children.setdefault(parent, []).append(completion)
    weight = _weights(session, parents)
    heir = {parent: max(group, key=lambda child: weight[child.id]).id for parent, group in children.items()}
    return _paths(session.completions, parents, heir)


def parents_of(completions: Sequence[Completion]) -> Mapping[str, str | None]:
    """Each completion's parent by id: the one it tells, where the tokens agree; where none tells any, by tokens."""
    if not any(completion.parent for completion in completions):
        return _parents_by_tokens(completions)
    known = {completion.id: completion for completion in completions}
    return {
        completion.id: completion.parent if extends(completion, known.get(completion.parent or "")) else None
        for completion in completions
    }


def extends(completion: Completion, parent: Completion | None) -> bool:
    """Whether the prompt begins with the parent's prompt ‖ output, token for token."""
    if parent is None or parent.length > len(completion.prompt_ids):
        return False
    middle = len(parent.prompt_ids)
    prompt, output = completion.prompt_ids, parent.generation.output_ids
    return same(prompt[:middle], parent.prompt_ids) and np.array_equal(prompt[middle : parent.length], output)


def same(left: TokenIds, right: TokenIds) -> bool:
    """Views of one buffer are equal without a look at their tokens."""
    return (left.ctypes.data == right.ctypes.data and len(left) == len(right)) or np.array_equal(left, right)


def _parents_by_tokens(completions: Sequence[Completion]) -> Mapping[str, str | None]:
    """The longest strict token prefix among what came before; of equal ones the latest."""
    parents: dict[str, str | None] = {}
    by_length: dict[int, dict[bytes, list[Completion]]] = {}
    for completion in completions:
        parents[completion.id] = None
        data = np.ascontiguousarray(completion.prompt_ids)
        for length in sorted((n for n in by_length if n <= len(data)), reverse=True):
            candidates = by_length[length].get(_tail(data[:length]), [])
            if found := next((one for one in reversed(candidates) if extends(completion, one)), None):
                parents[completion.id] = found.id
                break
        sequence = np.concatenate((data, completion.generation.output_ids))
        if len(completion.generation.output_ids):
            by_length.setdefault(len(sequence), {}).setdefault(_tail(sequence), []).append(completion)
    return parents


def _tail(ids: TokenIds) -> bytes:
    """The last tokens tell candidates apart; `extends` then compares all of them."""
    return ids[-64:].tobytes()


def _weights(session: CompletionSession, parents: Mapping[str, str | None]) -> Mapping[str, tuple[int, bool]]:
    """Tokens sampled in and below each completion that was extended, then whether it arrived."""
    below = {completion.id: len(completion.generation.output_ids) for completion in session.completions}
    extended = dict.fromkeys(below, False)
    for completion in reversed(session.completions):
        if parent := parents[completion.id]:
            below[parent] += below[completion.id]
            extended[parent] = True
    return {
        completion.id: (
            below[completion.id] if extended[completion.id] else 0,
            session.delivered(completion),
        )
        for completion in session.completions
    }


def _paths(
    completions: Sequence[Completion], parents: Mapping[str, str | None], heir: Mapping[str, str]
) -> list[Chain]:
    chain_of: dict[str, list[Completion]] = {}
    found: list[list[Completion]] = []
    for completion in completions:
        parent = parents[completion.id]
        if parent and heir[parent] == completion.id:
            chain = chain_of[parent]
        else:
            found.append(chain := list[Completion]())
        chain.append(completion)
        chain_of[completion.id] = chain
    return [tuple(chain) for chain in found]
