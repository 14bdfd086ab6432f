"""Random sessions against an oracle that is slow and obviously right: lists of tokens, every pair compared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_plugin.errors import MergeError
from polar_plugin.merge.builders import PerRequest, PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.merge.untrained import Policy
from polar_plugin.records import Completion, Role, Trace

from .build import Ledger
from .test_check import CORRUPTIONS


@st.composite
def forests(draw: st.DrawFn) -> Ledger:
    """Random sessions: each call starts anew, extends any earlier call, repeats its prompt, or tells a parent that it
    does not extend."""
    ledger = Ledger(draw(st.booleans()))
    token = st.integers(0, 3)  # few, so that prefixes meet by accident too
    for number in range(draw(st.integers(1, 12))):
        at, role = number + draw(st.sampled_from([0.0, 0.5])), draw(st.sampled_from([Role.MAIN, Role.MAIN, *Role]))
        output, delivered = draw(st.lists(token, max_size=4)), draw(st.booleans())
        version = draw(st.sampled_from(["", "1", "2"]))
        earlier = draw(st.none() | st.sampled_from(ledger.completions)) if ledger.completions else None
        kind = draw(st.sampled_from(["extend", "extend", "repeat", "shorten", "refute"])) if earlier else "anew"
        parent = earlier.id if earlier else None
        if earlier and kind == "extend":
            prompt = sequence(earlier) + draw(st.lists(token, max_size=3))
        elif earlier and kind == "repeat":
            prompt, parent = earlier.prompt_ids.tolist(), earlier.parent
        elif earlier and kind == "shorten":
            prompt = earlier.prompt_ids.tolist()[:-1]
        else:
            prompt = draw(st.lists(token, min_size=draw(st.integers(0, 1)), max_size=3))
        ledger.say(
            prompt, output, after=parent, delivered=delivered, role=role, at=1.5 * at, version=version
        )  # fmt: skip
    return ledger


def sequence(completion: Completion) -> list[int]:
    return [*completion.prompt_ids.tolist(), *completion.generation.output_ids.tolist()]


@dataclass
class Oracle:
    """Which completions are trained, and how few traces hold them."""

    ledger: Ledger
    policy: Policy

    def parent(self, completion: Completion) -> Completion | None:
        before = self.ledger.completions[: self.ledger.completions.index(completion)]
        begins = [one for one in before if completion.prompt_ids.tolist()[: one.length] == sequence(one)]
        if any(one.parent for one in self.ledger.completions):
            return next((one for one in begins if one.id == completion.parent), None)
        begins = [one for one in begins if len(one.generation.output_ids)]
        longest = [one for one in begins if one.length == max(other.length for other in begins)]
        arrived = [one for one in longest if self.delivered(one)]
        return (arrived or longest or [None])[-1]

    def delivered(self, completion: Completion) -> bool:
        return self.ledger.delivery[completion.id] == "delivered"

    def children(self, completion: Completion) -> list[Completion]:
        return [one for one in self.ledger.completions if self.parent(one) is completion]

    def trained(self, completion: Completion) -> bool:
        return (
            len(completion.generation.output_ids) > 0
            and len(completion.prompt_ids) > 0
            and self.policy.roles[completion.role] == "train"
            and self.fitting(completion) > 0
            and (bool(self.children(completion)) or (self.delivered(completion) and not self.discarded(completion)))
        )

    def fitting(self, completion: Completion) -> int:
        """How many of its sampled tokens may be trained for the length of the trace."""
        limit, sampled = self.policy.max_trace_tokens, len(completion.generation.output_ids)
        if limit is None or completion.length <= limit:
            return sampled
        return max(0, limit - len(completion.prompt_ids)) if self.policy.overlong == "split" else 0

    def discarded(self, completion: Completion) -> bool:
        return self.policy.discarded == "drop" and any(
            other is not completion
            and other.prompt_ids.tolist() == completion.prompt_ids.tolist()
            and self.parent(other) is self.parent(completion)
            and (self.children(other) or self.delivered(other))
            and other.started >= completion.ended
            for other in self.ledger.completions
        )

    def tips(self) -> list[Completion]:
        """Trained completions below which nothing is trained: each needs a trace of its own."""

        def below(completion: Completion) -> bool:
            return any(self.trained(child) or below(child) for child in self.children(completion))

        return [one for one in self.ledger.completions if self.trained(one) and not below(one)]


def spans(trace: Trace, ledger: Ledger) -> list[tuple[str, list[bool]]]:
    """For each completion of the trace, its id and the loss mask over its output."""
    by_id = {one.id: one for one in ledger.completions}
    start = len(trace.prompt_ids)
    return [
        (name, trace.loss_mask[len(by_id[name].prompt_ids) - start : by_id[name].length - start].tolist())
        for name in trace.completion_ids
    ]


POLICIES = st.builds(
    Policy.of,
    st.none() | st.integers(2, 12),
    st.dictionaries(st.sampled_from([role.value for role in Role]), st.sampled_from(["train", "drop"])),
    st.sampled_from(["train", "drop"]),
    st.sampled_from(["clip", "split"]),
)


@given(forests(), POLICIES)
def test_any_session_is_merged_as_the_oracle_says(ledger: Ledger, policy: Policy) -> None:
    session, oracle = ledger.sealed(), Oracle(ledger, policy)
    roles = {role.value: choice for role, choice in policy.roles.items()}
    traces = PrefixMerging(policy.max_trace_tokens, roles, policy.discarded, policy.overlong).build(session)
    check(traces, session, policy)
    trained = [one for one in ledger.completions if oracle.trained(one)]
    assert sorted(name for trace in traces for name in trace.completion_ids) == sorted(one.id for one in trained)
    assert len(traces) == len(oracle.tips())
    by_id = {one.id: one for one in ledger.completions}
    for trace in traces:
        tokens = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        logprobs = [0.0] * len(tokens)
        for name, mask in spans(trace, ledger):
            begin, fitting = len(by_id[name].prompt_ids), oracle.fitting(by_id[name])
            end = begin + fitting
            assert tokens[:end] == sequence(by_id[name])[:end]
            assert mask == [True] * fitting
            logprobs[begin:end] = by_id[name].generation.logprobs.tolist()[:fitting]
        assert trace.response_logprobs.tolist() == logprobs[len(trace.prompt_ids) :]
        assert trace.trained == sum(len(mask) for _, mask in spans(trace, ledger))
        assert policy.max_trace_tokens is None or len(tokens) <= policy.max_trace_tokens


@given(forests(), POLICIES)
def test_every_sampled_token_is_trained_or_counted_under_a_reason(ledger: Ledger, policy: Policy) -> None:
    session = ledger.sealed()
    for builder in (PrefixMerging(), PerRequest()):
        builder.policy = policy
        traces = builder.build(session)
        check(traces, session, policy)
        told = counts(session, traces, policy)
        untrained = sum(count for name, count in told.items() if name.startswith("untrained_"))
        assert told["sampled_tokens"] == told["trained_tokens"] + untrained
        assert told["trained_tokens"] == sum(trace.trained for trace in traces)
        assert "untrained_unexplained" not in told
        assert told["sampled_tokens"] == sum(len(one.generation.output_ids) for one in ledger.completions)


@given(forests(), st.data())
def test_check_finds_any_corruption_of_any_trace(ledger: Ledger, data: st.DataObject) -> None:
    session = ledger.sealed()
    traces = list(PrefixMerging().build(session))
    if not traces:
        return
    at = data.draw(st.integers(0, len(traces) - 1))
    name = data.draw(st.sampled_from(sorted(CORRUPTIONS)))
    corrupted = CORRUPTIONS[name](traces[at], data.draw(st.integers(0, len(traces[at].response_ids) - 1)))
    if corrupted is None:
        return
    with pytest.raises(MergeError):
        check([*traces[:at], corrupted, *traces[at + 1 :]], session)
