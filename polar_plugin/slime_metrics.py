"""What a rollout's sessions add up to, as scalars for slime's logger: one vote a session, every drop counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .records import Status
from .rewards import pass_at_k, uninformative
from .slime_samples import SessionSamples

Metrics = dict[str, float]


def session_metrics(groups: Sequence[Sequence[SessionSamples]], prefix: str) -> Metrics:
    """Metrics by name, each under `prefix` ("rollout/session/": slime's trackers know the first part)."""
    sessions = [session for group in groups for session in group]
    metrics = {
        **_rewards(groups),
        **{f"status/{status}": _share(s.trajectory.status is status for s in sessions) for status in Status},
        "excluded": _share(bool(session.excluded) for session in sessions),
        **{f"excluded/{reason}": n for reason, n in Counter(s.excluded for s in sessions if s.excluded).items()},
        "traces": _mean(len(session.trajectory.traces) for session in sessions),
        "delivered_fraction": _mean_known(session.trajectory.delivered_fraction for session in sessions),
        "trained_fraction": _mean_known(session.trajectory.trained_fraction for session in sessions),
        "trained_tokens": _mean(_trained(session) for session in sessions),
        "context_tokens": _mean(sum(len(x.tokens) for x in s.samples) - _trained(s) for s in sessions),
        **{f"dropped/{reason}": n for reason, n in _summed(session.dropped for session in sessions).items()},
        **{f"count/{name}": n for name, n in _summed(session.trajectory.counts for session in sessions).items()},
        **_timings(sessions),
    }
    return {f"{prefix}{name}": float(value) for name, value in metrics.items()}


def passes(rewards: Sequence[float], size: int) -> Metrics:
    """`pass@k` for k = 1, 2, 4, ... of attempts in groups of `size`; a reward of 1 is a pass."""
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    powers = [1 << exponent for exponent in range(size.bit_length())]
    return {f"pass@{k}": _mean(pass_at_k(len(g), sum(r == 1 for r in g), k) for g in groups) for k in powers}


def _rewards(groups: Sequence[Sequence[SessionSamples]]) -> Metrics:
    sessions = [(group, session) for group, members in enumerate(groups) for session in members]
    flat = [session.reward for _, session in sessions]
    excluded = [bool(session.excluded) for _, session in sessions]
    dull = uninformative(flat, [group for group, _ in sessions], excluded=excluded)
    sizes = {len(group) for group in groups}
    return {
        "reward": _mean(reward for reward, out in zip(flat, excluded, strict=True) if not out),
        "uninformative_groups": len(dull) / len(groups),
        **(passes(flat, sizes.pop()) if len(sizes) == 1 else {}),
    }


def _timings(sessions: Iterable[SessionSamples]) -> Metrics:
    seconds: dict[str, list[float]] = {}
    for session in sessions:
        for stage, value in session.trajectory.timings.items():
            seconds.setdefault(stage, []).append(value)
    return {f"seconds/{stage}": _mean(values) for stage, values in seconds.items()}


def _trained(session: SessionSamples) -> int:
    return sum(sum(sample.loss_mask) for sample in session.samples)


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for part in counts:
        total.update(part)
    return total


def _share(flags: Iterable[bool]) -> float:
    return _mean(float(flag) for flag in flags)


def _mean_known(values: Iterable[float | None]) -> float:
    """Of sessions that sampled anything."""
    return _mean(value for value in values if value is not None)


def _mean(values: Iterable[float]) -> float:
    """0.0 of nothing: a metric must be a number."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
