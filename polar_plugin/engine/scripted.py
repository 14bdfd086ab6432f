"""An engine for tests: replies from a script, tokenised, with made-up but reproducible log-probabilities."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import numpy as np

from ..errors import EngineError
from ..records import (
    Experts,
    FinishReason,
    Generation,
    LogProbs,
    Nucleus,
    Routing,
    SamplingParams,
    TokenIds,
    VersionSpan,
    log_probs,
    token_ids,
)
from .base import EngineInfo


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that the engine saw."""

    session_id: str
    request_id: str
    prompt_ids: TokenIds
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    index: int
    """How many calls this session made before."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted turn."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    """The very ids to return instead of those of `text` and a stop id."""
    finish_reason: FinishReason = FinishReason.STOP
    """LENGTH: as cut there; no stop id is added."""
    stop: str | None = None
    """The stop string that ends `text`; no stop id is added."""
    raises: Exception | None = None
    until: anyio.Event | None = None
    """Hang until this is set."""


Script = Callable[[Call], "str | Reply"]
Delay = Callable[[Call], Awaitable[None]]


class Encoder(Protocol):
    """Text to ids without special tokens of the tokenizer's own; special tokens in the text are recognised."""

    def __call__(self, text: str, /) -> Sequence[int]: ...


class ScriptedEngine:
    """An `Engine` that answers from `replies`: one list for all calls in order, or a function of the `Call`.

    `encode` is a function, or a Hugging Face tokenizer. `delay` is awaited before each answer. A reply longer than
    `max_tokens` is cut, with LENGTH. What happened is in `calls`, `aborted` (request ids of cancelled calls) and
    `active`. A list that runs out is an EngineError.
    """

    def __init__(
        self,
        replies: Sequence[str | Reply] | Script,
        encode: Encoder | Any,
        *,
        context_length: int = 32768,
        version: str = "0",
        delay: Delay | None = None,
        model: str = "scripted",
        replay: Sequence[str] = (),
    ) -> None:
        self._replies = replies
        self._encode: Encoder = _encoder(encode)
        self._delay = delay
        self._model = model
        self.context_length = context_length
        self.version = version
        """Of the weights; assign to it as a trainer would update them."""
        self.replay = tuple(replay)
        """As for an SGLang engine; experts and choices are `made_up_experts` and `made_up_nucleus`."""
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.active: set[str] = set()

    async def __aenter__(self) -> ScriptedEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def probe(self) -> EngineInfo:
        return EngineInfo(self._model, self.context_length, self.version)

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
        replay_from: int = 0,
    ) -> Generation:
        index = sum(call.session_id == session_id for call in self.calls)
        call = Call(session_id, request_id, prompt_ids, sampling, tuple(stop_ids), index)
        self.calls.append(call)
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise EngineError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.context_length}")
        reply = self._reply(call, len(self.calls) - 1)
        await self._wait(call, reply)
        if reply.raises is not None:
            raise reply.raises
        generation = self._generation(reply, call, room)
        if "routed_experts" in self.replay:
            ids = np.concatenate((prompt_ids, generation.output_ids))
            generation = replace(generation, routing=Routing(made_up_experts(ids)[replay_from:], replay_from))
        if "top_p" in self.replay:
            generation = replace(generation, nucleus=made_up_nucleus(generation.output_ids))
        return generation

    def _reply(self, call: Call, position: int) -> Reply:
        if callable(self._replies):
            reply = self._replies(call)
        elif position < len(self._replies):
            reply = self._replies[position]
        else:
            raise EngineError(f"the script has {len(self._replies)} replies, and this is call number {position + 1}")
        return Reply(reply) if isinstance(reply, str) else reply

    async def _wait(self, call: Call, reply: Reply) -> None:
        self.active.add(call.request_id)
        try:
            await anyio.lowlevel.checkpoint()
            if self._delay is not None:
                await self._delay(call)
            if reply.until is not None:
                await reply.until.wait()
        except anyio.get_cancelled_exc_class():
            self.aborted.append(call.request_id)
            raise
        finally:
            self.active.discard(call.request_id)

    def _generation(self, reply: Reply, call: Call, room: int) -> Generation:
        ids = self._encode(reply.text) if reply.ids is None else reply.ids
        if reply.ids is None and reply.stop is None and reply.finish_reason is FinishReason.STOP:
            ids = (*ids, *call.stop_ids[:1])
        limit = room if call.sampling.max_tokens is None else min(room, call.sampling.max_tokens)
        reason = FinishReason.LENGTH if len(ids) > limit else reply.finish_reason
        output = token_ids(np.asarray(ids[:limit], np.int32))
        versions = (VersionSpan(self.version, len(output)),) if len(output) else ()
        return Generation(output, made_up_logprobs(call.prompt_ids, output), reason, versions, reply.stop)


def made_up_logprobs(prompt_ids: TokenIds, output_ids: TokenIds) -> LogProbs:
    """float32 [n] in (-8, 0): a function of each token and of everything before it, so that a shift by one shows."""
    state = zlib.crc32(np.ascontiguousarray(prompt_ids, np.int32).tobytes())
    values: list[float] = []
    for token in output_ids:
        state = zlib.crc32(int(token).to_bytes(4, "little"), state)
        values.append(-(state % 7999 + 1) / 1000)
    return log_probs(values)


def made_up_experts(ids: TokenIds) -> Experts:
    """int16 [len(ids) - 1, 4]: a function of each token and its position."""
    rows = np.arange(len(ids) - 1)
    return np.stack([(ids[:-1] + rows * step) % 128 for step in (1, 3, 5, 7)], axis=1).astype(np.int16)


def made_up_nucleus(output_ids: TokenIds) -> Nucleus:
    """One to three choices a token, itself among them."""
    counts = 1 + output_ids % 3
    offsets = np.concatenate(([0], np.cumsum(counts)))
    ids = [token + more for token in output_ids.tolist() for more in range(1 + token % 3)]
    return Nucleus(token_ids(np.array(ids, np.int32)), token_ids(offsets))


def _encoder(encode: Any) -> Encoder:
    if hasattr(encode, "encode"):
        return lambda text, /: encode.encode(text, add_special_tokens=False)
    return encode
