"""A group that lost attempts to the infrastructure is made whole sample by sample, or trained or dropped as a whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from polar_plugin.config import load_config
from polar_plugin.errors import ConfigError, SandboxError
from polar_plugin.records import (
    Attempt,
    Evaluation,
    FinishReason,
    Status,
    Trace,
    Trajectory,
    log_probs,
    mask,
    token_ids,
)
from polar_plugin.stages.attempt import Script
from polar_plugin.stages.batch import STRAGGLER, Batch
from polar_plugin.stages.groups import GroupPolicy, Groups
from polar_plugin.wiring import group_policy

from .clock import JUMPING
from .doubles import World, attempt, raising, stages
from .test_batch import outcomes, scripts, under_way

pytestmark = pytest.mark.anyio
GRPO = 8


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


def drawn(groups: int, size: int = GRPO, **told: Any) -> list[Attempt]:
    """`groups` prompts with `size` attempts each."""
    return [
        replace(attempt(f"g{group}-{n}"), group_index=group, index=group * size + n, **told)
        for group in range(groups)
        for n in range(size)
    ]


def batch_of(
    attempts: Sequence[Attempt], policy: GroupPolicy, start: Callable[[Attempt], Script], **options: Any
) -> Batch:
    return Batch(start, admitted=len(attempts), groups=Groups(attempts, policy), **options)


def by_group(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.attempt.group_index, []).append(trajectory)
    return list(groups.values())


# --- refills


@pytest.mark.parametrize(("refills", "whole"), [(0, 0.66), (1, 0.98), (2, 0.999)])
async def test_case_53_of_groups_of_8_with_failing_starts_the_refilled_ones_stay_whole(
    refills: int, whole: float
) -> None:
    """One start in twenty fails. Without refills a third of the groups lose an attempt."""
    dice = random.Random(1)
    world = World()

    async def start() -> None:
        await anyio.sleep(10)
        if dice.random() < 0.05:
            raise SandboxError("no sandbox")

    world.steps["agent.start"] = start
    attempts = drawn(200)
    batch = batch_of(attempts, GroupPolicy(refills=refills), scripts(world, stages(8, 8, 8, 8)))
    seen = by_group(await outcomes(batch, attempts))
    kept = [group for group in seen if all(one.status is Status.COMPLETED for one in group)]
    assert len(kept) / len(seen) == pytest.approx(whole, abs=0.04)
    starts = world.seen.count("agent.start")
    assert starts <= len(attempts) + refills * 0.06 * len(attempts), "only the failed samples are run again"


async def test_a_refill_waits_longer_each_time_and_counts_what_it_cost() -> None:
    world = World(steps={"agent.exec": raising(SandboxError("daemon gone"))})
    policy = GroupPolicy(refills=3, refill_pause=10)
    attempts = drawn(1, 1)
    batch = batch_of(attempts, policy, scripts(world), retries=1)
    started = anyio.current_time()
    (only,) = await outcomes(batch, attempts)
    assert anyio.current_time() - started == 10 + 20 + 40
    assert only.status is Status.INFRA_ERROR
    assert (only.counts["refills"], only.counts["retries"]) == (3, 4)
    assert only.counts["retried_tokens"] == 7 * 2
    assert world.opened == world.closed == list(range(8))


async def test_a_sample_that_waits_for_its_refill_can_be_aborted() -> None:
    world = World(steps={"agent.start": raising(SandboxError("no image"))})
    attempts = drawn(1, 1)
    batch = batch_of(attempts, GroupPolicy(refills=1, refill_pause=100), scripts(world))
    async with under_way(batch, attempts) as seen:
        await anyio.sleep(50)
        assert batch.states == {"g0-0": "queued"}
        batch.abort_task("t")
    assert [(one.status, one.counts["refills"]) for one in seen] == [(Status.ABORTED, 1)]


# --- what is left of a group


def ended(status: Status, reward: float | None = 1.0) -> Trajectory:
    trace = Trace(token_ids([1]), token_ids([2]), mask([True]), log_probs([0.0]), FinishReason.STOP, reward=reward)
    graded = status.gradable and reward is not None
    return Trajectory(attempt(), status, (trace,), Evaluation(reward) if graded and reward is not None else None)


def group(*, lost: int = 0, timed_out: int = 0, size: int = GRPO) -> list[Trajectory]:
    good = [ended(Status.COMPLETED)] * (size - lost - timed_out)
    return [*good, *[ended(Status.INFRA_ERROR)] * lost, *[ended(Status.TIMED_OUT)] * timed_out]


@pytest.mark.parametrize(
    ("policy", "trajectories", "trained"),
    [
        ("drop", group(), True),
        ("drop", group(lost=1), False),
        ({"train_if": 6}, group(lost=2), True),
        ({"train_if": 6}, group(lost=3), False),
        ({"train_if": 2}, group(lost=7), False),
        ({"train_if": 6}, group(lost=2, timed_out=2), True),
        ("drop", group(timed_out=8), True),
        ("drop", [*group(size=7), ended(Status.ABORTED)], False),
        ({"train_if": 7}, [*group(size=7), ended(Status.COMPLETED, None)], True),
    ],
)
def test_case_52_an_incomplete_group_is_trained_from_k_usable_attempts_on_or_dropped(
    policy: Any, trajectories: list[Trajectory], trained: bool
) -> None:
    told = group_policy(load_config({"groups": {"incomplete_group": policy}}))
    assert told.trains(trajectories) is trained


def test_attempts_out_of_time_count_as_lost_only_where_they_are_excluded_and_others_are_lost_too() -> None:
    told = group_policy(load_config({"groups": {"incomplete_group": {"train_if": 6}}, "on_timeout": "exclude"}))
    assert not told.trains(group(lost=2, timed_out=2))
    assert told.trains(group(timed_out=2))


# --- stragglers


async def test_once_a_group_has_enough_usable_attempts_its_stragglers_are_ended() -> None:
    world = World()
    seconds = iter([10.0, 10, 10, 50, 10, 10, 40, 50])

    async def run() -> None:
        await anyio.sleep(next(seconds))

    world.steps["agent.exec"] = run
    attempts = drawn(2, 4)
    seen = await outcomes(batch_of(attempts, GroupPolicy(min_usable=3), scripts(world, stages(8, 8, 8, 8))), attempts)
    took = {one.attempt.session_id: one.timings["total"] for one in seen}
    assert took == {
        **dict.fromkeys(("g0-0", "g0-1", "g0-2", "g0-3", "g1-0", "g1-1"), 10.0),
        **dict.fromkeys(("g1-2", "g1-3"), 40.0),
    }
    stragglers = [one for one in seen if one.status is Status.ABORTED]
    assert {one.attempt.session_id for one in stragglers} == {"g0-3", "g1-3"}
    assert {one.failure for one in stragglers} == {STRAGGLER}
    assert all(one.counts["untrained_aborted"] == one.counts["sampled_tokens"] == 2 for one in stragglers)
    assert sorted(world.opened) == sorted(world.closed)


async def test_an_evaluation_has_no_stragglers() -> None:
    attempts = drawn(1, 4, evaluation=True)
    seen = await outcomes(batch_of(attempts, GroupPolicy(min_usable=1), scripts(World())), attempts)
    assert [one.status for one in seen] == [Status.COMPLETED] * 4


async def test_a_group_that_has_enough_is_not_refilled() -> None:
    world = World()
    failures = iter([None, None, SandboxError("gone"), None])

    async def start() -> None:
        if error := next(failures):
            await anyio.sleep(0.5)
            raise error

    world.steps["agent.start"] = start
    attempts = drawn(1, 3)
    policy = GroupPolicy(refills=5, min_usable=2)
    batch = batch_of(attempts, policy, scripts(world, stages(8, 8, 8, 8)))
    assert Counter(one.status for one in await outcomes(batch, attempts)) == {Status.COMPLETED: 2, Status.ABORTED: 1}
    assert world.seen.count("agent.start") == 3


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"min_usable": 3, "incomplete_group": "drop"}, "not drop"),
        ({"min_usable": 3, "incomplete_group": {"train_if": 4}}, "must not be less than"),
        ({"incomplete_group": {"train_if": 0}}, "train_if"),
        ({"incomplete_group": "keep"}, "incomplete_group"),
    ],
)
def test_a_policy_under_which_groups_would_be_lost_by_intent_is_refused(groups: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"groups": groups})
