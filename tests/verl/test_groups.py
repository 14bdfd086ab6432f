"""What a session of a prompt is told of its siblings. Needs no verl."""

from __future__ import annotations

import asyncio

import pytest

from polar_plugin.verl_groups import Groups

pytestmark = pytest.mark.anyio


async def test_survivors_are_told_once_all_have_ended() -> None:
    groups, told = Groups(), []

    async def session(counted: bool, may_end: asyncio.Event) -> None:
        with groups.joined("u") as member:
            await may_end.wait()
            member.end(counted=counted)
            told.append(await member.survivors())

    gates = [asyncio.Event() for _ in range(3)]
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for counted, gate in zip((False, True, True), gates, strict=True):
            tasks.create_task(session(counted, gate))
        await asyncio.sleep(0)  # all have joined, as verl starts them
        for gate in gates:
            assert told == []
            gate.set()
            await asyncio.sleep(0)
    assert told == [2, 2, 2]


async def test_a_session_that_raises_counts_for_nothing_and_holds_no_one_up() -> None:
    groups = Groups()
    with groups.joined("u") as member:
        with pytest.raises(RuntimeError), groups.joined("u"):
            raise RuntimeError
        member.end(counted=True)
        assert await asyncio.wait_for(member.survivors(), 5) == 1


async def test_prompts_have_nothing_to_do_with_each_other() -> None:
    groups = Groups()
    with groups.joined("a") as one, groups.joined("b"):
        one.end(counted=True)
        assert await asyncio.wait_for(one.survivors(), 5) == 1
