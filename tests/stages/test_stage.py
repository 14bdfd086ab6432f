"""Stages hold what they say, and what is opened is closed."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from polar_plugin.stages.attempt import Stages
from polar_plugin.stages.stage import Stage, closing

from .clock import JUMPING
from .doubles import raising, taking

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


async def test_a_stage_counts_who_runs_who_waits_and_who_left() -> None:
    stage = Stage("run", 2)

    async def pass_through() -> None:
        async with stage.slot():
            await anyio.sleep(1)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(pass_through)
            await anyio.sleep(0.5)
            assert (stage.slots, stage.running, stage.waiting, stage.done) == (2, 2, 3, 0)
    assert (stage.running, stage.waiting, stage.done) == (0, 0, 5)


async def test_a_slot_comes_back_from_whoever_fails_or_is_cancelled_waiting_or_holding() -> None:
    stage = Stage("run", 1)
    with pytest.raises(ValueError):
        async with stage.slot():
            raise ValueError
    async with anyio.create_task_group() as group:

        async def hold() -> None:
            async with stage.slot():
                await anyio.sleep_forever()

        group.start_soon(hold)
        group.start_soon(hold)
        await anyio.sleep(1)
        assert (stage.running, stage.waiting) == (1, 1)
        group.cancel_scope.cancel()
    assert (stage.running, stage.waiting, stage.done) == (0, 0, 2)


def test_live_is_what_runs_and_what_is_ready() -> None:
    stages = Stages.sized(init=4, ready=3, run=8, postrun=2)
    assert [stages.live.slots, stages.init.slots, stages.run.slots, stages.postrun.slots] == [11, 4, 8, 2]


async def test_closing_runs_to_its_end_while_everything_around_is_cancelled() -> None:
    closed: list[float] = []

    async def close() -> None:
        await anyio.sleep(5)
        closed.append(anyio.current_time())

    counts = Counter[str]()
    started = anyio.current_time()
    with anyio.move_on_after(1):
        async with closing(close, grace=10, name="x", counts=counts):
            await anyio.sleep_forever()
    assert closed == [started + 6]
    assert not counts


async def test_a_close_that_hangs_is_given_up_and_counted() -> None:
    counts = Counter[str]()
    started = anyio.current_time()
    async with closing(anyio.sleep_forever, grace=10, name="x", counts=counts):
        pass
    assert anyio.current_time() == started + 10
    assert counts == {"close_overran": 1}


@pytest.mark.parametrize("outcome", ["good", "failed"])
async def test_a_close_that_fails_is_counted_and_hides_nothing(outcome: str) -> None:
    counts = Counter[str]()

    async def block() -> str:
        async with closing(raising(OSError("busy")), grace=10, name="x", counts=counts):
            if outcome == "failed":
                raise KeyError("the block's own")
            return "good"

    if outcome == "failed":
        with pytest.raises(KeyError):
            await block()
    else:
        assert await block() == "good"
    assert counts == {"close_failed": 1}


async def test_a_close_within_its_grace_is_not_counted() -> None:
    counts = Counter[str]()
    async with closing(taking(9.9), grace=10, name="x", counts=counts):
        pass
    assert not counts
