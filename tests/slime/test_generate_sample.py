"""One session within slime's own rollout loops."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError
from polar_plugin.records import Attempt, Status, Trajectory
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import SampleLike, SampleStatus

from .sessions import POLAR, Outcome, Prompts, ReadyService, trajectory

PATH = "polar_plugin.slime_rollout.generate_sample"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 64}


def arguments(**told: Any) -> SlimeArgs:
    return SlimeArgs(**{"polar": POLAR, "custom_generate_function_path": PATH, "n_samples_per_prompt": 2, **told})


def sessions(outcome: Outcome, evaluation: bool = False, **told: Any) -> list[list[Any]]:
    """The samples of one group, as slime's loop gathers them."""

    async def group() -> list[list[Any]]:
        (slots,) = Prompts(SampleLike, 2).get_samples(1)
        asked = [slime_rollout.generate_sample(arguments(**told), slot, SAMPLING, evaluation) for slot in slots]
        return await asyncio.gather(*asked)

    with slime_rollout.use_service(ReadyService(outcome)):
        return asyncio.run(group())


def test_the_signature_is_slimes_own() -> None:
    assert list(inspect.signature(slime_rollout.generate_sample).parameters) == [
        "args", "sample", "sampling_params", "evaluation",
    ]  # fmt: skip
    assert inspect.iscoroutinefunction(slime_rollout.generate_sample)


def test_a_session_is_its_traces_graded_and_under_one_id() -> None:
    group = sessions(lambda attempt: trajectory(attempt, 0.5, 3 - 2 * attempt.index))
    assert [len(session) for session in group] == [3, 1]
    assert [{sample.rollout_id for sample in session} for session in group] == [{0}, {1}]
    assert {sample.reward for session in group for sample in session} == {0.5}


def test_a_failed_session_is_a_placeholder() -> None:
    (hole,), _ = sessions(lambda a: trajectory(a, status=Status.COMPLETED if a.index else Status.INFRA_ERROR))
    assert (hole.status, hole.remove_sample, hole.reward) == (SampleStatus.ABORTED, True, 0.0)


def test_an_evaluation_samples_as_its_data_set_says() -> None:
    service = ReadyService(trajectory)

    async def one() -> list[Any]:
        args = arguments(rollout_temperature=1.0)
        return await slime_rollout.generate_sample(args, SampleLike(prompt="p"), {**SAMPLING, "temperature": 0.0}, True)

    with slime_rollout.use_service(service):
        assert len(asyncio.run(one())) == 1
    assert service.configs[0].sampling.temperature == 0.0
    assert service.attempts[0].evaluation


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"group_rm": True}, "leave out --group-rm"),
        ({"partial_rollout": True}, "leave out --partial-rollout"),
        ({"custom_reward_post_process_path": None}, "set --custom-reward-post-process-path"),
        (
            {"dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check_x"},
            "set --dynamic-sampling-filter-path polar_plugin.slime_rollout.check_x",
        ),
    ],
)
def test_flags_of_slimes_loop_that_break_on_many_traces_are_refused(told: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        sessions(trajectory, **told)


@dataclass
class Hanging(ReadyService):
    begun: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None
    cleaned: list[str] = field(default_factory=list[str])

    async def run(
        self, attempts: Sequence[Attempt], *, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        assert self.loop
        assert self.begun
        self.loop.call_soon_threadsafe(self.begun.set)
        try:
            await anyio.sleep_forever()
        finally:
            self.cleaned.append(attempts[0].session_id)
        raise AssertionError("unreachable")


def test_cancelling_it_ends_the_session() -> None:
    service = Hanging(trajectory)

    async def cancelled() -> None:
        service.begun, service.loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.create_task(slime_rollout.generate_sample(arguments(), SampleLike(prompt="p"), SAMPLING))
        await asyncio.wait_for(service.begun.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with slime_rollout.use_service(service):
        asyncio.run(cancelled())
    assert len(service.cleaned) == 1


def test_a_data_source_that_would_never_learn_what_was_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave out --data-source-path, or set --rollout-function-path"):
        sessions(trajectory, data_source_path="polar_plugin.slime_rollout.PolarDataSource")
