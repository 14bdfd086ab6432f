"""docs/conformance.md, made of what the suite saw: `python -m tests.cli.conformance` after `pytest --conformance`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .clis import CLI, CLIS
from .scenarios import SCENARIOS

if TYPE_CHECKING:
    from .running import Ran

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"

_HEAD = """\
# Agent programs, run for real

Made by `python -m tests.cli.conformance` of what `make test-clis` saw; never edited. Each program, at the version
given, is installed from its registry and started by its preset in a sandbox whose only peer is the proxy; a scripted
model answers over a real tokenizer. In every cell it is checked that all sampled tokens reached the program and are
trained, but those whose reason is named, that there is one trace for each conversation, that each call's role is the
true one, and that the program tried to reach no other host (the kernel counts it).

"calls" are model calls, failed ones among them, and in brackets those that are not the main conversation's; "traces"
are what the trainer gets: a compaction gives one for what was before it, one for itself, and one for what comes after.
"""


@dataclass
class Results:
    """What has been seen, by row and scenario."""

    seen: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @classmethod
    def load(cls) -> Results:
        return cls(json.loads(RESULTS.read_text())) if RESULTS.exists() else cls()

    def add(self, cli: CLI, scenario: str, ran: Ran) -> None:
        row = self.seen.setdefault(cli.name, {})
        if row.get("version") != cli.version:
            row.clear()
        row |= {"version": cli.version, "api": cli.api, "ignored": sorted(cli.ignored)}
        row.setdefault("scenarios", {})[scenario] = {**ran.outcome, "note": cli.expects[scenario].note}

    def save(self) -> None:
        RESULTS.write_text(json.dumps(self.seen, indent=1, sort_keys=True, default=sorted) + "\n")


def page(seen: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_tables(seen)]) + "\n"


def _tables(seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = [(name, seen[name]) for name in dict.fromkeys([*(cli.name for cli in CLIS), *seen]) if name in seen]
    yield f"| program | version | {' | '.join(scenario.feature for scenario in SCENARIOS.values())} |"
    yield "|---" * (len(SCENARIOS) + 2) + "|"
    for name, row in rows:
        lacks = next((cli.lacks for cli in CLIS if cli.name == name), {})
        cells = (_cell(row["scenarios"].get(scenario), lacks.get(scenario, "-")) for scenario in SCENARIOS)
        yield f"| {name} | {row['version']} | {' | '.join(cells)} |"


def _cell(outcome: Mapping[str, Any] | None, lacking: str) -> str:
    if outcome is None:
        return lacking
    status, code = outcome["status"], outcome["exit_code"]
    words = [
        "ok" if status == "completed" else status,
        *([f"exit {code}"] if code else []),
        *(["task not done"] if outcome["reward"] != 1.0 else []),
        _number(outcome["calls"], "call") + _others(outcome["roles"]),
        _number(outcome["traces"], "trace"),
        *(f"{reason} not trained" for reason in sorted(outcome["untrained"])),
        *([outcome["note"]] if outcome["note"] else []),
    ]
    return ", ".join(words)


def _others(roles: Mapping[str, int]) -> str:
    told = [f"{count} {role.replace('_', '-')}" for role, count in roles.items() if role != "main"]
    return f" ({', '.join(told)})" if told else ""


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def main() -> int:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(Results.load().seen))
    sys.stdout.write(f"{PAGE}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
