"""What a task's builder makes of its session, from the service: awaited, verified, counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from polar_plugin.errors import ConfigError, MergeError
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.records import CompletionSession, Status, Trace, Trajectory, log_probs

from ..test_service import WRITE, agent_py, attempt, service_over, tiny

__all__ = ["tiny"]

pytestmark = pytest.mark.anyio
HERE = "tests.merge.test_building"
REPLIES = [WRITE, "Done."]


class Awaited:
    """A builder that waits for something outside before it builds."""

    def __init__(self, max_trace_tokens: int) -> None:
        self._inner = PrefixMerging(max_trace_tokens)
        self.policy = self._inner.policy

    async def build(self, session: CompletionSession) -> Sequence[Trace]:
        await anyio.lowlevel.checkpoint()
        return list(self._inner.build(session))


class Shifting:
    """A builder with a fault: log-probabilities that are not those recorded."""

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        (only,) = PrefixMerging().build(session)
        return (replace(only, response_logprobs=log_probs(only.response_logprobs * 2)),)


class Refusing:
    """A builder that cannot take the session."""

    def build(self, session: CompletionSession) -> tuple[Trace, ...]:
        raise MergeError("no such session")


async def built(tiny: Path, strategy: str, config: dict[str, Any] | None = None, **service: Any) -> Trajectory:
    async with service_over(tiny, REPLIES, {"retries": 0, **service}) as (service_, _):
        builder = {"strategy": strategy, "config": config or {}}
        (trajectory,) = await service_.run([attempt(agent_py(), builder=builder)])
    return trajectory


async def test_a_builder_by_import_path_is_made_with_its_config_and_awaited(tiny: Path) -> None:
    whole = await built(tiny, f"{HERE}:Awaited", {"max_trace_tokens": 5000})
    assert whole.status is Status.COMPLETED, whole.failure
    assert (len(whole.traces), whole.trained_fraction, whole.delivered_fraction) == (1, 1.0, 1.0)
    (only,) = whole.traces
    limit = len(only.prompt_ids) + len(only.response_ids) - 1
    cut = await built(tiny, f"{HERE}:Awaited", {"max_trace_tokens": limit})
    told = cut.counts
    assert told["untrained_over_length"] == told["sampled_tokens"] - told["trained_tokens"] > 0
    assert cut.trained_fraction == told["trained_tokens"] / told["sampled_tokens"] < 1
    assert cut.delivered_fraction == 1.0


async def test_per_request_is_a_builder_by_name(tiny: Path) -> None:
    trajectory = await built(tiny, "per_request")
    assert (len(trajectory.traces), trajectory.trained_fraction) == (2, 1.0)


async def test_a_builder_that_does_not_take_its_config_is_refused_before_anything_starts(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="'prefix_merging' does not take config"):
        await built(tiny, "prefix_merging", {"max_tokens": 5})


@pytest.mark.parametrize("verify", ["all", "off"])
async def test_traces_that_break_an_invariant_are_an_error_of_their_session_alone(tiny: Path, verify: str) -> None:
    attempts = [
        attempt(agent_py(), "broken", builder={"strategy": f"{HERE}:Shifting"}),
        attempt(agent_py(), "sound"),
    ]
    async with service_over(tiny, lambda _: "Done.", {"retries": 0, "verify": verify}) as (service, _):
        broken, sound = await service.run(attempts)
        total = service.counts["merge_errors"]
    assert (sound.status, sound.trained_fraction) == (Status.COMPLETED, 1.0)
    if verify == "off":
        assert (broken.status, len(broken.traces), total) == (Status.COMPLETED, 1, 0)
        return
    assert broken.failure is not None
    assert (broken.status, broken.failure.boundary, broken.failure.kind) == (Status.INFRA_ERROR, "build", "MergeError")
    assert "log-probability at response token 0 is" in broken.failure.message
    assert (broken.traces, total) == ((), 1)
    told = broken.counts
    assert told["untrained_build_failed"] == told["sampled_tokens"] > 0
    assert (broken.trained_fraction, broken.delivered_fraction) == (0.0, 1.0)


async def test_a_sample_of_the_sessions_is_verified(tiny: Path) -> None:
    builder = {"strategy": f"{HERE}:Shifting"}
    attempts = [attempt(agent_py(), f"s{number}", builder=builder) for number in range(8)]
    async with service_over(tiny, lambda _: "Done.", {"retries": 0, "verify": "sample"}) as (service, _):
        ended = await service.run(attempts)
    assert [trajectory.status for trajectory in ended].count(Status.INFRA_ERROR) == 1


async def test_a_builder_that_raises_leaves_every_sampled_token_counted(tiny: Path) -> None:
    trajectory = await built(tiny, f"{HERE}:Refusing")
    assert trajectory.failure is not None
    assert trajectory.failure.message == "no such session"
    told = trajectory.counts
    assert (told["untrained_build_failed"], told["merge_errors"]) == (told["sampled_tokens"], 1)
