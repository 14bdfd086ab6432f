"""Assertions on recorded sessions, for the tests of a project that trains through agent programs.

    from polar_plugin.testing import assert_breaks, assert_fractions, assert_traces, recorded

    def test_my_agent_gives_one_trace_a_session():
        for session in recorded("tests/sessions"):
            assert_traces(session, 1)
            assert_fractions(session, delivered=1.0, trained=0.95)
            assert_breaks(session, first_call=1)

`recorded` builds the traces anew, with any builder, and checks their invariants (`merge.check`). A failure shows the
part of the session that it is about, as text where the recording names its tokenizer or one is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from .merge.compare import ranges
from .merge.explain_text import text
from .records import TokenIds, Trace
from .replayed import Builder, Replayed, disagreements, files, read_expectations, replay

__all__ = [
    "Replayed",
    "assert_breaks",
    "assert_expected",
    "assert_fractions",
    "assert_masks",
    "assert_traces",
    "assert_untrained",
    "mask_runs",
    "recorded",
]

_AROUND = 12  # tokens shown on either side of a difference


def recorded(
    path: str | Path,
    *,
    builder: str = "prefix_merging",
    config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> list[Replayed]:
    """The session of a recording, or those of a directory of them, with the traces that the builder makes of each.

    Raises RecordingError, ConfigError, or MergeError where the builder's traces are not what was sampled.
    """
    chosen = Builder(builder, config)
    return [replay(one, chosen, tokenizer) for one in files([Path(path)])]


def assert_traces(session: Replayed, expected: int | Sequence[Sequence[int]]) -> None:
    """The number of traces, or which calls each one trains: calls are numbered from 1 in the order recorded."""
    numbers = {one.id: number for number, one in enumerate(session.session.completions, 1)}
    calls = [[numbers[name] for name in trace.completion_ids] for trace in session.traces]
    found, wanted = (len(calls), expected) if isinstance(expected, int) else (calls, [list(one) for one in expected])
    if found != wanted:
        told = "; ".join(ranges(iter(one)) for one in calls)
        raise AssertionError(
            f"{session.path}: traces train the calls {told}, expected {expected}\n{_explained(session)}"
        )


def assert_fractions(session: Replayed, *, delivered: float = 0.0, trained: float = 0.0) -> None:
    """The least share of the sampled tokens that reached the harness, and that a trace trains."""
    told = session.explained()
    for name, found, least in (
        ("delivered", told.delivered_fraction, delivered),
        ("trained", told.trained_fraction, trained),
    ):
        if found < least:
            raise AssertionError(
                f"{session.path}: {found:.4f} of the tokens are {name}, not {least}\n{_explained(session)}"
            )


def assert_breaks(session: Replayed, **expected: int) -> None:
    """Completions by recorded break reason, as in `first_call=1`; a reason that is not named does not occur."""
    _assert_counts(session, "break reasons", session.outcome.breaks or {}, expected)


def assert_untrained(session: Replayed, **expected: int) -> None:
    """Sampled tokens that no trace trains, by reason; a reason that is not named does not occur."""
    _assert_counts(session, "untrained tokens", session.outcome.untrained or {}, expected)


def assert_masks(session: Replayed, expected: Sequence[Sequence[int]]) -> None:
    """The loss mask of each trace as `mask_runs` tells it."""
    if len(session.traces) != len(expected):
        raise AssertionError(
            f"{session.path}: {len(session.traces)} traces, expected {len(expected)}\n{_explained(session)}"
        )
    for index, (trace, wanted) in enumerate(zip(session.traces, expected, strict=True)):
        if (found := mask_runs(trace)) != list(wanted):
            where = f"{session.path}: trace {index}: the loss mask has runs {found}, expected {list(wanted)}"
            raise AssertionError(f"{where}\n{_first_difference(session, trace, found, wanted)}")


def assert_expected(sessions: Iterable[Replayed], path: str | Path) -> None:
    """All that an expectation file says (`polar-plugin replay --write-expect` writes one)."""
    found, file = list(sessions), Path(path)
    if lines := disagreements(found, read_expectations(file), str(file)):
        raise AssertionError("\n".join(lines))


def mask_runs(trace: Trace) -> list[int]:
    """Lengths of the runs of the response's loss mask: trained, not trained, trained, ... A response begins trained."""
    return [len(list(group)) for _, group in groupby(trace.loss_mask.tolist())]


def _assert_counts(session: Replayed, what: str, found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    if dict(found) != {name: count for name, count in expected.items() if count}:
        raise AssertionError(f"{session.path}: {what} are {dict(found)}, expected {expected}\n{_explained(session)}")


def _explained(session: Replayed) -> str:
    return text(session.explained(), session.decoded_by)


def _first_difference(session: Replayed, trace: Trace, found: Sequence[int], wanted: Sequence[int]) -> str:
    """The tokens round the end of the first run that has another length."""
    run = next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), None)
    run = min(len(found), len(wanted)) if run is None else run
    begin = sum(found[:run])
    ends = [begin + runs[run] for runs in (found, wanted) if run < len(runs)]
    at, kind = min(ends, default=begin), "trained" if run % 2 == 0 else "context"
    before, after = trace.response_ids[max(begin, at - _AROUND) : at], trace.response_ids[at : at + _AROUND]
    return (
        f"run {run} ({kind}) begins at response token {begin}; the first difference is at {at}:"
        f" after {_shown(session, before)} comes {_shown(session, after)}\n{session.decoded_by}"
    )


def _shown(session: Replayed, ids: TokenIds) -> str:
    return repr(session.decode(ids)) if session.decode else str(ids.tolist())
