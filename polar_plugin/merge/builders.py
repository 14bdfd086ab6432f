"""Builders: a sealed session to traces."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

from ..records import CompletionSession, Trace
from .chains import chains
from .plan import Plan
from .traces import trace
from .untrained import Policy


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
        overlong: str = "clip",
        prompts: str = "extended",
        end_of_turn: Sequence[int] | int = (),
    ) -> None:
        """What is wrong raises ConfigError with its path.

        max_trace_tokens: prompt and response. What lies beyond is not trained: no shorter trace has its whole context.
        overlong: such a trace ends with the last completion that fits ("clip"), or within the next one ("split"), whose
            first tokens are trained too.
        roles: "train" or "drop" for "main", "sub_agent", "side" and "compaction"; by default "side" alone is dropped.
        discarded: "train" or "drop" for an answer that the harness got but asked for again.
        prompts: "extended" where prompts hold the sampled ids, as this library's own do; "rerendered" for recordings of
            servers that render the history anew for each call. Both train a token only behind what it was sampled
            behind; with "rerendered" parents are found by tokens, whatever the recording tells, and each turn that came
            back changed splits the trace and is counted under `breaks_<reason>` (`parents.rerendered_breaks`).
        end_of_turn: for "rerendered", the id or ids that end an assistant's turn in the server's chat template; by
            default `end_of_turn` of the session's metadata. It is never guessed: without either, `build` raises
            ConfigError.
        """
        self.policy = Policy.of(max_trace_tokens, roles, discarded, overlong, prompts, end_of_turn)

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        """Raises MergeError where two completions share an id."""
        plan = Plan.of(session, self.policy)
        found = (trace(chain, plan) for chain in chains(session, plan.parents, plan.left_out))
        return tuple(one for one in found if one is not None)


class PerRequest:
    """One trace for each completion: its whole prompt again as context, so the trainer's cost is quadratic in turns."""

    def __init__(
        self,
        max_trace_tokens: int | None = None,
        roles: Mapping[str, str] | None = None,
        discarded: str = "drop",
        overlong: str = "clip",
    ) -> None:
        """As for `PrefixMerging`."""
        self.policy = Policy.of(max_trace_tokens, roles, discarded, overlong)

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        """Raises MergeError where two completions share an id."""
        plan = Plan.of(session, self.policy)
        found = (trace((completion,), plan) for completion in session.completions)
        return tuple(one for one in found if one is not None)
