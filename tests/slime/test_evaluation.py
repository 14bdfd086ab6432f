"""Evaluation through slime: one reward a session, over a denominator that failures do not shrink."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError
from polar_plugin.records import Status
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import EvalOutput

from .sessions import POLAR, Outcome, ReadyService, scripted, trajectory


def dataset(path: Path, rows: int, **told: Any) -> SimpleNamespace:
    path.write_text("".join(json.dumps({"q": f"bug {i}", "a": i, "meta": {"i": i}}) + "\n" for i in range(rows)))
    keys = {"input_key": "q", "label_key": "a", "metadata_key": "meta", "n_samples_per_eval_prompt": 2}
    return SimpleNamespace(**{"name": "held_out", "path": str(path), **keys, **told})


def evaluate(outcome: Outcome, *datasets: Any, service: Any = None, **told: Any) -> EvalOutput:
    args = SlimeArgs(**{"polar": POLAR, "eval_datasets": datasets, **told})
    with slime_rollout.use_service(service or ReadyService(outcome)):
        return slime_rollout.generate(args, 5, None, evaluation=True)


def test_failures_count_as_zero_and_sessions_have_one_vote(tmp_path: Path) -> None:
    table: list[Any] = [(1.0, 3), Status.INFRA_ERROR, (0.0, 1), (1.0, 2)]
    output = evaluate(scripted(table), dataset(tmp_path / "d.jsonl", 2))
    told = output.data["held_out"]
    assert (told["rewards"], told["truncated"]) == ([1.0, 0.0, 0.0, 1.0], [False] * 4)
    assert [sample.group_index for sample in told["samples"]] == [0, 0, 0, 0, 1, 1, 1]
    assert [sample.index for sample in told["samples"]] == [0, 0, 0, 1, 2, 3, 3]
    assert output.metrics is not None
    assert output.metrics["eval/held_out/session/pass@1"] == 0.5
    assert output.metrics["eval/held_out/session/pass@2"] == 1.0
    assert output.metrics["eval/held_out/session/status/infra_error"] == 0.25


def test_tasks_are_filled_from_the_rows_of_the_dataset(tmp_path: Path) -> None:
    task = {**POLAR["task"], "instruction": "{sample.prompt} {sample.label} {sample.metadata.i} {dataset}"}
    service = ReadyService(trajectory)
    evaluate(trajectory, dataset(tmp_path / "d.jsonl", 2), service=service, polar={**POLAR, "eval_task": task})
    assert [attempt.task.instruction for attempt in service.attempts[1:3]] == [
        "bug 0 0 0 held_out",
        "bug 1 1 1 held_out",
    ]


def test_a_dataset_samples_by_its_own_settings(tmp_path: Path) -> None:
    service = ReadyService(trajectory)
    told = dataset(tmp_path / "d.jsonl", 1, temperature=0.0, max_response_len=99)
    evaluate(trajectory, told, service=service, rollout_temperature=1.0, rollout_max_response_len=512)
    assert (service.configs[0].sampling.temperature, service.configs[0].sampling.max_tokens) == (0.0, 99)


def test_long_traces_are_not_cut_where_nothing_is_trained(tmp_path: Path) -> None:
    output = evaluate(trajectory, dataset(tmp_path / "d.jsonl", 1), max_tokens_per_gpu=4)
    assert {len(sample.tokens) for sample in output.data["held_out"]["samples"]} == {7}


def test_an_evaluation_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is nothing to evaluate: set --eval-prompt-data"):
        evaluate(trajectory)
    with pytest.raises(ConfigError, match="has no rows"):
        evaluate(trajectory, dataset(tmp_path / "d.jsonl", 0))
    with pytest.raises(ConfigError, match="cannot read eval dataset"):
        evaluate(trajectory, SimpleNamespace(name="x", path=str(tmp_path / "absent.jsonl")))
