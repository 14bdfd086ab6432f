"""Sessions made by hand: each call is `say(prompt ids, output ids)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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
    VersionSpan,
    log_probs,
    token_ids,
)


@dataclass
class Ledger:
    """`parents=False` leaves the parent out, as recordings of other systems do."""

    parents: bool = True
    completions: list[Completion] = field(default_factory=list[Completion])
    delivery: dict[str, Delivery] = field(default_factory=dict[str, Delivery])

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
            name, request or ChatRequest((), role=role), token_ids(prompt), generation, reply or Message("assistant"),
            SamplingParams(), at, at + 1, after if self.parents else None, break_reason,
        )  # fmt: skip
        self.completions.append(completion)
        self.delivery[name] = Delivery.DELIVERED if delivered else Delivery.UNDELIVERED
        return name

    def sealed(self) -> CompletionSession:
        return CompletionSession("s", tuple(self.completions), dict(self.delivery))
