"""What only slime itself can say: its classes, its logger, its dumps, its plugin contract."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polar_plugin import slime_rollout
from polar_plugin.records import Status
from polar_plugin.slime_args import SlimeArgs

from .real_slime import RealSlime, load
from .sessions import POLAR, Outcome, Prompts, ReadyService, scripted

pytestmark = pytest.mark.slime
TABLE: list[Any] = [(1.0, 3), Status.INFRA_ERROR, (0.0, 1), (0.5, 2)]


@pytest.fixture
def real() -> RealSlime:
    home = os.environ.get("SLIME_HOME")
    if not home:
        pytest.skip("SLIME_HOME is not set")
    return load(home)


def call(evaluation: bool, args: SlimeArgs, source: Any, outcome: Outcome) -> Any:
    base_types = importlib.import_module("slime.rollout.base_types")
    with slime_rollout.use_service(ReadyService(outcome)):
        output = slime_rollout.generate(args, 0, source, evaluation=evaluation)
    assert type(output) is (base_types.RolloutFnEvalOutput if evaluation else base_types.RolloutFnTrainOutput)
    return output


def flat(real: RealSlime) -> list[Any]:
    args = SlimeArgs(polar=POLAR, rollout_batch_size=2, n_samples_per_prompt=2)
    output = call(False, args, Prompts(real.sample, 2), scripted(TABLE))
    return [sample for prompt in output.samples for session in prompt for sample in session]


def test_samples_are_slimes_own_and_survive_its_dump(real: RealSlime) -> None:
    for sample in flat(real):
        assert type(sample) is real.types.Sample
        again = real.types.Sample.from_dict(sample.to_dict())
        assert again.to_dict() == sample.to_dict()
        assert again.metadata["polar"]["session_id"] == sample.session_id


def test_slimes_logger_takes_our_samples(real: RealSlime) -> None:
    try:
        metrics = importlib.import_module("slime.observability.rollout_metrics").compute_metrics_from_samples
    except ImportError:
        metrics = real.rollout.compute_metrics_from_samples
    told = metrics(
        SimpleNamespace(advantage_estimator="grpo", reward_key=None, log_reward_category=None, rollout_top_p=1.0),
        flat(real),
    )
    assert told["response_len/max"] == 4
    assert told["truncated_ratio"] == 0.0


def test_an_evaluation_reads_slimes_datasets_and_gives_slimes_output(real: RealSlime, tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": f"bug {i}", "metadata": {"i": i}}) + "\n" for i in range(4)))
    eval_config = importlib.import_module("slime.utils.eval_config")
    dataset = eval_config.EvalDatasetConfig(
        name="held_out", path=f"{path}@[0:2]", input_key="text", metadata_key="metadata", n_samples_per_eval_prompt=2
    )
    output = call(True, SlimeArgs(polar=POLAR, eval_datasets=[dataset]), None, scripted(TABLE))
    told = output.data["held_out"]
    assert told["rewards"] == [1.0, 0.0, 0.0, 0.5]
    assert {type(sample) for sample in told["samples"]} == {real.types.Sample}
    assert [sample.prompt for sample in told["samples"]] == ["bug 0"] * 4 + ["bug 1"] * 3


def test_slimes_plugin_contract_accepts_the_reward_hook(real: RealSlime) -> None:
    test = "tests/plugin_contracts/test_plugin_runtime_hook_contracts.py"
    told = subprocess.run(
        [sys.executable, test, "--custom-reward-post-process-path", "polar_plugin.slime_rollout.post_process_rewards"],
        cwd=real.home,
        env={**os.environ, "PYTHONPATH": f"{Path.cwd()}:{real.home}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-1000:]
