"""What a trainer reads of recorded sessions: rows and tokens with one trace a request, and with prefixes merged.

    python benchmarks/trainer_cost.py [SESSION...] [--recordings DIR] [--tokenizer DIR]

Without arguments the redacted HTTP recordings of real agent programs in tests/recorded are asked of our own proxy,
with a real tokenizer (default: Qwen3's, as the tests fetch it); --recordings takes another folder of that form
(PROGRAM/NAME.jsonl.xz). SESSIONs are recordings of polar_plugin, files or directories, and are taken as they stand.

A row is one trace, an update's unit. Its tokens are prompt and response together: all that a forward pass reads. The
second table has only the sessions of at least five calls. arXiv 2605.24220 reports 1185 rows -> 218, which is 5.4x.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from polar_plugin.merge.builders import PerRequest, PrefixMerging
from polar_plugin.recording import load, recordings
from polar_plugin.records import CompletionSession, Trace

_LONG = 5  # calls


@dataclass(frozen=True)
class Cost:
    """Of some sessions."""

    sessions: int = 0
    calls: int = 0
    rows: tuple[int, int] = (0, 0)
    """One trace a request, then merged."""
    tokens: tuple[int, int] = (0, 0)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.sessions + other.sessions,
            self.calls + other.calls,
            (self.rows[0] + other.rows[0], self.rows[1] + other.rows[1]),
            (self.tokens[0] + other.tokens[0], self.tokens[1] + other.tokens[1]),
        )


def cost(session: CompletionSession) -> Cost:
    split, merged = PerRequest().build(session), PrefixMerging().build(session)
    return Cost(1, len(session.completions), (len(split), len(merged)), (read(split), read(merged)))


def read(traces: Sequence[Trace]) -> int:
    return sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)


def recorded_sessions(directory: Path, tokenizer: Path | None) -> Iterator[tuple[str, CompletionSession]]:
    """(program, session) of each HTTP recording, asked again of our proxy."""
    from transformers import AutoTokenizer

    from polar_plugin.engine.render import load_renderer
    from tests import tokenizers
    from tests.recorded.replay import replay

    chosen = tokenizer or tokenizers.load("qwen3")
    renderer, encoder = load_renderer(chosen), AutoTokenizer.from_pretrained(str(chosen))
    for path in sorted(directory.resolve().glob("*/*.jsonl.xz")):
        name = str(path).removesuffix(".jsonl.xz")
        yield path.parent.name, anyio.run(replay, name, renderer, encoder).session


def given_sessions(paths: Sequence[Path]) -> Iterator[tuple[str, CompletionSession]]:
    for path in (one for given in paths for one in recordings(given)):
        recording = load(path)
        yield recording.header.harness or "unnamed", recording.session


def table(title: str, costs: Mapping[str, Cost]) -> Table:
    shown = Table(title=title)
    for column in ("program", "sessions", "calls", "rows", "merged", "ratio", "tokens", "merged", "ratio"):
        shown.add_column(column, justify="left" if column == "program" else "right")
    for name, one in [*costs.items(), ("all", sum(costs.values(), Cost()))]:
        rows = (f"{one.rows[0]:,}", f"{one.rows[1]:,}", ratio(one.rows))
        tokens = (f"{one.tokens[0]:,}", f"{one.tokens[1]:,}", ratio(one.tokens))
        shown.add_row(name, f"{one.sessions}", f"{one.calls}", *rows, *tokens)
    shown.add_row("arXiv 2605.24220", "", "", "1,185", "218", "5.4x", "", "", "")
    return shown


def ratio(pair: tuple[int, int]) -> str:
    return f"{pair[0] / pair[1]:.1f}x" if pair[1] else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=Path, nargs="*", help="recordings of polar_plugin")
    parser.add_argument("--recordings", type=Path, default=Path(__file__).parents[1] / "tests" / "recorded")
    parser.add_argument("--tokenizer", type=Path)
    arguments = parser.parse_args()
    found = given_sessions(arguments.sessions)
    if not arguments.sessions:
        found = recorded_sessions(arguments.recordings, arguments.tokenizer)
    every: dict[str, Cost] = {}
    long: dict[str, Cost] = {}
    for name, session in found:
        one = cost(session)
        every[name] = every.get(name, Cost()) + one
        if one.calls >= _LONG:
            long[name] = long.get(name, Cost()) + one
    console = Console(width=120)
    console.print(table("All sessions", every))
    console.print(table(f"Sessions of at least {_LONG} calls", long))


if __name__ == "__main__":
    main()
