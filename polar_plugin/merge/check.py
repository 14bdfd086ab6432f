"""The invariants of traces, as code: run in every test and, sampled, in production. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MergeError
from ..records import Completion, CompletionSession, TokenIds, Trace, VersionSpan
from .chains import extends, same
from .traces import version_spans
from .untrained import Policy, Untrained, untrained

Decode = Callable[[TokenIds], str]
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
      with the last one's;
    * its loss mask is True on what they sampled and nowhere else; log-probabilities (0.0 elsewhere), weight versions
      ("" elsewhere) and the finish reason are the recorded ones;
    * each completion that sampled anything is trained exactly once, or in no trace for a reason of `untrained`, so that
      sampled tokens = trained + untrained.

    `policy` is the builder's (`PrefixMerging.policy`). Messages show token ids, or with `decode` their text.
    """
    known = {completion.id: completion for completion in session.completions}
    if len(known) != len(session.completions):
        raise MergeError(f"session {session.session_id}: completions share an id")
    for position, trace in enumerate(traces):
        trained = [_known(known, name, position) for name in trace.completion_ids]
        _check_trace(trace, trained, f"trace {position}", decode)
    _check_once(traces, session, untrained(session, policy))


def _known(known: Mapping[str, Completion], name: str, position: int) -> Completion:
    if name not in known:
        raise MergeError(f"trace {position} trains completion {name}, which the session does not have")
    return known[name]


def _check_trace(trace: Trace, trained: Sequence[Completion], where: str, decode: Decode | None) -> None:
    if not trained:
        raise MergeError(f"{where} trains nothing")
    last, start = trained[-1], len(trace.prompt_ids)
    _check_sequence(trace, last, f"{where}, completion {last.id}", decode)
    loss_mask = np.zeros(len(trace.response_ids), np.bool_)
    logprobs = np.zeros(len(trace.response_ids), np.float32)
    for before, completion in pairwise((None, *trained)):
        assert completion
        begin, end = len(completion.prompt_ids) - start, completion.length - start
        if begin < 0 or end > len(logprobs):
            raise MergeError(f"{where}, completion {completion.id}: its output does not lie within the response")
        if before:
            _check_extends(completion, before, where, decode)
        loss_mask[begin:end] = True
        logprobs[begin:end] = completion.generation.logprobs
    _check_equal(trace.loss_mask, loss_mask, f"{where}: loss mask")
    if not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise MergeError(f"{where}: log-probability at response token {at} is {logprobs[at]}: it cannot be trained")
    _check_equal(trace.response_logprobs, logprobs, f"{where}: log-probability")
    _check_ends(trace, trained, where)


def _check_sequence(trace: Trace, last: Completion, where: str, decode: Decode | None) -> None:
    """The trace's prompt ‖ response is the last completion's prompt ‖ output; split elsewhere, so in three pieces."""
    start, middle = len(trace.prompt_ids), len(last.prompt_ids)
    if start <= middle and start + len(trace.response_ids) == last.length:
        pieces = (
            (trace.prompt_ids, last.prompt_ids[:start]),
            (trace.response_ids[: middle - start], last.prompt_ids[start:]),
            (trace.response_ids[middle - start :], last.generation.output_ids),
        )
        if all(same(got, recorded) for got, recorded in pieces):
            return
    tokens = np.concatenate((trace.prompt_ids, trace.response_ids))
    _differ(tokens, np.concatenate((last.prompt_ids, last.generation.output_ids)), where, decode)


def _check_extends(completion: Completion, before: Completion, where: str, decode: Decode | None) -> None:
    """Each completion's prompt begins with the one before, so that the trace, which holds the last, holds them all."""
    if not extends(completion.prompt_ids, before):
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


def _check_equal(got: NDArray[Any], right: NDArray[Any], what: str) -> None:
    if not np.array_equal(got, right):
        at = int(np.flatnonzero(got != right)[0])
        raise MergeError(f"{what} at response token {at} is {got[at]}, but {right[at]} is right")


def _check_ends(trace: Trace, trained: Sequence[Completion], where: str) -> None:
    versions = version_spans(trained, len(trace.prompt_ids), len(trace.response_ids))
    if trace.versions != versions:
        raise MergeError(f"{where}: weight versions are {_told(trace.versions)}, but {_told(versions)} is right")
    reason = trained[-1].generation.finish_reason
    if trace.finish_reason is not reason:
        raise MergeError(f"{where}: finish reason is {trace.finish_reason}, but {reason} is right")


def _told(versions: Sequence[VersionSpan]) -> str:
    return " ".join(f"{span.version!r}x{span.count}" for span in versions) or "none"


def _check_once(traces: Sequence[Trace], session: CompletionSession, left_out: Mapping[str, Untrained]) -> None:
    times = Counter(name for trace in traces for name in trace.completion_ids)
    for completion in session.completions:
        tokens, reason = len(completion.generation.output_ids), left_out.get(completion.id)
        if times[completion.id] > 1:
            raise MergeError(
                f"completion {completion.id} ({tokens} tokens) is trained in {times[completion.id]} traces"
            )
        if times[completion.id] and reason:
            raise MergeError(f"completion {completion.id} ({tokens} tokens) is trained although it is {reason}")
        if tokens and not times[completion.id] and not reason:
            raise MergeError(f"completion {completion.id} ({tokens} tokens) is in no trace, and nothing says why")
