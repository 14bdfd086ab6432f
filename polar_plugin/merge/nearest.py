"""Which earlier completion a prompt nearly extends: the one whose tokens it has most in common with. Pure.

Token sequences are kept in lexicographic order, where the one with the longest common prefix is a neighbour of the
place that the prompt would have: a look-up compares with O(log n) sequences, not with all. Only the last completion of
each conversation is kept, since it holds those before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from functools import total_ordering

import numpy as np

from ..records import Completion, TokenIds

_BLOCK = 1_024


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A token sequence, compared by its tokens."""

    tokens: TokenIds
    completion: Completion | None = None

    def __lt__(self, other: _Row) -> bool:
        at = common_prefix(self.tokens, other.tokens)
        if at == len(other.tokens):
            return False
        return at == len(self.tokens) or bool(self.tokens[at] < other.tokens[at])


class Nearest:
    """The completions so far, in the order recorded. Mutable: it grows by `add`."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._waiting: dict[str, Completion] = {}
        """Last completions of conversations that no look-up needed yet."""

    def add(self, completion: Completion, parent: Completion | None) -> None:
        """`parent` is the completion whose tokens the prompt extends: this one holds it from now on."""
        if parent:
            self._waiting.pop(parent.id, None)
        self._waiting[completion.id] = completion

    def find(self, prompt: TokenIds) -> tuple[Completion, int] | None:
        """The completion whose prompt ‖ output has the longest common prefix with `prompt`, and that length.

        Of a conversation it is the last one that was added. None where nothing was added.
        """
        for completion in self._waiting.values():
            insort(self._rows, _Row(tokens_of(completion), completion))
        self._waiting.clear()
        at = bisect_left(self._rows, _Row(prompt))
        near = [
            (common_prefix(row.tokens, prompt), row.completion)
            for row in reversed(self._rows[max(0, at - 1) : at + 1])
            if row.completion
        ]
        if not near:
            return None
        length, completion = max(near, key=lambda one: one[0])
        return completion, length


def tokens_of(completion: Completion) -> TokenIds:
    """Prompt and output, as one new array."""
    return np.concatenate((completion.prompt_ids, completion.generation.output_ids), dtype=np.int32)


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many tokens both begin with. Costs what they have in common."""
    size = min(len(left), len(right))
    begin, block = 0, _BLOCK
    while begin < size:
        end = min(begin + block, size)
        differing = left[begin:end] != right[begin:end]
        at = int(differing.argmax())
        if differing[at]:
            return begin + at
        begin, block = end, 4 * block
    return size


def holder(tip: Completion, position: int, parents: Mapping[str, Completion | None]) -> Completion:
    """Of `tip` and the completions that it extends, the first one that has a token at `position`; else `tip`."""
    found = tip
    before = parents[tip.id]
    while before and before.length > position:
        found, before = before, parents[before.id]
    return found
