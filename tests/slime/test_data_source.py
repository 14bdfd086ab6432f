"""Prompts: drawn once an epoch, and after a restart exactly those that were not trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.slime_rollout import PolarDataSource


def source(folder: Path, rows: int = 5, **told: Any) -> PolarDataSource:
    path = folder / "prompts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"input": f"p{i}", "metadata": {"i": i}}) + "\n" for i in range(rows)))
    settings = {"prompt_data": str(path), "n_samples_per_prompt": 2, "save": str(folder), "load": str(folder), **told}
    return PolarDataSource(SimpleNamespace(**settings))


def prompts(groups: list[list[Any]]) -> list[str]:
    return [group[0].prompt for group in groups]


def test_each_epoch_has_every_prompt_once_however_many_are_drawn_at_a_time(tmp_path: Path) -> None:
    told = source(tmp_path, rollout_shuffle=True)
    drawn = [*prompts(told.get_samples(3)), *prompts(told.get_samples(12))]
    epochs = [drawn[0:5], drawn[5:10], drawn[10:15]]
    assert [sorted(epoch) for epoch in epochs] == [[f"p{i}" for i in range(5)]] * 3
    assert epochs[0] != epochs[1]


def test_samples_are_numbered_as_slimes_are(tmp_path: Path) -> None:
    told = source(tmp_path).get_samples(2)
    assert [(s.group_index, s.index) for group in told for s in group] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert told[1][0].metadata == {"i": 1}
    told[1][0].metadata["i"] = 9
    assert told[1][1].metadata == {"i": 1}


def test_what_comes_back_is_drawn_first_and_is_the_same(tmp_path: Path) -> None:
    told = source(tmp_path)
    first = told.get_samples(3)
    told.add_samples([first[2], first[1]])
    assert [group[0].group_index for group in told.get_samples(3)] == [1, 2, 3]


def test_a_group_that_is_not_under_way_cannot_come_back(tmp_path: Path) -> None:
    told = source(tmp_path)
    drawn = told.get_samples(1)
    told.trained(0, [0])
    with pytest.raises(ConfigError, match="group 0 was not drawn here, or is trained already"):
        told.add_samples(drawn)


def test_a_resume_draws_what_the_saved_rollout_had_not_trained_whatever_was_drawn_since(tmp_path: Path) -> None:
    told = source(tmp_path, rows=8)
    told.get_samples(4)
    told.trained(0, [0, 2])
    told.get_samples(2)
    told.trained(1, [1, 3])
    told.get_samples(2)  # for rollout 2, which has begun when slime saves rollout 1
    told.save(1)
    again = source(tmp_path)
    again.load(1)
    assert prompts(again.get_samples(4)) == ["p4", "p5", "p6", "p7"]
    told.save(0)
    again.load(0)
    assert prompts(again.get_samples(4)) == ["p1", "p3", "p4", "p5"]


def test_a_resume_in_a_later_epoch_keeps_its_order(tmp_path: Path) -> None:
    told = source(tmp_path, rollout_shuffle=True)
    told.get_samples(7)
    told.trained(0, range(7))
    told.save(0)
    again = source(tmp_path, rollout_shuffle=True)
    again.load(0)
    assert prompts(again.get_samples(5)) == prompts(told.get_samples(5))


def test_rows_that_changed_since_are_refused(tmp_path: Path) -> None:
    source(tmp_path).save(0)
    with pytest.raises(ConfigError, match="is of 5 rows, but --prompt-data has 3"):
        source(tmp_path, prompt_data=f"{tmp_path / 'prompts.jsonl'}@[0:3]").load(0)


def test_a_state_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    told = source(tmp_path)
    told.save(0)
    (tmp_path / "rollout" / "polar_data_source_0.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the data source's state"):
        told.load(0)


def test_parquet_and_hugging_face_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    from datasets import Dataset
    from pyarrow import Table, parquet

    rows = [{"input": f"p{i}", "metadata": {"i": i}} for i in range(5)]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "prompts.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for data in (str(tmp_path / "prompts.parquet"), f"hf:{tmp_path / 'saved'}"):
        told = source(tmp_path, prompt_data=f"{data}@[-2:]")
        assert (len(told), prompts(told.get_samples(2))) == (2, ["p3", "p4"])
        assert told.get_samples(1)[0][0].metadata == {"i": 3}


@pytest.mark.parametrize("name", ["none.jsonl", "prompts.txt", "none.parquet"])
def test_prompts_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read --prompt-data .*{name}"):
        source(tmp_path, prompt_data=str(tmp_path / name))
