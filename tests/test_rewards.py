"""A session is one vote: baselines and advantages over sessions, whatever the number of their traces."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from polar_plugin.rewards import ESTIMATORS, advantages, collapse, pass_at_k, uninformative

BASELINES = [name for name in ESTIMATORS if name != "none"]
estimators = st.sampled_from(BASELINES)
rewards_ = st.floats(-1e6, 1e6, allow_nan=False, width=32) | st.sampled_from([0.0, 0.1, 0.5, 1.0])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[int], list[bool]]:
    """Rewards, groups and exclusion flags of a batch of sessions in any order."""
    size = draw(st.integers(1, 24))
    rewards = draw(st.lists(rewards_, min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    return rewards, groups, draw(st.lists(st.booleans(), min_size=size, max_size=size))


@given(batches(), estimators)
def test_every_advantage_is_finite_and_excluded_sessions_get_none(
    batch: tuple[list[float], list[int], list[bool]], estimator: str
) -> None:
    rewards, groups, excluded = batch
    told = advantages(rewards, groups, excluded=excluded, estimator=estimator)
    assert np.isfinite(told).all()
    assert not told[np.array(excluded)].any()


@given(batches(), estimators, st.randoms(use_true_random=False))
def test_the_order_of_sessions_does_not_matter(
    batch: tuple[list[float], list[int], list[bool]], estimator: str, shuffler: random.Random
) -> None:
    rewards, groups, excluded = batch
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    told = advantages(rewards, groups, excluded=excluded, estimator=estimator)
    shuffled = advantages(
        [rewards[i] for i in order],
        [groups[i] for i in order],
        excluded=[excluded[i] for i in order],
        estimator=estimator,
    )
    assert_allclose(shuffled, told[order], rtol=1e-6, atol=1e-6)


@given(batches(), estimators, st.data())
def test_splitting_a_session_into_traces_changes_no_advantage(
    batch: tuple[list[float], list[int], list[bool]], estimator: str, data: st.DataObject
) -> None:
    rewards, groups, excluded = batch
    traces = data.draw(st.lists(st.integers(1, 5), min_size=len(rewards), max_size=len(rewards)))
    sessions = [session for session, count in enumerate(traces) for _ in range(count)]
    data.draw(st.randoms(use_true_random=False)).shuffle(sessions)
    per_session, of = collapse([rewards[session] for session in sessions], sessions)
    order = list(dict.fromkeys(sessions))
    told = advantages(
        per_session, [groups[s] for s in order], excluded=[excluded[s] for s in order], estimator=estimator
    )
    expected = advantages(rewards, groups, excluded=excluded, estimator=estimator)
    assert_allclose(told[of], expected[sessions], rtol=1e-6, atol=1e-6)


@given(batches(), estimators)
def test_the_advantages_of_a_group_add_up_to_zero(
    batch: tuple[list[float], list[int], list[bool]], estimator: str
) -> None:
    rewards, groups, excluded = batch
    told = advantages(rewards, groups, excluded=excluded, estimator=estimator)
    scale = max(1.0, float(np.abs(rewards).max()))
    for group in set(groups):
        assert abs(told[np.array(groups) == group].sum()) <= 1e-9 * scale


@given(batches(), estimators, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(
    batch: tuple[list[float], list[int], list[bool]], estimator: str, constant: float
) -> None:
    rewards = [round(reward, 3) for reward in batch[0]]
    groups, excluded = batch[1:]
    told = advantages(rewards, groups, excluded=excluded, estimator=estimator)
    moved = advantages([r + constant for r in rewards], groups, excluded=excluded, estimator=estimator)
    assert_allclose(moved, told, rtol=1e-4, atol=1e-4)


@given(batches())
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(
    batch: tuple[list[float], list[int], list[bool]],
) -> None:
    rewards, groups, _ = batch
    told = advantages(rewards, groups, estimator="rloo")
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert_allclose(told[i], expected, rtol=1e-6, atol=1e-6 * max(1.0, abs(reward)))


def test_grpo_divides_by_the_standard_deviation_of_a_sample() -> None:
    told = advantages([1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b"])
    assert_allclose(told, np.array([0.5, -0.5, -0.5, 0.5]) / (np.sqrt(0.5) + 1e-6))


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert advantages([1.0, 0.0, 0.5, 0.5], [0] * 4, estimator="dr_grpo").tolist() == [0.5, -0.5, 0.0, 0.0]


def test_an_estimator_with_a_baseline_of_its_own_gets_the_rewards() -> None:
    assert advantages([1.0, 3.0], [0, 0], excluded=[False, True], estimator="none").tolist() == [1.0, 0.0]


def test_equal_rewards_give_exactly_zero_even_where_their_mean_is_not_exact() -> None:
    """Three times 0.1 has a mean that is not 0.1: the rounding must not be divided by a tiny deviation."""
    for estimator in BASELINES:
        assert advantages([0.1, 0.1, 0.1], [0, 0, 0], estimator=estimator).tolist() == [0.0, 0.0, 0.0]


def test_case_45_groups_of_uneven_size_keep_their_own_baselines() -> None:
    """Case 45: sizes 4, 3, 4; the all-5.0 group gets 0, not what a common mean would give it."""
    rewards = [1, 1, 2, 2, 5, 5, 5, 0, 0, 0, 4]
    told = advantages(rewards, [0] * 4 + [1] * 3 + [2] * 4, estimator="dr_grpo")
    assert told.tolist() == [-0.5, -0.5, 0.5, 0.5, 0, 0, 0, -1, -1, -1, 3]


def test_two_groups_of_two_and_one() -> None:
    """Case 45, second example: rewards [1, 3] of one group and [5] of another."""
    assert advantages([1, 3, 5], [0, 0, 1], estimator="dr_grpo").tolist() == [-1.0, 1.0, 0.0]


def test_uneven_groups_whose_sizes_happen_to_fill_the_batch_are_not_mixed() -> None:
    """3 + 5 sessions where 2 x 4 were planned: grouped by prompt, never by position."""
    told = advantages([1, 1, 1, 0, 0, 0, 0, 5], [0] * 3 + [1] * 5, estimator="dr_grpo")
    assert told.tolist() == [0, 0, 0, -1, -1, -1, -1, 4]


def test_case_52_a_group_of_eight_with_two_failures_is_normalised_over_six() -> None:
    """Case 52."""
    rewards, failed = [1, 0, 0, 1, 1, 0, 0, 0], [False] * 6 + [True] * 2
    told = advantages(rewards, [0] * 8, excluded=failed)
    assert_allclose(told, [*advantages(rewards[:6], [0] * 6), 0, 0])


def test_case_54_a_masked_timeout_counts_in_the_baseline_only_if_it_is_included() -> None:
    """Case 54: [1, 1, 0 by timeout]."""
    rewards, groups = [1.0, 1.0, 0.0], [0, 0, 0]
    assert advantages(rewards, groups, excluded=[False, False, True], estimator="dr_grpo").tolist() == [0, 0, 0]
    assert_allclose(advantages(rewards, groups, estimator="dr_grpo"), [1 / 3, 1 / 3, -2 / 3])


def test_case_56_groups_are_uninformative_by_variance_not_by_mean() -> None:
    """Case 56: all 0.5 teaches nothing; [0, 1], whose mean is 0.5 too, does."""
    rewards, groups = [0.5, 0.5, 0.0, 1.0, 1.0, 0.0], ["flat", "flat", "mixed", "mixed", "single", "single"]
    assert uninformative(rewards, groups, excluded=[False] * 5 + [True]) == ("flat", "single")


def test_a_session_whose_traces_disagree_is_named() -> None:
    with pytest.raises(ValueError, match=r"session 'b' has traces with different rewards: 0\.0 and 1\.0"):
        collapse([1.0, 0.0, 1.0], ["a", "b", "b"])


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_counted_reward_must_be_finite(reward: float) -> None:
    with pytest.raises(ValueError, match="the reward of session 1 is"):
        advantages([0.0, reward], [0, 0])
    assert advantages([0.0, reward], [0, 0], excluded=[False, True]).tolist() == [0.0, 0.0]


def test_unknown_estimators_and_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown estimator 'gae'; known: grpo"):
        advantages([1.0], [0], estimator="gae")
    with pytest.raises(ValueError, match="1 rewards, 2 groups and 1 exclusion flags"):
        advantages([1.0], [0, 0])


@pytest.mark.parametrize(
    ("correct", "k", "chance"), [(0, 1, 0.0), (1, 1, 0.25), (1, 2, 0.5), (2, 2, 5 / 6), (1, 4, 1.0)]
)
def test_pass_at_k_is_the_unbiased_estimate(correct: int, k: int, chance: float) -> None:
    assert pass_at_k(4, correct, k) == pytest.approx(chance)
