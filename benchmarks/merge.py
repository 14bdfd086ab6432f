"""Tokens a second and peak memory of merging a session into traces: ours against a merge over Python lists.

    python benchmarks/merge.py [--tokens 500000] [--slime DIR]

A session of n turns is one conversation whose prompts repeat the history, as a proxy records it: half of the tokens are
sampled. Speed is in tokens of the final trace a second of CPU time (best run of at least a second); memory is the peak
beyond the session itself, measured by tracemalloc in a run of its own: the traces and what making them needs. Memory
comes from what the process had before, as in one that merges session after session: a first touch of a page would cost
more than all else at 10 turns, and by chance. "ours" is `PrefixMerging.build` over completions as the proxy keeps them,
prompts that are views of one buffer; each turn costs some microseconds beside its tokens, which is what shows at 1000
turns of 500 tokens. "ours + check" adds `merge.check`. "copies" has each prompt in an array of its own, as other
systems record them, so that the input itself is quadratic in turns (250 million tokens at 1000 turns, all of which are
compared: what is told of parents is never trusted); "no parents" is that with nothing said of who extends whom,
"rerendered" that with `prompts: rerendered`. "Python lists" is a plain merge by list slices, which trusts that turns
come in order and makes no checks. `--slime DIR` adds the TrajectoryManager of a checkout of slime; `--only NAME`
measures those alone whose names begin so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polar_plugin.engine.buffer import TokenBuffer
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.records import (
    ChatRequest,
    Completion,
    CompletionSession,
    FinishReason,
    Generation,
    Message,
    SamplingParams,
    VersionSpan,
    log_probs,
    token_ids,
)

_KEPT = 31 << 20  # bytes; a larger block says nothing to glibc (DEFAULT_MMAP_THRESHOLD_MAX is 32 MiB)


@dataclass(frozen=True)
class Figures:
    """`speed` in millions of trace tokens a second, `memory` in bytes a trace token."""

    speed: float
    memory: float

    def __str__(self) -> str:
        return f"{self.speed:9.2f} {self.memory:7.1f}"


def conversation(turns: int, total: int) -> CompletionSession:
    """One chain of `turns` calls and `total` tokens, half of them sampled; prompts share one buffer."""
    rng = np.random.default_rng(0)
    half = total // turns // 2
    made: list[Completion] = []
    buffer, length = TokenBuffer(token_ids([1])), 1
    for turn in range(turns):
        buffer = buffer.extended(length, rng.integers(0, 150_000, half, dtype=np.int32))
        length += half
        output = token_ids(rng.integers(0, 150_000, half))
        made.append(
            Completion(
                f"c{turn}", ChatRequest(()), buffer.view(length),
                Generation(output, log_probs(-rng.random(half)), FinishReason.STOP, (VersionSpan("1", half),)),
                Message("assistant"), SamplingParams(), turn, turn + 0.5, made[-1].id if made else None,
            )
        )  # fmt: skip
        buffer = buffer.extended(length, output)
        length += half
    return CompletionSession("benchmark", tuple(made))


def copied(session: CompletionSession) -> CompletionSession:
    """Each prompt in an array of its own."""
    alone = (replace(one, prompt_ids=token_ids(one.prompt_ids)) for one in session.completions)
    return replace(session, completions=tuple(alone))


def orphaned(session: CompletionSession) -> CompletionSession:
    """Nothing said of who extends whom."""
    return replace(session, completions=tuple(replace(one, parent=None) for one in session.completions))


Turn = tuple[list[int], list[int], list[float]]


def as_lists(session: CompletionSession) -> list[Turn]:
    return [
        (one.prompt_ids.tolist(), one.generation.output_ids.tolist(), one.generation.logprobs.tolist())
        for one in session.completions
    ]


def merge_lists(turns: Sequence[Turn]) -> list[tuple[list[int], list[int], list[float]]]:
    """The plain way: compare each prompt with the sequence so far by list slices, and grow three lists."""
    traces: list[tuple[list[int], list[int], list[float]]] = []
    for prompt, output, logprobs in turns:
        for trace in traces:
            tokens, mask, told = trace
            if prompt[: len(tokens)] == tokens:
                new = prompt[len(tokens) :]
                break
        else:
            tokens, mask, told, new = [], [], [], prompt
            traces.append((tokens, mask, told))
        tokens.extend(new + output)
        mask.extend([0] * len(new) + [1] * len(output))
        told.extend([0.0] * len(new) + logprobs)
    return traces


def measured(work: Callable[[], object], tokens: int, seconds: float = 1.0) -> Figures:
    """Best of the runs that `seconds` take (one at least); memory in one more."""
    best, spent = float("inf"), 0.0
    gc.collect()
    while spent < seconds:
        before = time.process_time()
        work()
        took = time.process_time() - before
        best, spent = min(best, took), spent + took
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Figures(tokens / best / 1e6, peak / tokens)


def keep_memory() -> None:
    """Have glibc keep what is freed: it returns no more than twice the largest block that it ever freed."""
    np.ones(_KEPT // 8)


def slime_merge(directory: str, session: CompletionSession) -> Callable[[], object]:
    """Record and export with slime.agent.trajectory, fed with token lists and messages of one word."""
    sys.path.insert(0, directory)
    trajectory: Any = importlib.import_module("slime.agent.trajectory")
    sample: Any = importlib.import_module("slime.utils.types").Sample
    turns = as_lists(session)

    def work() -> object:
        manager = trajectory.TrajectoryManager()
        messages: list[dict[str, str]] = [{"role": "user", "content": "0"}]
        for number, (prompt, output, logprobs) in enumerate(turns):
            record = trajectory.TurnRecord(
                prompt_ids=prompt, output_ids=output, finish_reason="stop", output_log_probs=logprobs
            )
            reply = {"role": "assistant", "content": f"a{number}"}
            manager.record_turn("s", turn=record, prompt_messages=list(messages), response_message=reply)
            messages += [reply, {"role": "user", "content": f"u{number}"}]
        return manager.get_trajectory("s", base_sample=sample(), reward=0.0)

    return work


def contenders(session: CompletionSession, slime: str | None) -> dict[str, Callable[[], object]]:
    builder, copies, lists = PrefixMerging(), copied(session), as_lists(session)
    alone = orphaned(copies)
    rerendered = PrefixMerging(prompts="rerendered", end_of_turn=0)
    assert len(merge_lists(lists)) == len(builder.build(alone)) == 1
    found: dict[str, Callable[[], object]] = {
        "ours": lambda: builder.build(session),
        "ours + check": lambda: check(builder.build(session), session),
        "ours, copies": lambda: builder.build(copies),
        "ours, no parents": lambda: builder.build(alone),
        "ours, rerendered": lambda: rerendered.build(alone),
        "Python lists": lambda: merge_lists(lists),
    }
    return found | {"slime": slime_merge(slime, session)} if slime else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--turns", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--slime", help="a checkout of slime")
    parser.add_argument("--only", default="", help="the beginning of a contender's name")
    arguments = parser.parse_args()
    keep_memory()
    print(f"{arguments.tokens} tokens a session; million tokens a CPU second, and peak bytes a token")
    for row, turns in enumerate(arguments.turns):
        session = conversation(turns, arguments.tokens)
        every = contenders(session, arguments.slime)
        work = {name: one for name, one in every.items() if name.startswith(arguments.only)}
        if not row:
            print(f"{'turns':>6}" + "".join(f"{name:>20}" for name in work))
        tokens = session.completions[-1].length
        print(f"{turns:>6}" + "".join(f"{measured(one, tokens)!s:>20}" for one in work.values()), flush=True)


if __name__ == "__main__":
    main()
