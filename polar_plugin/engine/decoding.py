# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The tensors of the embedded engine: key-value caches, and a batch of rows of unequal length, padded on the left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


@dataclass(frozen=True)
class Cache:
    """Keys and values of one sequence: per layer float [1, heads, length, dim]."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @property
    def length(self) -> int:
        return int(self.layers[0][0].shape[2]) if self.layers else 0

    def cropped(self, length: int) -> Cache:
        return Cache(tuple((k[:, :, :length], v[:, :, :length]) for k, v in self.layers)) if length else Cache()


def forward(model: Any, ids: torch.Tensor, past: Cache | None) -> tuple[torch.Tensor, Cache]:
    """One sequence, `ids` int64 [1, n] after `past`: logits [1, n, vocabulary] and the cache that now covers both."""
    cache = _dynamic(past.layers if past else ())
    output = model(input_ids=ids, past_key_values=cache, use_cache=True)
    return output.logits, Cache(_layers(output.past_key_values))


def _dynamic(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache


def _layers(cache: Any) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return tuple((layer.keys, layer.values) for layer in cache.layers)


class Batch:
    """Running rows over one padded cache, which is rebuilt only when a row joins or leaves. Mutable."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.logits: list[torch.Tensor] = []
        self._lengths: list[int] = []
        self._cache: DynamicCache | None = None

    def add(self, row: Any, cache: Cache, logits: torch.Tensor) -> None:
        """`logits` [vocabulary] say what follows the cached tokens."""
        caches = [*self._split(), cache]
        self.rows.append(row)
        self.logits.append(logits)
        self._lengths.append(cache.length)
        self._join(caches)

    def remove(self, row: Any) -> Cache | None:
        """Take a row out; its cache, or None where it was not in."""
        if row not in self.rows:
            return None
        caches = self._split()
        position = self.rows.index(row)
        del self.rows[position], self.logits[position], self._lengths[position]
        removed = caches.pop(position)
        self._join(caches)
        return removed

    def clear(self) -> None:
        self.rows, self.logits, self._lengths, self._cache = [], [], [], None

    def advance(self, model: Any, tokens: Sequence[int]) -> None:
        """Feed one token a row; `logits` then say what follows it."""
        width = max(self._lengths)
        padding = torch.tensor([[width - length] for length in self._lengths])
        attention = (torch.arange(width + 1)[None, :] >= padding).long()
        output = model(
            input_ids=torch.tensor([[token] for token in tokens]),
            attention_mask=attention,
            position_ids=torch.tensor([[length] for length in self._lengths]),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
        self._lengths = [length + 1 for length in self._lengths]
        self.logits = list(output.logits[:, -1])

    def _split(self) -> list[Cache]:
        """Each row's own cache, without its padding."""
        layers = _layers(self._cache) if self._cache is not None else ()
        return [
            Cache(tuple((k[i : i + 1, :, -n:], v[i : i + 1, :, -n:]) for k, v in layers))
            for i, n in enumerate(self._lengths)
        ]

    def _join(self, caches: Sequence[Cache]) -> None:
        width = max(self._lengths, default=0)
        layers = range(len(caches[0].layers)) if caches else ()
        padded = [(_stacked(caches, n, 0, width), _stacked(caches, n, 1, width)) for n in layers]
        self._cache = _dynamic(padded) if caches else None


def _stacked(caches: Sequence[Cache], layer: int, part: int, width: int) -> torch.Tensor:
    parts = [cache.layers[layer][part] for cache in caches]
    return torch.cat([torch.nn.functional.pad(one, (0, 0, width - one.shape[2], 0)) for one in parts])


class CacheStore:
    """The caches of past calls by session, bounded in tokens; the one that was not used for longest goes first."""

    def __init__(self, tokens: int) -> None:
        self._limit = tokens
        self._kept: OrderedDict[tuple[str, int], tuple[list[int], Cache]] = OrderedDict()
        self._number = 0

    def put(self, session_id: str, tokens: list[int], cache: Cache) -> None:
        own = Cache(tuple((k.clone(), v.clone()) for k, v in cache.layers))  # not a view of the whole batch
        self._number += 1
        self._kept[session_id, self._number] = (tokens, own)
        while self._kept and sum(cache.length for _, cache in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)

    def take(self, session_id: str, tokens: Sequence[int]) -> Cache:
        """The cache of the longest common prefix with a past call, at least one token short of `tokens`."""
        best, length = None, 0
        for key, (kept, _) in self._kept.items():
            if key[0] == session_id and (shared := _common(kept, tokens)) > length:
                best, length = key, shared
        if best is None:
            return Cache()
        kept, cache = self._kept[best]
        if length == len(kept):  # the new call replaces what it extends
            del self._kept[best]
        else:
            self._kept.move_to_end(best)
        return cache.cropped(min(length, len(tokens) - 1))

    def clear(self) -> None:
        self._kept.clear()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((n for n in range(shorter) if left[n] != right[n]), shorter)
