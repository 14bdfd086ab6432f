"""How a batch of rows becomes optimiser steps of sessions, and what weighs each row's advantage. Pure numpy.

verl aggregates a loss over rows by `loss_agg_mode`. What is wanted is, in each step, over the G sessions a step has by
configuration: sum over sessions of A(s) / G times the mean over the session's trained tokens. All policy losses of
verl that are allowed here scale with the advantage, so the difference can be put into it:

| loss_agg_mode           | verl multiplies each token's term with | so the advantage is multiplied with |
|-------------------------|----------------------------------------|-------------------------------------|
| token-mean              | 1 / tokens of the step                 | tokens of the step / (G T)          |
| token-sum               | 1                                      | 1 / (G T)                           |
| seq-mean-token-sum      | 1 / G                                  | 1 / T                               |
| seq-mean-token-sum-norm | 1 / (G loss_scale_factor)              | loss_scale_factor / T               |
| seq-mean-token-mean     | 1 / (G tokens of the row)              | tokens of the row / T               |

where T are the trained tokens of the session (`verl/trainer/ppo/core_algos.py`, `agg_loss`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rewards import advantages, collapse

Values = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """An order of rows in which each optimiser step of each data-parallel rank finds the rows of whole sessions."""

    order: list[int]
    """Positions of real rows (below `rows`) and of padding (from `rows` on)."""
    steps: list[int]
    """The optimiser step of each position of `order`."""


def session_of(key: str) -> str:
    """`{uid}_{session}` of a row's key, `{uid}_{session}_{trace}`."""
    return key.rsplit("_", 1)[0]


def session_advantages(
    rewards: Sequence[float], keys: Sequence[str], *, estimator: str, standardise: bool = True
) -> Values:
    """float64 [rows]: the session's advantage, on each of its rows.

    `rewards` are the rows', all of a session alike. `estimator` is verl's name; `reinforce_plus_plus_baseline` is
    divided by the standard deviation over the batch as verl does, but over sessions. A group without spread gets 0.
    """
    per_session, of = collapse(rewards, [session_of(key) for key in keys])
    groups = [session.rsplit("_", 1)[0] for session in dict.fromkeys(session_of(key) for key in keys)]
    name = "dr_grpo" if estimator == "grpo" and not standardise else estimator
    result = advantages(per_session, groups, estimator=name)
    if estimator == "reinforce_plus_plus_baseline" and len(result) > 1:
        result = result / np.sqrt(result.var(ddof=1) + 1e-8)
    return result[of]


def plan(keys: Sequence[str], lengths: Sequence[int], *, steps: int, ranks: int) -> Plan:
    """Split the sessions of `keys` into `steps` optimiser steps of as many sessions each, for `ranks` ranks.

    `lengths` are the rows' tokens. Each rank gets one contiguous part of the order, which it cuts into `steps` equal
    parts; so all have the same number of rows, the rest being padding.
    """
    members: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(session_of(key), []).append(position)
    sessions = list(members.values())
    cuts = [-(-len(sessions) * step // steps) for step in range(steps + 1)]
    parts = [sessions[start:end] for start, end in itertools.pairwise(cuts)]
    cells = [_balanced([row for rows in part for row in rows], lengths, ranks) for part in parts]
    size = max(1, max(len(cell) for step in cells for cell in step))
    order: list[int] = []
    numbers: list[int] = []
    padding = len(keys)
    for rank in range(ranks):
        for number, step in enumerate(cells):
            missing = size - len(step[rank])
            order += [*step[rank], *range(padding, padding + missing)]
            numbers += [number] * size
            padding += missing
    return Plan(order, numbers)


def _balanced(rows: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """`rows` for each rank: numbers differ by one at most, and the longest go to whom has fewest tokens."""
    limit = -(-len(rows) // ranks)
    cells: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda one: -lengths[one]):
        rank = min((r for r in range(ranks) if len(cells[r]) < limit), key=lambda r: loads[r])
        cells[rank].append(row)
        loads[rank] += lengths[row]
    return cells


def factors(
    mode: str, keys: Sequence[str], tokens: Sequence[int], steps: Sequence[int], *, sessions: int, scale: float = 1.0
) -> Values:
    """float64 [rows]: what each row's advantage is multiplied with; see the module's table.

    `tokens` are the rows' trained tokens, `steps` their optimiser steps, `sessions` G, `scale` the loss_scale_factor.
    Raises ValueError on an unknown mode.
    """
    own = np.asarray(tokens, np.float64)
    order = {session: at for at, session in enumerate(dict.fromkeys(session_of(key) for key in keys))}
    of = np.array([order[session_of(key)] for key in keys], np.int64)
    whole = np.maximum(np.bincount(of, weights=own)[of], 1.0)
    step = np.bincount(np.asarray(steps, np.int64), weights=own)[np.asarray(steps, np.int64)]
    by_mode = {
        "token-mean": step / (sessions * whole),
        "token-sum": 1.0 / (sessions * whole),
        "seq-mean-token-sum": 1.0 / whole,
        "seq-mean-token-sum-norm": scale / whole,
        "seq-mean-token-mean": own / whole,
    }
    if mode not in by_mode:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(by_mode)}")
    return by_mode[mode]
