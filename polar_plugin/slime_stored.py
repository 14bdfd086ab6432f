"""Groups that have ended and are not trained yet, on disk: a restart takes them up instead of running them again."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .records import Trajectory

_log = logging.getLogger(__name__)
_FORMAT = 1


@dataclass(frozen=True)
class Store:
    """A directory of this run's own. Files are pickles: they are only as trustworthy as who may write there."""

    directory: Path

    def put(self, group: int, rollout_id: int, trajectories: Sequence[Trajectory]) -> None:
        """Keep the group as it ended during `rollout_id`. Whole or not at all, also where the process is killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        light = [replace(trajectory, session=None) for trajectory in trajectories]
        beside = self._path(group).with_suffix(f".{os.getpid()}.tmp")
        beside.write_bytes(pickle.dumps((_FORMAT, rollout_id, light)))
        beside.replace(self._path(group))

    def take(self, group: int, size: int, rollout_id: int) -> list[Trajectory] | None:
        """The group's trajectories, where they ended before weights that `rollout_id` does not have.

        One that ended in a later rollout was sampled by weights that a resume from a checkpoint went back behind.
        """
        try:
            version, ended, trajectories = pickle.loads(self._path(group).read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged pickle does: the group is run again
            _log.warning("%s cannot be read, the group is run again: %r", self._path(group), error)
            return None
        if version != _FORMAT or ended > rollout_id or len(trajectories) != size:
            return None
        return trajectories

    def forget(self, group: int) -> None:
        self._path(group).unlink(missing_ok=True)

    def _path(self, group: int) -> Path:
        return self.directory / f"group_{group}.pickle"
