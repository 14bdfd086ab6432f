"""An OpenAI Chat server of a few lines on a Unix socket: answers from a script, remembers what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from polar_plugin.runtimes.base import ProxyEndpoint


def says(text: str | None, *calls: tuple[str, str]) -> dict[str, Any]:
    """An assistant message; `calls` are (tool, arguments as JSON text)."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{position}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for position, (name, arguments) in enumerate(calls)
        ]
    return message


def bash(command: str) -> tuple[str, str]:
    return "bash", json.dumps({"command": command})


@dataclass
class ModelAPI:
    replies: Sequence[dict[str, Any]]
    endpoint: ProxyEndpoint
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: list[str] = field(default_factory=list[str])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.append(request.headers.get("Authorization", ""))
        self.requests.append(body)
        if len(self.requests) > len(self.replies):
            return web.json_response({"error": {"message": "the script is over"}}, status=400)
        reply = self.replies[len(self.requests) - 1]
        reason = "tool_calls" if reply.get("tool_calls") else "stop"
        if not body.get("stream"):
            return web.json_response({"choices": [{"index": 0, "message": reply, "finish_reason": reason}]})
        return await self._streamed(request, reply, reason)

    async def _streamed(self, request: web.Request, reply: dict[str, Any], reason: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in _deltas(reply):
            await response.write(_chunk({"index": 0, "delta": delta, "finish_reason": None}))
        await response.write(_chunk({"index": 0, "delta": {}, "finish_reason": reason}))
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def model_api(directory: Path, *replies: dict[str, Any]) -> AsyncGenerator[ModelAPI]:
    """Serves while the block runs."""
    path = directory / "model.sock"
    api = ModelAPI(replies, ProxyEndpoint("http://127.0.0.1:1", path))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", api.chat)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield api
    finally:
        await runner.cleanup()


def _deltas(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """In small pieces, tool calls' arguments too."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    text = reply.get("content") or ""
    deltas += [{"content": text[start : start + 5]} for start in range(0, len(text), 5)]
    for index, call in enumerate(reply.get("tool_calls", ())):
        function, arguments = call["function"], call["function"]["arguments"]
        begin = {"index": index, "id": call["id"], "type": "function", "function": {**function, "arguments": ""}}
        deltas.append({"tool_calls": [begin]})
        for start in range(0, len(arguments), 7):
            part = {"index": index, "function": {"arguments": arguments[start : start + 7]}}
            deltas.append({"tool_calls": [part]})
    return deltas


def _chunk(choice: dict[str, Any]) -> bytes:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
