"""A running service is told to end attempts, to shut down, to pause, and what it is doing."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from polar_plugin.engine.turn import Conversation
from polar_plugin.errors import ConfigError, PolarError
from polar_plugin.records import Attempt, Status, Trajectory
from polar_plugin.service import RolloutService

from .test_service import ask, attempt, client, service_over, tiny

__all__ = ["tiny"]
pytestmark = pytest.mark.anyio
TOKEN = "a-token-of-sixteen"
SLEEPER = {"harness": "shell", "command": "sleep 600"}


def sleepers(count: int) -> list[Attempt]:
    return [replace(attempt(SLEEPER, f"s{n}", timeout_seconds=300), index=n) for n in range(count)]


async def until_running(service: RolloutService, count: int) -> None:
    while [one["state"] for one in service.status()["sessions"].values()].count("agent") < count:
        await anyio.sleep(0.02)


async def collect(service: RolloutService, attempts: list[Attempt], ended: list[Trajectory]) -> None:
    ended += await service.run(attempts)


async def test_one_attempt_one_task_and_all_can_be_ended(tiny: Path) -> None:
    ended: list[Trajectory] = []
    attempts = sleepers(4)
    attempts[1] = replace(attempts[1], task=replace(attempts[1].task, task_id="other"))
    async with service_over(tiny, [], {"stages": {"run": 4}}) as (service, _), anyio.create_task_group() as group:
        group.start_soon(collect, service, attempts, ended)
        await until_running(service, 4)
        service.abort("s0")
        service.abort_task("other")
        while set(service.status()["sessions"]) != {"s2", "s3"}:
            await anyio.sleep(0.02)
        service.abort_all()
    assert [trajectory.status for trajectory in ended] == [Status.ABORTED] * 4


@pytest.mark.parametrize("grace", [0, 0.2])
async def test_a_shutdown_ends_everything_and_refuses_what_comes_after(tiny: Path, grace: float) -> None:
    ended: list[Trajectory] = []
    async with service_over(tiny, [], {"stages": {"run": 1, "ready": 0}}) as (service, _):
        async with anyio.create_task_group() as group:
            group.start_soon(collect, service, sleepers(3), ended)
            await until_running(service, 1)
            await service.shutdown(grace)
        with pytest.raises(PolarError, match="shut down"):
            await service.run(sleepers(1))
    kinds = [trajectory.failure.kind for trajectory in ended if trajectory.failure]
    assert kinds == ["aborted", "stopping", "stopping"]


async def test_a_graceful_shutdown_lets_what_runs_end_by_itself(tiny: Path) -> None:
    ended: list[Trajectory] = []
    asks = 'sleep 0.5; curl -s "$OPENAI_BASE_URL/chat/completions" -o /dev/null; true'
    one = attempt({"harness": "shell", "command": asks}, "s0", timeout_seconds=60)
    async with service_over(tiny, []) as (service, _), anyio.create_task_group() as group:
        group.start_soon(collect, service, [one], ended)
        await until_running(service, 1)
        await service.shutdown(math.inf)
    assert [trajectory.status.gradable for trajectory in ended] == [True]


async def test_leaving_the_service_ends_what_another_task_runs(tiny: Path) -> None:
    ended: list[Trajectory] = []
    async with anyio.create_task_group() as group, service_over(tiny, []) as (service, _):
        group.start_soon(collect, service, sleepers(1), ended)
        await until_running(service, 1)
    assert [trajectory.status for trajectory in ended] == [Status.ABORTED]


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_pause_always_reopens(tiny: Path, how: str) -> None:
    async with service_over(tiny, ["Done."]) as (service, _):
        if how == "cancelled":
            with anyio.move_on_after(0.05):
                async with service.paused():
                    await anyio.sleep_forever()
        else:
            with pytest.raises(KeyError):
                async with service.paused():
                    raise KeyError("the update broke")
        conversation = Conversation(service.policy, "s")
        with anyio.fail_after(30):
            async with service.proxy.session("s", conversation) as session, client(service, session.key) as api:
                await ask(api, "still there?")
        assert len(session.completions) == 1


async def test_the_status_is_served_under_its_own_token_and_no_session_key_opens_it(tiny: Path) -> None:
    ended: list[Trajectory] = []
    told: dict[str, Any] = {}
    config: dict[str, Any] = {"admin": {"port": 0, "token": TOKEN}, "stages": {"run": 1, "ready": 1}}
    async with service_over(tiny, [], config) as (service, _), aiohttp.ClientSession() as web:
        async with anyio.create_task_group() as group:
            group.start_soon(collect, service, sleepers(3), ended)
            await until_running(service, 1)
            async with web.get(service.admin.url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                told = await answer.json()
            async with service.proxy.session("other", Conversation(service.policy, "other")) as session:
                for key in (session.key, "", "Bearer"):
                    async with web.get(service.admin.url, headers={"Authorization": f"Bearer {key}"}) as answer:
                        assert answer.status == 401
            async with web.get(f"{service.proxy.url}/status", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == 404
            service.abort_all()
        assert service.counts["stage_run_done"] == 1
    run = told["stages"]["run"]
    assert (run["slots"], run["running"], run["done"]) == (1, 1, 0)
    assert {told["stages"][name]["slots"] for name in ("live", "init", "postrun")} == {2, 4}
    assert {one["task"] for one in told["sessions"].values()} == {"t"}
    assert "agent" in {one["state"] for one in told["sessions"].values()}
    assert all(one["age"] >= 0 for one in told["sessions"].values())


async def test_the_status_is_logged_as_one_line_of_json(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "polar_plugin.status")
    async with service_over(tiny, ["Done."], {"admin": {"log_seconds": 0.05}}) as (service, _):
        await service.run([attempt({"harness": "shell", "command": "sleep 0.3"})])
    lines = [json.loads(record.message) for record in caplog.records if record.name == "polar_plugin.status"]
    assert any(line["sessions"] for line in lines)
    assert lines[-1]["counts"]["attempts_failed"] == 1
    assert set(lines[0]["stages"]) == {"live", "init", "run", "postrun", "prewarm"}


async def test_a_port_that_is_taken_is_a_config_error(tiny: Path) -> None:
    async with service_over(tiny, [], {"admin": {"port": 0}}) as (service, _):
        port = int(service.admin.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=r"admin\.port"):
            async with service_over(tiny, [], {"admin": {"port": port}}):
                pass
