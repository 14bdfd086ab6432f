"""Does batching sessions and keeping their caches pay? The embedded engine in four modes, side by side in one run.

    python benchmarks/embedded_batching.py [--model tiny|smollm2|DIR] [--sessions 8] [--turns 3] [--tokens 32]

Each session is a conversation of `--turns` turns of `--tokens` sampled tokens. The modes take turns, round by round, so
that a busy machine slows all of them. The ratio is the result, the rates are not; that of CPU time hardly feels others.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np
from rich.console import Console
from rich.table import Table

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.records import LogProbs, SamplingParams, TokenIds, token_ids

PROMPT_TOKENS = 256
TOOL_TOKENS = 48


@dataclass
class Mode:
    name: str
    max_batch: int
    cache_tokens: int
    seconds: list[float] = field(default_factory=list[float])
    cpu_seconds: list[float] = field(default_factory=list[float])
    worst: float = 0.0


def random_ids(count: int, seed: int, vocab: int) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(0, vocab, count))


async def converse(engine: TransformersEngine, session: int, turns: int, tokens: int) -> tuple[TokenIds, LogProbs]:
    """One session: its tokens, and the log-probabilities recorded for the last turn's."""
    full = token_ids(np.empty(0, np.int32))
    new = random_ids(PROMPT_TOKENS, session, engine.vocab_size)
    for turn in range(turns):
        ids = token_ids(np.concatenate([full, new]))
        sampling = SamplingParams(max_tokens=tokens, seed=turn)
        generation = await engine.generate(ids, sampling, request_id=f"{session}-{turn}", session_id=str(session))
        full = token_ids(np.concatenate([ids, generation.output_ids]))
        new = random_ids(TOOL_TOKENS, 1000 + turn, engine.vocab_size)
    return full, generation.logprobs


async def run(mode: Mode, model: Path, args: argparse.Namespace) -> None:
    sessions: list[tuple[TokenIds, LogProbs]] = []

    async def one(session: int) -> None:
        sessions.append(await converse(engine, session, args.turns, args.tokens))

    limits = {"max_batch": mode.max_batch, "cache_tokens": mode.cache_tokens}
    async with TransformersEngine(model, threads=args.threads, **limits) as engine:
        await engine.probe()
        started, cpu_started = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as group:
            for session in range(args.sessions):
                group.start_soon(one, session)
        mode.seconds.append(time.perf_counter() - started)
        mode.cpu_seconds.append(time.process_time() - cpu_started)
        for full, recorded in sessions:
            scored = await engine.score(full)
            mode.worst = max(mode.worst, float(np.abs(scored[-len(recorded) :] - recorded).max()))


async def main(args: argparse.Namespace) -> None:
    model = resolve_model(args.model, args.cache_dir)
    modes = [
        Mode("one call at a time, no cache", 1, 0),
        Mode("one call at a time, cache along sessions", 1, 1 << 30),
        Mode(f"{args.sessions} calls batched, no cache", args.sessions, 0),
        Mode(f"{args.sessions} calls batched, cache along sessions", args.sessions, 1 << 30),
    ]
    for _ in range(args.rounds):
        for mode in modes:
            await run(mode, model, args)
    show(modes, args)


def show(modes: list[Mode], args: argparse.Namespace) -> None:
    sampled = args.sessions * args.turns * args.tokens
    table = Table(title=f"{args.sessions} sessions x {args.turns} turns x {args.tokens} tokens, best of {args.rounds}")
    for column in ("mode", "tokens/s", "ratio", "tokens/CPU s", "ratio", "max |Δ log p|"):
        table.add_column(column)
    for mode in modes:
        wall, cpu = min(mode.seconds), min(mode.cpu_seconds)
        table.add_row(
            mode.name,
            f"{sampled / wall:.1f}",
            f"{min(modes[0].seconds) / wall:.2f}x",
            f"{sampled / cpu:.1f}",
            f"{min(modes[0].cpu_seconds) / cpu:.2f}x",
            f"{mode.worst:.1e}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/models"))
    for name, default in (("sessions", 8), ("turns", 3), ("tokens", 32), ("rounds", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    anyio.run(main, parser.parse_args())
