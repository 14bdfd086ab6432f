"""How much of its run slots a batch uses, where starting a sandbox takes as heavy-tailed a time as running in it.

    python -m benchmarks.stages

On a simulated clock: the real `Batch`, `Script` and `Stages`, over sandboxes in memory. INIT is log-normal with median
20 s and 95th percentile 120 s, RUN with median 120 s and 95th percentile 600 s. All schedules have the same run slots
and the same attempts in the same order. The ideal one has every sandbox ready before it is needed, but for the first.
Ours starts at most `run` + `ready` sandboxes, blocking workers `run` + `init`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio

from polar_plugin.config import StagesConfig
from polar_plugin.stages.attempt import Budgets, Script, Stages
from polar_plugin.stages.batch import Batch
from tests.stages.clock import JumpingLoop
from tests.stages.doubles import MemoryRuntime, MemorySessions, World, attempt, parts

ATTEMPTS, SEEDS = 512, (1, 2, 3)
INIT, RUN = (20.0, 120.0), (120.0, 600.0)
FOREVER = Budgets(init=math.inf, agent=1e9, build=math.inf, evaluation=math.inf, overall=math.inf)


@dataclass(frozen=True)
class Times:
    """Seconds of one attempt."""

    init: float
    run: float


Schedule = Callable[[Sequence[Times], StagesConfig], Awaitable[float]]
"""Returns the makespan in seconds."""


def drawn(seed: int) -> list[Times]:
    dice = random.Random(seed)

    def lognormal(median: float, p95: float) -> float:
        return median * math.exp(dice.gauss(0, math.log(p95 / median) / 1.6449))

    return [Times(lognormal(*INIT), lognormal(*RUN)) for _ in range(ATTEMPTS)]


async def ours(times: Sequence[Times], stages: StagesConfig) -> float:
    """The stages of the library."""

    class Timed(MemoryRuntime):
        def __init__(self, world: World, purpose: str, takes: Times) -> None:
            super().__init__(world, purpose)
            self.takes = takes

        async def start(self) -> None:
            await super().start()
            await anyio.sleep(self.takes.init if self.purpose == "agent" else 0)

        async def exec(self, command: object, **options: object) -> object:
            if options.get("watch"):
                await anyio.sleep(self.takes.run)
            return await super().exec(command, **options)  # type: ignore[arg-type]

    world, slots = World(), Stages.sized(**stages.model_dump())
    sessions, by_name = MemorySessions(world), {f"s{n}": one for n, one in enumerate(times)}

    def start(one: object) -> Script:
        takes = by_name[one.session_id]  # type: ignore[attr-defined]
        made = parts(world, runtime=lambda purpose: Timed(world, purpose, takes))
        return Script(one, parts=made, sessions=sessions, stages=slots, budgets=FOREVER)  # type: ignore[arg-type]

    batch = Batch(start, admitted=len(times))
    async with anyio.create_task_group() as group:
        for name in by_name:
            group.start_soon(batch.one, attempt(name))
    return anyio.current_time()


async def one_coroutine(times: Sequence[Times], stages: StagesConfig) -> float:
    """(a) A coroutine an attempt that starts and runs, as many at once as there are run slots."""
    slots = anyio.Semaphore(stages.run)

    async def whole(one: Times) -> None:
        async with slots:
            await anyio.sleep(one.init + one.run)

    async with anyio.create_task_group() as group:
        for one in times:
            group.start_soon(whole, one)
    return anyio.current_time()


async def blocking_workers(times: Sequence[Times], stages: StagesConfig) -> float:
    """(b) `init` workers, each of which starts a sandbox and then holds on to it until a run slot is free."""
    slots, queue = anyio.Semaphore(stages.run), iter(times)

    async def worker(group: anyio.abc.TaskGroup) -> None:
        for one in queue:
            await anyio.sleep(one.init)
            await slots.acquire()
            group.start_soon(running, one)

    async def running(one: Times) -> None:
        await anyio.sleep(one.run)
        slots.release()

    async with anyio.create_task_group() as group:
        for _ in range(stages.init):
            group.start_soon(worker, group)
    return anyio.current_time()


async def ideal(times: Sequence[Times], stages: StagesConfig) -> float:
    free = [one.init for one in times[: stages.run]]
    heapq.heapify(free)
    for one in times:
        heapq.heappush(free, heapq.heappop(free) + one.run)
    return max(free)


def use(schedule: Schedule, times: Sequence[Times], stages: StagesConfig) -> float:
    """Of the run slots' time until the last attempt has ended, the share in which one ran."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        makespan = runner.run(schedule(times, stages))  # type: ignore[arg-type]
    return sum(one.run for one in times) / (stages.run * makespan)


def rows() -> Iterator[tuple[StagesConfig, dict[str, float]]]:
    """Use of the run slots by schedule, the mean over the seeds."""
    schedules: dict[str, Schedule] = {
        "ideal": ideal, "ours": ours, "one coroutine": one_coroutine, "blocking workers": blocking_workers,
    }  # fmt: skip
    for sized in ({}, {"init": 2, "ready": 8}, {"init": 4, "ready": 8}, {"run": 32, "init": 8, "ready": 16}):
        stages = StagesConfig(**sized)
        yield (
            stages,
            {
                name: sum(use(schedule, drawn(seed), stages) for seed in SEEDS) / len(SEEDS)
                for name, schedule in schedules.items()
            },
        )


def main() -> None:
    logging.disable(logging.CRITICAL)
    print(f"{ATTEMPTS} attempts, mean of {len(SEEDS)} draws; use of the run slots, and as a share of the ideal one\n")
    print(f"{'run init ready':16}{'ideal':>8}{'ours':>16}{'one coroutine':>20}{'blocking workers':>20}")
    for stages, used in rows():
        best = used.pop("ideal")
        cells = "".join(f"{share:>12.1%} {share / best:>6.1%}" for share in used.values())
        print(f"{stages.run:<4}{stages.init:<5}{stages.ready:<7}{best:>8.1%}{cells}")


if __name__ == "__main__":
    main()
