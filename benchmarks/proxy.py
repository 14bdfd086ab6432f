"""What the proxy costs: one turn through each model API against a bare echo, and many sessions on one core.

    python benchmarks/proxy.py [--tokenizer DIR] [--slime DIR] [--turns 15] [--sessions 200] [--lengths 2000 100000]

Everything stays on the loopback: each server is a process of its own on one core, the load comes from another one.

Turns: a conversation of messages of about 500 tokens grows to N tokens; then its next turns, streamed, take turns with
an echo: a bare aiohttp server that reads the very same body and answers with it. "wall" is from the first byte sent to
the last one read, "CPU" is all that the server's process used, medians of `--turns` turns. "re-render" is the CPU of
this library's own full render and tokenisation of the same messages in the same process, without any HTTP. `--slime`
adds the adapters of a checkout of slime, with a model that answers as fast.

Sessions: all of them have a streamed call under way all the time; the model takes one to three seconds for each. What
the client waits beyond that is "added"; "run queue" is how long the server was ready and another program had its core.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import numpy as np
from aiohttp import web
from rich.console import Console
from rich.table import Table

from polar_plugin.engine.base import EngineInfo
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.server import Proxy
from polar_plugin.records import (
    FinishReason,
    Generation,
    SamplingParams,
    TokenIds,
    VersionSpan,
    log_probs,
    token_ids,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.speakers import SPEAKERS, Wire

REPLY = "I read it; the next part, please."
LINE = "    {0:5d} | value = compute(argument_{0}, other={0})  # a line of some module\n"
CONTEXT = 1_000_000
BODY_LIMIT = 64 << 20
SLOWEST = 3.0
KEYS = 1000


# --- servers: one process each ----------------------------------------------------------------------------------------


class Model:
    """An engine that says `REPLY`, at once or after a time that follows from the session and its turn."""

    def __init__(self, ids: Sequence[int], *, slow: bool) -> None:
        self._generation = Generation(
            token_ids(ids), log_probs([-0.5] * len(ids)), FinishReason.STOP, (VersionSpan("1", len(ids)),)
        )
        self._slow = slow
        self._turns: dict[str, int] = {}

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def probe(self) -> EngineInfo:
        return EngineInfo("model", CONTEXT, "1")

    async def generate(
        self, prompt_ids: TokenIds, sampling: SamplingParams, *, request_id: str, session_id: str, stop_ids: Any = ()
    ) -> Generation:
        turn = self._turns[session_id] = self._turns.get(session_id, -1) + 1
        await anyio.sleep(thinking(session_id, turn) if self._slow else 0)
        return self._generation


def thinking(session: str, turn: int) -> float:
    """Seconds that the slow model takes."""
    return random.Random(f"{session}/{turn}").uniform(1.0, SLOWEST)


async def serve_ours(args: argparse.Namespace) -> None:
    renderer = load_renderer(args.tokenizer)
    ids = [*renderer.encode(REPLY), renderer.stop_ids[0]]
    engine = Model(ids, slow=args.slow)
    policy = Policy(engine, renderer, SamplingParams(max_tokens=1000), CONTEXT)
    async with Proxy().serving() as proxy, anyio.create_task_group() as group:
        sessions = [
            proxy._table.open(f"s{number}", Conversation(policy, f"s{number}"))
            for number in range(KEYS if args.slow else 100)
        ]

        def render(_: str) -> float:
            """CPU seconds of rendering what the last turn of the latest session was asked."""
            latest = max((one for one in sessions if one.completions), key=lambda one: one.completions[-1].ended)
            request, started = latest.completions[-1].request, time.process_time()
            renderer.render(request.messages, request.tools)
            return time.process_time() - started

        await command(proxy.url, [session.key for session in sessions], {"render": render})
        group.cancel_scope.cancel()


async def serve_echo(args: argparse.Namespace) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application(client_max_size=BODY_LIMIT)
    app.router.add_post("/{path:.*}", echo)
    async with listening(app) as url:
        await command(url, ["any"], {})


async def serve_slime(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(args.slime))
    transformers, common = (
        importlib.import_module("transformers"),
        importlib.import_module("slime.agent.adapters.common"),
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(args.tokenizer))
    ids = tokenizer.encode(REPLY)

    async def answer(prompt_ids: list[int], *_: Any, **__: Any) -> Any:
        return common.TurnRecord(
            prompt_ids=list(prompt_ids), output_ids=ids, finish_reason="stop", output_log_probs=[-0.5] * len(ids)
        )

    common.call_sglang_generate = answer
    adapter = importlib.import_module(f"slime.agent.adapters.{args.serve.removeprefix('slime_')}")
    name = {"slime_anthropic": "AnthropicAdapter", "slime_openai": "OpenAIAdapter"}[args.serve]
    served = getattr(adapter, name)(tokenizer=tokenizer, sglang_url="http://127.0.0.1:9")
    keys = [f"s{number}" for number in range(100)]
    for key in keys:
        served.open_session(key)
    async with listening(served.app) as url:
        await command(url, keys, {})


@asynccontextmanager
async def listening(app: web.Application) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def command(url: str, keys: Sequence[str], more: dict[str, Any]) -> None:
    """Say where this server is, then answer the questions of the process that measures, until it is gone."""
    print(json.dumps({"url": url, "keys": list(keys)}), flush=True)
    answers = {"cpu": lambda _: time.process_time(), "queued": lambda _: queued(), **more}
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        print(json.dumps(answers[line.strip()](line)), flush=True)


def queued() -> float:
    """Seconds that this process was ready to run and did not."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


# --- the other side ---------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A server's process, on the first of our cores."""

    process: subprocess.Popen[str]
    url: str
    keys: list[str]

    def ask(self, what: str) -> float:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@asynccontextmanager
async def server(kind: str, args: argparse.Namespace, *, slow: bool = False) -> AsyncGenerator[Server]:
    argv = [sys.executable, __file__, "--serve", kind, "--tokenizer", str(args.tokenizer), "--core", str(CORES[0])]
    argv += ["--slime", str(args.slime)] if args.slime else []
    process = subprocess.Popen(  # noqa: ASYNC220
        [*argv, *(["--slow"] if slow else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        said = await anyio.to_thread.run_sync(process.stdout.readline)
        if not said:
            raise RuntimeError(f"the server {kind!r} did not start")
        yield Server(process, **json.loads(said))
    finally:
        process.kill()
        process.wait()


@dataclass
class Talk:
    """One conversation over one API, growing turn by turn."""

    api: str
    key: str
    history: list[Wire] = field(default_factory=list[Wire])
    tokens: int = 0

    @property
    def path(self) -> str:
        return (
            "/v1beta/models/m:streamGenerateContent?alt=sse"
            if self.api == "google_generate"
            else SPEAKERS[self.api].path
        )

    def ask(self) -> bytes:
        """The body of the next turn."""
        speaker, number = SPEAKERS[self.api], 18 * len(self.history)
        self.history += [] if self.history else [speaker.system("You read a module, part by part.")]
        self.history.append(speaker.user("".join(LINE.format(number + line) for line in range(18))))
        body = speaker.body(self.history, 1000)
        body.pop("tools")
        return json.dumps(body | ({} if self.api == "google_generate" else {"stream": True})).encode()

    def hear(self) -> None:
        said: dict[str, Wire] = {
            "openai_chat": {"role": "assistant", "content": REPLY},
            "anthropic_messages": {"role": "assistant", "content": [{"type": "text", "text": REPLY}]},
            "openai_responses": {
                "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": REPLY}],
            },
            "google_generate": {"role": "model", "parts": [{"text": REPLY}]},
        }  # fmt: skip
        self.history.append(said[self.api])
        self.tokens += TOKENS_A_TURN


TOKENS_A_TURN = 540


async def exchange(http: aiohttp.ClientSession, path: str, key: str, body: bytes) -> float:
    """Seconds from the first byte sent to the last one read."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    started = time.perf_counter()
    async with http.post(path, data=body, headers=headers) as response:
        said = await response.read()
        took = time.perf_counter() - started
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {said[:500]!r}")
    return took


@dataclass
class Cost:
    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    async def turn(self, of: Server, http: aiohttp.ClientSession, path: str, key: str, body: bytes) -> None:
        before = of.ask("cpu")
        self.wall.append(await exchange(http, path, key, body))
        self.cpu.append(of.ask("cpu") - before)

    @property
    def milliseconds(self) -> tuple[float, float]:
        return 1e3 * statistics.median(self.wall), 1e3 * statistics.median(self.cpu)


async def one_api(api: str, kind: str, args: argparse.Namespace, table: Table) -> None:
    async with server(kind, args) as ours, server("echo", args) as bare:
        connections = [aiohttp.ClientSession(one.url) for one in (ours, bare)]
        talk = Talk(api, ours.keys[0])
        for length in args.lengths:
            while talk.tokens < length:
                await exchange(connections[0], talk.path, talk.key, talk.ask())
                talk.hear()
            cost, echo, rendered = Cost(), Cost(), list[float]()
            for _ in range(args.turns):
                body = talk.ask()
                await cost.turn(ours, connections[0], talk.path, talk.key, body)
                await echo.turn(bare, connections[1], "/x", "any", body)
                if kind == "ours":
                    rendered.append(1e3 * ours.ask("render"))
                talk.hear()
            (wall, cpu), (echo_wall, echo_cpu) = cost.milliseconds, echo.milliseconds
            again = statistics.median(rendered) if rendered else None
            table.add_row(
                f"{kind} {api}" if kind == "ours" else kind, f"{length:,}", f"{len(body) / 1e3:,.0f}",
                f"{wall:.2f}", f"{echo_wall:.2f}", f"{wall / echo_wall:.2f}x",
                f"{cpu:.2f}", f"{echo_cpu:.2f}", f"{cpu / echo_cpu:.2f}x",
                f"{again:.1f}" if again else "", f"{again / cpu:.0f}x" if again else "",
            )  # fmt: skip
        for one in connections:
            await one.close()


async def many_sessions(args: argparse.Namespace, table: Table) -> None:
    added: list[float] = []
    async with server("ours", args, slow=True) as ours:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(ours.url, connector=connector) as http, anyio.create_task_group() as group:
            started, cpu, waited = time.perf_counter(), ours.ask("cpu"), ours.ask("queued")

            async def one(number: int) -> None:
                talk = Talk(list(SPEAKERS)[number % len(SPEAKERS)], ours.keys[number])
                await anyio.sleep(random.Random(number).uniform(0, SLOWEST))
                for turn in range(args.session_turns):
                    body = talk.ask()
                    took = await exchange(http, talk.path, talk.key, body)
                    added.append(1e3 * (took - thinking(f"s{number}", turn)))
                    talk.hear()

            for number in range(args.sessions):
                group.start_soon(one, number)
        seconds = time.perf_counter() - started
        cpu, waited = ours.ask("cpu") - cpu, ours.ask("queued") - waited
    points = np.percentile(added, [50, 90, 99, 100])
    table.add_row(
        f"{args.sessions}", f"{len(added) / seconds:.0f}", *(f"{point:.1f}" for point in points),
        f"{100 * cpu / seconds:.0f} %", f"{1e3 * cpu / len(added):.2f}", f"{100 * waited / seconds:.0f} %",
    )  # fmt: skip


async def measure(args: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {CORES[-1]})
    console = Console(width=150)
    if args.lengths:
        table = Table(title="One streamed turn, medians")
        for name in (
            "",
            "tokens",
            "body, kB",
            "wall, ms",
            "echo",
            "ratio",
            "CPU, ms",
            "echo",
            "ratio",
            "re-render, CPU",
            "",
        ):
            table.add_column(name, justify="right")
        for api in SPEAKERS:
            await one_api(api, "ours", args, table)
        if args.slime:
            await one_api("openai_chat", "slime_openai", args, table)
            await one_api("anthropic_messages", "slime_anthropic", args, table)
        console.print(table)
    if args.sessions:
        table = Table(title="Streaming sessions side by side on one core: added latency, ms")
        for name in (
            "sessions",
            "turns/s",
            "p50",
            "p90",
            "p99",
            "most",
            "CPU of the core",
            "CPU a turn, ms",
            "run queue",
        ):
            table.add_column(name, justify="right")
        await many_sessions(args, table)
        console.print(table)


CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="default: Qwen3's, as the tests fetch it")
    parser.add_argument("--slime", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--session-turns", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2_000, 20_000, 100_000])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--slow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tokenizer is None:
        from tests import tokenizers

        args.tokenizer = tokenizers.load("qwen3")
    if not args.serve:
        return anyio.run(measure, args)
    os.sched_setaffinity(0, {args.core})
    anyio.run({"ours": serve_ours, "echo": serve_echo}.get(args.serve, serve_slime), args)


if __name__ == "__main__":
    main()
