"""Late in the agent's run: it is told that its time runs out, and its evaluation's sandbox is made ready."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anyio
import pytest

from polar_plugin.errors import SandboxError
from polar_plugin.evaluators.session_completed import SessionCompleted
from polar_plugin.records import Status, Trajectory
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages.attempt import Budgets, Script
from polar_plugin.stages.batch import Batch
from polar_plugin.stages.parts import Stages

from .clock import JUMPING
from .doubles import MemoryEvaluator, MemoryRuntime, MemorySessions, World, attempt, parts, raising, running, taking
from .doubles import stages as sized
from .test_batch import under_way

pytestmark = pytest.mark.anyio
BUDGETS = Budgets(init=30, build=30, evaluation=40, cleanup=10, soft_deadline=15, prewarm_lead=20)
TIMED_OUT = ExecResult(137, b"", b"", 60.0, timed_out=True)


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


class Written(MemoryRuntime):
    """Keeps what was uploaded, and when."""

    files: dict[str, tuple[float, bytes]]

    async def upload(self, source: Any, target: str) -> None:
        await super().upload(source, target)
        self.files[target] = (anyio.current_time(), source)


async def run(
    world: World, budgets: Budgets = BUDGETS, slots: Stages | None = None, grader: Any = None, **made_of: Any
) -> Trajectory:
    slots = slots or sized()
    with anyio.fail_after(10_000):
        trajectory = await Script(
            attempt(),
            parts=parts(world, grader, **made_of),
            sessions=MemorySessions(world),
            stages=slots,
            budgets=budgets,
        ).run()
    assert sorted(world.opened) == sorted(world.closed)
    assert running(slots) == [0, 0, 0, 0, 0]
    return trajectory


# --- the soft deadline


async def told_of(agent_takes: float, **budgets: float | None) -> tuple[Trajectory, dict[str, tuple[float, bytes]]]:
    world = World(steps={"agent.exec": taking(agent_takes)})
    files: dict[str, tuple[float, bytes]] = {}

    def runtime(purpose: str) -> Written:
        made = Written(world, purpose)
        made.files = files
        return made

    trajectory = await run(world, replace(BUDGETS, **budgets), runtime=runtime)
    assert world.execs[0]["env"] == {
        "POLAR_DEADLINE_FILE": "/home/agent/.polar/deadline.json",
        "POLAR_TIMEOUT_SECONDS": "60",
        "KEY": "key0",
    }
    return trajectory, files


async def test_a_program_whose_time_runs_out_is_told_by_a_file() -> None:
    trajectory, files = await told_of(50)
    when, content = files["/home/agent/.polar/deadline.json"]
    assert (when, json.loads(content)) == (45, {"seconds_left": 15})
    assert trajectory.counts["deadline_told"] == 1
    assert trajectory.status is Status.COMPLETED


async def test_a_program_that_ends_before_is_not_told() -> None:
    trajectory, files = await told_of(44)
    assert set(files) == {"/home/agent/config"}
    assert "deadline_told" not in trajectory.counts


async def test_a_time_shorter_than_the_warning_is_told_at_the_start() -> None:
    _, files = await told_of(10, soft_deadline=500)
    when, content = files["/home/agent/.polar/deadline.json"]
    assert (when, json.loads(content)) == (0, {"seconds_left": 60})


@pytest.mark.parametrize("step", [raising(SandboxError("read-only")), anyio.sleep_forever], ids=["fails", "hangs"])
async def test_a_sandbox_that_takes_no_file_does_not_end_the_program(step: Any) -> None:
    world = World(steps={"agent.exec": taking(55)})

    class Refusing(MemoryRuntime):
        async def upload(self, source: Any, target: str) -> None:
            if target.endswith("deadline.json"):
                await step()
            await super().upload(source, target)

    trajectory = await run(world, runtime=lambda purpose: Refusing(world, purpose))
    assert (trajectory.status, trajectory.timings["agent"]) == (Status.COMPLETED, 55)


async def test_a_harness_is_told_how_long_its_program_may_take() -> None:
    seen: list[float | None] = []
    made = parts(World())

    class Asking:
        name = "asking"

        def launch(self, context: Any) -> Any:
            seen.append(context.seconds)
            return made.harness.launch(context)

    await run(World(), harness=Asking())
    await run(World(), replace(BUDGETS, agent=7.0), harness=Asking())
    assert seen == [60, 7]


# --- the evaluator's sandbox


async def test_late_in_the_agents_run_the_evaluators_sandbox_is_made_ready_and_then_used() -> None:
    world = World(steps={"agent.exec": taking(60), "evaluation.start": taking(12)}, result=TIMED_OUT)
    trajectory = await run(world)
    assert world.seen.index("evaluation.start") < world.seen.index("extract")
    assert world.seen.count("evaluation.start") == 1
    assert (trajectory.status, trajectory.reward) == (Status.TIMED_OUT, 1.0)
    assert trajectory.timings["evaluation"] == 0
    assert trajectory.counts["prewarmed"] == 1


async def test_what_is_not_ready_yet_is_waited_for_and_not_started_twice() -> None:
    world = World(steps={"agent.exec": taking(60), "evaluation.start": taking(28)})
    trajectory = await run(world)
    assert world.seen.count("evaluation.start") == 1
    assert trajectory.timings["evaluation"] == 8


async def test_an_agent_that_ends_early_has_its_sandbox_started_when_it_is_graded() -> None:
    world = World(steps={"agent.exec": taking(39), "evaluation.start": taking(12)})
    trajectory = await run(world)
    assert world.seen.index("evaluation.start") > world.seen.index("evaluate")
    assert trajectory.timings["evaluation"] == 12
    assert "prewarmed" not in trajectory.counts


@pytest.mark.parametrize("failure", ["fails", "hangs"])
async def test_a_sandbox_that_cannot_be_made_ready_is_made_when_it_is_asked_for(failure: str) -> None:
    first = iter([raising(SandboxError("no slot")) if failure == "fails" else anyio.sleep_forever])

    async def start() -> None:
        if step := next(first, None):
            await step()

    trajectory = await run(World(steps={"agent.exec": taking(60), "evaluation.start": start}))
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0)
    assert trajectory.counts["prewarm_failed"] == 1


async def test_a_sandbox_made_ready_for_nothing_is_closed() -> None:
    world = World(steps={"agent.exec": anyio.sleep_forever})
    trajectory = await run(world)
    assert trajectory.status is Status.INFRA_ERROR
    assert trajectory.counts["prewarm_unused"] == 1


async def test_no_more_are_made_ready_than_there_are_slots_for_and_nobody_waits_for_one() -> None:
    world = World(steps={"agent.exec": taking(60)})
    slots = sized(init=4, run=4, postrun=4, prewarm=1)
    attempts = [attempt(f"s{number}") for number in range(4)]
    made = Batch(
        lambda one: Script(one, parts=parts(world), sessions=MemorySessions(world), stages=slots, budgets=BUDGETS),
        admitted=4,
    )
    async with under_way(made, attempts) as seen:
        await anyio.sleep(50)
        assert (slots.prewarm.running, world.busy["evaluation"]) == (1, 1)
    assert sum(one.counts.get("prewarmed", 0) for one in seen) == 1
    assert sum(one.counts.get("prewarm_full", 0) for one in seen) == 3
    assert [one.reward for one in seen] == [1.0] * 4


@pytest.mark.parametrize("grader", [SessionCompleted(), MemoryEvaluator(World(), prewarm=False)])
async def test_an_evaluator_that_does_not_ask_for_it_gets_none_early(grader: Any) -> None:
    world = World(steps={"agent.exec": taking(60)})
    await run(world, grader=grader)
    assert "evaluation.start" not in world.seen[: world.seen.index("agent.stop")]


async def test_an_evaluator_that_opens_two_sandboxes_gets_the_second_one_lazily() -> None:
    class Twice(MemoryEvaluator):
        async def evaluate(self, finished: Any) -> Any:
            async with finished.fresh_runtime() as one, finished.fresh_runtime() as two:
                assert one is not two
            return self.evaluation

    world = World(steps={"agent.exec": taking(60)})
    trajectory = await run(world, grader=Twice(world))
    assert trajectory.reward == 1.0
    assert world.seen.count("evaluation.start") == 2


# --- the guard over everything


async def test_the_guard_ends_what_no_budget_covers_and_what_was_recorded_is_built() -> None:
    world = World(steps={"session.open": anyio.sleep_forever})
    trajectory = await run(world, replace(BUDGETS, overall=100))
    assert trajectory.failure is not None
    assert (trajectory.status, trajectory.failure.kind) == (Status.INFRA_ERROR, "attempt_timeout")
    assert trajectory.timings["total"] == 100
    world = World(steps={"agent.exec": taking(59)})
    trajectory = await run(world, replace(BUDGETS, overall=50))
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("attempt", "attempt_timeout")
    assert len(trajectory.traces) == 1


async def test_by_default_the_guard_lets_every_stage_spend_all_of_its_own() -> None:
    seconds = {"agent.start": 29.9, "agent.exec": 59.9, "extract": 39.9, "agent.stop": 9.9, "evaluate": 39.9}
    world = World(steps={place: taking(time) for place, time in seconds.items()})
    assert (await run(world)).status is Status.COMPLETED


async def test_waiting_for_a_slot_is_not_on_the_guards_time() -> None:
    world = World(steps={"agent.exec": taking(50)})
    slots = sized(init=1, ready=1, run=1, postrun=1)
    batch = Batch(
        lambda one: Script(
            one,
            parts=parts(world),
            sessions=MemorySessions(world),
            stages=slots,
            budgets=replace(BUDGETS, overall=60),
        ),
        admitted=9,
    )
    async with under_way(batch, [attempt(f"s{number}") for number in range(9)]) as seen:
        pass
    assert [one.status for one in seen] == [Status.COMPLETED] * 9
