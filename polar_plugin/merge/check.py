"""The invariants of traces, as code: run in every test and, sampled, in production. Pure.

One pass over the tokens, which compares views with views: beyond the traces it needs a byte a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MergeError
from ..records import Completion, CompletionSession, LogProbs, TokenIds, Trace, VersionSpan
from .parents import Parents, extends, same
from .plan import Plan
from .replay import nucleus, routing_pieces
from .traces import finish_reason, mask_of, output_runs, version_spans
from .untrained import Policy

Decode = Callable[[TokenIds], str]
_KINDS = {
    "prompt_ids": np.int32, "response_ids": np.int32, "loss_mask": np.bool_, "response_logprobs": np.float32
}  # fmt: skip
_AROUND = 8  # tokens shown on either side of a difference


def check(
    traces: Sequence[Trace],
    session: CompletionSession,
    policy: Policy | None = None,
    *,
    decode: Decode | None = None,
) -> None:
    """Verify that the traces say exactly what was sampled; raises MergeError with the first differing position.

    * a trace's tokens up to the end of each completion that it trains are that completion's prompt ‖ output, and end
      with the last one's, which alone may be cut, at `max_trace_tokens`;
    * its loss mask is True on what they sampled and nowhere else; log-probabilities (0.0 elsewhere), weight versions
      ("" elsewhere), the finish reason, the role, experts and choices of tokens are the recorded ones;
    * no trace is longer than `max_trace_tokens`;
    * each completion that sampled anything is trained exactly once, or in no trace for a reason of `untrained`, so that
      sampled tokens = trained + untrained.

    `policy` is the builder's (`PrefixMerging.policy`). Messages show token ids, or with `decode` their text.
    """
    known = {completion.id: completion for completion in session.completions}
    plan = Plan.of(session, policy)
    for position, trace in enumerate(traces):
        trained = [_known(known, name, position) for name in trace.completion_ids]
        _check_trace(trace, trained, plan, f"trace {position}", decode)
    _check_once(traces, session, plan)


def _known(known: Mapping[str, Completion], name: str, position: int) -> Completion:
    if name not in known:
        raise MergeError(f"trace {position} trains completion {name}, which the session does not have")
    return known[name]


def _check_trace(trace: Trace, trained: Sequence[Completion], plan: Plan, where: str, decode: Decode | None) -> None:
    if not trained:
        raise MergeError(f"{where} trains nothing")
    for name, kind in _KINDS.items():
        if (found := getattr(trace, name).dtype) != kind:
            raise MergeError(f"{where}: {name} is {found}, but must be {np.dtype(kind)}")
    last = trained[-1]
    length, limit = len(trace.prompt_ids) + len(trace.response_ids), plan.policy.max_trace_tokens
    if limit is not None and length > limit and last.id not in plan.left_out:
        raise MergeError(f"{where} has {length} tokens, but max_trace_tokens is {limit}")
    _check_sequence(trace, last, _output(last, plan), f"{where}, completion {last.id}", decode)
    _check_chain(trained, plan.parents, where, decode)
    runs = output_runs(trained, len(trace.prompt_ids), len(trace.response_ids))
    _check_trained(trace, trained, runs, where)
    versions = version_spans(trained, runs)
    if trace.versions != versions:
        raise MergeError(f"{where}: weight versions are {_told(trace.versions)}, but {_told(versions)} is right")
    reason = finish_reason(last, plan.policy)
    if trace.finish_reason is not reason:
        raise MergeError(f"{where}: finish reason is {trace.finish_reason}, but {reason} is right")
    if trace.role is not trained[0].role:
        raise MergeError(f"{where}: role is {trace.role}, but {trained[0].role} is right: that of its first completion")
    _check_replay(trace, trained, plan.parents, where)


def _output(completion: Completion, plan: Plan) -> TokenIds:
    """What of it a trace may hold; all, where none of it may be trained: that is told by its own name later."""
    output = completion.generation.output_ids
    return output[: plan.policy.trained_output(completion) or len(output)]


def _check_sequence(trace: Trace, last: Completion, output: TokenIds, where: str, decode: Decode | None) -> None:
    """The trace's prompt ‖ response is the last completion's prompt ‖ output; split elsewhere, so in three pieces."""
    start, middle = len(trace.prompt_ids), len(last.prompt_ids)
    if start <= middle and start + len(trace.response_ids) == middle + len(output):
        pieces = (
            (trace.prompt_ids, last.prompt_ids[:start]),
            (trace.response_ids[: middle - start], last.prompt_ids[start:]),
            (trace.response_ids[middle - start :], output),
        )
        if all(same(got, recorded) for got, recorded in pieces):
            return
    tokens = np.concatenate((trace.prompt_ids, trace.response_ids))
    _differ(tokens, np.concatenate((last.prompt_ids, output)), where, decode)


def _check_chain(trained: Sequence[Completion], parents: Parents, where: str, decode: Decode | None) -> None:
    """Each completion's prompt begins with the one before, so that the trace, which holds the last, holds them all.

    Between ancestors that is known: their tokens were compared when the parents were found.
    """
    ancestor: Completion | None = trained[-1]
    for before, completion in reversed([*pairwise(trained)]):
        while ancestor is not None and ancestor is not before:
            ancestor = parents[ancestor.id]
        if (ancestor is None or before is completion) and not extends(completion.prompt_ids, before):
            recorded = np.concatenate((before.prompt_ids, before.generation.output_ids))
            where = f"{where}, completion {completion.id} after {before.id}"
            _differ(completion.prompt_ids[: len(recorded)], recorded, where, decode)


def _differ(got: TokenIds, recorded: TokenIds, where: str, decode: Decode | None) -> None:
    shorter = min(len(got), len(recorded))
    differing = np.flatnonzero(got[:shorter] != recorded[:shorter])
    at = int(differing[0]) if len(differing) else shorter
    show = decode if decode else TokenIds.tolist
    around = slice(max(0, at - _AROUND), at + _AROUND)
    raise MergeError(
        f"{where}: tokens differ at position {at} ({_at(got, at)} in the trace, {_at(recorded, at)} recorded):"
        f" {show(got[around])!r} is not {show(recorded[around])!r}"
    )


def _at(ids: TokenIds, position: int) -> str:
    return f"id {ids[position]}" if position < len(ids) else "the end"


# --- mask and log-probabilities --------------------------------------------------------------------------------------


def _check_trained(trace: Trace, trained: Sequence[Completion], runs: Sequence[tuple[int, int]], where: str) -> None:
    """Mask and log-probabilities: right within each output, and nothing left over outside of all."""
    for completion, run in zip(trained, runs, strict=True):
        if min(run) < 0:
            raise MergeError(f"{where}, completion {completion.id}: its output does not lie within the response")
    mask, logprobs = mask_of(runs), trace.response_logprobs
    _check_equal(trace.loss_mask, mask, f"{where}: loss mask")
    if not np.isfinite(logprobs).all():
        at = int(np.isfinite(logprobs).argmin())
        raise MergeError(f"{where}: log-probability at response token {at} is {logprobs[at]}: it cannot be trained")
    left_over = logprobs != 0
    end, right = 0, not np.greater(left_over, mask, out=left_over).any()
    for completion, (gap, tokens) in zip(trained, runs, strict=True):
        recorded, end = completion.generation.logprobs, end + gap + tokens
        recorded = recorded if recorded.size == tokens else recorded[:tokens]
        right = right and same(logprobs[end - tokens : end], recorded)
    if not right:
        _check_equal(logprobs, _told_logprobs(trained, runs), f"{where}: log-probability")


def _told_logprobs(trained: Sequence[Completion], runs: Sequence[tuple[int, int]]) -> LogProbs:
    """The slow way, which says where."""
    pieces = (
        (np.zeros(gap, np.float32), completion.generation.logprobs[:tokens])
        for completion, (gap, tokens) in zip(trained, runs, strict=True)
    )
    return np.concatenate([piece for pair in pieces for piece in pair])


def _check_equal(got: NDArray[Any], right: NDArray[Any], what: str) -> None:
    if not np.array_equal(got, right):
        at = int(np.flatnonzero(got != right)[0])
        raise MergeError(f"{what} at response token {at} is {got[at]}, but {right[at]} is right")


# --- replay data, and each token once --------------------------------------------------------------------------------


def _check_replay(trace: Trace, trained: Sequence[Completion], parents: Parents, where: str) -> None:
    """Experts and choices of tokens are the recorded ones, for each token or not at all."""
    start, length = len(trace.prompt_ids), len(trace.response_ids)
    pieces = routing_pieces(trained[-1], parents, start + length - 1)
    rows = sum(map(len, pieces or ()))
    if (trace.routing is None) != (not pieces) or (trace.routing is not None and len(trace.routing) != rows):
        got, right = ("no" if one is None else f"{one}" for one in (_length(trace.routing), rows if pieces else None))
        raise MergeError(f"{where} has {got} rows of experts, but {right} are right: a trace's tokens less one")
    position = 0
    for piece in pieces or ():
        assert trace.routing is not None
        if not np.array_equal(trace.routing[position : position + len(piece)], piece):
            raise MergeError(f"{where}: the experts of tokens {position} to {position + len(piece)} are not those told")
        position += len(piece)
    right = nucleus(trained, start, length)
    if (trace.nucleus is None) != (right is None):
        raise MergeError(f"{where}: choices of tokens are {'missing' if right else 'told, but were not recorded'}")
    if trace.nucleus is not None and right is not None:
        _check_equal(trace.nucleus.offsets[1:], right.offsets[1:], f"{where}: end of the choices")
        _check_equal(trace.nucleus.ids, right.ids, f"{where}: choice of tokens, counted from the first,")


def _length(array: NDArray[Any] | None) -> int | None:
    return None if array is None else len(array)


def _told(versions: Sequence[VersionSpan]) -> str:
    return " ".join(f"{span.version!r}x{span.count}" for span in versions) or "none"


def _check_once(traces: Sequence[Trace], session: CompletionSession, plan: Plan) -> None:
    times = Counter(name for trace in traces for name in trace.completion_ids)
    for completion in session.completions:
        tokens, reason = len(completion.generation.output_ids), plan.left_out.get(completion.id)
        if times[completion.id] > 1:
            raise MergeError(
                f"completion {completion.id} ({tokens} tokens) is trained in {times[completion.id]} traces"
            )
        if times[completion.id] and reason:
            raise MergeError(f"completion {completion.id} ({tokens} tokens) is trained although it is {reason}")
        if tokens and not times[completion.id] and not reason:
            raise MergeError(f"completion {completion.id} ({tokens} tokens) is in no trace, and nothing says why")
