"""Whatever fails, hangs, dawdles or is aborted, wherever: one Trajectory an attempt, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from polar_plugin.errors import EngineError, EvaluationError, HarnessError, SandboxError
from polar_plugin.records import Attempt, Status, Trajectory
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages.attempt import Budgets, Script
from polar_plugin.stages.batch import Batch
from polar_plugin.stages.groups import GroupPolicy, Groups

from . import doubles
from .clock import JUMPING
from .doubles import EMPTY, MemorySessions, World, attempt, parts, running

pytestmark = pytest.mark.anyio

SEEDS = 500
ATTEMPTS = 20
BUDGETS = Budgets(
    init=30, agent=40, build=10, evaluation=50, cleanup=5, first_call=20, soft_deadline=15, prewarm_lead=25
)
ERRORS = (SandboxError, EngineError, HarnessError, EvaluationError, ValueError, TimeoutError, OSError)
RESULTS = (
    ExecResult(0, b"", b"", 1.0),
    ExecResult(3, b"", b"boom", 1.0),
    ExecResult(127, b"", b"", 1.0),
    ExecResult(137, b"", b"", 40.0, timed_out=True),
    ExecResult(137, b"", b"", 1.0, oom=True),
)


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    """Tracebacks of made-up failures, thousands of them, are most of the time these tests take."""
    caplog.set_level(logging.CRITICAL, "polar_plugin.stages")


@dataclass
class Chaos:
    """Rolls the dice at every await of every stand-in: go on, dawdle, fail, hang, come up late, abort somebody."""

    random: random.Random
    world: World = field(init=False)
    batch: Batch = field(init=False)
    stages: doubles.Stages = field(init=False)
    sessions: MemorySessions = field(init=False)
    attempts: list[Attempt] = field(init=False)
    budgets: Budgets = field(init=False)

    def __post_init__(self) -> None:
        dice = self.random
        in_memory = {"session.open": partial(self.mischief, hangs=False)}
        self.world = World(in_memory, anywhere=self.mischief)
        self.stages = doubles.stages(*(dice.randint(1, 4) for _ in range(4)), prewarm=dice.randint(0, 3))
        self.attempts = [
            replace(attempt(f"s{n}"), group_index=n // 5, evaluation=dice.random() < 0.2) for n in range(ATTEMPTS)
        ]
        self.sessions = MemorySessions(self.world)
        self.budgets = replace(BUDGETS, overall=dice.choice((None, None, 60.0)))
        policy = GroupPolicy(dice.randint(0, 2), dice.choice((0.0, 20.0)), min_usable=dice.choice((None, None, 2)))
        groups = Groups(self.attempts, policy)
        self.batch = Batch(self.start, admitted=dice.randint(1, 12), retries=dice.randint(0, 2), groups=groups)

    def start(self, one: Attempt) -> Script:
        if self.random.random() < 0.01:
            raise ValueError("parts that cannot be made")
        self.world.result = self.random.choice(RESULTS)
        self.sessions.calls, self.sessions.ledger = self.random.choice(
            ((0, EMPTY), (1, EMPTY), (1, doubles.ledger()), (1, doubles.ledger()))
        )
        self.sessions.last_error = self.random.choice((None, None, None, EngineError("down")))
        return Script(one, parts=parts(self.world), sessions=self.sessions, stages=self.stages, budgets=self.budgets)

    async def mischief(self, *, hangs: bool = True) -> None:
        dice = self.random.random()
        if dice < 0.05:
            raise self.random.choice(ERRORS)("chaos")
        if dice < 0.08 and hangs:
            await anyio.sleep_forever()
        if dice < 0.0805:
            self.end_many()
        if dice < 0.10:
            self.batch.abort(f"s{self.random.randrange(ATTEMPTS)}")
        if dice < 0.12:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(self.random.random() * 100)
        if dice < 0.6:
            await anyio.sleep(self.random.random() * 30)
        await anyio.lowlevel.checkpoint()

    def end_many(self) -> None:
        self.random.choice((self.batch.stop, self.batch.abort_all, lambda: self.batch.abort_task("t")))()


def check_nothing_is_left(chaos: Chaos, tasks_before: set[asyncio.Task[object]]) -> None:
    assert sorted(chaos.world.opened) == sorted(chaos.world.closed)
    assert running(chaos.stages) == [0, 0, 0, 0, 0]
    assert [stage.waiting for stage in chaos.stages] == [0, 0, 0, 0, 0]
    assert chaos.sessions.under_way == 0
    assert all(session.sealed for session in chaos.sessions.opened)
    assert chaos.batch.states == {}
    assert not +chaos.world.busy
    assert asyncio.all_tasks() == tasks_before
    for place, stage in (("agent", "live"), ("agent.start", "init"), ("agent.exec", "run"), ("evaluate", "postrun")):
        assert chaos.world.most[place] <= getattr(chaos.stages, stage).slots


def check_makes_sense(trajectory: Trajectory) -> None:
    graded = trajectory.evaluation is not None
    assert all((trace.reward is not None) == graded for trace in trajectory.traces)
    if not trajectory.status.gradable:
        assert not graded
    if trajectory.status in (Status.INFRA_ERROR, Status.ABORTED, Status.FAILED):
        assert trajectory.failure is not None
    else:
        assert trajectory.failure is None
        assert graded
        assert trajectory.session is not None
        assert len(trajectory.traces) == len(trajectory.session.completions)
    if trajectory.status is Status.ABORTED:
        assert trajectory.traces == ()
    assert all(seconds <= trajectory.timings["total"] + 1e-9 for seconds in trajectory.timings.values())


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_each_attempt_gives_exactly_one_trajectory_and_nothing_is_left_behind(seed: int) -> None:
    chaos = Chaos(random.Random(seed))
    before = asyncio.all_tasks()
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    seen: list[Trajectory] = []
    with anyio.fail_after(1_000_000):
        async with anyio.create_task_group() as group, receive:
            group.start_soon(chaos.batch.run, chaos.attempts, send)
            async for trajectory in receive:
                seen.append(trajectory)
                await anyio.sleep(chaos.random.choice((0, 0, 5)))
    assert Counter(t.attempt.session_id for t in seen) == {f"s{n}": 1 for n in range(ATTEMPTS)}
    assert chaos.batch.counts["admitted"] == ATTEMPTS == sum(chaos.batch.counts[status] for status in Status)
    for trajectory in seen:
        check_makes_sense(trajectory)
    check_nothing_is_left(chaos, before)


@pytest.mark.parametrize("seed", range(SEEDS // 3))
async def test_a_batch_cancelled_at_any_moment_leaves_nothing_behind(seed: int) -> None:
    chaos = Chaos(random.Random(seed))
    before = asyncio.all_tasks()
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    seen: list[str] = []
    with anyio.fail_after(1_000_000), anyio.move_on_after(chaos.random.random() * 200):
        async with anyio.create_task_group() as group, receive:
            group.start_soon(chaos.batch.run, chaos.attempts, send)
            async for trajectory in receive:
                seen.append(trajectory.attempt.session_id)  # noqa: PERF401 - it is cancelled meanwhile
    assert len(seen) == len(set(seen))
    check_nothing_is_left(chaos, before)
