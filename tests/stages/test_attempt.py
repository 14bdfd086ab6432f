"""Every attempt ends in one Trajectory whose status says whose doing it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from polar_plugin.errors import (
    BadRequest,
    ConfigError,
    EngineBusy,
    EngineError,
    EvaluationError,
    HarnessError,
    MergeError,
    SandboxError,
)
from polar_plugin.evaluators.base import Evaluator
from polar_plugin.evaluators.session_completed import SessionCompleted
from polar_plugin.records import (
    CompletionSession,
    Evaluation,
    EvaluatorSpec,
    FinishReason,
    PrepareAction,
    Role,
    RuntimeSpec,
    Status,
    Trajectory,
)
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages.attempt import Budgets, run_attempt

from .clock import JUMPING
from .doubles import (
    EMPTY,
    Exploding,
    MemoryEvaluator,
    MemorySessions,
    World,
    attempt,
    completion,
    ledger,
    parts,
    raising,
    running,
    stages,
    taking,
)

pytestmark = pytest.mark.anyio
BUDGETS = Budgets(init=30, build=30, evaluation=40, cleanup=10)


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


async def run(
    world: World,
    *,
    budgets: Budgets = BUDGETS,
    sessions: MemorySessions | None = None,
    grader: Evaluator | None = None,
    made_of: dict[str, Any] | None = None,
    **task: object,
) -> Trajectory:
    """One attempt; whatever it comes to, nothing of it may be left open."""
    sessions = sessions or MemorySessions(world)
    slots = stages()
    with anyio.fail_after(10_000):
        trajectory = await run_attempt(
            attempt(**task),
            parts=parts(world, grader, **made_of or {}),
            sessions=sessions,
            stages=slots,
            budgets=budgets,
        )
    assert sorted(world.opened) == sorted(world.closed)
    assert all(session.sealed for session in sessions.opened)
    assert sessions.under_way == 0
    assert running(slots) == [0, 0, 0, 0, 0]
    assert trajectory.status.gradable or trajectory.evaluation is None
    assert all((trace.reward is None) == (trajectory.evaluation is None) for trace in trajectory.traces)
    return trajectory


def told(trajectory: Trajectory) -> tuple[Status, str | None, str | None]:
    failure = trajectory.failure
    return trajectory.status, failure and failure.boundary, failure and failure.kind


# --- what goes well


async def test_a_good_attempt_is_built_graded_and_rewarded_in_this_order() -> None:
    world = World()
    trajectory = await run(world)
    assert told(trajectory) == (Status.COMPLETED, None, None)
    assert trajectory.reward == 1.0
    assert [trace.reward for trace in trajectory.traces] == [1.0]
    assert trajectory.exit_code == 0
    assert trajectory.counts["sampled_tokens"] == trajectory.counts["trained_tokens"] == 2
    assert world.seen == [
        "session.open", "agent.start", "before", "agent.upload", "agent.exec", "extract", "agent.stop",
        "evaluate", "evaluation.start", "evaluation.exec", "evaluation.stop",
    ]  # fmt: skip


async def test_the_program_gets_its_own_key_its_stdin_and_the_tasks_budget() -> None:
    world = World()
    await run(world, timeout_seconds=77.0)
    assert world.execs[0] == {"command": ("agent",), "env": {"KEY": "key0"}, "stdin": b"do it", "timeout": 77.0}


async def test_a_budget_for_the_agent_goes_before_the_tasks() -> None:
    world = World()
    await run(world, budgets=replace(BUDGETS, agent=5.0), timeout_seconds=77.0)
    assert world.execs[0]["timeout"] == 5.0


async def test_the_session_is_sealed_before_anything_is_extracted() -> None:
    world = World()
    sessions = MemorySessions(world)

    async def extracting() -> None:
        assert sessions.opened[0].sealed

    world.steps["extract"] = extracting
    assert (await run(world, sessions=sessions)).status is Status.COMPLETED


async def test_the_grader_sees_how_it_ended_and_what_was_extracted() -> None:
    world = World(result=ExecResult(3, b"", b"", 1.0))
    evaluator = MemoryEvaluator(world)
    await run(world, grader=evaluator)
    (finished,) = evaluator.finished
    assert (finished.status, finished.exit_code, finished.artifact) == (Status.FAILED, 3, b"patch")
    assert len(finished.session.completions) == 1


async def test_trace_rewards_go_to_their_traces_and_the_outcome_stays() -> None:
    world = World()
    sessions = MemorySessions(world, ledger(completion("a"), completion("b")))
    evaluator = MemoryEvaluator(world, Evaluation(0.5, trace_rewards=(1.0, 0.25)))
    trajectory = await run(world, sessions=sessions, grader=evaluator)
    assert [trace.reward for trace in trajectory.traces] == [1.0, 0.25]
    assert trajectory.reward == 0.5


async def test_the_evaluators_fresh_sandbox_replays_prepare_unless_it_has_its_own() -> None:
    action = PrepareAction("exec", command="agent's")
    world = World()
    await run(world, runtime=RuntimeSpec(prepare=(action,)))
    assert [each["command"] for each in world.execs] == ["agent's", ("agent",), "agent's", "tests"]
    world = World()
    own = replace(action, command="its own")
    await run(world, runtime=RuntimeSpec(prepare=(action,), eval_prepare=(own,)))
    assert [each["command"] for each in world.execs] == ["agent's", ("agent",), "its own", "tests"]


async def test_the_evaluator_looks_at_the_sandbox_between_prepare_and_the_harnesss_files() -> None:
    world = World()
    action = PrepareAction("exec", command="git clone")
    await run(world, runtime=RuntimeSpec(prepare=(action,)))
    assert world.seen[1:5] == ["agent.start", "agent.exec", "before", "agent.upload"]


async def test_an_evaluator_that_needs_no_look_beforehand_need_not_offer_one() -> None:
    trajectory = await run(World(), grader=SessionCompleted())
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0)


async def test_grading_in_the_agents_own_sandbox_is_refused_not_ignored() -> None:
    trajectory = await run(World(), evaluator=EvaluatorSpec(refresh_runtime=False))
    assert told(trajectory) == (Status.INFRA_ERROR, "evaluation", "ConfigError")
    assert trajectory.failure is not None
    assert "evaluator.refresh_runtime" in trajectory.failure.message


# --- the agent's own doing: graded as it stands


async def test_an_agent_out_of_time_is_graded_as_it_stands() -> None:
    trajectory = await run(World(result=ExecResult(137, b"", b"", 60.0, timed_out=True)))
    assert told(trajectory) == (Status.TIMED_OUT, None, None)
    assert trajectory.reward == 1.0
    assert [trace.reward for trace in trajectory.traces] == [1.0]


async def test_a_bad_exit_code_and_the_reward_are_independent_facts() -> None:
    trajectory = await run(World(result=ExecResult(3, b"out", b"boom", 1.0)))
    assert told(trajectory) == (Status.FAILED, "agent", "exit_code")
    assert trajectory.exit_code == 3
    assert trajectory.reward == 1.0
    assert trajectory.failure is not None
    assert "boom" in trajectory.failure.message


async def test_case_120_memory_run_out_in_the_sandbox_is_told_apart() -> None:
    trajectory = await run(World(result=ExecResult(137, b"", b"", 1.0, oom=True)))
    assert told(trajectory) == (Status.FAILED, "agent", "oom")
    assert trajectory.reward == 1.0


async def test_a_program_that_never_called_the_model_failed_and_is_told_apart() -> None:
    world = World()
    trajectory = await run(world, sessions=MemorySessions(world, EMPTY, calls=0))
    assert told(trajectory) == (Status.FAILED, "agent", "no_model_call")
    assert trajectory.traces == ()


async def test_a_program_whose_calls_were_all_refused_failed_and_is_told_apart() -> None:
    world = World()
    sessions = MemorySessions(world, EMPTY, calls=2, last_error=BadRequest("no messages"))
    assert told(await run(world, sessions=sessions)) == (Status.FAILED, "agent", "no_completion")


async def test_a_last_answer_cut_by_length_makes_the_attempt_truncated() -> None:
    world = World()
    cut = ledger(completion("a"), completion("b", FinishReason.LENGTH))
    trajectory = await run(world, sessions=MemorySessions(world, cut))
    assert told(trajectory) == (Status.TRUNCATED, None, None)
    assert trajectory.reward == 1.0


async def test_an_early_answer_or_a_side_call_cut_by_length_does_not() -> None:
    world = World()
    cut = ledger(completion("a", FinishReason.LENGTH), completion("b"), completion("c", FinishReason.LENGTH, Role.SIDE))
    assert (await run(world, sessions=MemorySessions(world, cut))).status is Status.COMPLETED


async def test_an_agent_that_ends_well_and_leaves_nothing_to_grade_failed_and_is_told_apart() -> None:
    world = World()
    nothing_done = Evaluation(0.0, report={"reason": "empty_patch"})
    trajectory = await run(world, grader=MemoryEvaluator(world, nothing_done))
    assert told(trajectory) == (Status.FAILED, "agent", "empty_patch")
    assert (trajectory.reward, trajectory.exit_code, trajectory.counts["empty_patch"]) == (0.0, 0, 1)
    assert [trace.reward for trace in trajectory.traces] == [0.0]


async def test_an_empty_patch_does_not_hide_how_else_an_agent_failed() -> None:
    world = World(result=ExecResult(3, b"", b"boom", 1.0))
    nothing_done = Evaluation(0.0, report={"reason": "empty_patch"})
    trajectory = await run(world, grader=MemoryEvaluator(world, nothing_done))
    assert told(trajectory) == (Status.FAILED, "agent", "exit_code")
    assert trajectory.counts["empty_patch"] == 1


async def test_a_harness_error_is_the_agents_failure() -> None:
    trajectory = await run(World(steps={"agent.exec": raising(HarnessError("no result"))}))
    assert told(trajectory) == (Status.FAILED, "agent", "HarnessError")


# --- infrastructure: never reward 0


@pytest.mark.parametrize(
    ("place", "error", "boundary", "traces"),
    [
        ("session.open", EngineError("gone"), "init", 0),
        ("agent.start", SandboxError("no image"), "init", 1),
        ("agent.start", ValueError("a bug"), "init", 1),
        ("agent.upload", SandboxError("disk full"), "init", 1),
        ("before", SandboxError("gone"), "init", 1),
        ("agent.exec", SandboxError("gone"), "agent", 1),
        ("agent.exec", EngineError("down"), "agent", 1),
        ("extract", SandboxError("gone"), "extract", 1),
        ("evaluate", EvaluationError("no tests"), "evaluation", 1),
        ("evaluate", HarnessError("not the agent's: it is over"), "evaluation", 1),
        ("evaluate", TimeoutError("of a library inside"), "evaluation", 1),
        ("evaluation.start", SandboxError("no image"), "evaluation", 1),
        ("evaluation.exec", SandboxError("gone"), "evaluation", 1),
    ],
)
async def test_case_122_infrastructure_is_never_reward_0_and_keeps_what_was_recorded(
    place: str, error: Exception, boundary: str, traces: int
) -> None:
    trajectory = await run(World(steps={place: raising(error)}))
    assert told(trajectory) == (Status.INFRA_ERROR, boundary, type(error).__name__)
    assert len(trajectory.traces) == traces
    assert trajectory.reward is None


@pytest.mark.parametrize("error", [EngineError("down"), EngineBusy("full"), KeyError("a bug of ours")])
@pytest.mark.parametrize("code", [0, 1])
async def test_a_program_that_ended_on_an_engine_failure_did_not_fail_by_itself(error: Exception, code: int) -> None:
    world = World(result=ExecResult(code, b"", b"502", 1.0))
    trajectory = await run(world, sessions=MemorySessions(world, last_error=error))
    assert told(trajectory) == (Status.INFRA_ERROR, "engine", type(error).__name__)
    assert trajectory.exit_code == code
    assert len(trajectory.traces) == 1
    assert "extract" not in world.seen


async def test_an_error_that_was_the_programs_own_does_not_excuse_it() -> None:
    world = World(result=ExecResult(1, b"", b"400", 1.0))
    trajectory = await run(world, sessions=MemorySessions(world, last_error=BadRequest("no messages")))
    assert told(trajectory) == (Status.FAILED, "agent", "exit_code")


@pytest.mark.parametrize(
    "result", [ExecResult(127, b"", b"agent: not found", 0.1), ExecResult(137, b"", b"", 1, oom=True)]
)
async def test_a_program_that_could_not_start_is_infrastructure(result: ExecResult) -> None:
    world = World(result=result)
    trajectory = await run(world, sessions=MemorySessions(world, EMPTY, calls=0))
    assert told(trajectory) == (Status.INFRA_ERROR, "agent", "did_not_start")


@pytest.mark.parametrize("case", [87, 110])
async def test_cases_87_and_110_no_first_call_in_time_is_infrastructure(case: int) -> None:
    world = World(steps={"agent.exec": anyio.sleep_forever})
    trajectory = await run(
        world, budgets=replace(BUDGETS, first_call=7), sessions=MemorySessions(world, EMPTY, calls=0)
    )
    assert told(trajectory) == (Status.INFRA_ERROR, "agent", "no_first_call")
    assert trajectory.timings["agent"] == 7
    assert "extract" not in world.seen


async def test_a_first_call_in_time_lets_the_program_run_on() -> None:
    world = World(steps={"agent.exec": taking(50)})
    trajectory = await run(world, budgets=replace(BUDGETS, first_call=7))
    assert told(trajectory) == (Status.COMPLETED, None, None)


async def test_no_call_within_the_agents_whole_budget_is_infrastructure() -> None:
    world = World(result=ExecResult(137, b"", b"", 60.0, timed_out=True))
    trajectory = await run(world, sessions=MemorySessions(world, EMPTY, calls=0))
    assert told(trajectory) == (Status.INFRA_ERROR, "agent", "no_first_call")


async def test_a_sandbox_that_does_not_come_back_after_the_agents_deadline_is_given_up() -> None:
    trajectory = await run(World(steps={"agent.exec": anyio.sleep_forever}))
    assert told(trajectory) == (Status.INFRA_ERROR, "agent", "agent_overran")
    assert trajectory.timings["agent"] == 70
    assert len(trajectory.traces) == 1


@pytest.mark.parametrize(
    ("place", "state", "budget"),
    [
        ("agent.start", "init", 30),
        ("agent.upload", "init", 30),
        ("extract", "extract", 40),
        ("evaluate", "evaluation", 40),
        ("evaluation.exec", "evaluation", 40),
    ],
)
async def test_cases_39_and_121_a_stage_over_its_budget_is_named_and_closed(
    place: str, state: str, budget: float
) -> None:
    trajectory = await run(World(steps={place: anyio.sleep_forever}))
    assert told(trajectory) == (Status.INFRA_ERROR, state, f"{state}_timeout")
    assert trajectory.timings[state] == budget


async def test_case_129_a_sandbox_that_comes_up_after_its_deadline_is_stopped() -> None:
    """Its start cannot be cancelled, as a daemon goes on creating what nobody waits for."""

    async def late() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(BUDGETS.init + 5)

    world = World(steps={"agent.start": late})
    trajectory = await run(world)
    assert told(trajectory) == (Status.INFRA_ERROR, "init", "init_timeout")
    assert "agent.exec" not in world.seen
    assert world.closed == world.opened == [0]


async def test_the_first_failure_of_the_infrastructure_is_the_one_that_is_told() -> None:
    world = World(steps={"agent.exec": raising(SandboxError("first"))})
    trajectory = await run(world, made_of={"builder": Exploding(MergeError("second"))})
    assert told(trajectory) == (Status.INFRA_ERROR, "agent", "SandboxError")


async def test_traces_that_break_an_invariant_are_never_shown() -> None:
    def check(traces: object, session: CompletionSession) -> None:
        raise MergeError("position 3")

    trajectory = await run(World(), made_of={"check": check})
    assert told(trajectory) == (Status.INFRA_ERROR, "build", "MergeError")
    assert trajectory.traces == ()


@pytest.mark.parametrize(
    "evaluation", [Evaluation(float("nan")), Evaluation(1.0, (float("inf"),)), Evaluation(1.0, (1.0, 1.0))]
)
async def test_rewards_that_do_not_fit_or_are_not_finite_are_the_evaluators_fault(evaluation: Evaluation) -> None:
    world = World()
    trajectory = await run(world, grader=MemoryEvaluator(world, evaluation))
    assert told(trajectory) == (Status.INFRA_ERROR, "evaluation", "EvaluationError")


async def test_an_error_inside_a_task_group_keeps_its_name() -> None:
    group = ExceptionGroup("group", [ExceptionGroup("inner", [SandboxError("gone")])])
    trajectory = await run(World(steps={"evaluate": raising(group)}))
    assert told(trajectory) == (Status.INFRA_ERROR, "evaluation", "SandboxError")


async def test_a_failure_with_nothing_to_build_or_grade_does_not_wait_for_the_graders() -> None:
    world = World(steps={"agent.start": raising(SandboxError("no image"))})
    trajectory = await run(world, sessions=MemorySessions(world, EMPTY, calls=0))
    assert "postrun_queued" not in trajectory.timings


# --- prepare


async def test_prepare_is_tried_again_with_doubling_pauses_and_then_is_infrastructure() -> None:
    world = World(result=ExecResult(1, b"", b"no network", 0.1))
    action = PrepareAction("exec", command="pip install x", max_attempts=3, retry_backoff_seconds=2)
    trajectory = await run(world, runtime=RuntimeSpec(prepare=(action,)))
    assert told(trajectory) == (Status.INFRA_ERROR, "init", "SandboxError")
    assert trajectory.failure is not None
    assert "no network" in trajectory.failure.message
    assert world.seen.count("agent.exec") == 3
    assert trajectory.timings["init"] == 2 + 4


async def test_prepare_stops_trying_once_it_worked() -> None:
    world = World()
    results = iter([SandboxError("busy"), None])

    async def flaky() -> None:
        if error := next(results, None):
            raise error

    world.steps["agent.upload"] = flaky
    action = PrepareAction("upload_file", source="/a", target="/b", max_attempts=5)
    trajectory = await run(world, runtime=RuntimeSpec(prepare=(action,), eval_prepare=()))
    assert trajectory.status is Status.COMPLETED
    assert world.seen.count("agent.upload") == 2 + 1  # and the harness's own file


@pytest.mark.parametrize("action", [PrepareAction("exec"), PrepareAction("upload_dir", source="/a")])
async def test_a_prepare_action_that_lacks_something_is_not_tried_again(action: PrepareAction) -> None:
    trajectory = await run(World(), runtime=RuntimeSpec(prepare=(replace(action, max_attempts=9),)))
    assert told(trajectory) == (Status.INFRA_ERROR, "init", ConfigError.__name__)
    assert trajectory.timings["init"] == 0


# --- times


async def test_each_stage_is_charged_for_its_own_time_and_no_other() -> None:
    seconds = {
        "agent.start": 1, "agent.upload": 2, "agent.exec": 4, "extract": 8, "agent.stop": 0.5,
        "evaluate": 16, "evaluation.start": 3, "evaluation.exec": 5, "evaluation.stop": 1,
    }  # fmt: skip
    world = World(steps={place: taking(time) for place, time in seconds.items()})
    trajectory = await run(world)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.timings == pytest.approx(
        {
            "queued": 0,
            "init": 3,
            "ready": 0,
            "agent": 4,
            "extract": 8,
            "close": 0.5,
            "postrun_queued": 0,
            "build": 0,
            "evaluation": 25,
            "total": 40.5,
        }
    )


async def test_no_stage_spends_the_budget_of_another() -> None:
    """Each takes nearly all of its own: together far more than any of them."""
    world = World(
        steps={"agent.start": taking(29), "agent.exec": taking(59), "extract": taking(39), "evaluate": taking(39)}
    )
    trajectory = await run(world)
    assert trajectory.status is Status.COMPLETED
    assert trajectory.timings["total"] == 166
