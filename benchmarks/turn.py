"""CPU of one turn against the length of its history: extending the parent's tokens, and rendering all of it again.

    python benchmarks/turn.py [--tokenizer DIR]

Both do the turn that follows a history of N tokens (tool results of about 500 tokens each): "ours" from the decoded
request to the ids that are sent (match, extend, record), "re-render" by the tokenizer's own chat template and
tokenisation of the whole. Process CPU time, median of several turns, both in one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.merge.traces import message_json, tool_json
from polar_plugin.records import ChatRequest, Message, SamplingParams, Tool

BASH = Tool("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n 1,40p module.py"}}\n</tool_call>'
LINE = "    {i:4d} | value = compute(argument_{i}, other={i})  # a line of some module\n"
LENGTHS = (2_000, 20_000, 100_000)
TURNS = 7


async def measure(renderer: Any, tokenizer: Any, length: int) -> tuple[float, float]:
    """Milliseconds of CPU a turn, ours and re-rendered, at a history of `length` tokens."""
    engine = ScriptedEngine(lambda _: CALL, tokenizer, context_length=1_000_000)
    conversation = Conversation(Policy(engine, renderer, SamplingParams(max_tokens=100), 1_000_000), "s")
    messages = [Message("system", "You work in a shell."), Message("user", "Fix the bug.")]
    ours: list[float] = []
    anew: list[float] = []
    reached = 0
    while reached < length or len(ours) < TURNS:
        request = ChatRequest(tuple(messages), (BASH,))
        started = time.process_time()
        completion = await conversation(request)
        if reached >= length:
            ours.append(time.process_time() - started)
            anew.append(cpu(lambda: rendered(tokenizer, messages)))
        reached = completion.length
        messages.append(completion.reply)
        text = "".join(LINE.format(i=reached + line) for line in range(18))
        messages.append(Message("tool", text, tool_call_id=completion.reply.tool_calls[0].id, name="bash"))
    return 1e3 * statistics.median(ours), 1e3 * statistics.median(anew)


def rendered(tokenizer: Any, messages: list[Message]) -> Any:
    told = [message_json(message) for message in messages]
    text = tokenizer.apply_chat_template(told, tools=[tool_json(BASH)], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="default: Qwen3's, as the tests fetch it")
    directory = parser.parse_args().tokenizer
    if directory is None:
        from tests import tokenizers

        directory = tokenizers.load("qwen3")
    renderer, tokenizer = load_renderer(directory), AutoTokenizer.from_pretrained(str(directory))
    table = Table(title=f"CPU of one turn, {renderer.name}")
    for column in ("history, tokens", "ours, ms", "re-render, ms", "ratio"):
        table.add_column(column, justify="right")
    for length in LENGTHS:
        ours, anew = anyio.run(measure, renderer, tokenizer, length)
        table.add_row(f"{length:,}", f"{ours:.1f}", f"{anew:.1f}", f"{anew / ours:.0f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
