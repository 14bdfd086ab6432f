"""The samples of a real run, a black-box agent in sandboxes over a real model, as slime's trainer takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from polar_plugin import slime_rollout
from polar_plugin.config import RolloutConfig
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.quickstart import (
    Observed,
    Options,
    Prompts,
    load_tasks,
    recipe_directory,
    script_of,
    slime_arguments,
)
from tests.slime_contract import Slime


def test_a_quickstarts_samples_reach_the_loss_as_they_were_sampled(
    slime: Slime, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = resolve_model("tiny", tmp_path_factory.getbasetemp() / "models")
    recipe = recipe_directory()
    options = Options(str(directory), tmp_path, attempts=2, max_tokens=2000, agent_script=recipe / "script.json")
    rows = load_tasks(recipe)
    engine = TransformersEngine(directory, script=script_of(options, rows))
    args = replace(slime_arguments(options, directory, rows), rollout_top_p=1.0, max_tokens_per_gpu=16_384)
    kept: list[Observed] = []

    def factory(config: RolloutConfig) -> Observed:
        kept.append(Observed(config, engine))
        return kept[-1]

    prompts = Prompts(rows, options.attempts, slime.sample)
    with slime_rollout.use_service(factory):
        trained = slime.train(args, slime_rollout.generate, prompts, slime_rollout.post_process_rewards)
    assert sorted(one.session for one in trained) == [0, 1, 2, 3]
    by_index = {trajectory.attempt.index: trajectory for trajectory in kept[0].trajectories}
    for one in trained:
        (trace,) = by_index[one.session].traces
        assert one.tokens == [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        assert one.mask == trace.loss_mask.astype(int).tolist()
        assert_allclose(one.log_probs, trace.response_logprobs)
        assert_allclose(one.weights.sum(), 1 / 4, rtol=1e-6)
        expected = 0.7071 if by_index[one.session].reward == 1.0 else -0.7071
        assert_allclose(np.unique(one.advantages[trace.loss_mask]), [expected], rtol=1e-3)
