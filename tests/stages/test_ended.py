"""A program that does not end by itself is ended: after its result, and after an error that it does not get over."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from polar_plugin.errors import BadRequest
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.records import Status, Trajectory
from polar_plugin.stages.attempt import Budgets, run_attempt

from .clock import JUMPING
from .doubles import MemoryHarness, MemorySessions, World, attempt, parts, stages, taking

pytestmark = pytest.mark.anyio
BUDGETS = Budgets(linger=20, idle=50, cleanup=10)
RESULT = b'noise\n{"session":"1","type":"result"}\n'


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


class Finishing(MemoryHarness):
    def launch(self, context: LaunchContext) -> Launch:
        return replace(super().launch(context), finished=r'^\{.*"type":"result"')


async def run(world: World, **sessions: object) -> Trajectory:
    return await run_attempt(
        attempt(),
        parts=parts(world, harness=Finishing()),
        sessions=MemorySessions(world, **sessions),  # type: ignore[arg-type]
        stages=stages(),
        budgets=BUDGETS,
    )


@pytest.mark.parametrize("result", [RESULT, RESULT[:-1], RESULT + b"\n"])
async def test_case_85_a_program_that_printed_its_result_and_does_not_exit_is_done(result: bytes) -> None:
    trajectory = await run(World(prints=result, steps={"agent.exec": anyio.sleep_forever}))
    assert (trajectory.status, trajectory.failure, trajectory.exit_code) == (Status.COMPLETED, None, None)
    assert trajectory.counts["ended_lingered"] == 1
    assert trajectory.timings["agent"] == BUDGETS.linger
    assert trajectory.reward == 1.0


async def test_a_program_that_exits_within_its_grace_is_left_alone() -> None:
    trajectory = await run(World(prints=RESULT, steps={"agent.exec": taking(19)}))
    assert (trajectory.exit_code, trajectory.timings["agent"]) == (0, 19)
    assert "ended_lingered" not in trajectory.counts


@pytest.mark.parametrize(
    "printed", [b"", b'{"type":"progress"}\n', RESULT + b"and more\n", b' {"type":"result"}\n', RESULT[:20]]
)
async def test_what_is_no_result_does_not_end_a_program(printed: bytes) -> None:
    trajectory = await run(World(prints=printed, steps={"agent.exec": taking(59)}))
    assert (trajectory.exit_code, trajectory.timings["agent"]) == (0, 59)


async def test_case_111_a_program_that_hangs_after_an_error_is_ended_and_graded() -> None:
    world = World(steps={"agent.exec": anyio.sleep_forever})
    trajectory = await run(world, last_error=BadRequest("no such model"))
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, 1.0)
    assert trajectory.failure
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("agent", "hung")
