"""What a policy makes of a session, worked out once for building, checking or counting. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..records import BreakReason, Completion, CompletionSession
from .parents import Parents, rerendered_breaks
from .untrained import Policy, Untrained, untrained


@dataclass(frozen=True, slots=True)
class Plan:
    """Parents and what is not trained, by completion id."""

    policy: Policy
    parents: Parents
    left_out: Mapping[str, Untrained]
    breaks: Mapping[str, BreakReason]
    """Why completions continue no other: as recorded, or what rerendered prompts show."""

    @classmethod
    def of(cls, session: CompletionSession, policy: Policy | None) -> Plan:
        """Raises MergeError where two completions share an id, ConfigError where the policy lacks what it needs."""
        policy = Policy() if policy is None else policy
        parents = policy.parents(session)
        if policy.prompts == "rerendered":
            breaks = rerendered_breaks(session, parents, policy.ends(session))
        else:
            breaks = {one.id: one.break_reason for one in session.completions if one.break_reason is not None}
        return cls(policy, parents, untrained(session, policy, parents), breaks)

    def trained(self, completions: Sequence[Completion]) -> list[Completion]:
        """Those of them that are."""
        left_out = self.left_out
        return [one for one in completions if one.id not in left_out and one.generation.output_ids.size]
