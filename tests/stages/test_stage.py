"""Stages hold what they say, and what is opened is closed."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter

import anyio
import pytest

from polar_plugin.errors import EngineError, SandboxError
from polar_plugin.stages.parts import Stages
from polar_plugin.stages.stage import Priority, Stage, closing, failure_of

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


# --- who goes first


async def entered(stage: Stage, name: str, priority: Priority, seen: list[str]) -> None:
    async with stage.slot(priority):
        seen.append(name)
        await anyio.sleep(1)


async def test_evaluations_overtake_training_attempts_that_wait_and_nobody_else() -> None:
    stage, seen = Stage("run", 1), list[str]()
    async with anyio.create_task_group() as group:
        for name in ("t1", "t2", "t3", "e1", "e2"):
            priority = Priority.EVALUATION if name.startswith("e") else Priority.TRAINING
            group.start_soon(entered, stage, name, priority, seen)
        await anyio.sleep(1.5)
        group.start_soon(entered, stage, "e3", Priority.EVALUATION, seen)
    assert seen == ["t1", "e1", "e2", "e3", "t2", "t3"]


async def test_a_slot_goes_to_who_waits_and_not_to_who_comes_just_then() -> None:
    stage, seen = Stage("run", 1), list[str]()
    async with anyio.create_task_group() as group:
        group.start_soon(entered, stage, "first", Priority.TRAINING, seen)
        group.start_soon(entered, stage, "waits", Priority.TRAINING, seen)
        await anyio.sleep(1)
        await entered(stage, "comes", Priority.TRAINING, seen)
    assert seen == ["first", "waits", "comes"]


async def test_who_is_cancelled_at_the_moment_it_is_called_passes_the_slot_on() -> None:
    stage, seen = Stage("run", 1), list[str]()
    async with anyio.create_task_group() as group:
        async with stage.slot():
            called = asyncio.get_running_loop().create_task(entered(stage, "called", Priority.TRAINING, seen))
            await anyio.sleep(1)
            group.start_soon(entered, stage, "next", Priority.TRAINING, seen)
            await anyio.sleep(1)
        called.cancel()
    assert (seen, called.cancelled()) == (["next"], True)
    assert (stage.running, stage.waiting, stage.done) == (0, 0, 2)


async def test_a_spare_slot_is_taken_only_where_one_is_free() -> None:
    stage = Stage("prewarm", 1)
    async with stage.spare() as first, stage.spare() as second:
        assert (first, second, stage.running) == (True, False, 1)
    assert (stage.running, stage.done) == (0, 1)


async def test_a_stage_knows_how_long_its_slots_were_held_and_how_many_at_most() -> None:
    stage, seen = Stage("run", 3), list[str]()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(entered, stage, "x", Priority.TRAINING, seen)
        await anyio.sleep(0.5)
        assert stage.busy_seconds == pytest.approx(1.5)
    await anyio.sleep(10)
    assert (stage.busy_seconds, stage.peak) == (pytest.approx(5), 3)


# --- what failed, by name


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SandboxError("x"), "SandboxError"),
        (SandboxError("x", kind="daemon"), "daemon"),
        (SandboxError("x", kind="image"), "image"),
        (EngineError("x"), "EngineError"),
        (OSError(errno.ENOSPC, "no space left on device"), "disk_full"),
        (caused(SandboxError("x"), OSError(errno.ENOSPC, "no space")), "disk_full"),
        (caused(SandboxError("x"), OSError(errno.EDQUOT, "quota")), "disk_full"),
        (caused(SandboxError("x"), OSError(errno.ENOMEM, "fork")), "host_memory"),
        (MemoryError(), "host_memory"),
        (caused(SandboxError("x"), OSError(errno.ENOENT, "no such file")), "SandboxError"),
    ],
)
def test_case_122_what_the_machine_lacks_and_what_of_the_infrastructure_failed_is_told_apart(
    error: Exception, kind: str
) -> None:
    assert failure_of("init", error).kind == kind
