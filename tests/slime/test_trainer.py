"""What slime's trainer makes of our samples, by its rules as restated and, with SLIME_HOME, by its own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from polar_plugin import slime_rollout
from polar_plugin.records import Status, Trajectory
from polar_plugin.rewards import advantages
from polar_plugin.slime_args import SlimeArgs
from tests.slime_contract import Slime, Trained

from .sessions import POLAR, Outcome, Prompts, ReadyService, scripted, trace, trajectory


def arguments(**told: Any) -> SlimeArgs:
    shape = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4, "max_tokens_per_gpu": 64}
    return SlimeArgs(**{"polar": POLAR, "rollout_top_p": 1.0, **shape, **told})


def train(slime: Slime, outcome: Outcome, **told: Any) -> list[Trained]:
    args = arguments(**told)
    prompts = Prompts(slime.sample, args.n_samples_per_prompt)
    with slime_rollout.use_service(ReadyService(outcome)):
        return slime.train(args, slime_rollout.generate, prompts, slime_rollout.post_process_rewards)


def by_session(trained: Sequence[Trained]) -> dict[int, list[Trained]]:
    sessions: dict[int, list[Trained]] = {}
    for one in trained:
        sessions.setdefault(one.session, []).append(one)
    return dict(sorted(sessions.items()))


def test_case_49_a_session_of_three_traces_weighs_as_much_as_one_of_one(slime: Slime) -> None:
    """Case 49."""
    sessions = by_session(train(slime, scripted([(1.0, 3), (0.0, 1), (0.0, 1), (0.0, 1)])))
    assert [len(traces) for traces in sessions.values()] == [3, 1, 1, 1]
    weights = [sum(one.weights.sum() for one in traces) for traces in sessions.values()]
    assert_allclose(weights, [0.25] * 4, rtol=1e-6)


def test_a_long_trace_does_not_outweigh_its_session(slime: Slime) -> None:
    def outcome(attempt: Any) -> Trajectory:
        lengths = [(30, 2, 2), (4,), (4,), (4,)][attempt.index]
        return trajectory(attempt, 1.0, [trace(n) for n in lengths])

    sessions = by_session(train(slime, outcome))
    assert_allclose([sum(o.weights.sum() for o in s) for s in sessions.values()], [0.25] * 4, rtol=1e-6)
    assert_allclose(sessions[0][0].weights, 1 / 34 / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "standardised", "ours"),
    [
        ("grpo", True, "grpo"),
        ("grpo", False, "dr_grpo"),
        ("gspo", True, "gspo"),
        ("cispo", True, "cispo"),
        ("reinforce_plus_plus_baseline", True, "reinforce_plus_plus_baseline"),
    ],
)
def test_the_gradient_is_that_of_an_ideal_loss_over_sessions(
    slime: Slime, estimator: str, standardised: bool, ours: str
) -> None:
    """Token terms x of session s contribute A(s) * mean over its trained tokens, divided by the number of sessions."""
    if estimator not in slime.estimators:
        pytest.skip(f"this slime has no {estimator}")
    rewards, traces = [1.0, 0.0, 0.25, 1.0], [3, 1, 2, 1]
    outcome = scripted(list(zip(rewards, traces, strict=True)))
    trained = train(slime, outcome, advantage_estimator=estimator, grpo_std_normalization=standardised)
    expected = advantages(rewards, [0, 0, 1, 1], estimator=ours)
    for session, members in by_session(trained).items():
        tokens = sum(sum(one.mask) for one in members)
        for one in members:
            ideal = expected[session] * np.array(one.mask) / tokens / 4
            assert_allclose(one.advantages * one.weights, ideal, atol=1e-6)


def test_case_45_groups_that_are_uneven_in_traces_do_not_share_a_baseline(slime: Slime) -> None:
    """Case 45: sizes 4, 3, 4; the middle group is all 5.0, so its advantage is 0."""
    table = [(1.0, 2), (3.0, 2), (5.0, 1), (5.0, 2), (2.0, 3), (4.0, 1)]
    args = {"rollout_batch_size": 3, "global_batch_size": 6}
    sessions = by_session(train(slime, scripted(table), **args))
    told = [traces[0].advantages[0] for traces in sessions.values()]
    assert_allclose(told, np.array([-1, 1, 0, 0, -1, 1]) / np.sqrt(2), atol=1e-5)


def test_case_46_a_session_of_many_traces_has_one_vote_in_its_baseline(slime: Slime) -> None:
    """Case 46: reward 1 in three traces, reward 0 in one: +-0.5 around 0.5, not around 0.75."""
    trained = train(
        slime, scripted([(1.0, 3), (0.0, 1)]), rollout_batch_size=1, global_batch_size=2, grpo_std_normalization=False
    )
    sessions = by_session(trained)
    assert [float(one.advantages[0]) for one in sessions[0]] == [0.5, 0.5, 0.5]
    assert [float(one.advantages[0]) for one in sessions[1]] == [-0.5]


def test_failed_sessions_leave_the_group_and_keep_their_place_in_the_batch(slime: Slime) -> None:
    """Cases 52 and 58: two of eight fail; the other six are normalised among themselves."""
    table: list[Any] = [(1.0, 1), (0.0, 2), Status.INFRA_ERROR, (1.0, 1), (0.0, 1), Status.ABORTED, (1.0, 3), (0.0, 1)]
    trained = train(slime, scripted(table), rollout_batch_size=1, n_samples_per_prompt=8, global_batch_size=8)
    sessions = by_session(trained)
    told = [float(traces[0].advantages[0]) for traces in sessions.values()]
    half = 0.5 / (np.std([1, 0, 1, 0, 1, 0], ddof=1) + 1e-6)
    assert_allclose(told, [half, -half, 0, half, -half, 0, half, -half], rtol=1e-5)
    weights = [sum(one.weights.sum() for one in traces) for traces in sessions.values()]
    assert_allclose(weights, [0.125, 0.125, 0, 0.125, 0.125, 0, 0.125, 0.125], rtol=1e-6)


def test_a_single_survivor_gets_no_advantage_and_no_nan(slime: Slime) -> None:
    table: list[Any] = [(1.0, 2), Status.INFRA_ERROR, (0.5, 1), (0.5, 1)]
    assert {float(one.advantages.max()) for one in train(slime, scripted(table))} == {0.0}


def test_two_optimiser_steps_get_whole_sessions(slime: Slime) -> None:
    trained = train(slime, scripted([(1.0, 3), (0.0, 1), (0.0, 2), (1.0, 1)]), global_batch_size=2)
    steps = {session: {one.step for one in traces} for session, traces in by_session(trained).items()}
    assert steps == {0: {0}, 1: {0}, 2: {1}, 3: {1}}


def test_tokens_masks_and_log_probabilities_arrive_as_recorded(slime: Slime) -> None:
    recorded = trace(3, prompt=2, context=2, start=50)
    trained = train(slime, lambda attempt: trajectory(attempt, 1.0, [recorded]))
    for one in trained:
        assert one.tokens == [50, 51, 52, 53, 54, 55, 56]
        assert (one.response_length, one.mask) == (5, [0, 0, 1, 1, 1])
        assert one.log_probs == [0.0, 0.0, -0.5, -0.5, -0.5]


def test_the_default_baseline_of_slime_is_wrong_for_many_traces(slime: Slime) -> None:
    """Why the hook is mandatory: a group of zeros gets a negative advantage. Turns red once slime is fixed."""
    samples = [
        slime.sample(group_index=group, index=i, reward=reward, tokens=[1, 2], response_length=1)
        for i, (group, reward) in enumerate([(0, 1.0), (0, 1.0), (0, 1.0), (0, 0.0), (1, 0.0), (1, 0.0)])
    ]
    assert_allclose(slime.default_rewards(arguments(), samples)[-2:], [-0.9128, -0.9128], atol=1e-3)
