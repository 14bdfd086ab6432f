"""Prompts for slime, drawn so that a run that was stopped goes on with exactly those that it had not trained yet.

    --data-source-path polar_plugin.slime_rollout.PolarDataSource

slime's own source saves what it has *drawn*; `train_async.py` draws ahead of what it trains, so a resume would skip.
This one keeps a snapshot for each rollout: where the draws stand, and which prompts were drawn and not trained by then.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from .errors import ConfigError
from .slime_types import sample_class

_SNAPSHOTS = 16
"""How many are kept in memory: slime saves a rollout at most one after the next has begun."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """Where the draws stand."""

    epoch: int = 0
    offset: int = 0
    """In the epoch's order."""
    groups: int = 0
    """How many were drawn."""


@dataclass(frozen=True)
class Snapshot:
    """What `load` needs to go on behind a rollout."""

    position: Position
    reserved: tuple[tuple[int, int], ...] = ()
    """(group, row) of the prompts that were drawn and not trained yet, in the order of their draws."""
    rows: int = 0
    """Of the whole data set, which must not change between."""


@dataclass
class _Settings:
    """slime's arguments that a data source reads, with slime's defaults."""

    prompt_data: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    n_samples_per_prompt: int = 1
    rollout_shuffle: bool = False
    rollout_seed: int = 42
    save: str | None = None
    load: str | None = None


class PolarDataSource:
    """slime's `DataSource` (`--data-source-path`), for the rollout functions of this library.

    Those say by `trained` what a rollout was made of. Every prompt is drawn once an epoch; in epoch e the order is that
    of slime's own source under the same seed. Rows come from --prompt-data: `FILE.jsonl`, `FILE.parquet`,
    `hf:NAME` or `hf:NAME:SPLIT` (the `datasets` package; NAME may be a directory), each with `@[a:b]` for some of them.

    Thread-safe. Raises ConfigError where rows cannot be read, or changed since the state was saved.
    """

    def __init__(self, args: Any) -> None:
        names = _Settings.__dataclass_fields__
        self._args = _Settings(**{name: getattr(args, name) for name in names if hasattr(args, name)})
        if not self._args.prompt_data:
            raise ConfigError("there are no prompts: set --prompt-data")
        self._rows = list(read_rows(self._args.prompt_data))
        if not self._rows:
            raise ConfigError(f"--prompt-data {self._args.prompt_data} has no rows")
        self._lock = threading.RLock()
        self._position = Position()
        self._order = self._shuffled(0)
        self._reserved: dict[int, int] = {}
        self._waiting: list[int] = []
        """Groups that were drawn before and are to be drawn again, first."""
        self._snapshots: dict[int, Snapshot] = {}
        self._make = sample_class()

    def __len__(self) -> int:
        return len(self._rows)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """`num_samples` groups of `n_samples_per_prompt` samples; what was given back comes first."""
        with self._lock:
            again, self._waiting = self._waiting[:num_samples], self._waiting[num_samples:]
            return [self._group(group) for group in [*again, *(self._next() for _ in range(num_samples - len(again)))]]

    def add_samples(self, samples: Sequence[Sequence[Any]]) -> None:
        """Take back groups that were not trained. Samples stay what they were, so their prompts are drawn again."""
        with self._lock:
            for group in samples:
                number = _first(group).group_index
                if number not in self._reserved:
                    raise ConfigError(f"group {number} was not drawn here, or is trained already")
                if number not in self._waiting:
                    self._waiting.append(number)
            self._waiting.sort()

    def trained(self, rollout_id: int, groups: Iterable[int]) -> None:
        """A rollout is complete: `groups` are trained or dropped for good; a resume behind it does not draw them."""
        with self._lock:
            for group in groups:
                self._reserved.pop(group, None)
            self._snapshots[rollout_id] = self._snapshot()
            for old in sorted(self._snapshots)[:-_SNAPSHOTS]:
                del self._snapshots[old]

    def save(self, rollout_id: int) -> None:
        """Write the state behind `rollout_id`, whatever was drawn since."""
        if self._args.save is None:
            return
        with self._lock:
            told = self._snapshots.get(rollout_id) or self._snapshot()
        position = vars(told.position)
        write(_path(self._args.save, rollout_id), {**position, "reserved": told.reserved, "rows": told.rows})

    def load(self, rollout_id: int | None = None) -> None:
        """Go on behind `rollout_id`; from the start where nothing was saved of it."""
        path = None if self._args.load is None or rollout_id is None else _path(self._args.load, rollout_id)
        if path is None or not path.exists():
            return
        try:
            told: dict[str, Any] = json.loads(path.read_text())
            position = Position(told["epoch"], told["offset"], told["groups"])
            reserved = {int(group): int(row) for group, row in told["reserved"]}
            rows = int(told["rows"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cannot read the data source's state {path}: {error!r}") from error
        if rows != len(self._rows):
            raise ConfigError(f"{path} is of {rows} rows, but --prompt-data has {len(self._rows)}: give it the same")
        with self._lock:
            self._position, self._reserved, self._waiting = position, reserved, sorted(reserved)
            self._order = self._shuffled(position.epoch)
            self._snapshots.clear()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._position, tuple(sorted(self._reserved.items())), len(self._rows))

    def _next(self) -> int:
        """Reserve the next prompt, over the end of an epoch where need be; its group."""
        here = self._position
        if here.offset == len(self._rows):
            here = replace(here, epoch=here.epoch + 1, offset=0)
            self._order = self._shuffled(here.epoch)
        self._reserved[here.groups] = self._order[here.offset]
        self._position = replace(here, offset=here.offset + 1, groups=here.groups + 1)
        return here.groups

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._args.rollout_shuffle:
            random.Random(self._args.rollout_seed + epoch).shuffle(order)
        return order

    def _group(self, number: int) -> list[Any]:
        row, size = self._rows[self._reserved[number]], self._args.n_samples_per_prompt
        prompt = self._make(
            prompt=row.get(self._args.input_key),
            label=row.get(self._args.label_key) if self._args.label_key else None,
            metadata=dict(row.get(self._args.metadata_key) or {}),
            group_index=number,
        )
        group = [copy.deepcopy(prompt) for _ in range(size)]
        for place, sample in enumerate(group):
            sample.index = number * size + place
        return group


def read_rows(path: str) -> Iterable[Row]:
    """The rows that --prompt-data names; see PolarDataSource. Raises ConfigError."""
    sliced = re.fullmatch(r"(.*)@\[(-?\d*):(-?\d*)\]", path)
    name = sliced[1] if sliced else path
    try:
        rows = list(_reader(name))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot read --prompt-data {name}: {error}") from error
    return rows[slice(*(int(part) if part else None for part in sliced.groups()[1:]))] if sliced else rows


def _reader(name: str) -> Iterable[Row]:
    if name.startswith("hf:"):
        return _hugging_face(name.removeprefix("hf:"))
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in Path(name).read_text().splitlines() if line.strip()]
    if name.endswith(".parquet"):
        parquet = importlib.import_module("pyarrow.parquet")
        return cast("list[Row]", parquet.read_table(name).to_pylist())
    raise ValueError("give a .jsonl or .parquet file, or hf:NAME")


def _hugging_face(name: str) -> Iterable[Row]:
    datasets: Any = importlib.import_module("datasets")
    path, _, split = name.partition(":")
    if (Path(path) / "state.json").exists():  # by `save_to_disk`
        return cast("Iterable[Row]", datasets.load_from_disk(path))
    return cast("Iterable[Row]", datasets.load_dataset(path, split=split or "train"))


def _first(group: Sequence[Any]) -> Any:
    first: Any = group[0]
    return cast("Any", first[0]) if isinstance(first, list) else first


def _path(directory: str, rollout_id: int) -> Path:
    return Path(directory) / "rollout" / f"polar_data_source_{rollout_id}.json"


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Whole or not at all, also where the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    with beside.open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
