"""Builders: a sealed session to traces."""

from __future__ import annotations

from typing import Protocol

from ..errors import ConfigError
from ..records import CompletionSession, Trace
from .chains import chains
from .traces import trace, untrained


class Builder(Protocol):
    """Built with `**BuilderSpec.config`. Pure, and linear in tokens."""

    def build(self, session: CompletionSession) -> tuple[Trace, ...]: ...


class PrefixMerging:
    """One trace for each chain of completions that extend one another token for token (arXiv 2605.24220, section 3).

    Every sampled token is trained in exactly one trace; a break starts a new trace and loses nothing.
    """

    def __init__(self, max_trace_tokens: int | None = None) -> None:
        """`max_trace_tokens` (prompt and response) cuts a trace to a causal prefix at a completion's end."""
        self._max_tokens = _limit(max_trace_tokens)

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        left_out = untrained(session)
        found = (trace(chain, left_out, self._max_tokens) for chain in chains(session))
        return tuple(one for one in found if one is not None)


class PerRequest:
    """One trace for each completion: its whole prompt again as context, so the trainer's cost is quadratic in turns."""

    def __init__(self, max_trace_tokens: int | None = None) -> None:
        self._max_tokens = _limit(max_trace_tokens)

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        left_out = untrained(session)
        found = (trace((completion,), left_out, self._max_tokens) for completion in session.completions)
        return tuple(one for one in found if one is not None)


def _limit(tokens: int | None) -> int | None:
    if tokens is not None and tokens < 2:
        raise ConfigError(f"builder.config.max_trace_tokens must be at least 2, got {tokens}")
    return tokens
