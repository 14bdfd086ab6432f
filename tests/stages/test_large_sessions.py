"""Building a large session does not stand in the event loop's way. On the real clock: it works in a thread."""

from __future__ import annotations

import threading
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from polar_plugin.records import CompletionSession, Status, Trace, token_ids
from polar_plugin.stages.attempt import Budgets, run_attempt

from .doubles import MemorySessions, World, attempt, completion, ledger, parts, running, stages

pytestmark = pytest.mark.anyio
LARGE = ledger(replace(completion(), prompt_ids=token_ids([1] * 250_000)))


class Waiting:
    """A builder that goes on only when it is told to, or for ten seconds."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        self.released.wait(10)
        return ()


async def test_the_loop_goes_on_while_a_large_session_is_built() -> None:
    world, builder = World(), Waiting()

    async def release() -> None:
        builder.released.set()

    with anyio.fail_after(9):
        async with anyio.create_task_group() as group:

            async def one() -> None:
                made_of = parts(world, builder=builder)
                sessions = MemorySessions(world, LARGE)
                trajectory = await run_attempt(
                    attempt(), parts=made_of, sessions=sessions, stages=stages(), budgets=Budgets()
                )
                assert trajectory.status is Status.COMPLETED

            group.start_soon(one)
            while "agent.stop" not in world.seen:
                await anyio.lowlevel.checkpoint()
            group.start_soon(release)


async def test_a_build_over_its_budget_is_given_up_and_graded_by_nobody() -> None:
    world, builder = World(), Waiting()
    slots = stages()
    with anyio.fail_after(9):
        trajectory = await run_attempt(
            attempt(),
            parts=parts(world, builder=builder),
            sessions=MemorySessions(world, LARGE),
            stages=slots,
            budgets=Budgets(build=0.05),
        )
    builder.released.set()
    assert trajectory.failure is not None
    assert (trajectory.status, trajectory.failure.kind) == (Status.INFRA_ERROR, "build_timeout")
    assert "evaluate" not in world.seen
    assert running(slots) == [0, 0, 0, 0, 0]
