"""Two builders over one session: what each trains, side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..records import CompletionSession, Trace
from .traces import counts
from .untrained import Policy

_FIGURES = ("traces", "trained_tokens", "context_tokens", "prompt_tokens", "mixed_version_traces")


@dataclass(frozen=True, slots=True)
class Built:
    """What one builder made of a session."""

    builder: str
    traces: Sequence[Trace]
    policy: Policy | None = None


def _alike(left: Trace, right: Trace) -> bool:
    """Whether a trainer would see no difference."""
    return (
        np.array_equal(left.prompt_ids, right.prompt_ids)
        and np.array_equal(left.response_ids, right.response_ids)
        and np.array_equal(left.loss_mask, right.loss_mask)
        and np.array_equal(left.response_logprobs, right.response_logprobs, equal_nan=True)
        and left.versions == right.versions
    )


def compared(session: CompletionSession, left: Built, right: Built) -> list[str]:
    """The differences in lines to read; empty where the traces are the same."""
    if len(left.traces) == len(right.traces) and all(map(_alike, left.traces, right.traces)):
        return []
    return [*_figures(session, left, right), *_trained_by_one(session, left, right), *_regrouped(session, left, right)]


def _figures(session: CompletionSession, left: Built, right: Built) -> Iterator[str]:
    one, other = (counts(session, built.traces, built.policy) for built in (left, right))
    names = [*_FIGURES, *sorted(name for name in {*one, *other} if name.startswith("untrained_"))]
    width = max(len(left.builder), len(right.builder), 14) + 2
    yield f"{'':<24}{left.builder:>{width}}{right.builder:>{width}}"
    for name in names:
        if one.get(name, 0) or other.get(name, 0):
            yield f"{name:<24}{one.get(name, 0):>{width},}{other.get(name, 0):>{width},}"


def _trained_by_one(session: CompletionSession, left: Built, right: Built) -> Iterator[str]:
    numbers = {completion.id: number for number, completion in enumerate(session.completions, 1)}
    trained = [{name for trace in built.traces for name in trace.completion_ids} for built in (left, right)]
    for built, only in ((left, trained[0] - trained[1]), (right, trained[1] - trained[0])):
        if only:
            yield f"only {built.builder} trains {ranges(numbers[name] for name in only)}"


def _regrouped(session: CompletionSession, left: Built, right: Built) -> Iterator[str]:
    """Each trace of `left` that `right` has otherwise, with the traces that hold its calls there."""
    numbers = {completion.id: number for number, completion in enumerate(session.completions, 1)}
    holder = {name: index for index, trace in enumerate(right.traces) for name in trace.completion_ids}
    for index, trace in enumerate(left.traces):
        others = list(dict.fromkeys(holder[name] for name in trace.completion_ids if name in holder))
        if len(others) == 1 and _alike(trace, right.traces[others[0]]):
            continue
        yield f"{left.builder} {_told(index, trace, numbers)}"
        yield from (f"  {right.builder} {_told(other, right.traces[other], numbers)}" for other in others)
        if len(others) == 1 and trace.completion_ids == right.traces[others[0]].completion_ids:
            yield f"  {_first_difference(trace, right.traces[others[0]])}"


def _told(index: int, trace: Trace, numbers: Mapping[str, int]) -> str:
    size = f"{len(trace.prompt_ids):,} prompt + {len(trace.response_ids):,} response tokens, {trace.trained:,} trained"
    return f"trace {index}: {ranges(numbers[name] for name in trace.completion_ids)}; {size}"


def _first_difference(left: Trace, right: Trace) -> str:
    """Of two traces of the same calls."""
    if len(left.prompt_ids) != len(right.prompt_ids):
        return f"their prompts end at {len(left.prompt_ids):,} and {len(right.prompt_ids):,}"
    for what, one, other in (
        ("prompt token", left.prompt_ids, right.prompt_ids),
        ("response token", left.response_ids, right.response_ids),
        ("loss mask at response token", left.loss_mask, right.loss_mask),
        ("log-probability at response token", left.response_logprobs, right.response_logprobs),
    ):
        size = min(len(one), len(other))
        differing = np.flatnonzero(one[:size] != other[:size])
        if len(differing):
            at = int(differing[0])
            return f"they differ first in {what} {at:,}: {one[at]} against {other[at]}"
        if len(one) != len(other):
            return f"they have {len(one):,} and {len(other):,} response tokens"
    return "they differ in weight versions"


def ranges(numbers: Iterator[int]) -> str:
    """Numbers of calls in words: "#1-#4, #7"."""
    ordered = sorted(numbers)
    ends = [at for at, (before, after) in enumerate(pairwise(ordered), 1) if after != before + 1]
    runs = [ordered[begin:end] for begin, end in pairwise((0, *ends, len(ordered)))]
    return ", ".join(f"#{run[0]}" if len(run) == 1 else f"#{run[0]}-#{run[-1]}" for run in runs if run)
