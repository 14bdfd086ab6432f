"""Anthropic's clients: the SDK with strict validation, and a bare socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
from anthropic.types import Message as AnthropicMessage

from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Session

from .anthropic_replies import HELLO
from .oracle import exactly
from .scripted import Scripted, serving


def client_of(url: str, key: str, **options: Any) -> anthropic.AsyncAnthropic:
    settings = {"max_retries": 0, "api_key": key} | options
    return anthropic.AsyncAnthropic(base_url=url, _strict_response_validation=True, **settings)


@asynccontextmanager
async def sdk(reply: Scripted, config: ProxyConfig | None = None) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    async with serving(reply, config) as (proxy, session, _), client_of(proxy.url, session.key) as client:
        with anyio.fail_after(30):
            yield client


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool, **more: Any) -> AnthropicMessage:
    """The SDK's own accumulation of the stream where `stream`, its plain answer otherwise."""
    if not stream:
        raw = await client.messages.with_raw_response.create(**(HELLO | more))
        exactly(AnthropicMessage, await raw.http_response.aread())
        return await raw.parse()
    async with client.messages.stream(**(HELLO | more)) as events:
        return await events.get_final_message()


def error_of(caught: anthropic.APIStatusError) -> dict[str, str]:
    assert isinstance(caught.body, dict)
    return caught.body["error"]  # type: ignore[no-any-return]


async def post_raw(proxy: Proxy, session: Session, *pieces: bytes) -> anyio.abc.SocketStream:
    """A connection on which a body was posted, one write a piece."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    stream = await anyio.connect_tcp(host, int(port))
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: "
    for piece in (f"{head}{sum(map(len, pieces))}\r\n\r\n".encode(), *pieces):
        await stream.send(piece)
        await anyio.lowlevel.checkpoint()
    return stream
