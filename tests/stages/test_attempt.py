"""Every attempt ends in one Trajectory whose status says whose doing it was."""

from __future__ import annotations

import random
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from polar_plugin.errors import EngineError, EvaluationError, HarnessError, SandboxError
from polar_plugin.records import (
    ChatRequest,
    Completion,
    CompletionSession,
    FinishReason,
    Generation,
    Message,
    PrepareAction,
    SamplingParams,
    Status,
    Trajectory,
    log_probs,
    token_ids,
)
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages.attempt import Budgets, run_attempt
from polar_plugin.stages.batch import Batch
from polar_plugin.stages.stage import closing

from . import doubles
from .doubles import MemoryEvaluator, MemorySessions, World

pytestmark = pytest.mark.anyio
BUDGETS = Budgets(init=30, build=30, evaluation=30, cleanup=30)


def ledger(finish: FinishReason = FinishReason.STOP) -> CompletionSession:
    generation = Generation(token_ids([2]), log_probs([-0.1]), finish)
    completion = Completion(
        "c", ChatRequest(()), token_ids([1]), generation, Message("assistant"), SamplingParams(), 0.0, 1.0
    )
    return CompletionSession("s0", (completion,))


async def run(
    world: World,
    *,
    budgets: Budgets = BUDGETS,
    calls: int = 1,
    session: CompletionSession | None = None,
    last_error: Exception | None = None,
    **task: object,
) -> Trajectory:
    one = doubles.attempt()
    one = replace(one, task=replace(one.task, **task))
    sessions = MemorySessions(session or ledger(), calls, last_error)
    stages = doubles.stages()
    with anyio.fail_after(20):
        trajectory = await run_attempt(
            one, parts=doubles.parts(world), sessions=sessions, stages=stages, budgets=budgets
        )
    assert sorted(world.opened) == sorted(world.closed)
    assert all(opened.sealed for opened in sessions.opened)
    assert [s.running for s in (stages.live, stages.init, stages.run, stages.postrun)] == [0, 0, 0, 0]
    return trajectory


def raising(error: Exception) -> doubles.Step:
    async def step() -> None:
        raise error

    return step


async def test_a_good_attempt_is_built_graded_and_rewarded() -> None:
    world = World()
    trajectory = await run(world)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.reward == 1.0
    assert [trace.reward for trace in trajectory.traces] == [1.0]
    assert trajectory.exit_code == 0
    assert {"init", "ready", "agent", "extract", "build", "evaluation", "total"} <= set(trajectory.timings)
    assert world.seen == [
        "agent.start", "agent.upload", "agent.exec", "extract", "agent.stop",
        "evaluate", "evaluation.start", "evaluation.exec", "evaluation.stop",
    ]  # fmt: skip


async def test_an_agent_out_of_time_is_graded_as_it_stands() -> None:
    trajectory = await run(World(result=ExecResult(137, b"", b"", 60.0, timed_out=True)))
    assert trajectory.status is Status.TIMED_OUT
    assert trajectory.reward == 1.0
    assert len(trajectory.traces) == 1


async def test_a_bad_exit_code_and_the_reward_are_independent_facts() -> None:
    trajectory = await run(World(result=ExecResult(3, b"out", b"boom", 1.0)))
    assert trajectory.status is Status.FAILED
    assert trajectory.exit_code == 3
    assert trajectory.reward == 1.0
    assert trajectory.failure is not None
    assert "boom" in trajectory.failure.message


async def test_a_program_that_never_called_the_model_failed() -> None:
    trajectory = await run(World(), calls=0, session=CompletionSession("s0", ()))
    assert trajectory.status is Status.FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "no_model_call"


async def test_case_87_no_first_call_in_time_is_infrastructure_not_reward_0() -> None:
    world = World(steps={"agent.exec": anyio.sleep_forever})
    budgets = replace(BUDGETS, first_call=0.01)
    trajectory = await run(world, budgets=budgets, calls=0, session=CompletionSession("s0", ()))
    assert trajectory.status is Status.INFRA_ERROR
    assert trajectory.reward is None
    assert trajectory.failure is not None
    assert "no model call" in trajectory.failure.message


async def test_a_last_answer_cut_by_length_makes_the_attempt_truncated() -> None:
    assert (await run(World(), session=ledger(FinishReason.LENGTH))).status is Status.TRUNCATED


@pytest.mark.parametrize(
    ("place", "error", "status", "boundary"),
    [
        ("agent.start", SandboxError("no image"), Status.INFRA_ERROR, "init"),
        ("agent.upload", SandboxError("disk full"), Status.INFRA_ERROR, "init"),
        ("agent.exec", SandboxError("gone"), Status.INFRA_ERROR, "agent"),
        ("agent.exec", HarnessError("bad"), Status.FAILED, "agent"),
        ("extract", SandboxError("gone"), Status.INFRA_ERROR, "extract"),
        ("evaluate", EvaluationError("no tests"), Status.INFRA_ERROR, "evaluation"),
        ("evaluation.start", SandboxError("no image"), Status.INFRA_ERROR, "evaluation"),
        ("agent.start", ValueError("a bug"), Status.INFRA_ERROR, "init"),
        ("agent.exec", EngineError("down"), Status.INFRA_ERROR, "agent"),
    ],
)
async def test_case_122_infrastructure_is_never_reward_0(
    place: str, error: Exception, status: Status, boundary: str
) -> None:
    trajectory = await run(World(steps={place: raising(error)}))
    assert trajectory.status is status
    assert trajectory.evaluation is None
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == (boundary, type(error).__name__)


@pytest.mark.parametrize(
    ("place", "boundary"), [("agent.start", "init"), ("extract", "extract"), ("evaluate", "evaluation")]
)
async def test_case_39_a_stage_over_its_budget_is_named_and_cleaned_up(place: str, boundary: str) -> None:
    budgets = replace(BUDGETS, init=0.05, evaluation=0.05)
    trajectory = await run(World(steps={place: anyio.sleep_forever}), budgets=budgets)
    assert trajectory.status is Status.INFRA_ERROR
    assert trajectory.failure is not None
    assert trajectory.failure.kind == f"{boundary}_timeout"


async def test_an_agent_that_ended_on_an_engine_failure_says_nothing_about_the_policy() -> None:
    trajectory = await run(World(result=ExecResult(1, b"", b"", 1.0)), last_error=EngineError("down"))
    assert trajectory.status is Status.INFRA_ERROR
    assert trajectory.exit_code == 1
    assert trajectory.evaluation is None


async def test_prepare_is_tried_again_and_a_command_that_keeps_failing_is_infrastructure() -> None:
    world = World(result=ExecResult(1, b"", b"no network", 0.1))
    action = PrepareAction("exec", command="pip install x", max_attempts=3, retry_backoff_seconds=0.001)
    trajectory = await run(world, runtime=replace(doubles.attempt().task.runtime, prepare=(action,)))
    assert trajectory.status is Status.INFRA_ERROR
    assert trajectory.failure is not None
    assert "no network" in trajectory.failure.message
    assert world.seen.count("agent.exec") == 3


async def test_a_close_that_hangs_is_given_up() -> None:
    with anyio.fail_after(5):
        async with closing(anyio.sleep_forever, grace=0.01, name="x"):
            pass


async def test_ready_sandboxes_wait_for_a_run_slot_and_hold_no_init_slot() -> None:
    """READY is real: while one runs, `live` more are initialised, and not one beyond."""
    world = World(steps={"agent.exec": anyio.sleep_forever})
    stages = doubles.stages(live=3, init=1, run=1)

    async def one(name: str) -> None:
        await run_attempt(
            doubles.attempt(name),
            parts=doubles.parts(world),
            sessions=MemorySessions(ledger()),
            stages=stages,
            budgets=BUDGETS,
        )

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for index in range(6):
                group.start_soon(one, f"s{index}")
            while not (stages.run.running == 1 and stages.run.waiting == 2 and stages.live.waiting == 3):
                await anyio.lowlevel.checkpoint()
            assert world.seen.count("agent.start") == 3
            assert stages.init.running == 0
            group.cancel_scope.cancel()
    assert sorted(world.opened) == sorted(world.closed)


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_fails_hangs_or_is_aborted_each_attempt_gives_one_trajectory(seed: int) -> None:
    rng = random.Random(seed)
    world = World()

    async def mischief() -> None:
        dice = rng.random()
        if dice < 0.08:
            raise rng.choice([SandboxError("x"), HarnessError("x"), ValueError("x")])
        await anyio.sleep(rng.random() / 500 if dice < 0.9 else 0.2)

    places = ("start", "exec", "upload", "stop")
    world.steps = {f"{purpose}.{place}": mischief for purpose in ("agent", "evaluation") for place in places}
    world.steps |= {"extract": mischief, "evaluate": mischief}
    stages = doubles.stages(live=5, init=2, run=3, postrun=2)
    budgets = Budgets(init=0.1, build=5, evaluation=0.1, cleanup=1.0)

    async def one(attempt: doubles.Attempt) -> Trajectory:
        return await run_attempt(
            attempt,
            parts=doubles.parts(world, MemoryEvaluator(world)),
            sessions=MemorySessions(ledger()),
            stages=stages,
            budgets=budgets,
        )

    batch = Batch(one, admitted=8, retries=1)
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    seen: list[Trajectory] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group, receive:
            group.start_soon(batch.run, [doubles.attempt(f"s{n}") for n in range(20)], send)
            async for trajectory in receive:
                seen.append(trajectory)
                batch.abort(f"s{rng.randrange(40)}")
    assert sorted(t.attempt.session_id for t in seen) == sorted(f"s{n}" for n in range(20))
    assert sorted(world.opened) == sorted(world.closed)
    assert [s.running for s in (stages.live, stages.init, stages.run, stages.postrun)] == [0, 0, 0, 0]
    for trajectory in seen:
        assert (trajectory.evaluation is not None) == (trajectory.failure is None)


async def test_an_infrastructure_error_is_run_again_and_counted() -> None:
    runs: list[str] = []

    async def one(attempt: doubles.Attempt) -> Trajectory:
        runs.append(attempt.session_id)
        return Trajectory(attempt, Status.INFRA_ERROR if len(runs) < 3 else Status.COMPLETED)

    batch = Batch(one, admitted=1, retries=2)
    send, receive = anyio.create_memory_object_stream[Trajectory](0)
    async with anyio.create_task_group() as group, receive:
        group.start_soon(batch.run, [doubles.attempt()], send)
        (only,) = [trajectory async for trajectory in receive]
    assert only.status is Status.COMPLETED
    assert batch.counts["infra_retries"] == 2
