"""A real model that says what was recorded: each token has the log-probability that the model gives it in that call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from polar_plugin.engine.base import EngineInfo
from polar_plugin.engine.scripted import Reply
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.records import FinishReason, Generation, SamplingParams, TokenIds


class Forced:
    """The embedded engine over `model`, which says a recording's replies instead of sampling its own."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._engine = TransformersEngine(
            model,
            tokenizer=tokenizer,
            script=lambda *_: self._reply().text,
            cache_tokens=100_000,
        )
        self._tokenizer = tokenizer
        self._script: Callable[[object], Reply] | None = None

    def saying(self, script: Callable[[object], Reply], _tokenizer: Any) -> Forced:
        """As a `replay.Voice`."""
        self._script = script
        return self

    async def __aenter__(self) -> Forced:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.__aexit__(*exc)

    async def probe(self) -> EngineInfo:
        return await self._engine.probe()

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        reply = self._reply()
        if reply.raises is not None:
            raise reply.raises
        if reply.finish_reason is FinishReason.LENGTH:
            sampling = replace(sampling, max_tokens=len(self._tokenizer.encode(reply.text, add_special_tokens=False)))
        return await self._engine.generate(
            prompt_ids, sampling, request_id=request_id, session_id=session_id, stop_ids=stop_ids
        )

    def _reply(self) -> Reply:
        assert self._script is not None, "no recording is being replayed"
        return self._script(None)
