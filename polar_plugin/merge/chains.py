"""Which completions follow one another: a session to chains, each of which one trace is made of. Pure.

A chain is a path down the forest of `parents`; where a completion has several children, the one that the
session went on with keeps the chain and the others start chains of their own, with the shared part as context. So every
completion stands in exactly one chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..records import Completion, CompletionSession
from .parents import Parents

Chain = tuple[Completion, ...]

ROOTS = ""


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
