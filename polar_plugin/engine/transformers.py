"""The embedded engine: any Hugging Face causal LM, in this process, on the CPU. Small models, exact log-probabilities.

One worker thread owns the model, so the event loop never computes; calls of many sessions share its forward passes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..errors import EngineError
from ..records import Generation, LogProbs, SamplingParams, TokenIds, VersionSpan, log_probs, token_ids
from .base import EngineInfo
from .scheduler import PauseMode, Request, Sampled, Scheduler
from .worker import Worker

_PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


class Script(Protocol):
    """Says what a session's next turn is, instead of sampling it."""

    def __call__(self, session_id: str, turn: int, prompt: str) -> str | None:
        """The reply of this session's call number `turn` (from 0); None: sample as usual."""
        ...


class TransformersEngine:
    """An `Engine` over a Hugging Face causal LM.

    `model` is a directory, or a model, which then belongs to the engine while it is open. Log-probabilities are those
    of the distribution at the sampling temperature over the full vocabulary (temperature 0 is greedy, recorded at 1).
    With `script`, a scripted turn's tokens are recorded with the log-probabilities that the model gives them.
    A seed fixes the random stream of a call; which other calls share its batch moves logits by about 1e-6.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        dtype: str = "float32",
        context_length: int | None = None,
        threads: int | None = None,
        max_batch: int = 8,
        prefill_chunk: int = 256,
        cache_tokens: int = 32768,
        seed: int = 0,
        version: str = "0",
        script: Script | None = None,
    ) -> None:
        self._source = model
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._context_length = context_length
        self._threads = threads
        self._version = version
        self._script = script
        self._turns: dict[str, int] = {}
        self._limits = {
            "max_batch": max_batch,
            "prefill_chunk": prefill_chunk,
            "cache_tokens": cache_tokens,
            "seed": seed,
        }
        self._worker = Worker()

    async def __aenter__(self) -> TransformersEngine:
        self._worker = Worker()
        await self._worker.start(self._build)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._worker.stop()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model's directory, or the one that was given; None without either."""
        return self._tokenizer

    @property
    def info(self) -> EngineInfo:
        """Known once the engine is open."""
        config = self._model.config.get_text_config()
        longest = int(getattr(config, "max_position_embeddings", 0) or 2**31 - 1)
        name = type(self._model).__name__ if isinstance(self._source, PreTrainedModel) else Path(self._source).name
        return EngineInfo(name, min(self._context_length or longest, longest), self._worker.scheduler.version)

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_input_embeddings().num_embeddings)  # pyright: ignore[reportArgumentType]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What the model itself calls its end: used for scripted replies, and where a caller names no stop id."""
        generation, config = self._model.generation_config, self._model.config.get_text_config()
        eos = getattr(generation, "eos_token_id", None)
        eos = config.eos_token_id if eos is None else eos
        return () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)

    async def probe(self) -> EngineInfo:
        """Sample a few tokens and check them against transformers' own full forward pass.

        Raises EngineError where they differ: such an architecture must not be trained on through this engine.
        """
        prompt = token_ids(np.arange(1, 18) * 31 % self.vocab_size)
        sampled = await self._submit(
            prompt, SamplingParams(max_tokens=8), request_id="probe", session_id="probe", stop_ids=(), forced=None
        )
        output = sampled.generation.output_ids
        scored = (await self.score(np.concatenate([prompt, output])))[len(prompt) - 1 :]
        off = float(np.abs(scored - sampled.generation.logprobs).max())
        if not off <= _PROBE_TOLERANCE.get(str(self._model.dtype).removeprefix("torch."), 1e-3):
            raise EngineError(
                f"{self.info.model}: log-probabilities of sampled tokens are off by {off:.2g} from a full forward pass;"
                " the embedded engine cannot run this architecture exactly. Serve it with SGLang or vLLM"
            )
        return self.info

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        forced = self._scripted(prompt_ids, session_id, stop_ids)
        parts: list[Generation] = []
        while True:
            done = sum(len(part.output_ids) for part in parts)
            sampled = await self._submit(
                np.concatenate([prompt_ids, *(part.output_ids for part in parts)]),
                _remaining(sampling, done),
                request_id=f"{request_id}+{done}" if parts else request_id,
                session_id=session_id,
                stop_ids=stop_ids,
                forced=forced and forced[done:],
            )
            parts.append(sampled.generation)
            if not sampled.aborted:
                return parts[0] if len(parts) == 1 else _joined(parts)

    async def sample(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Sampled:
        """As `generate`, but an abort is told, not re-issued: what a server in front of the engine needs."""
        return await self._submit(
            prompt_ids,
            sampling,
            request_id=request_id,
            session_id=session_id,
            stop_ids=stop_ids,
            forced=self._scripted(prompt_ids, session_id, stop_ids),
        )

    async def _submit(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int],
        forced: Sequence[int] | None,
    ) -> Sampled:
        prompt = self._checked(prompt_ids)
        room = self.info.context_length - len(prompt)
        if room < 1 or sampling.max_tokens == 0:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens leaves no token to sample: the context has"
                f" {self.info.context_length}, max_tokens is {sampling.max_tokens}"
            )
        if sampling.stop and self._tokenizer is None:
            raise EngineError("stop strings need a tokenizer: pass TransformersEngine(..., tokenizer=...)")
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        request = Request(
            request_id,
            session_id,
            prompt,
            sampling,
            limit,
            frozenset(stop_ids),
            None if forced is None else tuple(self._checked(forced)),
        )
        future: Future[Sampled] = Future()
        self._worker.send(lambda scheduler: scheduler.submit(request, future))
        return await asyncio.wrap_future(future)

    async def score(self, ids: TokenIds | Sequence[int], temperature: float = 1.0) -> LogProbs:
        """float32 [n - 1]: each id's log-probability after those before it, by one full forward pass without a cache.

        It shares no attention code with sampling, so it proves what sampling recorded.
        """
        checked = self._checked(ids)
        return await self._worker.call(lambda scheduler: scheduler.score(checked, temperature))

    async def load_weights(self, state: Mapping[str, Tensor], version: str) -> None:
        """Replace all weights between two tokens; calls that run go on under `version`, their context recomputed.

        A tied weight may be named once. Raises EngineError, nothing changed, where names or shapes do not fit.
        """
        await self._worker.call(lambda scheduler: scheduler.load_weights(state, version))

    async def set_version(self, version: str) -> None:
        """Name the weights anew without changing them."""
        await self._worker.call(lambda scheduler: setattr(scheduler, "version", version))

    async def abort(self, prefix: str = "") -> int:
        """End the calls whose request id starts with `prefix` (all without one); returns how many."""
        return await self._worker.call(lambda scheduler: scheduler.abort(lambda rid: rid.startswith(prefix)))

    async def progress(self) -> dict[str, int]:
        """How many tokens each call that runs or waits has sampled so far, by request id."""
        return await self._worker.call(lambda scheduler: scheduler.progress())

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Sample nothing until `resume`. What runs is ended ("abort"), recomputed ("retract") or kept ("in_place")."""
        await self._worker.call(lambda scheduler: scheduler.pause(mode))

    async def resume(self) -> None:
        await self._worker.call(lambda scheduler: scheduler.resume())

    @property
    def _model(self) -> PreTrainedModel:
        return self._worker.scheduler.model

    def _checked(self, ids: TokenIds | Sequence[int]) -> tuple[int, ...]:
        checked = tuple(int(i) for i in ids)
        if not checked:
            raise EngineError("no token ids were given; a prompt has at least one")
        if min(checked) < 0 or max(checked) >= self.vocab_size:
            raise EngineError(
                f"token ids lie in [{min(checked)}, {max(checked)}], the vocabulary has {self.vocab_size}"
            )
        return checked

    def _scripted(self, prompt_ids: TokenIds, session_id: str, stop_ids: Sequence[int]) -> tuple[int, ...] | None:
        """The scripted reply's ids, a stop id at the end."""
        if self._script is None:
            return None
        turn = self._turns.get(session_id, 0)
        self._turns[session_id] = turn + 1
        tokenizer, ends = self._tokenizer, tuple(stop_ids) or self.eos_ids
        if tokenizer is None or not ends:
            raise EngineError("a script needs a tokenizer, and a stop id or a model with an end-of-sequence id")
        text = self._script(session_id, turn, str(tokenizer.decode(list(map(int, prompt_ids)))))
        return None if text is None else (*tokenizer.encode(text, add_special_tokens=False), ends[0])

    def _build(self) -> Scheduler:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        model = self._source if isinstance(self._source, PreTrainedModel) else self._load(self._source)
        return Scheduler(model, tokenizer=self._tokenizer, version=self._version, **self._limits)

    def _load(self, directory: str | Path) -> PreTrainedModel:
        try:
            if self._tokenizer is None:
                self._tokenizer = AutoTokenizer.from_pretrained(directory)
            with _no_progress_bar():
                return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, self._dtype))
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            raise EngineError(f"cannot load a causal LM in {self._dtype} from {directory}: {error}") from error


@contextmanager
def _no_progress_bar() -> Generator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _remaining(sampling: SamplingParams, done: int) -> SamplingParams:
    """What is left to sample once `done` tokens are there; a given seed moves on, so as not to repeat its stream."""
    if not done:
        return sampling
    return replace(
        sampling,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - done,
        seed=None if sampling.seed is None else sampling.seed + done,
    )


def _joined(parts: Sequence[Generation]) -> Generation:
    spans: list[VersionSpan] = []
    for span in (span for part in parts for span in part.versions):
        if spans and spans[-1].version == span.version:
            span = VersionSpan(span.version, spans.pop().count + span.count)
        spans.append(span)
    return Generation(
        token_ids(np.concatenate([part.output_ids for part in parts])),
        log_probs(np.concatenate([part.logprobs for part in parts])),
        parts[-1].finish_reason,
        tuple(spans),
        parts[-1].stop,
    )
