"""What goes on at this moment, as JSON: stages, sessions, counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .batch import Batch
from .parts import Stages


def status(stages: Stages, batches: Iterable[Batch], counts: Mapping[str, int]) -> dict[str, Any]:
    """`stages` by name: `slots`, `running`, `waiting`, `done`, `peak`, `busy_seconds`; `sessions` and `counts`.

    Sessions by id: `task`, `state`, `age` in seconds since the attempt was admitted. Counts are totals since the start.
    """
    return {
        "stages": {
            stage.name: {
                "slots": stage.slots,
                "running": stage.running,
                "waiting": stage.waiting,
                "done": stage.done,
                "peak": stage.peak,
                "busy_seconds": round(stage.busy_seconds, 3),
            }
            for stage in stages
        },
        "sessions": {name: told for batch in batches for name, told in batch.sessions().items()},
        "counts": dict(counts),
    }


def stage_counts(stages: Stages) -> dict[str, int]:
    """The stages' totals as counters for a trainer's metrics: `stage_NAME_done`, `_peak` and `_busy_seconds`."""
    return {
        f"stage_{stage.name}_{what}": int(value)
        for stage in stages
        for what, value in (("done", stage.done), ("peak", stage.peak), ("busy_seconds", stage.busy_seconds))
    }
