"""What an attempt in a container costs over a bare `docker run` of the same command.

    python -m benchmarks.docker --image debian:stable-slim

Rounds of both, in turn: eight at once, each running one command for `--seconds`. Ours is a whole attempt by the stages,
a container without a network but the relayed proxy, its supervisor, the command by exec, no grader; the baseline is
`docker run --rm --network none IMAGE sh -c COMMAND` as it stands.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from polar_plugin.evaluators.session_completed import SessionCompleted
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.records import RuntimeSpec, Status
from polar_plugin.runtimes.base import ProxyEndpoint
from polar_plugin.runtimes.docker import DockerRuntime
from polar_plugin.stages.attempt import Budgets, Script, Stages
from tests.stages.doubles import MemorySessions, World, attempt, parts

AT_ONCE = 8


class Sleeps:
    name = "sleeps"

    def __init__(self, command: str) -> None:
        self._command = command

    def launch(self, context: LaunchContext) -> Launch:
        return Launch(("sh", "-c", self._command))


async def ours(number: int, image: str, command: str, socket: Path) -> float:
    """Seconds of one attempt."""
    world = World()
    endpoint = ProxyEndpoint("http://127.0.0.1:1", socket)

    def runtime(purpose: str) -> DockerRuntime:
        return DockerRuntime(RuntimeSpec(image=image), proxy=endpoint, labels={"purpose": purpose})

    made = parts(world, SessionCompleted(), harness=Sleeps(command), runtime=runtime)
    slots = Stages.sized(init=1, ready=0, run=1, postrun=1)
    sessions = MemorySessions(world)
    script = Script(attempt(f"s{number}"), parts=made, sessions=sessions, stages=slots, budgets=Budgets())
    started = time.perf_counter()
    trajectory = await script.run()
    if trajectory.status is not Status.COMPLETED:
        raise SystemExit(f"an attempt ended {trajectory.status}: {trajectory.failure}")
    return time.perf_counter() - started


async def bare(number: int, image: str, command: str, socket: Path) -> float:
    started = time.perf_counter()
    await anyio.run_process(["docker", "run", "--rm", "--network", "none", image, "sh", "-c", command])
    return time.perf_counter() - started


async def round_of(one: Callable[..., Awaitable[float]], *given: object) -> tuple[float, list[float]]:
    """Seconds of the whole round, and of each in it."""
    took: list[float] = []

    async def timed(number: int) -> None:
        took.append(await one(number, *given))

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(AT_ONCE):
            group.start_soon(timed, number)
    return time.perf_counter() - started, took


async def measure(image: str, seconds: float, rounds: int) -> dict[str, tuple[float, float]]:
    """The median round and the median single one, in seconds, of ours and of the baseline."""
    found: dict[str, list[tuple[float, list[float]]]] = {"ours": [], "docker run": []}
    with tempfile.TemporaryDirectory() as directory:
        socket = Path(directory) / "proxy.sock"
        async with await asyncio.start_unix_server(lambda _, writer: writer.close(), socket):
            for counted in (False, *[True] * rounds):  # the first one warms caches of both
                for name, one in (("docker run", bare), ("ours", ours)):
                    result = await round_of(one, image, f"sleep {seconds}", socket)
                    if counted:
                        found[name].append(result)
    return {
        name: (
            statistics.median(whole for whole, _ in results),
            statistics.median(each for _, singles in results for each in singles),
        )
        for name, results in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default="polar-test-base:latest")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{AT_ONCE} at once, median of {args.rounds} rounds\n")
    print(f"{'command':12}{'':14}{'one, s':>10}{'all, s':>10}{'ratio':>8}")
    for seconds in args.seconds:
        found = anyio.run(measure, args.image, seconds, args.rounds)
        base = found["docker run"][1]
        for name, (whole, single) in found.items():
            print(f"sleep {seconds:<6g}{name:14}{single:>10.2f}{whole:>10.2f}{single / base:>8.2f}")


if __name__ == "__main__":
    main()
