"""The servers that `benchmarks/proxy.py` measures: each a process of its own, on one core, on the loopback.

A server says on its standard output where it listens, then answers the questions of the process that measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from aiohttp import web

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

TEXT = (
    "The function takes its arguments in the order of the table above, so the value that the test expects cannot come"
    " from this branch. I will read the next part of the module before I change anything in it."
)
COMMAND = "cd /workspace/project && sed -n '1,400p' src/module/compute.py | grep -n 'value = compute' | head -n 40"
REPLY = f"{TEXT}\n<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': COMMAND}})}\n</tool_call>"
"""About 100 tokens."""
SLOWEST = 3.0
KEYS = 1000
_CONTEXT = 1_000_000
_BODY_LIMIT = 64 << 20


def call_id(session: str, turn: int) -> str:
    """The id of the call in a reply: made up by ours in a way that is known here too."""
    return f"call_{_made(session, 2 * turn + 1)}"


def _made(session: str, number: int) -> str:
    return f"{session}x{number}"


def thinking(session: str, turn: int) -> float:
    """Seconds that the slow model takes for a session's turn."""
    return random.Random(f"{session}/{turn}").uniform(1.0, SLOWEST)


# --- a server's process -----------------------------------------------------------------------------------------------


class Model:
    """An engine that says `REPLY`, at once or after a time that follows from the session and its turn."""

    def __init__(self, ids: Sequence[int], *, slow: bool) -> None:
        self._generation = Generation(
            token_ids(ids), log_probs([-0.5] * len(ids)), FinishReason.STOP, (VersionSpan("1", len(ids)),)
        )
        self._slow = slow
        self._turns: Counter[str] = Counter()

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def probe(self) -> EngineInfo:
        return EngineInfo("model", _CONTEXT, "1")

    async def generate(
        self, prompt_ids: TokenIds, sampling: SamplingParams, *, request_id: str, session_id: str, stop_ids: Any = ()
    ) -> Generation:
        turn = self._turns[session_id]
        self._turns[session_id] += 1
        await anyio.sleep(thinking(session_id, turn) if self._slow else 0)
        return self._generation


async def serve_ours(args: argparse.Namespace) -> None:
    renderer = load_renderer(args.tokenizer)
    engine = Model([*renderer.encode(REPLY), renderer.stop_ids[0]], slow=args.slow)
    policy = Policy(engine, renderer, SamplingParams(max_tokens=1000), _CONTEXT)
    async with Proxy().serving() as proxy, anyio.create_task_group() as group:
        sessions = [proxy._table.open(name, _conversation(policy, name)) for name in _names(args)]

        def render(_: str) -> float:
            """CPU seconds of rendering what the last turn of the latest session was asked."""
            latest = max((one for one in sessions if one.completions), key=lambda one: one.completions[-1].ended)
            request, started = latest.completions[-1].request, time.process_time()
            renderer.render(request.messages, request.tools)
            return time.process_time() - started

        def extended(_: str) -> float:
            """Turns that did not go on from their parent's tokens; each session has one."""
            return sum(one.parent is None for session in sessions for one in session.completions)

        await _command(proxy.url, [session.key for session in sessions], {"render": render, "anew": extended})
        group.cancel_scope.cancel()


def _conversation(policy: Policy, name: str) -> Conversation:
    numbers = count()
    return Conversation(policy, name, new_id=lambda: _made(name, next(numbers)))


def _names(args: argparse.Namespace) -> list[str]:
    return [f"s{number}" for number in range(KEYS if args.slow else 100)]


async def serve_bare(args: argparse.Namespace) -> None:
    """Reads a body and streams as many bytes of it back as the path says; the slow one thinks in between."""
    turns: Counter[str] = Counter()

    async def echo(request: web.Request) -> web.StreamResponse:
        body, session = await request.read(), request.headers["Authorization"].removeprefix("Bearer ")
        if args.slow:
            turns[session] += 1
            await anyio.sleep(thinking(session, turns[session] - 1))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(body[: int(request.match_info["size"])])
        return response

    app = web.Application(client_max_size=_BODY_LIMIT)
    app.router.add_post("/{size}", echo)
    async with listening(app) as url:
        await _command(url, _names(args), {})


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
    keys = _names(args)
    for key in keys:
        served.open_session(key)
    async with listening(served.app) as url:
        await _command(url, keys, {})


@asynccontextmanager
async def listening(app: web.Application) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _command(url: str, keys: Sequence[str], more: dict[str, Any]) -> None:
    """Say where this server is, then answer questions until the process that measures is gone."""
    print(json.dumps({"url": url, "keys": list(keys)}), flush=True)
    answers = {"cpu": lambda _: time.process_time(), "queued": lambda _: _queued(), **more}
    while line := await anyio.to_thread.run_sync(sys.stdin.readline):
        print(json.dumps(answers[line.strip()](line)), flush=True)


def _queued() -> float:
    """Seconds that this process was ready to run and did not."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


# --- seen from the process that measures ------------------------------------------------------------------------------


@dataclass
class Server:
    """A server's process."""

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
async def server(kind: str, args: argparse.Namespace, core: int, *, slow: bool = False) -> AsyncGenerator[Server]:
    """ "ours", "bare", "slime_openai" or "slime_anthropic", while the block runs."""
    argv = [sys.executable, __file__, kind, "--tokenizer", str(args.tokenizer), "--core", str(core)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("serve")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--slime", type=Path)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--core", type=int)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    anyio.run({"ours": serve_ours, "bare": serve_bare}.get(args.serve, serve_slime), args)


if __name__ == "__main__":
    main()
