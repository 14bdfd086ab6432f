"""Sessions made by hand: each call is `say(prompt ids, output ids)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polar_plugin.engine.buffer import TokenBuffer
from polar_plugin.records import (
    BreakReason,
    ChatRequest,
    Completion,
    CompletionSession,
    Delivery,
    FinishReason,
    Generation,
    Message,
    Role,
    SamplingParams,
    TokenIds,
    VersionSpan,
    log_probs,
    token_ids,
)


@dataclass
class Ledger:
    """`parents=False` leaves the parent out, as recordings of other systems do.

    Prompts share a buffer with their parent's wherever the tokens allow it, as those of the engine's turns do.
    """

    parents: bool = True
    completions: list[Completion] = field(default_factory=list[Completion])
    delivery: dict[str, Delivery] = field(default_factory=dict[str, Delivery])
    buffers: dict[str, TokenBuffer] = field(default_factory=dict[str, TokenBuffer])

    def say(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        after: str | None = None,
        delivered: bool = True,
        version: str = "",
        reply: Message | None = None,
        request: ChatRequest | None = None,
        role: Role = Role.MAIN,
        at: float = 0.0,
        break_reason: BreakReason | None = None,
    ) -> str:
        """Record a call that takes a second from `at`; `after` names its parent. Returns its id."""
        name = f"c{len(self.completions)}"
        generation = Generation(
            token_ids(np.asarray(output, np.int32)),
            log_probs([-(position + 1) / 8 for position in range(len(output))]),
            FinishReason.STOP,
            (VersionSpan(version, len(output)),) if version and output else (),
        )
        completion = Completion(
            name, request or ChatRequest((), role=role), self._shared(list(prompt), after, name, list(output)),
            generation, reply or Message("assistant"), SamplingParams(), at, at + 1, after if self.parents else None,
            break_reason,
        )  # fmt: skip
        self.completions.append(completion)
        self.delivery[name] = Delivery.DELIVERED if delivered else Delivery.UNDELIVERED
        return name

    def _shared(self, prompt: list[int], after: str | None, name: str, output: list[int]) -> TokenIds:
        parent = next((one for one in self.completions if one.id == after), None)
        before = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist()] if parent else []
        if parent and prompt[: len(before)] == before:
            buffer = self.buffers[parent.id].extended(len(before), token_ids(prompt[len(before) :]))
        elif parent and before[: len(prompt)] == prompt:
            buffer = self.buffers[parent.id]
        else:
            buffer = TokenBuffer(token_ids(prompt))
        shared = buffer.view(len(prompt))
        self.buffers[name] = buffer.extended(len(prompt), token_ids(output))
        return shared

    def sealed(self) -> CompletionSession:
        return CompletionSession("s", tuple(self.completions), dict(self.delivery))
