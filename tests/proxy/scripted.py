"""A token side with a script, and a proxy around it: what the suites of this folder drive."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import anyio

from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Ready, Session
from polar_plugin.records import (
    ChatRequest,
    Completion,
    FinishReason,
    Generation,
    Message,
    SamplingParams,
    ToolCall,
    log_probs,
    token_ids,
)

CHAT = "/v1/chat/completions"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
STREAM = HELLO | {"stream": True}


def say(content: str = "", reasoning: str = "", *calls: ToolCall) -> Message:
    return Message("assistant", content, reasoning, calls)


def completion_of(
    reply: Message, request: ChatRequest, *, finish: FinishReason = FinishReason.STOP, number: int = 1
) -> Completion:
    """A completion by hand: one prompt token a message, three sampled tokens."""
    return Completion(
        id=f"c{number}",
        request=request,
        prompt_ids=token_ids(range(1, len(request.messages) + 8)),
        generation=Generation(token_ids([11, 12, 13]), log_probs([-0.5, -0.25, float("-inf")]), finish),
        reply=reply,
        sampling=SamplingParams(max_tokens=99),
        started=1_700_000_000.0,
        ended=1_700_000_001.5,
    )


@dataclass
class Scripted:
    """Replies in order, over and over; `before` runs inside each call, where a test can hold it or fail it."""

    replies: list[Message] = field(default_factory=lambda: [say("hello")])
    finish: FinishReason = FinishReason.STOP
    before: Callable[[ChatRequest], Awaitable[None]] | None = None
    requests: list[ChatRequest] = field(default_factory=list[ChatRequest])
    cancelled: anyio.Event = field(default_factory=anyio.Event)
    started: anyio.Event = field(default_factory=anyio.Event)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def __call__(self, request: ChatRequest, ready: Ready) -> Completion:
        await ready()
        number = next(self._numbers)
        self.requests.append(request)
        self.started.set()
        try:
            if self.before is not None:
                await self.before(request)
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise
        reply = self.replies[(number - 1) % len(self.replies)]
        return completion_of(reply, request, finish=self.finish, number=number)

    async def count(self, request: ChatRequest) -> int:
        return len(completion_of(say(), request).prompt_ids)


@dataclass
class Stopped(Scripted):
    """Replies that a stop string ended."""

    stop: str = "END"

    async def __call__(self, request: ChatRequest, ready: Ready) -> Completion:
        completion = await super().__call__(request, ready)
        return replace(completion, generation=replace(completion.generation, stop=self.stop))


async def forever(request: ChatRequest) -> None:
    await anyio.sleep_forever()


@asynccontextmanager
async def serving(
    reply: Scripted, config: ProxyConfig | None = None, **metadata: str
) -> AsyncGenerator[tuple[Proxy, Session, aiohttp.ClientSession]]:
    """A proxy with one session, and a plain HTTP client that carries its key."""
    async with Proxy(config).serving() as proxy, proxy.session("s1", reply, **metadata) as session:
        headers = {"Authorization": f"Bearer {session.key}"}
        async with aiohttp.ClientSession(proxy.url, headers=headers) as http:
            yield proxy, session, http


def request_bytes(session: Session, body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def raw_post(proxy: Proxy, session: Session, body: object) -> anyio.abc.SocketStream:
    """A connection on which `body` was posted: for clients that hang up when they please."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    stream = await anyio.connect_tcp(host, int(port))
    await stream.send(request_bytes(session, body))
    return stream


async def receive_until(stream: anyio.abc.SocketStream, wanted: bytes) -> bytes:
    """What comes in, until `wanted` is in it."""
    got = b""
    while wanted not in got:
        got += await stream.receive()
    return got


async def skim_until(stream: anyio.abc.SocketStream, end: bytes) -> None:
    """Read and forget a long answer until `end` stands at most a few bytes before its end."""
    tail = b""
    with anyio.fail_after(60):
        while end not in tail:
            tail = (tail + await stream.receive(1 << 20))[-64:]


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the event loop until something that another task does has happened."""
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()
