"""Which sampled tokens are not trained, and why. Pure.

Nothing is left out without one of these reasons, and `traces.counts` adds up the tokens under each.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np

from ..errors import ConfigError
from ..records import Completion, CompletionSession, Role
from .chains import siblings
from .parents import Parents, parents_of

Choice = Literal["train", "drop"]
Overlong = Literal["clip", "split"]
Prompts = Literal["extended", "rerendered"]

_LARGEST = np.iinfo(np.int32).max  # token id
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
    """The harness got the answer, asked the same again, and got another answer."""
    OVER_LENGTH = "over_length"
    """It lies beyond `max_trace_tokens`, whole or (`overlong: split`) with its last tokens."""
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
    """Prompt and response; what lies beyond is not trained, and what is trained stands behind all that it was sampled
    behind: so a trace is always a causal prefix."""
    roles: Mapping[Role, Choice] = field(default_factory=lambda: ROLES)
    discarded: Choice = "drop"
    overlong: Overlong = "clip"
    """Where a trace that is too long ends: with the last completion that fits, or (split) within the next one."""
    prompts: Prompts = "extended"
    """Whether prompts hold what was sampled before, or what a server rendered of it; see `parents`."""
    end_of_turn: tuple[int, ...] = ()
    """For rerendered prompts: the ids that end an assistant's turn; by default the session's metadata tell them."""

    @classmethod
    def of(
        cls,
        max_trace_tokens: int | None = None,
        roles: Mapping[str, str] | None = None,
        discarded: str = "drop",
        overlong: str = "clip",
        prompts: str = "extended",
        end_of_turn: Sequence[int] | int = (),
    ) -> Policy:
        """From a builder's configuration; raises ConfigError with the path of what is wrong."""
        if max_trace_tokens is not None and (type(max_trace_tokens) is not int or max_trace_tokens < 2):
            raise ConfigError(
                f"builder.config.max_trace_tokens must be a whole number, at least 2, got {max_trace_tokens!r}"
            )
        if overlong != "clip" and overlong != "split":
            raise ConfigError(f'builder.config.overlong must be "clip" or "split", got {overlong!r}')
        if prompts != "extended" and prompts != "rerendered":
            raise ConfigError(f'builder.config.prompts must be "extended" or "rerendered", got {prompts!r}')
        if not isinstance(cast("object", roles), Mapping | None):
            raise ConfigError(f"builder.config.roles must be a mapping, as in {{side: train}}, got {roles!r}")
        chosen = dict(ROLES)
        for name, choice in (roles or {}).items():
            chosen[_role(name)] = _choice(choice, f"roles.{name}")
        ends = _ids(end_of_turn, "builder.config.end_of_turn")
        return cls(max_trace_tokens, chosen, _choice(discarded, "discarded"), overlong, prompts, ends)

    def parents(self, session: CompletionSession) -> Parents:
        """As `parents_of`; what is told of rerendered prompts is not relied on."""
        return parents_of(session, told=self.prompts == "extended")

    def ends(self, session: CompletionSession) -> tuple[int, ...]:
        """The ids that end a turn. Raises ConfigError where neither the configuration nor the session tells any."""
        ends = self.end_of_turn or _ids(session.metadata.get("end_of_turn") or (), "metadata.end_of_turn")
        if not ends:
            raise ConfigError(
                "builder.config.end_of_turn is not set: with `prompts: rerendered` it must be the token ids that end"
                " an assistant's turn in the chat template (that of <|im_end|>, say), unless the session's metadata"
                f" have `end_of_turn`; those of session {session.session_id} do not"
            )
        return ends

    def trained_output(self, completion: Completion) -> int:
        """How many of a completion's sampled tokens lie within `max_trace_tokens`, in tokens from its first."""
        sampled = len(completion.generation.output_ids)
        if self.max_trace_tokens is None or completion.length <= self.max_trace_tokens:
            return sampled
        return max(0, self.max_trace_tokens - len(completion.prompt_ids)) if self.overlong == "split" else 0


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError as error:
        raise ConfigError(f"builder.config.roles: unknown role {name!r}: use one of {', '.join(Role)}") from error


def _ids(value: object, path: str) -> tuple[int, ...]:
    ids: list[object] = list(cast("Iterable[object]", value)) if isinstance(value, Iterable) else [value]
    known = (isinstance(one, int | np.integer) and not isinstance(one, bool) and 0 <= one <= _LARGEST for one in ids)
    if not all(known):
        raise ConfigError(f"{path} must be a token id or a list of token ids, got {value!r}")
    return tuple(cast("list[int]", ids))


def _choice(value: str, path: str) -> Choice:
    if value == "train" or value == "drop":
        return value
    raise ConfigError(f'builder.config.{path} must be "train" or "drop", got {value!r}')


def untrained(
    session: CompletionSession, policy: Policy | None = None, parents: Parents | None = None
) -> Mapping[str, Untrained]:
    """By completion id, the completions whose output is not trained, and why.

    `parents` are those of `Policy.parents`, for callers that have them already. Of a completion that is split at
    `max_trace_tokens` the first tokens are trained, so it is not among them: see `Policy.trained_output`.
    """
    policy = Policy() if policy is None else policy
    parents = policy.parents(session) if parents is None else parents
    extended = {parent.id for parent in parents.values() if parent is not None}
    left_out = _lost(session, parents, extended, policy.discarded)
    dropped = [role for role, choice in policy.roles.items() if choice == "drop"]
    limit = policy.max_trace_tokens
    for completion in session.completions:
        if completion.request.role in dropped:
            left_out[completion.id] = Untrained(completion.request.role.value)
        elif not completion.prompt_ids.size:
            left_out[completion.id] = Untrained.NO_PROMPT
        elif limit is not None and completion.length > limit and not policy.trained_output(completion):
            left_out.setdefault(completion.id, Untrained.OVER_LENGTH)
    return left_out


def _lost(session: CompletionSession, parents: Parents, extended: set[str], discarded: Choice) -> dict[str, Untrained]:
    """Leaves that the harness did not get, or did not accept."""
    lost = {
        completion.id: Untrained.UNDELIVERED
        for completion in session.completions
        if completion.id not in extended and not session.delivered(completion)
    }
    unreached = frozenset(lost)
    for answers in _same_prompts(session.completions, parents):
        for position, answer in enumerate(answers):
            others = [*answers[:position], *answers[position + 1 :]]
            if answer.id in lost:
                if answer is not answers[-1] or any(other.id not in unreached for other in others):
                    lost[answer.id] = Untrained.SUPERSEDED
            elif discarded == "drop" and answer.id not in extended and _asked_again(answer, others, unreached):
                lost[answer.id] = Untrained.DISCARDED
    return lost


def _asked_again(answer: Completion, others: Sequence[Completion], unreached: Collection[str]) -> bool:
    """Whether the harness had the answer when it asked again and got another; not so for parallel draws, or threads."""
    return any(
        other.id not in unreached and other.started >= answer.ended and other.request.thread == answer.request.thread
        for other in others
    )


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
