"""Which sampled tokens are not trained, and why. Pure.

Nothing is left out without one of these reasons, and `traces.counts` adds up the tokens under each.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError
from ..records import Completion, CompletionSession, Role
from .chains import Parents, parents_of, siblings

Choice = Literal["train", "drop"]

ROLES: Mapping[Role, Choice] = {
    Role.MAIN: "train",
    Role.SUB_AGENT: "train",
    Role.SIDE: "drop",
    Role.COMPACTION: "train",
}


class Untrained(enum.StrEnum):
    """Why a sampled token is in no trace's loss."""

    UNDELIVERED = "undelivered"
    """The harness never got the answer and nothing extends it."""
    SUPERSEDED = "superseded"
    """The harness never got the answer, and the same prompt was answered again."""
    DISCARDED = "discarded"
    """The harness got the answer, asked the same again, and went on from another answer."""
    OVER_LENGTH = "over_length"
    """It ends beyond `max_trace_tokens`."""
    NO_PROMPT = "no_prompt"
    """Its prompt is empty, so that nothing predicts its first token."""
    MAIN = "main"
    SUB_AGENT = "sub_agent"
    SIDE = "side"
    COMPACTION = "compaction"
    """The last four: calls of this role are not trained (`Policy.roles`)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a builder trains. `check` and `counts` take the builder's own, to tell its choices from a loss."""

    max_trace_tokens: int | None = None
    """Prompt and response; a trace ends with the last completion that fits: a causal prefix."""
    roles: Mapping[Role, Choice] = field(default_factory=lambda: ROLES)
    discarded: Choice = "drop"

    @classmethod
    def of(
        cls,
        max_trace_tokens: int | None = None,
        roles: Mapping[str, str] | None = None,
        discarded: str = "drop",
    ) -> Policy:
        """From a builder's configuration; raises ConfigError with the path of what is wrong."""
        if max_trace_tokens is not None and max_trace_tokens < 2:
            raise ConfigError(f"builder.config.max_trace_tokens must be at least 2, got {max_trace_tokens}")
        chosen = dict(ROLES)
        for name, choice in (roles or {}).items():
            chosen[_role(name)] = _choice(choice, f"roles.{name}")
        return cls(max_trace_tokens, chosen, _choice(discarded, "discarded"))


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError as error:
        raise ConfigError(f"builder.config.roles: unknown role {name!r}: use one of {', '.join(Role)}") from error


def _choice(value: str, path: str) -> Choice:
    if value == "train" or value == "drop":
        return value
    raise ConfigError(f'builder.config.{path} must be "train" or "drop", got {value!r}')


def untrained(
    session: CompletionSession, policy: Policy | None = None, parents: Parents | None = None
) -> Mapping[str, Untrained]:
    """By completion id, the completions whose output is not trained, and why.

    `parents` are those of `chains.parents_of`, for callers that have them already.
    """
    policy = Policy() if policy is None else policy
    parents = parents_of(session) if parents is None else parents
    extended = {parent.id for parent in parents.values() if parent}
    left_out = _lost(session, parents, extended, policy.discarded)
    for completion in session.completions:
        if policy.roles.get(completion.role, "train") == "drop":
            left_out[completion.id] = Untrained(completion.role.value)
        elif not len(completion.prompt_ids):
            left_out[completion.id] = Untrained.NO_PROMPT
        elif policy.max_trace_tokens is not None and completion.length > policy.max_trace_tokens:
            left_out.setdefault(completion.id, Untrained.OVER_LENGTH)
    return left_out


def _lost(session: CompletionSession, parents: Parents, extended: set[str], discarded: Choice) -> dict[str, Untrained]:
    """Leaves that the harness did not get, or did not go on with."""
    lost = {
        completion.id: Untrained.UNDELIVERED
        for completion in session.completions
        if completion.id not in extended and not session.delivered(completion)
    }
    reached = {completion.id for completion in session.completions} - lost.keys()
    for answers in _same_prompts(session.completions, parents):
        for position, answer in enumerate(answers):
            others = [*answers[:position], *answers[position + 1 :]]
            if answer.id in lost:
                if answer is not answers[-1] or any(other.id in reached for other in others):
                    lost[answer.id] = Untrained.SUPERSEDED
            elif discarded == "drop" and answer.id not in extended and _asked_again(answer, others, extended):
                lost[answer.id] = Untrained.DISCARDED
    return lost


def _asked_again(answer: Completion, others: Sequence[Completion], extended: set[str]) -> bool:
    """Whether the harness had the answer when it asked again, and went on from the other; not so for parallel draws."""
    return any(other.id in extended and other.started >= answer.ended for other in others)


def _same_prompts(completions: Sequence[Completion], parents: Parents) -> list[list[Completion]]:
    """The answers to each prompt that was answered more than once, in the order recorded."""
    answers: list[list[Completion]] = []
    for family in siblings(completions, parents).values():
        parent = parents[family[0].id]
        begin = parent.length if parent else 0
        by_prompt: dict[int, list[Completion]] = {}
        for completion in family:
            by_prompt.setdefault(len(completion.prompt_ids), []).append(completion)
        for group in by_prompt.values():
            answers.extend(_equal_from(begin, group))
    return answers


def _equal_from(begin: int, group: Sequence[Completion]) -> list[list[Completion]]:
    """Those of a group whose prompts are equal from token `begin` on, where there are several."""
    if len(group) == 1:
        return []
    equal: dict[bytes, list[Completion]] = {}
    for completion in group:
        equal.setdefault(completion.prompt_ids[begin:].tobytes(), []).append(completion)
    return [answers for answers in equal.values() if len(answers) > 1]
