"""What slime gets back from the rollout function."""

from __future__ import annotations

from typing import Any

from polar_plugin import slime_rollout
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_samples import SampleLike, TrainOutput

from .sessions import POLAR, Outcome, Prompts, ReadyService, scripted


def rollout(outcome: Outcome, *, prompts: int = 1, size: int = 2, make: Any = SampleLike, **args: Any) -> TrainOutput:
    told = SlimeArgs(**{"polar": POLAR, "rollout_batch_size": prompts, "n_samples_per_prompt": size, **args})
    with slime_rollout.use_service(ReadyService(outcome)):
        return slime_rollout.generate(told, 3, Prompts(make, size))


def test_a_rollout_is_prompts_of_sessions_of_traces() -> None:
    output = rollout(scripted([(1.0, 3), (0.0, 1), (0.0, 1), (0.0, 2)]), prompts=2)
    assert [[len(session) for session in prompt] for prompt in output.samples] == [[3, 1], [1, 2]]
    assert [[{s.rollout_id for s in session} for session in prompt] for prompt in output.samples] == [
        [{0}, {1}],
        [{2}, {3}],
    ]
