"""Session-level baselines and advantages: a session is one vote, whatever its number of traces. Pure numpy.

Rewards come one a session, with the group (prompt) each belongs to and a mask of sessions that are excluded because
they say nothing about the policy (infrastructure failures). For the n counted rewards r_1..r_n of one group:

| estimator                      | advantage of session i        | source                                          |
|--------------------------------|-------------------------------|-------------------------------------------------|
| `grpo`, `gspo`, `cispo`        | (r_i - mean) / (std + 1e-6)   | slime `_post_process_rewards`; arXiv 2402.03300 |
| `dr_grpo`                      | r_i - mean                    | arXiv 2503.20783; slime without std             |
| `reinforce_plus_plus_baseline` | r_i - mean                    | slime; arXiv 2501.03262                         |
| `rloo`, `leave_one_out`        | r_i - mean of the other n - 1 | arXiv 2402.14740                                |
| `none`                         | r_i                           | estimators with a baseline of their own         |

`std` has one degree of freedom less (ddof=1), as torch's. A group whose counted rewards are all equal, one with a
single counted session, and every excluded session get exactly 0: never NaN, never a difference divided by 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import comb
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]
Indices = NDArray[np.int64]

STD_EPSILON = 1e-6


def _standardised(rewards: Values) -> Values:
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPSILON)


def _centred(rewards: Values) -> Values:
    return rewards - rewards.mean()


def _left_one_out(rewards: Values) -> Values:
    n = len(rewards)
    return (rewards - rewards.mean()) * n / (n - 1)


ESTIMATORS: Mapping[str, Callable[[Values], Values] | None] = {
    "grpo": _standardised,
    "gspo": _standardised,
    "cispo": _standardised,
    "dr_grpo": _centred,
    "reinforce_plus_plus_baseline": _centred,
    "rloo": _left_one_out,
    "leave_one_out": _left_one_out,
    "none": None,
}
"""By name; None leaves rewards as they are."""


def advantages(
    rewards: ArrayLike, groups: Sequence[Hashable], *, excluded: ArrayLike | None = None, estimator: str = "grpo"
) -> Values:
    """float64 [s]: the advantage of each session, in input order; see the module's table.

    `rewards` [s], `groups` [s], `excluded` bool [s] (default: none is). Raises ValueError on an unknown estimator, on
    lengths that differ, and on a counted reward that is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    values, counted = _checked(rewards, groups, excluded)
    result = np.zeros_like(values)
    normalise = ESTIMATORS[estimator]
    if normalise is None:
        result[counted] = values[counted]
        return result
    for members in _members(groups, counted):
        if _spread(values[members]):
            result[members] = normalise(values[members])
    return result


def uninformative(
    rewards: ArrayLike, groups: Sequence[Hashable], *, excluded: ArrayLike | None = None
) -> tuple[Hashable, ...]:
    """The groups that teach nothing: their counted rewards do not vary, or fewer than two are counted.

    Told by variance, never by the mean: [0.5, 0.5] is uninformative, [0, 1] is not.
    """
    values, counted = _checked(rewards, groups, excluded)
    informative = {groups[members[0]] for members in _members(groups, counted) if _spread(values[members])}
    return tuple(group for group in dict.fromkeys(groups) if group not in informative)


def collapse(values: ArrayLike, sessions: Sequence[Hashable]) -> tuple[Values, Indices]:
    """One value a session, from one value a trace.

    Returns float64 [s], in order of first appearance, and int64 [t]: each trace's session, so that `per_session[of]`
    broadcasts back in input order. Raises ValueError that names a session whose traces disagree.
    """
    order = {session: position for position, session in enumerate(dict.fromkeys(sessions))}
    of = np.array([order[session] for session in sessions], np.int64)
    per_trace = np.asarray(values, np.float64)
    if len(per_trace) != len(of):
        raise ValueError(f"{len(per_trace)} values but {len(of)} traces")
    per_session = np.zeros(len(order))
    per_session[of[::-1]] = per_trace[::-1]  # the first trace of a session is written last, so it wins
    wrong = np.flatnonzero((per_session[of] != per_trace) & ~(np.isnan(per_session[of]) & np.isnan(per_trace)))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"session {sessions[first]!r} has traces with different rewards: {per_session[of[first]]} and "
            f"{per_trace[first]}; a session has one outcome, broadcast to all of its traces"
        )
    return per_session, of


def pass_at_k(attempts: int, correct: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k attempts is right (arXiv 2107.03374)."""
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} cannot be told from {attempts} attempts")
    return 1.0 - comb(attempts - correct, k) / comb(attempts, k)


def _checked(
    rewards: ArrayLike, groups: Sequence[Hashable], excluded: ArrayLike | None
) -> tuple[Values, NDArray[np.bool_]]:
    values = np.array(rewards, np.float64).reshape(-1)
    counted = np.ones(len(values), np.bool_) if excluded is None else ~np.asarray(excluded, np.bool_).reshape(-1)
    if not len(values) == len(groups) == len(counted):
        raise ValueError(f"{len(values)} rewards, {len(groups)} groups and {len(counted)} exclusion flags")
    wrong = np.flatnonzero(counted & ~np.isfinite(values))
    if len(wrong):
        raise ValueError(f"the reward of session {int(wrong[0])} is {values[wrong[0]]}: exclude it or grade it")
    return values, counted


def _members(groups: Sequence[Hashable], counted: NDArray[np.bool_]) -> list[Indices]:
    """The positions of each group's counted sessions; groups without any are left out."""
    members: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        if counted[position]:
            members.setdefault(group, []).append(position)
    return [np.array(positions, np.int64) for positions in members.values()]


def _spread(rewards: NDArray[Any]) -> bool:
    """Whether they vary at all; compared, not subtracted, so that rounding in a mean cannot pass for a signal."""
    return bool(rewards.min() < rewards.max())
