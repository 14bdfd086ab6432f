"""The invariants of traces, as code: run in every test and, sampled, in production. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MergeError
from ..records import Completion, CompletionSession, TokenIds, Trace, VersionSpan
from .chains import same
from .traces import untrained

Decode = Callable[[TokenIds], str]


def check(
    traces: Sequence[Trace],
    session: CompletionSession,
    *,
    max_trace_tokens: int | None = None,
    decode: Decode | None = None,
) -> None:
    """Verify that the traces say exactly what was sampled; raises MergeError with the first differing position.

    * a trace's tokens up to a completion's end are that completion's prompt ‖ output, and its trained tokens have the
      recorded log-probabilities and weight versions;
    * no token is trained that no completion of the trace sampled;
    * each completion is trained exactly once, or in no trace for a counted reason (`max_trace_tokens`: the builder's).
    """
    known = {completion.id: completion for completion in session.completions}
    seen: set[str] = set()
    for position, trace in enumerate(traces):
        _check_trace(trace, [_known(known, name, position) for name in trace.completion_ids], position, decode)
        for name in trace.completion_ids:
            if name in seen:
                raise MergeError(f"completion {name} is trained twice, the second time in trace {position}")
            seen.add(name)
    _check_complete(session, seen, max_trace_tokens)


def _known(known: dict[str, Completion], name: str, position: int) -> Completion:
    if name not in known:
        raise MergeError(f"trace {position} trains completion {name}, which the session does not have")
    return known[name]


def _check_trace(trace: Trace, completions: Sequence[Completion], position: int, decode: Decode | None) -> None:
    if not completions:
        raise MergeError(f"trace {position} trains nothing")
    start, last = len(trace.prompt_ids), completions[-1]
    tokens = np.concatenate((trace.prompt_ids, trace.response_ids))
    recorded = np.concatenate((last.prompt_ids, last.generation.output_ids))
    _check_tokens(tokens, recorded, f"trace {position}, completion {last.id}", decode)
    loss_mask = np.zeros(len(trace.response_ids), np.bool_)
    logprobs = np.zeros(len(trace.response_ids), np.float32)
    for completion in completions:
        where = f"trace {position}, completion {completion.id}"
        begin, end = len(completion.prompt_ids), completion.length
        if begin < start:
            raise MergeError(f"{where} does not lie within the trace")
        if not same(last.prompt_ids[:begin], completion.prompt_ids):
            _check_tokens(tokens[:begin], completion.prompt_ids, f"{where}, prompt", decode)
        _check_tokens(tokens[begin:end], completion.generation.output_ids, f"{where}, output", decode)
        loss_mask[begin - start : end - start] = True
        logprobs[begin - start : end - start] = completion.generation.logprobs
    _check_equal(trace.loss_mask, loss_mask, f"trace {position}: loss mask")
    _check_equal(trace.response_logprobs, logprobs, f"trace {position}: log-probability")
    _check_versions(trace, completions, position)


def _check_equal(got: NDArray[Any], right: NDArray[Any], what: str) -> None:
    if not np.array_equal(got, right):
        at = int(np.flatnonzero(got != right)[0])
        raise MergeError(f"{what} at response token {at} is {got[at]}, but {right[at]} is right")


def _check_tokens(got: TokenIds, recorded: TokenIds, where: str, decode: Decode | None) -> None:
    if np.array_equal(got, recorded):
        return
    shorter = min(len(got), len(recorded))
    differing = np.flatnonzero(got[:shorter] != recorded[:shorter])
    at = int(differing[0]) if len(differing) else shorter
    left, right = got[max(0, at - 8) : at + 8], recorded[max(0, at - 8) : at + 8]
    told = (decode(left), decode(right)) if decode else (left.tolist(), right.tolist())
    raise MergeError(f"{where}: tokens differ at position {at}: {told[0]!r} is not {told[1]!r}")


def _check_versions(trace: Trace, completions: Sequence[Completion], position: int) -> None:
    told = _expanded(trace.versions)
    if told and len(told) != len(trace.response_ids):
        raise MergeError(f"trace {position}: weight versions cover {len(told)} of {len(trace.response_ids)} tokens")
    for completion in completions:
        begin = len(completion.prompt_ids) - len(trace.prompt_ids)
        recorded = _expanded(completion.generation.versions)
        if recorded and told[begin : begin + len(recorded)] != recorded:
            raise MergeError(f"trace {position}, completion {completion.id}: weight versions are not the recorded ones")


def _expanded(spans: Sequence[VersionSpan]) -> list[str]:
    return [span.version for span in spans for _ in range(span.count)]


def _check_complete(session: CompletionSession, seen: set[str], limit: int | None) -> None:
    left_out = untrained(session)
    for completion in session.completions:
        reason = left_out.get(completion.id)
        if reason and completion.id in seen:
            raise MergeError(f"completion {completion.id} is trained although it is {reason}")
        over = limit is not None and completion.length > limit
        if completion.id not in seen and not reason and not over and len(completion.generation.output_ids):
            raise MergeError(f"completion {completion.id} is in no trace, and nothing says why")
