"""What is left at a Docker engine when a trainer dies, and who removes it."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import textwrap

import anyio
import pytest

from polar_plugin.runtimes.docker_sweep import sweep
from polar_plugin.runtimes.owner import Life, life, mine

from .engines import IMAGE, containers, docker

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

TRAINER = """
import anyio, sys
from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes.docker import DockerRuntime
async def one(group, number):
    runtime = DockerRuntime(RuntimeSpec(image={image!r}), proxy=None, labels=dict(session={session!r}))
    await runtime.start()
    group.start_soon(runtime.exec, "setsid sleep 1000 & sleep 1000")
async def main():
    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as starting:
            for number in range({count}):
                starting.start_soon(one, group, number)
        print("up", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
        {ending}
anyio.run(main)
"""


def trainer(session: str, count: int, ending: str = "pass") -> subprocess.Popen[bytes]:
    """A process with `count` running containers; it is up when this returns."""
    program = textwrap.dedent(TRAINER.format(image=IMAGE, session=session, count=count, ending=ending))
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    process.send_signal(how)
    process.communicate(timeout=60)


async def test_case_119_the_next_start_removes_a_killed_trainers_eight_and_no_neighbours() -> None:
    dead, alive = secrets.token_hex(8), secrets.token_hex(8)
    killed, neighbour = trainer(dead, 8), trainer(alive, 2)
    try:
        network = docker("network", "create", "--label", f"polar.owner={owner_of(dead)}", f"polar-{dead}")
        end(killed, signal.SIGKILL)
        names = containers(f"polar.session={dead}")
        assert len(names) == 8
        removed = await sweep()
        assert {*names, f"polar-{dead}"} <= set(removed)
        assert containers(f"polar.session={dead}") == []
        assert network[:12] not in docker("network", "ls", "--quiet").split()
        assert len(containers(f"polar.session={alive}")) == 2
        assert not set(containers(f"polar.session={alive}")) & set(removed)
    finally:
        end(neighbour, signal.SIGTERM)


def owner_of(session: str) -> str:
    one = containers(f"polar.session={session}")[0]
    return docker("inspect", "--format", '{{index .Config.Labels "polar.owner"}}', one)


@pytest.mark.parametrize(("how", "ending"), [(signal.SIGTERM, "pass"), (signal.SIGINT, "pass"), (None, "sys.exit(3)")])
async def test_a_trainer_that_ends_without_closing_removes_its_own(how: signal.Signals | None, ending: str) -> None:
    session = secrets.token_hex(8)
    process = trainer(session, 1, ending)
    if how is None:
        process.communicate(timeout=60)
    else:
        end(process, how)
    assert process.returncode in (-15, -2, 1, 3, 130)
    assert containers(f"polar.session={session}") == []


async def test_a_killed_trainers_commands_end_at_once_though_its_containers_stay() -> None:
    session = secrets.token_hex(8)
    process = trainer(session, 1)
    (name,) = containers(f"polar.session={session}")
    with anyio.fail_after(20):
        while "sleep" not in docker("top", name):
            await anyio.sleep(0.05)
    end(process, signal.SIGKILL)
    with anyio.fail_after(20):
        while "sleep" in docker("top", name):
            await anyio.sleep(0.05)
    await sweep()
    assert containers(f"polar.session={session}") == []


def test_an_owner_is_dead_only_where_that_can_be_seen() -> None:
    boot, namespace, pid, started = mine().split(":")
    assert life(mine()) is Life.ALIVE
    assert life(f"{boot}:{namespace}:{pid}:1") is Life.DEAD, "the process id is another's now"
    with subprocess.Popen(["true"]) as child:
        child.wait()
    assert life(f"{boot}:{namespace}:{child.pid}:{started}") is Life.DEAD
    assert life(f"{boot}:1:{pid}:1") is Life.UNKNOWN
    assert life(f"another-boot:{namespace}:{pid}:{started}") is Life.UNKNOWN
    assert life("") is Life.UNKNOWN


async def test_what_cannot_be_judged_is_left_alone() -> None:
    boot, _, pid, _ = mine().split(":")
    names = [
        docker("run", "--detach", "--label", f"polar.owner={mark}", IMAGE, "sleep", "1000")
        for mark in (f"{boot}:1:{pid}:1", "another-machine:1:1:1")
    ]
    try:
        await sweep()
        for name in names:
            assert docker("inspect", "--format", "{{.State.Running}}", name) == "true"
    finally:
        docker("rm", "--force", *names)
