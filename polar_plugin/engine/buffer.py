"""A growing token array, so that the prompts of a conversation share memory instead of repeating their history."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..records import TokenIds


class TokenBuffer:
    """int32 tokens that are only ever appended; views of it stay valid and never change."""

    def __init__(self, ids: TokenIds) -> None:
        self._data: NDArray[np.int32] = np.array(ids, np.int32)
        self._used = len(ids)

    def view(self, stop: int) -> TokenIds:
        """The first `stop` tokens, read-only, without a copy."""
        view = self._data[:stop]
        view.flags.writeable = False
        return view

    def extended(self, start: int, ids: TokenIds) -> TokenBuffer:
        """A buffer that holds the first `start` tokens and then `ids`.

        This one where nothing follows `start` yet (amortised O(len(ids))), else a copy: a branch.
        """
        if start != self._used:
            return TokenBuffer(np.concatenate((self._data[:start], ids)))
        stop = start + len(ids)
        if stop > len(self._data):
            grown = np.empty(max(stop, 2 * len(self._data)), np.int32)
            grown[:start] = self._data[:start]
            self._data = grown
        self._data[start:stop] = ids
        self._used = stop
        return self
