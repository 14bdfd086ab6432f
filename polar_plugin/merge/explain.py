"""What became of each completion of a session, and why each trace starts where it does. Pure.

`explain` makes an `Explanation`; `explain_text`, `explain_html` and `as_json` show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.meaning import Meaning
from ..records import BreakReason, Completion, CompletionSession, Delivery, JSONObject, TokenIds, Trace
from .chains import chains
from .changes import Change, change, learned
from .check import Decode
from .nearest import Nearest, holder
from .parents import Parents
from .plan import Plan
from .reasons import ASKED_AGAIN, BRANCH, REASONS, TOKENS_DIFFER, UNRECORDED
from .traces import counts
from .untrained import Policy

AROUND = 24
"""Tokens shown on either side of a difference."""
VERSION = 1
"""Of the JSON form. Keys may be added to a version; none is taken away or changes its meaning."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt leaves the tokens of the completion that it nearly extends."""

    position: int
    """Index of the first differing token; both have the same tokens before it."""
    before: tuple[int, ...]
    """The last tokens that both have."""
    old: tuple[int, ...]
    """From `position` on, in the earlier completion's prompt ‖ output; empty where it ends."""
    new: tuple[int, ...]
    """From `position` on, in the prompt."""
    before_text: str | None = None
    """The last three as text; None without a tokenizer."""
    old_text: str | None = None
    new_text: str | None = None


@dataclass(frozen=True, slots=True)
class Break:
    """Why a completion starts a trace of its own, and what that costs."""

    reason: str
    """A `BreakReason`, or another key of `reasons.REASONS`."""
    cause: str
    remedy: str
    near: str | None = None
    """Id of the completion that it nearly extends: the longest common token prefix. None where there is none."""
    common: int = 0
    """Tokens that both begin with: the trainer reads them once more, as context."""
    difference: Difference | None = None
    """None where the prompt ends before the two differ."""
    change: Change | None = None
    """Who changed what; None where there is no `near`."""
    left_behind: int = 0
    """Sampled tokens of that conversation that this one goes on without; 0 where it is another conversation."""
    lost: int = 0
    """Those of them that no trace trains."""


@dataclass(frozen=True, slots=True)
class Call:
    """One completion, in its place in the tree."""

    number: int
    """From 1, in the order recorded."""
    id: str
    parent: str | None
    """The completion whose tokens its prompt extends."""
    depth: int
    """How many branches it stands below: 0 along a conversation and its first continuation."""
    role: str
    thread: str
    api: str
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens behind the parent's."""
    output_tokens: int
    finish_reason: str
    delivery: str
    trained_tokens: int
    """Fewer than were sampled where a trace ends within the answer."""
    trace: int | None
    """Index of the trace that trains it."""
    untrained: str | None
    """Why none does; "empty" where nothing was sampled."""
    start: Break | None
    """Set where it continues no trace."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A session, explained."""

    session_id: str
    task_id: str
    calls: tuple[Call, ...]
    """In the order of the tree: branches behind the call that they continue, then the conversation goes on."""
    traces: int
    delivered_fraction: float
    """Of the sampled tokens, those that the harness got; 1.0 where nothing was sampled."""
    trained_fraction: float
    counts: Mapping[str, int]
    torn: bool = False
    """Whether a crash cut the recording short, so that what its last line began to say is not here."""

    @property
    def breaks(self) -> tuple[Call, ...]:
        """The calls that start a trace, the first one aside."""
        return tuple(call for call in self.calls if call.start and call.start.near)


def explain(
    session: CompletionSession,
    traces: Sequence[Trace],
    policy: Policy | None = None,
    *,
    decode: Decode | None = None,
    torn: bool = False,
) -> Explanation:
    """Explain the `traces` that a builder with `policy` made of `session`; with `decode` tokens are shown as text.

    `torn` is told as it is: whether the session was read from a recording that a crash cut short.

    Costs what the breaks have in common with what they break from, beside one pass over the session.
    """
    plan = Plan.of(session, policy)
    parents = plan.parents
    told = counts(session, traces, policy)
    trace_of = {name: index for index, trace in enumerate(traces) for name in trace.completion_ids}
    found = chains(session, parents, plan.left_out)
    heads = {chain[0].id for chain in found}
    breaks = _Breaks(session, plan, trace_of, decode).of(heads)
    depths = _depths(session, parents, heads)
    numbers = {completion.id: number for number, completion in enumerate(session.completions, 1)}
    calls = tuple(
        _call(one, numbers[one.id], depths[one.id], plan, session, trace_of, breaks.get(one.id))
        for one in _in_tree_order(session, parents, heads)
    )
    sampled = told["sampled_tokens"]
    return Explanation(
        session.session_id,
        session.task_id,
        calls,
        len(traces),
        told["delivered_tokens"] / sampled if sampled else 1.0,
        told["trained_tokens"] / sampled if sampled else 1.0,
        told,
        torn,
    )


def as_json(explanation: Explanation) -> JSONObject:
    """The explanation as JSON: the fields of the records above under their own names, and the version of this form."""
    return {"version": VERSION, **dataclasses.asdict(explanation)}


def _call(
    completion: Completion,
    number: int,
    depth: int,
    plan: Plan,
    session: CompletionSession,
    trace_of: Mapping[str, int],
    start: Break | None,
) -> Call:
    parent, request, trace = plan.parents[completion.id], completion.request, trace_of.get(completion.id)
    why = plan.left_out.get(completion.id, "unexplained") if len(completion.generation.output_ids) else "empty"
    return Call(
        number=number,
        id=completion.id,
        parent=parent.id if parent else None,
        depth=depth,
        role=completion.role.value,
        thread=request.thread,
        api=request.api,
        prompt_tokens=len(completion.prompt_ids),
        new_tokens=len(completion.prompt_ids) - (parent.length if parent else 0),
        output_tokens=len(completion.generation.output_ids),
        finish_reason=completion.generation.finish_reason.value,
        delivery=session.delivery.get(completion.id, Delivery.DELIVERED).value,
        trained_tokens=0 if trace is None else plan.policy.trained_output(completion),
        trace=trace,
        untrained=None if trace is not None else str(why),
        start=start,
    )


# --- the tree --------------------------------------------------------------------------------------------------------


def _depths(session: CompletionSession, parents: Parents, heads: set[str]) -> dict[str, int]:
    depths: dict[str, int] = {}
    for completion in session.completions:
        parent = parents[completion.id]
        depths[completion.id] = depths[parent.id] + (completion.id in heads) if parent else 0
    return depths


def _in_tree_order(session: CompletionSession, parents: Parents, heads: set[str]) -> Iterator[Completion]:
    roots: list[Completion] = []
    below: dict[str, list[Completion]] = {}
    for completion in session.completions:
        parent = parents[completion.id]
        (below.setdefault(parent.id, []) if parent else roots).append(completion)
    stack = roots[::-1]
    while stack:
        completion = stack.pop()
        yield completion
        last_first = reversed(below.get(completion.id, ()))
        stack += sorted(last_first, key=lambda one: one.id in heads)  # branches on top: they come before what goes on


# --- breaks ----------------------------------------------------------------------------------------------------------


class _Breaks:
    """Explains the calls of one session that start a trace."""

    def __init__(
        self, session: CompletionSession, plan: Plan, trained: Mapping[str, int], decode: Decode | None
    ) -> None:
        self._session = session
        self._parents = plan.parents
        self._told = plan.breaks
        self._trained = trained
        self._decode = decode
        self._meaning: Meaning | None = None

    def of(self, heads: set[str]) -> dict[str, Break]:
        """By completion id, for each of `heads`."""
        nearest, breaks = Nearest(), dict[str, Break]()
        for completion in self._session.completions:
            if completion.id in heads:
                breaks[completion.id] = self._break(completion, nearest.find(completion.prompt_ids))
            nearest.add(completion, self._parents[completion.id])
        return breaks

    def _break(self, completion: Completion, found: tuple[Completion, int] | None) -> Break:
        if found is None:
            return _reasoned(BreakReason.FIRST_CALL)
        tip, common = found
        near, differs = self._differs(completion, tip, common)
        reason = self._reason(completion, tip, common)
        behind = [] if reason == BreakReason.NEW_THREAD else list(self._behind(tip, common))
        return dataclasses.replace(
            _reasoned(reason),
            near=near.id,
            common=common,
            difference=self._difference(near, completion.prompt_ids, common),
            change=differs,
            left_behind=sum(tokens for _, tokens in behind),
            lost=sum(tokens for one, tokens in behind if one.id not in self._trained),
        )

    def _reason(self, completion: Completion, tip: Completion, common: int) -> str:
        answered = (one for one in (tip, *self._before(tip)) if len(one.prompt_ids) == len(completion.prompt_ids))
        if common == len(completion.prompt_ids) and any(answered):
            return ASKED_AGAIN
        if self._parents[completion.id]:
            return BRANCH
        return self._told.get(completion.id) or (TOKENS_DIFFER if completion.parent else UNRECORDED)

    def _differs(self, completion: Completion, tip: Completion, common: int) -> tuple[Completion, Change]:
        """What it nearly extends of the conversation that ends with `tip`, and what was changed."""
        if self._meaning is None:
            self._meaning = learned(self._session.completions)
        ancestors = () if self._parents[completion.id] else self._before(tip)
        found, whole = change(tip, completion, self._meaning, ancestors)
        return whole or holder(tip, common, self._parents), found

    def _before(self, completion: Completion) -> Iterator[Completion]:
        parent = self._parents[completion.id]
        while parent:
            yield parent
            parent = self._parents[parent.id]

    def _behind(self, tip: Completion, position: int) -> Iterator[tuple[Completion, int]]:
        """The completions of a conversation that sampled something behind `position`, and how many tokens there."""
        for one in (tip, *self._before(tip)):
            if one.length <= position:
                return
            yield one, one.length - max(position, len(one.prompt_ids))

    def _difference(self, near: Completion, prompt: TokenIds, position: int) -> Difference | None:
        if position == len(prompt):
            return None
        before = prompt[max(0, position - AROUND) : position]
        old, new = _slice(near, position, position + AROUND), prompt[position : position + AROUND]
        texts = [self._decode(ids) for ids in (before, old, new)] if self._decode else [None] * 3
        return Difference(position, tuple(before.tolist()), tuple(old.tolist()), tuple(new.tolist()), *texts)


def _slice(completion: Completion, start: int, stop: int) -> TokenIds:
    """Tokens of prompt ‖ output, without a copy of the whole."""
    size = len(completion.prompt_ids)
    output = completion.generation.output_ids[max(0, start - size) : max(0, stop - size)]
    return np.concatenate((completion.prompt_ids[start:stop], output))


def _reasoned(reason: str) -> Break:
    told = REASONS[reason]
    return Break(reason, told.cause, told.remedy)
