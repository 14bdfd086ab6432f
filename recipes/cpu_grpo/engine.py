"""The embedded engine with draws that a seed repeats, and what `--ablate rerender` puts in its way."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polar_plugin.engine.base import Parsed, Renderer
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.records import (
    BreakReason,
    ChatRequest,
    Completion,
    Generation,
    Message,
    SamplingParams,
    TokenIds,
    Tool,
)


class SeededEngine(TransformersEngine):
    """What a session samples follows from the seed, its place in the run and the turn, not from its random id."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model, threads=1, max_batch=16)
        self._run_seed = seed
        self._calls: Counter[str] = Counter()
        self.spelt: Callable[[TokenIds], TokenIds] = lambda prompt: prompt
        """The ids that are sampled behind instead of a prompt's own."""

    async def generate(self, prompt_ids: TokenIds, sampling: SamplingParams, **told: Any) -> Generation:
        session_id: str = told["session_id"]
        place = f"{self._run_seed}/{session_id.rpartition('-')[0]}/{self._calls[session_id]}"
        self._calls[session_id] += 1
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4], "big")
        return await super().generate(self.spelt(prompt_ids), replace(sampling, seed=seed), **told)


class Respelling:
    """A `Renderer` that also renders in full whatever it extends, as a system does that sends messages, not tokens.

    What was sampled is put back into the trace, but sampling goes on behind the chat template's own spelling of it: the
    recorded log-probabilities are those of another context than the one that is trained.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._spelt: dict[bytes, TokenIds] = {}
        self.extended = 0
        """Prompts of later turns."""
        self.changed = 0
        """Those that the template spells in other ids."""
        self.name, self.vocab_size = renderer.name, renderer.vocab_size
        self.stop_ids, self.multimodal = renderer.stop_ids, renderer.multimodal

    def spelt(self, prompt: TokenIds) -> TokenIds:
        return self._spelt.pop(prompt.tobytes(), prompt)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        return self._renderer.render(messages, tools)

    def extend(
        self, parent: Completion, prompt_and_output: TokenIds, new: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | BreakReason:
        added = self._renderer.extend(parent, prompt_and_output, new, tools)
        if not isinstance(added, BreakReason):
            prompt = np.concatenate((prompt_and_output, added))
            anew = self._renderer.render([*parent.request.messages, parent.reply, *new], tools)
            self._spelt[prompt.tobytes()] = anew
            self.extended += 1
            self.changed += not np.array_equal(prompt, anew)
        return added

    def parse(self, output_ids: TokenIds, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        return self._renderer.parse(output_ids, request, prompt_ids)

    def decode(self, ids: TokenIds) -> str:
        return self._renderer.decode(ids)
