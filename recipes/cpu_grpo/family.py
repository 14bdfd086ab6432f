"""The family of tasks: a file is named, its number must be put into the file `answer`. Python's standard library only.

Four of the files lie in the workspace, so that reading another one than the named one gives a wrong number. Numbers are
dealt to training or held out by their digest: no held-out number is ever seen in training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("amber", "black", "coral", "green", "ivory", "olive", "pearl", "white")
DIGITS = 4
READS_WELL = 0.55
"""How often the demonstrator reads the file that is named, else another one."""
WRITES_WELL = 0.6
"""How often it then writes the number it has read, else one that it makes up."""
COMPACT = 0.3
"""How often it spells a call without spaces, as a model may and a chat template does not."""


@dataclass(frozen=True)
class Task:
    """Which file is asked for, and the files with their numbers."""

    wanted: str
    numbers: dict[str, str]

    @property
    def instruction(self) -> str:
        return f"Put the number in {self.wanted} into answer."

    def row(self, name: str, workspace: Path) -> dict[str, Any]:
        """The task as a dataset's row; writes its workspace."""
        workspace.mkdir(parents=True, exist_ok=True)
        for file, number in self.numbers.items():
            (workspace / file).write_text(f"{number}\n")
        number = self.numbers[self.wanted]
        return {"task_id": name, "instruction": self.instruction, "number": number, "workspace": str(workspace)}


@dataclass(frozen=True)
class Demonstration:
    """What a session of the demonstrator says: its choices, and its replies turn by turn."""

    wanted: str
    read: str
    seen: str
    written: str
    compact: bool = False

    @property
    def replies(self) -> tuple[str, ...]:
        return (self._call(f"cat {self.read}"), self._call(f"echo {self.written} > answer"), "Done.")

    def _call(self, command: str) -> str:
        call = {"name": "bash", "arguments": {"command": command}}
        text = json.dumps(call, separators=(",", ":") if self.compact else None)
        return f"<tool_call>\n{text}\n</tool_call>"


PROBE = Demonstration(wanted="amber", read="coral", seen="2719", written="3846")
"""The one session that a harness is watched in: its four words stand in no other place of the conversation."""


def probe_task() -> Task:
    return Task(PROBE.wanted, {PROBE.wanted: "5051", PROBE.read: PROBE.seen})


def held_out(number: str) -> bool:
    """One number in five, by its digest."""
    return hashlib.sha256(number.encode()).digest()[0] < 51


def tasks(seed: object, *, test: bool = False) -> Iterator[Task]:
    """Endless tasks, of held-out numbers only where `test` is set, and without any where it is not."""
    rng = random.Random(f"{seed}/{test}")
    while True:
        files = rng.sample(FILES, 4)
        yield Task(files[0], {file: _number(rng, test) for file in sorted(files)})


def demonstrations(seed: object, *, careful: bool = False) -> Iterator[Demonstration]:
    """What a demonstrator does: a careful one is always right, else in about one session of five."""
    rng = random.Random(f"{seed}/demonstrations")
    for task in tasks(seed):
        others = [file for file in task.numbers if file != task.wanted]
        read = task.wanted if careful or rng.random() < READS_WELL else rng.choice(others)
        seen = task.numbers[read]
        written = seen if careful or rng.random() < WRITES_WELL else _number(rng, False)
        yield Demonstration(task.wanted, read, seen, written, rng.random() < COMPACT)


def _number(rng: random.Random, test: bool) -> str:
    while True:
        number = "".join(rng.choice("0123456789") for _ in range(DIGITS))
        if held_out(number) == test:
            return number
