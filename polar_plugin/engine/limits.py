"""What an engine can take. Checked before anything is sent: one id out of range kills an SGLang server."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import EngineError
from ..records import TokenIds


@dataclass(frozen=True, slots=True)
class Limits:
    """None: not known, so the engine itself has to refuse."""

    context_length: int | None = None
    """Prompt and output tokens together."""
    vocab_size: int | None = None
    """Ids at or above it have no embedding."""

    def check(self, prompt_ids: TokenIds, max_tokens: int) -> None:
        """Raises EngineError where a call cannot be served; clamping is the caller's."""
        if not len(prompt_ids):
            raise EngineError("the prompt is empty: an engine needs at least one token to continue")
        if max_tokens < 1:
            raise EngineError(f"max_tokens is {max_tokens}: at least one token must be asked for")
        self._check_context(len(prompt_ids), max_tokens)
        self._check_vocabulary(prompt_ids)

    def _check_context(self, prompt_tokens: int, max_tokens: int) -> None:
        if self.context_length is not None and prompt_tokens + max_tokens > self.context_length:
            raise EngineError(
                f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} exceed the context of"
                f" {self.context_length} tokens: clamp max_tokens before the call"
            )

    def _check_vocabulary(self, prompt_ids: TokenIds) -> None:
        lowest, highest = int(prompt_ids.min()), int(prompt_ids.max())
        if lowest < 0:
            raise EngineError(f"token id {lowest} is negative")
        if self.vocab_size is not None and highest >= self.vocab_size:
            raise EngineError(
                f"token id {highest} is out of the vocabulary of {self.vocab_size} ids:"
                " tokenizer and model do not belong together"
            )
