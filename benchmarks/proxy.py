"""What the proxy costs: one turn through each model API against a bare echo, and many sessions on one core.

    python benchmarks/proxy.py [--tokenizer DIR] [--slime DIR] [--turns 15] [--sessions 200] [--lengths 2000 100000]

Everything stays on the loopback: each server is a process of its own on one core, the load comes from another one.

Turns: a conversation grows to N tokens by tool results of about 500 tokens and replies of about 100, each with a tool
call. Its next turns, streamed, take turns with a bare aiohttp server that reads the very same body: "bare" streams as
many bytes back as ours does, "echo" the whole body. "wall" is from the first byte sent to the last one read, "CPU" is
all that the server's process used, medians of `--turns` turns. "re-render" is the CPU of this library's own full render
and tokenisation of the same messages in the same process, without any HTTP. `--slime` adds the adapters of a checkout
of slime, with a model that answers as fast.

Sessions: all of them have a streamed call under way all the time; the model takes one to three seconds for each. The
bare server sleeps as long and sends as much. "late" is what the client waits beyond the model; "added" is how much
later than with the bare server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import anyio
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.servers import COMMAND, SLOWEST, TEXT, Server, call_id, server, thinking
from tests.speakers import SPEAKERS, Answer, Call, Wire

LINE = "    {0:5d} | value = compute(argument_{0}, other={0})  # a line of some module\n"
TOKENS_A_TURN = 640
CORES = sorted(os.sched_getaffinity(0))


def toolbox(api: str) -> list[Wire]:
    """A dozen tools of 2 kB each."""
    (bash,) = SPEAKERS[api].body([{"content": "", "parts": []}], 1)["tools"]
    described = json.dumps(bash).replace("a command.", "a command; see the manual before you do. " * 45)
    return [json.loads(described.replace('"bash"', f'"bash{number or ""}"')) for number in range(12)]


TOOLS = {api: toolbox(api) for api in SPEAKERS}


@dataclass
class Talk:
    """One conversation over one API, growing turn by turn."""

    api: str
    session: str
    key: str
    history: list[Wire] = field(default_factory=list[Wire])
    turns: int = 0

    @property
    def path(self) -> str:
        return (
            "/v1beta/models/m:streamGenerateContent?alt=sse"
            if self.api == "google_generate"
            else SPEAKERS[self.api].path
        )

    @property
    def tokens(self) -> int:
        return TOKENS_A_TURN * self.turns

    def ask(self) -> bytes:
        """The body of the next turn."""
        speaker = SPEAKERS[self.api]
        if not self.history:
            self.history += [speaker.system("You work in a shell."), speaker.user("Find out why the test fails.")]
        body = speaker.body(self.history, 1000) | {"tools": TOOLS[self.api]}
        return json.dumps(body | ({} if self.api == "google_generate" else {"stream": True})).encode()

    def hear(self) -> None:
        """The reply and the result of its call."""
        call = Call("bash", {"command": COMMAND}, call_id(self.session, self.turns))
        self.turns += 1
        self.history.append(said(self.api, call))
        result = "".join(LINE.format(18 * self.turns + line) for line in range(18))
        self.history += SPEAKERS[self.api].results(Answer(TEXT, (call,), ()), result)
        if self.api == "openai_responses":  # there a call is an item of its own
            self.history.insert(-1, function_call(call))


def said(api: str, call: Call) -> Wire:
    """The reply as a program tells it."""
    arguments = json.dumps(call.arguments)
    function = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    use = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
    part = {"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}}
    told: dict[str, Wire] = {
        "openai_chat": {"role": "assistant", "content": TEXT, "tool_calls": [function]},
        "anthropic_messages": {"role": "assistant", "content": [{"type": "text", "text": TEXT}, use]},
        "openai_responses": {
            "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": TEXT}],
        },
        "google_generate": {"role": "model", "parts": [{"text": TEXT}, part]},
    }  # fmt: skip
    return told[api]


def function_call(call: Call) -> Wire:
    arguments = json.dumps(call.arguments)
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}


async def exchange(http: aiohttp.ClientSession, path: str, key: str, body: bytes) -> tuple[float, int]:
    """Seconds from the first byte sent to the last one read, and the bytes of the reply."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    started = time.perf_counter()
    async with http.post(path, data=body, headers=headers) as response:
        reply = await response.read()
        took = time.perf_counter() - started
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {reply[:500]!r}")
    return took, len(reply)


# --- one turn ---------------------------------------------------------------------------------------------------------


@dataclass
class Cost:
    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    async def turn(self, of: Server, http: aiohttp.ClientSession, path: str, key: str, body: bytes) -> int:
        before = of.ask("cpu")
        took, size = await exchange(http, path, key, body)
        self.wall.append(took)
        self.cpu.append(of.ask("cpu") - before)
        return size

    @property
    def milliseconds(self) -> tuple[float, float]:
        return 1e3 * statistics.median(self.wall), 1e3 * statistics.median(self.cpu)


async def one_api(api: str, kind: str, args: argparse.Namespace, table: Table) -> None:
    async with server(kind, args, CORES[0]) as ours, server("bare", args, CORES[0]) as bare:
        connections = [aiohttp.ClientSession(one.url) for one in (ours, bare)]
        talk = Talk(api, "s0", ours.keys[0])
        for length in args.lengths:
            while talk.tokens < length:
                await exchange(connections[0], talk.path, talk.key, talk.ask())
                talk.hear()
            cost, same, echo, rendered = Cost(), Cost(), Cost(), list[float]()
            for _ in range(args.turns):
                body = talk.ask()
                size = await cost.turn(ours, connections[0], talk.path, talk.key, body)
                await same.turn(bare, connections[1], f"/{size}", "s0", body)
                await echo.turn(bare, connections[1], f"/{len(body)}", "s0", body)
                if kind == "ours":
                    rendered.append(1e3 * ours.ask("render"))
                talk.hear()
            again = statistics.median(rendered) if rendered else None
            table.add_row(
                f"{kind} {api}" if kind == "ours" else kind, f"{length:,}", f"{len(body) / 1e3:,.0f}",
                *compared(cost, same, echo),
                *([f"{again:.0f}", f"{again / cost.milliseconds[1]:.0f}x"] if again else []),
            )  # fmt: skip
        if kind == "ours" and (anew := ours.ask("anew")) != 1:
            raise RuntimeError(f"{anew:.0f} turns of {api} were rendered anew, where the first alone should be")
        for one in connections:
            await one.close()


def compared(cost: Cost, *others: Cost) -> list[str]:
    """Wall, then CPU: ours, and for each other its time and the ratio."""
    cells: list[str] = []
    for which in (0, 1):
        mine = cost.milliseconds[which]
        theirs = [other.milliseconds[which] for other in others]
        cells += [f"{mine:.2f}", *(f"{one:.2f} {mine / one:.1f}x" for one in theirs)]
    return cells


# --- many sessions ----------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What a server did with all sessions at once. `late`: milliseconds beyond the model, by session and turn."""

    late: list[float]
    seconds: float
    cpu: float
    queued: float

    def cells(self) -> list[str]:
        return [
            f"{len(self.late) / self.seconds:.0f}",
            f"{100 * self.cpu / self.seconds:.0f} %",
            f"{1e3 * self.cpu / len(self.late):.2f}",
            f"{100 * self.queued / self.seconds:.0f} %",
        ]


async def load(kind: str, args: argparse.Namespace, size: int = 0) -> Load:
    """All sessions talk to a server; the bare one sends `size` bytes back."""
    late: dict[tuple[int, int], float] = {}
    async with server(kind, args, CORES[0], slow=True) as served:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(served.url, connector=connector) as http, anyio.create_task_group() as group:
            started, cpu, queued = time.perf_counter(), served.ask("cpu"), served.ask("queued")

            async def one(number: int) -> None:
                talk = Talk(list(SPEAKERS)[number % len(SPEAKERS)], f"s{number}", served.keys[number])
                await anyio.sleep(random.Random(number).uniform(0, SLOWEST))
                for turn in range(args.session_turns):
                    path = talk.path if kind == "ours" else f"/{size}"
                    took, _ = await exchange(http, path, talk.key, talk.ask())
                    late[number, turn] = 1e3 * (took - thinking(talk.session, turn))
                    talk.hear()

            for number in range(args.sessions):
                group.start_soon(one, number)
        seconds = time.perf_counter() - started
        cpu, queued = served.ask("cpu") - cpu, served.ask("queued") - queued
    return Load([late[key] for key in sorted(late)], seconds, cpu, queued)


async def many_sessions(args: argparse.Namespace, table: Table) -> None:
    for _ in range(args.repeats):
        bare, ours = await load("bare", args, 2000), await load("ours", args)
        added = np.array(ours.late) - np.array(bare.late)
        table.add_row("bare, late", *percentiles(bare.late), *bare.cells())
        table.add_row("ours, late", *percentiles(ours.late), *ours.cells())
        table.add_row("added", *percentiles(added.tolist()), end_section=True)


def percentiles(milliseconds: Sequence[float]) -> list[str]:
    return [f"{point:.1f}" for point in np.percentile(milliseconds, [50, 90, 99, 100])]


# ----------------------------------------------------------------------------------------------------------------------


async def measure(args: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {CORES[-1]})
    console = Console(width=150)
    if args.lengths:
        columns = ("", "tokens", "body, kB", "wall, ms", "bare", "echo", "CPU, ms", "bare", "echo", "re-render", "")
        table = titled("One streamed turn, medians", columns)
        for api in SPEAKERS:
            await one_api(api, "ours", args, table)
        if args.slime:
            await one_api("openai_chat", "slime_openai", args, table)
            await one_api("anthropic_messages", "slime_anthropic", args, table)
        console.print(table)
    if args.sessions:
        columns = ("ms", "p50", "p90", "p99", "most", "turns/s", "CPU of the core", "CPU a turn, ms", "run queue")
        table = titled(f"{args.sessions} streaming sessions side by side on one core", columns)
        await many_sessions(args, table)
        console.print(table)


def titled(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="default: Qwen3's, as the tests fetch it")
    parser.add_argument("--slime", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--session-turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2_000, 20_000, 100_000])
    args = parser.parse_args()
    if args.tokenizer is None:
        from tests import tokenizers

        args.tokenizer = tokenizers.load("qwen3")
    anyio.run(measure, args)


if __name__ == "__main__":
    main()
