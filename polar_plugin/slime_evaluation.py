"""slime's evaluation: the prompts of `args.eval_datasets`, and one reward a session over a fixed denominator."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .slime_args import SlimeArgs
from .slime_samples import SessionSamples
from .slime_types import sample_class


@dataclass(frozen=True)
class EvalGroups:
    """One dataset's samples, grouped by prompt, as a data source would give them."""

    name: str
    settings: Any
    """slime's `EvalDatasetConfig`."""
    groups: list[list[Any]]


def eval_groups(args: SlimeArgs) -> Iterator[EvalGroups]:
    """Each dataset of `args.eval_datasets` with `n_samples_per_eval_prompt` samples a prompt.

    Raises ConfigError where there are none, or one cannot be read or is empty.
    """
    if not args.eval_datasets:
        raise ConfigError("there is nothing to evaluate: set --eval-prompt-data NAME FILE or --eval-config")
    for dataset in args.eval_datasets:
        rows = list(_rows(dataset.path))
        if not rows:
            raise ConfigError(f"eval dataset {dataset.name}: {dataset.path} has no rows")
        size = dataset.n_samples_per_eval_prompt or 1
        yield EvalGroups(dataset.name, dataset, list(_groups(rows, dataset, size)))


def eval_results(groups: Sequence[Sequence[SessionSamples]]) -> dict[str, Any]:
    """What slime logs of a dataset: `rewards` and `truncated` one a session, excluded ones 0; `samples` one a trace."""
    sessions = [session for group in groups for session in group]
    return {
        "rewards": [session.reward for session in sessions],
        "truncated": [any(sample.status.value == "truncated" for sample in session.samples) for session in sessions],
        "samples": [sample for session in sessions for sample in session.samples],
    }


def _groups(rows: Iterable[Mapping[str, Any]], dataset: Any, size: int) -> Iterator[list[Any]]:
    make = sample_class()
    for number, row in enumerate(rows):
        prompt = make(
            prompt=_field(row, dataset, "input_key"),
            label=_field(row, dataset, "label_key"),
            metadata={
                **(_field(row, dataset, "metadata_key") or {}),
                **(getattr(dataset, "metadata_overrides", None) or {}),
            },
            group_index=number,
        )
        group = [copy.copy(prompt) for _ in range(size)]
        for position, sample in enumerate(group):
            sample.index = number * size + position
        yield group


def _field(row: Mapping[str, Any], dataset: Any, name: str) -> Any:
    key = getattr(dataset, name, None)
    return row.get(key) if key else None


def _rows(path: str) -> Iterable[Mapping[str, Any]]:
    """By slime's own reader (jsonl, parquet, `path@[a:b]`); where slime is absent, plain jsonl."""
    try:
        read_file = importlib.import_module("slime.utils.data").read_file
    except ImportError:
        return _jsonl(path)
    try:
        return read_file(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read eval dataset {path}: {error}") from error


def _jsonl(path: str) -> list[Mapping[str, Any]]:
    if Path(path).suffix != ".jsonl":
        raise ConfigError(f"eval dataset {path}: without slime only .jsonl files can be read")
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read eval dataset {path}: {error}") from error
