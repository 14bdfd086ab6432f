"""A batch gives exactly one Trajectory for each attempt it admits, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from polar_plugin.errors import ConfigError, MergeError, SandboxError
from polar_plugin.records import Attempt, Failure, Status, Trajectory
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages.attempt import Budgets, Script, Stages
from polar_plugin.stages.batch import Batch

from . import doubles
from .clock import JUMPING
from .doubles import MemorySessions, World, attempt, parts, raising, running, taking

pytestmark = pytest.mark.anyio
BUDGETS = Budgets(init=300, build=30, evaluation=300, cleanup=10)


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


def scripts(
    world: World, stages: Stages | None = None, sessions: MemorySessions | None = None
) -> Callable[[Attempt], Script]:
    stages = stages or doubles.stages()
    sessions = sessions or MemorySessions(world)
    return lambda one: Script(one, parts=parts(world), sessions=sessions, stages=stages, budgets=BUDGETS)


def named(count: int, **task: object) -> list[Attempt]:
    return [attempt(f"s{number}", **task) for number in range(count)]


@asynccontextmanager
async def under_way(batch: Batch, attempts: Sequence[Attempt]) -> AsyncGenerator[list[Trajectory]]:
    """The batch runs while the block does; after it, the list has everything that was sent."""
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    seen: list[Trajectory] = []

    async def collect() -> None:
        async with receive:
            async for trajectory in receive:
                seen.append(trajectory)  # noqa: PERF401 - a test looks at it meanwhile

    with anyio.fail_after(100_000):
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run, attempts, send)
            group.start_soon(collect)
            yield seen


async def outcomes(batch: Batch, attempts: Sequence[Attempt]) -> list[Trajectory]:
    async with under_way(batch, attempts) as seen:
        pass
    return seen


async def test_each_attempt_gives_one_trajectory_and_a_failed_one_ends_no_other() -> None:
    world = World()
    results = iter([SandboxError("gone"), None] * 10)

    async def every_other_fails() -> None:
        if error := next(results):
            raise error

    world.steps["agent.start"] = every_other_fails
    batch = Batch(scripts(world), admitted=4)
    seen = await outcomes(batch, named(20))
    assert Counter(trajectory.attempt.session_id for trajectory in seen) == {f"s{n}": 1 for n in range(20)}
    assert Counter(trajectory.status for trajectory in seen) == {Status.INFRA_ERROR: 10, Status.COMPLETED: 10}
    assert batch.counts == {"admitted": 20, Status.INFRA_ERROR: 10, Status.COMPLETED: 10}
    assert batch.states == {}


async def test_case_39_an_attempt_that_cannot_even_be_started_is_data_too() -> None:
    def start(one: Attempt) -> Script:
        if one.session_id == "s1":
            raise ConfigError("agent.settings: unknown key")
        return scripts(World())(one)

    seen = await outcomes(Batch(start, admitted=4, retries=3), named(3))
    (bad,) = [trajectory for trajectory in seen if trajectory.attempt.session_id == "s1"]
    assert bad.status is Status.INFRA_ERROR
    assert bad.failure == Failure("config", "ConfigError", "agent.settings: unknown key")
    assert [trajectory.status for trajectory in seen if trajectory is not bad] == [Status.COMPLETED] * 2


async def test_case_39_a_sandbox_that_never_comes_up_fails_its_attempt_and_the_others_go_on() -> None:
    world = World()
    hangs = iter([False, True, *[False] * 6])

    async def start() -> None:
        if next(hangs):
            await anyio.sleep_forever()

    world.steps["agent.start"] = start
    seen = await outcomes(Batch(scripts(world), admitted=2), named(8))
    assert Counter(trajectory.status for trajectory in seen) == {Status.INFRA_ERROR: 1, Status.COMPLETED: 7}
    (failure,) = [trajectory.failure for trajectory in seen if trajectory.failure]
    assert (failure.boundary, failure.kind) == ("init", "init_timeout")
    assert len(world.opened) == len(world.closed)


async def test_one_attempt_can_be_awaited_by_itself() -> None:
    world = World()
    batch = Batch(scripts(world), admitted=1)
    assert (await batch.one(attempt())).reward == 1.0
    world.steps["agent.start"] = raising(SandboxError("gone"))
    assert (await batch.one(attempt())).status is Status.INFRA_ERROR


# --- admission


async def test_what_a_consumer_does_not_take_holds_its_place() -> None:
    world = World()
    batch = Batch(scripts(world), admitted=3)
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    with anyio.fail_after(100_000):
        async with anyio.create_task_group() as group, receive:
            group.start_soon(batch.run, named(10), send)
            await anyio.sleep(1000)
            assert world.seen.count("agent.start") == 3
            await receive.receive()
            await anyio.sleep(1000)
            assert world.seen.count("agent.start") == 4
            assert len([trajectory async for trajectory in receive]) == 9


async def test_a_session_id_given_twice_is_refused_before_anything_starts() -> None:
    world = World()
    batch = Batch(scripts(world), admitted=3)
    with pytest.RaisesGroup(ValueError, flatten_subgroups=True):
        await outcomes(batch, [attempt("a"), attempt("b"), attempt("a")])
    assert world.seen == []
    assert (await batch.one(attempt("a"))).status is Status.COMPLETED


async def test_a_consumer_that_walks_away_ends_the_batch_and_is_told() -> None:
    world = World(steps={"agent.exec": taking(10)})
    stages = doubles.stages()
    batch = Batch(scripts(world, stages), admitted=5)
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    with pytest.RaisesGroup(anyio.BrokenResourceError, flatten_subgroups=True):
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run, named(9), send)
            await receive.receive()
            receive.close()
    assert sorted(world.opened) == sorted(world.closed)
    assert running(stages) == [0, 0, 0, 0, 0]
    assert batch.states == {}


# --- abort


@pytest.mark.parametrize(
    "place",
    [
        "session.open",
        "agent.start",
        "agent.upload",
        "agent.exec",
        "extract",
        "agent.stop",
        "evaluate",
        "evaluation.exec",
    ],
)
async def test_an_aborted_attempt_is_closed_and_keeps_what_was_recorded(place: str) -> None:
    world = World(steps={place: taking(5)})
    stages = doubles.stages()
    sessions = MemorySessions(world)
    batch = Batch(scripts(world, stages, sessions), admitted=2, retries=5)
    async with under_way(batch, [attempt()]) as seen:
        while place not in world.seen:
            await anyio.lowlevel.checkpoint()
        batch.abort("s0")
    (only,) = seen
    assert (only.status, only.evaluation, only.traces) == (Status.ABORTED, None, ())
    assert only.failure == Failure("batch", "aborted", "aborted on request")
    assert world.opened == world.closed
    assert running(stages) == [0, 0, 0, 0, 0]
    assert sessions.under_way == 0
    if place != "session.open":
        assert only.session is not None
        assert only.counts["untrained_aborted"] == only.counts["sampled_tokens"] == 2
    assert "total" in only.timings


async def test_an_attempt_that_waits_for_a_slot_or_for_admission_can_be_aborted() -> None:
    world = World(steps={"agent.exec": taking(100)})
    stages = doubles.stages(ready=1, run=1)
    batch = Batch(scripts(world, stages), admitted=3)
    async with under_way(batch, named(5)) as seen:
        await anyio.sleep(1)
        assert batch.states == {"s0": "agent", "s1": "ready", "s2": "queued", "s3": "queued", "s4": "queued"}
        for name in ("s1", "s2", "s4"):
            batch.abort(name)
        await anyio.sleep(1)
        assert {trajectory.attempt.session_id for trajectory in seen} == {"s1", "s2", "s4"}
        assert {trajectory.status for trajectory in seen} == {Status.ABORTED}
        assert batch.states == {"s0": "agent", "s3": "ready"}
    assert world.seen.count("agent.exec") == 2
    assert world.seen.count("session.open") == 3
    assert sorted(world.opened) == sorted(world.closed)


async def test_aborting_what_is_over_or_unknown_does_nothing() -> None:
    batch = Batch(scripts(World()), admitted=2)
    async with under_way(batch, named(2)) as seen:
        await anyio.sleep(1000)
        batch.abort("s0")
        batch.abort("nobody")
    assert [trajectory.status for trajectory in seen] == [Status.COMPLETED] * 2


async def test_all_can_be_aborted_at_once() -> None:
    world = World(steps={"agent.exec": taking(100)})
    batch = Batch(scripts(world), admitted=3)
    async with under_way(batch, named(7)) as seen:
        await anyio.sleep(1)
        batch.abort_all()
    assert [trajectory.status for trajectory in seen] == [Status.ABORTED] * 7
    assert sorted(world.opened) == sorted(world.closed)


@pytest.mark.parametrize(
    "place", ["agent.start", "agent.upload", "agent.exec", "extract", "evaluate", "evaluation.exec"]
)
async def test_cancelling_the_batch_closes_everything_and_sends_nothing_more(place: str) -> None:
    world = World(steps={place: anyio.sleep_forever, "agent.stop": taking(3), "evaluation.stop": taking(3)})
    stages = doubles.stages()
    sessions = MemorySessions(world)
    batch = Batch(scripts(world, stages, sessions), admitted=4)
    with anyio.fail_after(1000):
        with anyio.move_on_after(100):
            assert await outcomes(batch, named(10)) == []
    assert place in world.seen
    assert sorted(world.opened) == sorted(world.closed)
    assert all(session.sealed for session in sessions.opened)
    assert running(stages) == [0, 0, 0, 0, 0]
    assert batch.states == {}
    world.steps.clear()
    assert (await batch.one(attempt("s0"))).status is Status.COMPLETED


# --- retries


async def test_case_129_an_infrastructure_error_is_run_again_in_a_new_sandbox_and_a_new_session() -> None:
    world = World()
    sessions = MemorySessions(world)
    errors = iter([SandboxError("gone"), SandboxError("gone"), None])

    async def twice_gone() -> None:
        if error := next(errors):
            raise error

    world.steps["agent.exec"] = twice_gone
    batch = Batch(scripts(world, sessions=sessions), admitted=1, retries=2)
    (only,) = await outcomes(batch, [attempt()])
    assert (only.status, only.reward) == (Status.COMPLETED, 1.0)
    assert [session.key for session in sessions.opened] == ["key0", "key1", "key2"]
    assert world.opened == world.closed == [0, 1, 2, 3]
    assert only.counts["retries"] == 2
    assert only.counts["retried_tokens"] == 2 * 2


async def test_an_infrastructure_error_that_stays_is_told_after_the_last_try() -> None:
    world = World(steps={"agent.start": raising(SandboxError("no image"))})
    batch = Batch(scripts(world), admitted=1, retries=2)
    (only,) = await outcomes(batch, [attempt()])
    assert (only.status, only.counts["retries"]) == (Status.INFRA_ERROR, 2)
    assert world.seen.count("agent.start") == 3


@pytest.mark.parametrize(
    "result",
    [ExecResult(1, b"", b"", 1.0), ExecResult(137, b"", b"", 60.0, timed_out=True), ExecResult(0, b"", b"", 1.0)],
)
async def test_what_the_policy_did_is_never_run_again(result: ExecResult) -> None:
    world = World(result=result)
    await outcomes(Batch(scripts(world), admitted=1, retries=5), [attempt()])
    assert world.seen.count("agent.exec") == 1


async def test_a_try_that_cannot_be_started_shows_nothing_of_the_one_before() -> None:
    world = World(steps={"agent.exec": raising(SandboxError("gone"))})
    starts = iter([scripts(world)])

    def start(one: Attempt) -> Script:
        return next(starts, None)(one)  # type: ignore[misc]

    (only,) = await outcomes(Batch(start, admitted=1, retries=1), [attempt()])
    assert only.failure is not None
    assert (only.failure.boundary, only.failure.kind) == ("batch", "TypeError")
    assert (only.session, only.traces, only.counts) == (None, (), {"retries": 1, "retried_tokens": 2})


@pytest.mark.parametrize("error", [ConfigError("x"), MergeError("x")])
async def test_what_would_only_fail_again_is_not_run_again(error: Exception) -> None:
    world = World(steps={"agent.start": raising(error)})
    (only,) = await outcomes(Batch(scripts(world), admitted=1, retries=5), [attempt()])
    assert only.status is Status.INFRA_ERROR
    assert world.seen.count("agent.start") == 1


# --- READY, and how much of everything there is at once


async def test_ready_sandboxes_wait_for_a_run_slot_and_hold_no_init_slot() -> None:
    """While one runs, `ready` more are initialised, one after another, and not one beyond."""
    world = World(steps={"agent.start": taking(10), "agent.exec": taking(5000)})
    stages = doubles.stages(init=1, ready=3, run=1)
    batch = Batch(scripts(world, stages), admitted=10)
    async with under_way(batch, named(10, timeout_seconds=6000.0)):
        await anyio.sleep(1000)
        assert (stages.run.running, stages.run.waiting, stages.init.running, stages.live.waiting) == (1, 3, 0, 6)
        assert world.seen.count("agent.start") == 4
        batch.abort_all()


async def test_a_freed_run_slot_is_taken_at_once_by_what_is_ready() -> None:
    """Initialising takes as long as running; with a buffer the run slot is never idle after the first start."""
    world = World(steps={"agent.start": taking(60), "agent.exec": taking(60)})
    batch = Batch(scripts(world, doubles.stages(init=2, ready=2, run=1)), admitted=10)
    started = anyio.current_time()
    await outcomes(batch, named(10))
    assert anyio.current_time() - started == pytest.approx(60 + 10 * 60)


async def test_a_slow_grader_does_not_hold_up_the_agents() -> None:
    world = World(steps={"agent.exec": taking(10), "evaluate": taking(200)})
    stages = doubles.stages(init=2, ready=2, run=2, postrun=1)
    batch = Batch(scripts(world, stages), admitted=10)
    async with under_way(batch, named(10)):
        await anyio.sleep(60)
        assert world.seen.count("agent.stop") == 10
        assert stages.postrun.waiting == 9


async def test_extracting_holds_no_run_slot() -> None:
    world = World(steps={"agent.exec": taking(10), "extract": taking(100)})
    batch = Batch(scripts(world, doubles.stages(ready=1, run=1)), admitted=2)
    async with under_way(batch, named(2)):
        await anyio.sleep(15)
        assert world.busy["extract"] == world.busy["agent.exec"] == 1


async def test_no_stage_ever_holds_more_than_its_slots() -> None:
    world = World(anywhere=taking(1), steps={"agent.exec": taking(5)})
    await outcomes(Batch(scripts(world, doubles.stages(init=3, ready=2, run=4, postrun=2)), admitted=30), named(40))
    assert world.most["agent.start"] == 3
    assert world.most["agent.exec"] == 4
    assert world.most["agent"] == 6
    assert world.most["evaluate"] <= 2
    assert world.most["evaluation"] == 2


async def test_waiting_is_charged_to_the_queue_it_was_spent_in() -> None:
    world = World(steps={"agent.start": taking(1), "agent.exec": taking(10), "evaluate": taking(100)})
    batch = Batch(scripts(world, doubles.stages(init=1, ready=1, run=1, postrun=1)), admitted=3)
    seen = {trajectory.attempt.session_id: trajectory.timings for trajectory in await outcomes(batch, named(3))}
    assert [seen[name]["queued"] for name in ("s0", "s1", "s2")] == [0, 1, 11]
    assert [seen[name]["ready"] for name in ("s0", "s1", "s2")] == [0, 9, 9]
    assert [seen[name]["postrun_queued"] for name in ("s0", "s1", "s2")] == [0, 90, 180]
    assert all(timings["agent"] == 10 and timings["evaluation"] == 100 for timings in seen.values())
    assert all(timings["total"] == sum(timings.values()) - timings["total"] for timings in seen.values())
