# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
"""An engine inside the process: any Hugging Face causal language model, on the CPU.

One worker thread decodes all running requests as a batch; a session's key-value cache is kept, so a turn costs its own
tokens. For tests, demonstrations and small experiments: an inference server it is not.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import numpy as np
import torch

from ..errors import EngineBusy, EngineError
from ..records import (
    FinishReason,
    Generation,
    LogProbs,
    SamplingParams,
    TokenIds,
    VersionSpan,
    log_probs,
    token_ids,
)
from .base import EngineInfo
from .decoding import Batch, CacheStore, forward

_log = logging.getLogger("polar_plugin.engine")

Script = Callable[[str, int], Sequence[int] | None]
"""(session id, how many calls it made before) -> the ids to "sample" in this call, or None to sample really."""


@dataclass(eq=False)
class Request:
    """One call on its way through the worker. Mutable: the worker fills it; `cancelled` is how others stop it."""

    prompt_ids: TokenIds
    sampling: SamplingParams
    request_id: str
    session_id: str
    stop_ids: frozenset[int]
    generator: torch.Generator
    forced: Sequence[int] | None
    output: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])
    done: Future[Sampled] = field(default_factory=Future)
    cancelled: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_ids.tolist(), *self.output]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the worker made of a request. An aborted one has what was sampled until then."""

    output_ids: TokenIds
    logprobs: LogProbs
    versions: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """The stop id or stop string."""


class TransformersEngine:
    """`Engine` over a `transformers` model, float32 by default so that decoding and scoring agree to about 1e-5."""

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        tokenizer: Any = None,
        dtype: str = "float32",
        context_length: int | None = None,
        max_batch: int = 8,
        cache_tokens: int = 65_536,
        threads: int | None = None,
        seed: int = 0,
        version: str = "0",
        script: Script | None = None,
    ) -> None:
        """`model` is a directory or a loaded model. `tokenizer` decodes for stop strings; default: the directory's own.

        `cache_tokens` bounds the key-value caches kept between turns. `script` forces what is "sampled", with the
        model's true log-probabilities (teacher forcing).
        """
        self._source = model
        self._tokenizer = tokenizer
        self._dtype = getattr(torch, dtype)
        self._context_length = context_length
        self._max_batch = max_batch
        self._threads = threads
        self._seed = seed
        self.version = version
        self._script = script
        self._calls: dict[str, int] = {}
        self._caches = CacheStore(cache_tokens)
        self._wake = threading.Condition()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._weights: list[tuple[Mapping[str, torch.Tensor], str, Future[None]]] = []
        self._closing = False
        self._worker: threading.Thread | None = None
        self.model: Any = None

    async def __aenter__(self) -> TransformersEngine:
        await anyio.to_thread.run_sync(self._load)
        self._worker = threading.Thread(target=self._work, name="polar-engine", daemon=True)
        self._worker.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        worker = self._worker
        if worker:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(worker.join)

    async def probe(self) -> EngineInfo:
        """One token, to show that the model runs."""
        ids = token_ids([0])
        await self.sample(ids, SamplingParams(max_tokens=1), request_id="probe", session_id="")
        return EngineInfo(
            str(self._source) if isinstance(self._source, str | Path) else "", self.context_length, self.version
        )

    @property
    def context_length(self) -> int:
        return self._context_length or int(self.model.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        """See `Engine.generate`. At temperature 0 the likeliest token is taken and its log-probability is that at 1."""
        sampled = await self.sample(
            prompt_ids, sampling, request_id=request_id, session_id=session_id, stop_ids=stop_ids
        )
        if sampled.finish == "abort":
            raise EngineBusy("the call was aborted in the engine")
        return Generation(
            sampled.output_ids,
            sampled.logprobs,
            FinishReason(sampled.finish),
            sampled.versions,
            sampled.matched if isinstance(sampled.matched, str) else None,
        )

    async def sample(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Sampled:
        """As `generate`, but an aborted call returns what it has: what a server in front of this engine answers."""
        self._refuse(prompt_ids, sampling)
        request = self._request(prompt_ids, sampling, request_id, session_id, stop_ids)
        with self._wake:
            if self._closing or not self._worker or not self._worker.is_alive():
                raise EngineError("the engine is not running: use it inside `async with`")
            self._waiting.append(request)
            self._wake.notify()
        try:
            return await _result(request.done)
        except BaseException:
            request.cancelled = True
            raise

    def abort(self, request_id: str | None = None) -> int:
        """Stop a call by its id, or all; each returns what it has. Returns how many were stopped."""
        with self._wake:
            stopped = [r for r in (*self._waiting, *self._running) if request_id in (None, r.request_id)]
            for request in stopped:
                request.cancelled = True
            self._wake.notify()
        return len(stopped)

    async def load_weights(self, state: Mapping[str, torch.Tensor], version: str) -> None:
        """Replace weights between two tokens; caches are dropped and calls in flight go on under the new version.

        `state` may be partial. Raises EngineError for a name or shape that the model does not have.
        """
        done: Future[None] = Future()
        with self._wake:
            self._weights.append((state, version, done))
            self._wake.notify()
        await _result(done)

    def score(self, ids: TokenIds, *, temperature: float = 1.0) -> LogProbs:
        """Log-probability of each of `ids` given those before it: one forward pass, no cache, no batch.

        float32 [n - 1]: entry i belongs to `ids[i + 1]`. Blocking; call it while nothing is generated.
        """
        with torch.inference_mode():
            logits, _ = forward(self.model, torch.from_numpy(np.array(ids, np.int64))[None], None)
            told = torch.log_softmax(logits[0, :-1].float() / (temperature or 1.0), -1)
            chosen = torch.from_numpy(np.array(ids[1:], np.int64))
            return log_probs(told.gather(1, chosen[:, None])[:, 0].numpy())

    def _load(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        if isinstance(self._source, torch.nn.Module):
            self.model = self._source
            return
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            self.model = AutoModelForCausalLM.from_pretrained(str(self._source), dtype=self._dtype).eval()
            self._tokenizer = self._tokenizer or AutoTokenizer.from_pretrained(str(self._source))
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot load a causal language model from {self._source}: {error}") from error

    def _refuse(self, prompt_ids: TokenIds, sampling: SamplingParams) -> None:
        if not len(prompt_ids):
            raise EngineError("an empty prompt cannot be continued")
        if prompt_ids.min() < 0 or prompt_ids.max() >= self.vocab_size:
            raise EngineError(f"token id {int(prompt_ids.max())} is out of the vocabulary of {self.vocab_size}")
        if sampling.max_tokens is None or sampling.max_tokens < 1:
            raise EngineError("sampling.max_tokens must be at least 1")
        if len(prompt_ids) + sampling.max_tokens > self.context_length:
            raise EngineError(
                f"{len(prompt_ids)} prompt tokens and max_tokens {sampling.max_tokens} exceed the context of"
                f" {self.context_length}"
            )

    def _request(
        self, prompt_ids: TokenIds, sampling: SamplingParams, request_id: str, session_id: str, stop_ids: Sequence[int]
    ) -> Request:
        calls = self._calls.get(session_id, 0)
        self._calls[session_id] = calls + 1
        forced = self._script(session_id, calls) if self._script and session_id else None
        seed = sampling.seed
        if seed is None:
            told = f"{self._seed} {session_id} {calls}".encode() + prompt_ids.tobytes()
            seed = int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        return Request(prompt_ids, sampling, request_id, session_id, frozenset(stop_ids), generator, forced)

    # --- the worker thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        batch = Batch()
        try:
            with torch.inference_mode():
                while self._admit(batch):
                    self._step(batch)
        except BaseException as error:
            _log.exception("the embedded engine failed")
            self._fail(EngineError(f"the embedded engine failed: {error!r}"))

    def _fail(self, error: EngineError) -> None:
        with self._wake:
            self._closing = True
            for request in (*self._waiting, *self._running):
                if not request.done.done():
                    request.done.set_exception(error)

    def _admit(self, batch: Batch) -> bool:
        """Take in waiting requests and weights; False when the engine closes."""
        with self._wake:
            while not (self._waiting or self._running or self._weights or self._closing):
                self._wake.wait()
            if self._closing:
                for request in (*self._waiting, *self._running):
                    request.done.set_exception(EngineError("the engine was closed"))
                return False
            weights, self._weights = self._weights, []
            room = self._max_batch - len(self._running)
            admitted, self._waiting = self._waiting[:room], self._waiting[room:]
            self._running += admitted
        for state, version, done in weights:
            self._replace_weights(batch, state, version, done)
        for request in self._running:
            if request not in batch.rows and not request.cancelled:
                self._prefill(batch, request)
        return True

    def _replace_weights(self, batch: Batch, state: Mapping[str, Any], version: str, done: Future[None]) -> None:
        try:
            unknown = self.model.load_state_dict(dict(state), strict=False).unexpected_keys
            if unknown:
                raise EngineError(f"the model has no weights named {sorted(unknown)[:5]}")
        except (RuntimeError, EngineError) as error:
            done.set_exception(error if isinstance(error, EngineError) else EngineError(str(error)))
            return
        self.version = version
        self._caches.clear()
        batch.clear()  # rows still running are filled again from their tokens, under the new weights
        done.set_result(None)

    def _prefill(self, batch: Batch, request: Request) -> None:
        tokens = request.tokens
        kept = self._caches.take(request.session_id, tokens)
        logits, cache = forward(self.model, torch.tensor([tokens[kept.length :]]), kept)
        batch.add(request, cache, logits[0, -1])

    def _step(self, batch: Batch) -> None:
        """One token for every row."""
        ended = [r for r in self._running if r.cancelled]
        for row, request in enumerate(batch.rows):
            if not request.cancelled:
                self._take(request, batch.logits[row])
                if _finish(request, self._text) is not None:
                    ended.append(request)
        for request in ended:
            self._end(batch, request)
        if batch.rows:
            batch.advance(self.model, [request.output[-1] for request in batch.rows])

    def _take(self, request: Request, logits: torch.Tensor) -> None:
        forced = request.forced[len(request.output)] if request.forced else None
        chosen, logprob = draw(logits.float(), request.sampling, request.generator, forced)
        request.output.append(chosen)
        request.logprobs.append(logprob)
        request.versions.append(self.version)

    def _end(self, batch: Batch, request: Request) -> None:
        cache = batch.remove(request)
        if cache and request.session_id:
            self._caches.put(request.session_id, request.tokens[: cache.length], cache)
        with self._wake:
            self._running.remove(request)
        finish, matched = _finish(request, self._text) or ("abort", None)
        sampled = Sampled(
            token_ids(np.array(request.output, np.int64)),
            log_probs(request.logprobs),
            _spans(request.versions),
            finish,
            matched,
        )
        request.done.set_result(sampled)

    def _text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise EngineError("stop strings need a tokenizer: pass `tokenizer` to TransformersEngine")
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def draw(
    logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator, forced: int | None = None
) -> tuple[int, float]:
    """A token id and its log-probability at the sampling temperature, over the full vocabulary.

    `logits` is float32 [vocabulary]. top_k and top_p restrict what is drawn, not what the log-probability is taken of.
    """
    scores = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
    if forced is not None:
        return forced, float(scores[forced])
    if sampling.temperature == 0:
        chosen = int(scores.argmax())
    else:
        chosen = int(torch.multinomial(_truncated(scores.exp(), sampling), 1, generator=generator))
    return chosen, float(scores[chosen])


def _truncated(probabilities: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    if 0 < sampling.top_k < len(probabilities):
        least = probabilities.topk(sampling.top_k).values[-1]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.where(before < sampling.top_p * ordered.sum(), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ordered)
    return probabilities


def _finish(
    request: Request, decode: Callable[[Sequence[int]], str]
) -> tuple[Literal["stop", "length"], int | str | None] | None:
    """How a request ended, or None while it goes on."""
    output = request.output
    if not output:
        return None
    if request.forced is not None:
        last = output[-1]
        return (
            ("stop", last if last in request.stop_ids else None)
            if len(output) == len(request.forced)
            else _full(request)
        )
    if output[-1] in request.stop_ids:
        return "stop", output[-1]
    if request.sampling.stop:
        text = decode(output[-64:])
        for stop in request.sampling.stop:
            if stop in text:
                return "stop", stop
    return _full(request)


def _full(request: Request) -> tuple[Literal["length"], None] | None:
    return ("length", None) if len(request.output) >= (request.sampling.max_tokens or math.inf) else None


def _spans(versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    for version in versions:
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].count + 1)
        else:
            spans.append(VersionSpan(version, 1))
    return tuple(spans)


async def _result(future: Future[Any]) -> Any:
    """Wait for a thread's future on the event loop, cancellably."""
    arrived, loop = anyio.Event(), asyncio.get_running_loop()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(arrived.set))
    await arrived.wait()
    return future.result()
