"""Continuous batching: which tokens of which requests go through the model next. Synchronous; lives in one thread.

A request is its tokens, of which a prefix has keys and values. A step feeds each running request what is missing and
samples where nothing is: prefill, decode, a cache hit and a recomputation after new weights are all the same case.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import EngineError
from ..records import FinishReason, Generation, LogProbs, SamplingParams, TokenIds, VersionSpan, log_probs, token_ids
from . import ragged
from .ragged import KeyValues, Row
from .sampling import draw, log_distribution, seeded

PauseMode = Literal["abort", "retract", "in_place"]
_AHEAD = 64
"""So many forced ids go through the model at once: logits are the vocabulary's size for each."""


class Detokenizer(Protocol):
    """As much of a Hugging Face tokenizer as stop strings need."""

    def decode(self, token_ids: Sequence[int], /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call. `forced` ids are recorded with the model's log-probabilities instead of being drawn."""

    id: str
    session_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    forced: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What became of a call. An aborted one has the tokens so far, and LENGTH as its finish reason."""

    generation: Generation
    aborted: bool
    cached_tokens: int
    """Prompt tokens whose keys and values were there already."""
    retractions: int
    """How often its keys and values were dropped while it ran."""


@dataclass(eq=False)
class _Running:
    request: Request
    future: Future[Sampled]
    generator: torch.Generator
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    kv: KeyValues | None = None
    cached_tokens: int | None = None
    retractions: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def missing(self) -> int:
        return len(self.tokens) - (self.kv.length if self.kv else 0)

    @property
    def ahead(self) -> Sequence[int]:
        """Forced ids behind which others are: they need not wait until they are recorded."""
        done, forced = len(self.logprobs), self.request.forced or ()
        return forced[done : min(len(forced), self.request.max_tokens, done + _AHEAD) - 1]

    def add(self, token: int, logprob: float, version: str) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].count + 1)
        else:
            self.spans.append(VersionSpan(version, 1))

    def result(self, reason: FinishReason, *, stop: str | None = None, aborted: bool = False) -> Sampled:
        generation = Generation(
            token_ids(self.output or np.empty(0, np.int32)), log_probs(self.logprobs), reason, tuple(self.spans), stop
        )
        return Sampled(generation, aborted, self.cached_tokens or 0, self.retractions)


class PrefixCache:
    """Keys and values of finished requests, least recently used first, bounded by the tokens they hold memory for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[int, tuple[TokenIds, KeyValues]] = OrderedDict()

    def put(self, tokens: Sequence[int], kv: KeyValues) -> None:
        self._held[id(kv)] = (np.array(tokens[: kv.length], np.int32), kv)
        while self._held and sum(held.capacity for _, held in self._held.values()) > self._limit:
            self._held.popitem(last=False)

    def take(self, tokens: Sequence[int], running: Iterable[_Running]) -> KeyValues:
        """Keys and values of the longest known prefix of `tokens`, short of its last token.

        A finished sequence that is extended whole is handed over; of any other a copy is made, for its own thread of
        the conversation may go on.
        """
        wanted = np.array(tokens[:-1], np.int32)
        known = [*self._held.values(), *((np.array(r.tokens[: r.kv.length], np.int32), r.kv) for r in running if r.kv)]
        length, kv = max(((_common(ids, wanted), kv) for ids, kv in known), key=lambda hit: hit[0], default=(0, None))
        if kv is None or not length:
            return KeyValues()
        if length == kv.length and self._held.pop(id(kv), None):
            return kv
        return kv.fork(length)

    def clear(self) -> None:
        self._held.clear()


def _common(a: TokenIds, b: TokenIds) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


class Scheduler:
    """Owns the model while the engine is open. Every method runs in the engine's one worker thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Detokenizer | None,
        max_batch: int,
        prefill_chunk: int,
        cache_tokens: int,
        seed: int,
        version: str,
    ) -> None:
        ragged.adopt(model)
        self.model = model
        self.version = version
        self.paused = False
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._seed = seed
        self._cache = PrefixCache(cache_tokens)
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []

    @property
    def idle(self) -> bool:
        """Nothing to do until the next command."""
        return self.paused or not (self._running or self._waiting)

    def submit(self, request: Request, future: Future[Sampled]) -> None:
        """Queue a request; `future` gets its result. A cancelled future frees the slot before the next token."""
        seed = request.sampling.seed
        key = ("given", seed) if seed is not None else ("derived", self._seed, request.session_id, request.id)
        self._waiting.append(_Running(request, future, seeded(*key), list(request.prompt)))

    def step(self) -> None:
        """One forward pass: a token for each request that is up to date, and a piece of the oldest one that is not."""
        self._drop_cancelled()
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.popleft())
        batch = list(self._batch())
        if not batch:
            return
        logits = ragged.forward(self.model, [row for _, row in batch]).split([row.wanted for _, row in batch])
        for (sequence, _), row_logits in zip(batch, logits, strict=True):
            for last in row_logits:
                if sequence in self._running:  # a stop may come before the end of what is forced
                    self._sample(sequence, last)

    def fail(self, error: Exception) -> None:
        """End every request with `error`: after a step that broke, and at the end."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.future.set_running_or_notify_cancel():
                sequence.future.set_exception(error)
        self._running.clear()
        self._waiting.clear()
        self._cache.clear()

    def abort(self, chosen: Callable[[str], bool]) -> int:
        """End the requests whose id is `chosen` with their tokens so far; returns how many."""
        aborted = [s for s in [*self._running, *self._waiting] if chosen(s.request.id)]
        for sequence in aborted:
            self._finish(sequence, sequence.result(FinishReason.LENGTH, aborted=True))
        return len(aborted)

    def progress(self) -> dict[str, int]:
        """How many tokens each request has, by id."""
        return {s.request.id: len(s.logprobs) for s in [*self._running, *self._waiting]}

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing until `resume`: end what runs ("abort"), recompute it then ("retract"), or keep it."""
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            self._forget()

    def resume(self) -> None:
        self.paused = False

    def load_weights(self, state: Mapping[str, Tensor], version: str) -> None:
        """Replace every weight and forget what was computed with the old ones.

        Raises EngineError, nothing changed, where names or shapes do not fit.
        """
        _check_state(self.model, state)
        self.model.load_state_dict(dict(state), strict=False)
        self.version = version
        self._forget()

    def score(self, ids: Sequence[int], temperature: float) -> LogProbs:
        return ragged.score(self.model, ids, temperature)

    def close(self) -> None:
        self.fail(EngineError("the embedded engine was closed while this call was running"))
        ragged.release(self.model)

    def _forget(self) -> None:
        self._cache.clear()
        for sequence in self._running:
            sequence.retractions += sequence.kv is not None
            sequence.kv = None

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in [*self._running, *self._waiting] if s.future.cancelled()]:
            self._leave(sequence)

    def _batch(self) -> Iterator[tuple[_Running, Row]]:
        """Those one token behind, and the first of the others: of equal prompts only one is computed."""
        behind = next((s for s in self._running if s.missing > 1), None)
        for sequence in self._running:
            if sequence.kv is None and (sequence is behind or sequence.missing == 1):
                sequence.kv = self._cache.take(sequence.tokens, self._running)
                if sequence.cached_tokens is None:
                    sequence.cached_tokens = sequence.kv.length
            if sequence.kv is not None and (sequence is behind or sequence.missing == 1):
                yield sequence, self._row(sequence, sequence.kv)

    def _row(self, sequence: _Running, kv: KeyValues) -> Row:
        ids = sequence.tokens[kv.length : kv.length + self._prefill_chunk]
        if len(ids) < sequence.missing:
            return Row(kv, ids, wanted=0)
        ahead = sequence.ahead
        return Row(kv, [*ids, *ahead], wanted=1 + len(ahead))

    def _sample(self, sequence: _Running, logits: Tensor) -> None:
        request, done = sequence.request, len(sequence.logprobs)
        logprobs = log_distribution(logits, request.sampling.temperature).cpu()
        if logprobs.isnan().any():
            raise EngineError(f"log-probabilities are not numbers: the weights of version {self.version!r} are broken")
        token = request.forced[done] if request.forced else draw(logprobs, request.sampling, sequence.generator)
        sequence.add(token, float(logprobs[token]), self.version)
        if token in request.stop_ids or (request.forced and done + 1 == len(request.forced)):
            self._finish(sequence, sequence.result(FinishReason.STOP))
        elif stop := self._stop_string(sequence):
            self._finish(sequence, sequence.result(FinishReason.STOP, stop=stop))
        elif done + 1 == request.max_tokens:
            self._finish(sequence, sequence.result(FinishReason.LENGTH))

    def _stop_string(self, sequence: _Running) -> str | None:
        """The stop string that the newest token completes. A token has at least one byte, so a short tail is enough."""
        stops = sequence.request.sampling.stop
        if not stops or self._tokenizer is None:
            return None
        tail = max(len(stop.encode()) for stop in stops) + 1
        text = str(self._tokenizer.decode(sequence.output[-tail:]))
        return next((stop for stop in stops if stop in text), None)

    def _finish(self, sequence: _Running, result: Sampled) -> None:
        self._leave(sequence)
        if sequence.future.set_running_or_notify_cancel():
            sequence.future.set_result(result)

    def _leave(self, sequence: _Running) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        if sequence.kv is not None:
            sequence.kv.cut(len(sequence.tokens))
            self._cache.put(sequence.tokens, sequence.kv)


def _check_state(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    unknown = sorted(set(state) - set(own))
    # A tied weight may be told once: its storage is another's.
    told = {own[name].data_ptr() for name in state if name in own}
    absent = sorted(name for name, tensor in own.items() if name not in state and tensor.data_ptr() not in told)
    shapes = sorted(name for name in set(state) & set(own) if state[name].shape != own[name].shape)
    for what, names in (("unknown", unknown), ("missing", absent), ("wrongly shaped", shapes)):
        if names:
            raise EngineError(f"load_weights: {len(names)} {what} weights, the first {names[0]!r}; nothing was loaded")
