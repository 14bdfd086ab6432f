"""Builders: a sealed session to traces."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from ..records import CompletionSession, Trace
from .chains import chains, parents_of
from .traces import trace
from .untrained import Policy, untrained


class Builder(Protocol):
    """Built with `**BuilderSpec.config`. Pure, and linear in tokens.

    Its attribute `policy` (`untrained.Policy`), where it has one, tells `check` and `counts` what it leaves out on
    purpose; what nothing explains is an error where traces are verified, and is counted everywhere.
    """

    def build(self, session: CompletionSession) -> Sequence[Trace] | Awaitable[Sequence[Trace]]:
        """May be `async`: the attempt awaits it, within the build's budget."""
        ...


class PrefixMerging:
    """One trace for each chain of completions that extend one another token for token (arXiv 2605.24220, section 3).

    Every sampled token is trained in exactly one trace, or left out for a counted reason; a break starts a new trace
    and loses nothing.
    """

    def __init__(
        self,
        max_trace_tokens: int | None = None,
        roles: Mapping[str, str] | None = None,
        discarded: str = "drop",
    ) -> None:
        """`max_trace_tokens` (prompt and response) cuts a trace to a causal prefix at a completion's end.

        `roles` says "train" or "drop" for a role ("main", "sub_agent", "side", "compaction"; by default "side" alone is
        dropped), `discarded` for an answer that the harness got but asked for again. Raises ConfigError.
        """
        self.policy = Policy.of(max_trace_tokens, roles, discarded)

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        """Raises MergeError where two completions share an id."""
        parents = parents_of(session)
        left_out = untrained(session, self.policy, parents)
        found = (trace(chain, left_out) for chain in chains(session, parents, left_out))
        return tuple(one for one in found if one is not None)


class PerRequest:
    """One trace for each completion: its whole prompt again as context, so the trainer's cost is quadratic in turns."""

    def __init__(
        self,
        max_trace_tokens: int | None = None,
        roles: Mapping[str, str] | None = None,
        discarded: str = "drop",
    ) -> None:
        """As for `PrefixMerging`."""
        self.policy = Policy.of(max_trace_tokens, roles, discarded)

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        """Raises MergeError where two completions share an id."""
        left_out = untrained(session, self.policy)
        found = (trace((completion,), left_out) for completion in session.completions)
        return tuple(one for one in found if one is not None)
