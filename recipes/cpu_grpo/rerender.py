"""The ablation `rerender`: each turn is sampled behind the history as the chat template spells it anew.

So do systems that send messages, not tokens. What was sampled is put back into the trace afterwards, so the recorded
log-probabilities of later turns are those of another context than the one that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Respelling:
    """A `Renderer` that also renders in full whatever it extends, and remembers it by the ids of the true prompt."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._spelt: dict[bytes, TokenIds] = {}
        self.extended = 0
        self.changed = 0
        """Prompts that a template would have spelt in other ids."""
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


class RespellingEngine(TransformersEngine):
    """Samples behind the other spelling of each prompt. `respelling` is set once there is a renderer."""

    respelling: Respelling | None = None

    async def generate(self, prompt_ids: TokenIds, sampling: SamplingParams, **told: Any) -> Generation:
        return await super().generate(self.respelling.spelt(prompt_ids) if self.respelling else prompt_ids, sampling, **told)
