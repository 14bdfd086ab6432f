"""How rows become optimiser steps of whole sessions, and what weighs them alike. Needs no verl."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.testing import assert_allclose

from polar_plugin.verl_weights import factors, plan, session_advantages, session_of


def keys(*traces: int) -> list[str]:
    """Of sessions with as many traces each, two sessions a prompt."""
    return [f"p{number // 2}_{number % 2}_{at}" for number, count in enumerate(traces) for at in range(count)]


@pytest.mark.parametrize("traces", [(1, 1, 1, 1), (4, 1, 1, 2), (1, 9, 1, 1), (3, 3, 2, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_number_of_steps_does_not_follow_the_number_of_traces(traces: tuple[int, ...], ranks: int) -> None:
    names = keys(*traces)
    planned = plan(names, [10 + at for at in range(len(names))], steps=2, ranks=ranks)
    assert sorted(at for at in planned.order if at < len(names)) == list(range(len(names)))
    assert sorted(planned.order) == list(range(len(planned.order)))
    assert len(planned.order) % (2 * ranks) == 0
    steps: dict[str, set[int]] = {}
    for at, step in zip(planned.order, planned.steps, strict=True):
        if at < len(names):
            steps.setdefault(session_of(names[at]), set()).add(step)
    assert all(len(of_session) == 1 for of_session in steps.values())
    assert Counter(min(of_session) for of_session in steps.values()) == {0: 2, 1: 2}
    size = len(planned.order) // (2 * ranks)
    assert planned.steps == [step for _ in range(ranks) for step in (0, 1) for _ in range(size)]


def test_ranks_share_the_tokens_of_a_step() -> None:
    names = keys(2, 2)
    planned = plan(names, [100, 10, 90, 5], steps=1, ranks=2)
    halves = planned.order[:2], planned.order[2:]
    assert [sorted(half) for half in halves] == [[0, 3], [1, 2]]


def test_fewer_sessions_than_steps_are_padded() -> None:
    planned = plan(["p_0_0"], [7], steps=2, ranks=1)
    assert (planned.order, planned.steps) == ([0, 1], [0, 1])


def test_a_session_of_many_traces_votes_once_in_its_baseline() -> None:
    """Case 46."""
    found = session_advantages([1.0, 1.0, 1.0, 0.0], keys(3, 1), estimator="grpo", standardise=False)
    assert found.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_case_45_groups_that_are_uneven_in_traces_do_not_share_a_baseline() -> None:
    """Case 45."""
    rewards = [1.0, 1.0, 3.0, 3.0, 5.0, 5.0, 5.0, 2.0, 2.0, 2.0, 4.0]
    found = session_advantages(rewards, keys(2, 2, 1, 2, 3, 1), estimator="grpo", standardise=False)
    assert found.tolist() == [-1, -1, 1, 1, 0, 0, 0, -1, -1, -1, 1]


def test_case_56_all_equal_is_0_and_so_is_a_single_survivor() -> None:
    """Cases 52 and 56."""
    assert session_advantages([0.5, 0.5], keys(1, 1), estimator="grpo").tolist() == [0.0, 0.0]
    for estimator in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        assert session_advantages([1.0, 1.0], ["p_0_0", "p_0_1"], estimator=estimator).tolist() == [0.0, 0.0]


def test_traces_of_a_session_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="traces with different rewards"):
        session_advantages([1.0, 0.0], ["p_0_0", "p_0_1"], estimator="grpo")


def test_each_session_weighs_alike_by_token_mean() -> None:
    names, tokens = keys(3, 1), [30, 2, 2, 4]
    found = factors("token-mean", names, tokens, [0, 0, 0, 0], sessions=2)
    shares = found * tokens / sum(tokens)
    assert_allclose([shares[:3].sum(), shares[3]], [0.5, 0.5])


def test_an_unknown_way_to_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'sum'"):
        factors("sum", ["p_0_0"], [1], [0], sessions=1)


def test_padding_weighs_nothing_and_divides_by_nothing() -> None:
    assert np.isfinite(factors("seq-mean-token-sum", ["pad_0_0"], [0], [0], sessions=1)).all()
