"""What is recorded, and what counts as delivered, when clients wait, vanish or leave early."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import anyio
import pytest

from polar_plugin.errors import EngineError
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Session
from polar_plugin.records import ChatRequest, Delivery

from .scripted import (
    CHAT,
    HELLO,
    STREAM,
    Scripted,
    forever,
    raw_post,
    receive_until,
    request_bytes,
    say,
    serving,
    skim_until,
    until,
)

pytestmark = pytest.mark.anyio

streamed_and_whole = pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "streamed"])
END = {True: b"[DONE]\n\n", False: b'"total_tokens":11}}'}
HASTY = ProxyConfig(header_grace_seconds=0, keepalive_seconds=0.01)


def held(release: anyio.Event) -> Scripted:
    async def hold(request: ChatRequest) -> None:
        await release.wait()

    return Scripted(before=hold)


@streamed_and_whole
async def test_an_answer_is_recorded_and_delivered(body: dict[str, Any]) -> None:
    async with serving(Scripted()) as (_, session, http):
        async with http.post(CHAT, json=body) as response:
            await response.read()
        assert session.delivery == {"c1": Delivery.DELIVERED}
    assert [c.id for c in session.seal().completions] == ["c1"]


@streamed_and_whole
async def test_the_record_exists_before_the_first_byte_of_the_answer(body: dict[str, Any]) -> None:
    async with serving(Scripted(), HASTY) as (proxy, session, _), await raw_post(proxy, session, body) as stream:
        with anyio.fail_after(5):
            await receive_until(stream, b'"choices"')
        assert [c.id for c in session.completions] == ["c1"]


async def test_headers_and_keep_alives_arrive_while_the_reply_is_generated() -> None:
    release = anyio.Event()
    async with serving(held(release), HASTY) as (proxy, session, _), await raw_post(proxy, session, STREAM) as stream:
        with anyio.fail_after(5):
            waited = await receive_until(stream, b": keep-alive\n\n")
            waited += await receive_until(stream, b": keep-alive\n\n")
            assert b"data:" not in waited
            assert waited.startswith(b"HTTP/1.1 200 OK")
            assert b"text/event-stream" in waited
            assert session.completions == ()
            release.set()
            assert b"hello" in await receive_until(stream, b"[DONE]\n\n")


def test_the_default_signs_of_life_are_as_frequent_as_the_strictest_client_wants() -> None:
    assert ProxyConfig().header_grace_seconds + ProxyConfig().keepalive_seconds <= 10


@streamed_and_whole
async def test_a_hang_up_before_the_end_cancels_the_call_and_records_nothing(body: dict[str, Any]) -> None:
    engine = Scripted(before=forever)
    async with serving(engine) as (proxy, session, _):
        async with await raw_post(proxy, session, body):
            await engine.started.wait()
        with anyio.fail_after(2):
            await engine.cancelled.wait()
        await until(lambda: session.in_flight == 0)
        assert session.completions == ()
        assert session.counts["hangups"] == 1


async def test_a_hang_up_during_keep_alives_cancels_the_call() -> None:
    engine = Scripted(before=forever)
    async with serving(engine, HASTY) as (proxy, session, _):
        async with await raw_post(proxy, session, STREAM) as stream:
            await receive_until(stream, b": keep-alive")
        with anyio.fail_after(2):
            await engine.cancelled.wait()
        assert session.completions == ()


async def test_a_client_killed_in_a_call_cancels_it_too() -> None:
    """Unread bytes in its socket make the kernel answer with a reset instead of an end."""
    engine = Scripted(before=forever)
    async with serving(engine, HASTY) as (proxy, session, _):
        stream = await raw_post(proxy, session, STREAM)
        raw: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await engine.started.wait()
        await stream.aclose()
        with anyio.fail_after(2):
            await engine.cancelled.wait()


def post_and_keep(proxy: Proxy, session: Session, body: object) -> socket.socket:
    """A client whose socket can be closed without a turn of the event loop."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(request_bytes(session, body))
    return client


@streamed_and_whole
async def test_a_hang_up_between_the_record_and_the_answer_is_undelivered(body: dict[str, Any]) -> None:
    clients: list[socket.socket] = []

    async def vanish(request: ChatRequest) -> None:
        clients.pop().close()  # the proxy cannot know of it before the reply is recorded

    async with serving(Scripted(before=vanish)) as (proxy, session, _):
        clients.append(post_and_keep(proxy, session, body))
        await until(lambda: session.delivery.get("c1") is Delivery.UNDELIVERED)
        assert len(session.completions) == 1
    assert session.seal().counts["undelivered"] == 1
    assert not session.seal().delivered(session.completions[0])


@streamed_and_whole
async def test_an_answer_that_is_not_yet_read_is_pending_and_undelivered_once_its_client_leaves(
    body: dict[str, Any],
) -> None:
    engine = Scripted([say("x" * (32 << 20))])  # more than the kernel's buffers hold
    async with serving(engine) as (proxy, session, _):
        async with await raw_post(proxy, session, body) as stream:
            await until(lambda: len(session.completions) == 1)
            with anyio.fail_after(20):
                await receive_until(stream, b"xxxx")
            assert session.delivery["c1"] is Delivery.PENDING
        await until(lambda: session.delivery["c1"] is Delivery.UNDELIVERED)


async def test_an_answer_is_delivered_once_its_last_byte_has_left() -> None:
    engine = Scripted([say("x" * (32 << 20))])
    async with serving(engine) as (proxy, session, _):
        async with await raw_post(proxy, session, STREAM) as stream:
            await skim_until(stream, b"[DONE]\n\n")
        await until(lambda: session.delivery["c1"] is Delivery.DELIVERED)


@streamed_and_whole
async def test_delivered_means_that_no_byte_is_left_in_this_process(body: dict[str, Any]) -> None:
    """A client sends requests and reads nothing, until the kernel takes no more of the small replies."""
    async with serving(Scripted([say("x" * (40 << 10))])) as (proxy, session, _):
        with post_and_keep(proxy, session, body) as client:
            client.sendall(request_bytes(session, body) * 399)
            stuck = 0
            with anyio.fail_after(30):
                while stuck < 50 and len(session.completions) < 400:
                    await anyio.lowlevel.checkpoint()
                    stuck = stuck + 1 if Delivery.PENDING in session.delivery.values() else 0
            delivered = list(session.delivery.values()).count(Delivery.DELIVERED)
            assert 0 < delivered < 400
            read_until(client, END[body is STREAM], times=delivered)  # while the event loop, so the proxy, stands still


@streamed_and_whole
async def test_case_127_a_client_that_closes_right_after_the_end_has_its_answer(body: dict[str, Any]) -> None:
    async with serving(Scripted()) as (proxy, session, _):
        for number in range(1, 21):
            client = await anyio.to_thread.run_sync(post_and_keep, proxy, session, body)
            await anyio.to_thread.run_sync(read_and_close, client, END[body is STREAM])
            await until(lambda: session.delivery.get(f"c{number}") is not Delivery.PENDING)  # noqa: B023
        assert set(session.delivery.values()) == {Delivery.DELIVERED}
        assert session.counts["hangups"] == 0


def read_and_close(client: socket.socket, end: bytes) -> None:
    with client:
        read_until(client, end)


def read_until(client: socket.socket, end: bytes, times: int = 1) -> None:
    client.settimeout(5)
    got = b""
    while got.count(end) < times:
        piece = client.recv(1 << 20)
        assert piece, f"the connection ended early: {got[-200:]!r}"
        got += piece


async def test_a_client_that_stops_at_the_finish_reason_has_its_answer() -> None:
    """The end of the stream is sent with the reply: not reading it is no hang-up."""
    async with serving(Scripted()) as (proxy, session, _):
        async with await raw_post(proxy, session, STREAM) as stream:
            await receive_until(stream, b'"finish_reason":"stop"')
        await until(lambda: session.delivery.get("c1") is Delivery.DELIVERED)


async def test_sealing_cancels_a_call_under_way_and_its_client_is_told() -> None:
    engine = Scripted(before=forever)
    async with serving(engine) as (proxy, session, _), await raw_post(proxy, session, HELLO) as stream:
        await engine.started.wait()
        session.seal()
        with anyio.fail_after(2):
            await engine.cancelled.wait()
            assert b"session_sealed" in await receive_until(stream, b"}}")
        assert session.seal().completions == ()
        assert session.counts["hangups"] == 0


async def test_sealing_ends_a_stream_with_an_error_and_without_a_terminal_event() -> None:
    engine = Scripted(before=forever)
    async with serving(engine, HASTY) as (proxy, session, _), await raw_post(proxy, session, STREAM) as stream:
        await receive_until(stream, b": keep-alive")
        session.seal()
        with anyio.fail_after(5):
            got = await receive_until(stream, b"\r\n0\r\n\r\n")
        assert b"session_sealed" in got
        assert b"DONE" not in got
        assert b"finish_reason" not in got


async def test_an_answer_still_on_its_way_when_the_session_is_sealed_is_undelivered_for_good() -> None:
    engine = Scripted([say("x" * (32 << 20))])
    async with serving(engine) as (proxy, session, _), await raw_post(proxy, session, STREAM) as stream:
        await until(lambda: len(session.completions) == 1)
        ledger = session.seal()
        await skim_until(stream, b"[DONE]\n\n")
        assert ledger.delivery == session.seal().delivery == {"c1": Delivery.UNDELIVERED}


async def test_a_failed_call_records_nothing_and_shows_on_the_session_until_one_succeeds() -> None:
    fail = True

    async def maybe(request: ChatRequest) -> None:
        if fail:
            raise EngineError("no answer")

    async with serving(Scripted(before=maybe)) as (_, session, http):
        async with http.post(CHAT, json=HELLO) as response:
            assert response.status == 502
        assert session.completions == ()
        assert isinstance(session.last_error, EngineError)
        fail = False
        async with http.post(CHAT, json=HELLO) as response:
            assert response.status == 200
        assert session.last_error is None
        assert session.counts["errors.EngineError"] == 1


# --- holding turns ---------------------------------------------------------------------------------------------------


async def test_cases_30_and_43_a_pause_holds_new_turns_with_signs_of_life_and_lets_running_ones_finish() -> None:
    release = anyio.Event()
    engine = held(release)
    async with AsyncExitStack() as stack:
        proxy, session, _ = await stack.enter_async_context(serving(engine, HASTY))
        running = await stack.enter_async_context(await raw_post(proxy, session, STREAM))
        await engine.started.wait()
        with anyio.fail_after(5):
            async with proxy.paused():
                later = STREAM | {"messages": [{"role": "user", "content": "later"}]}
                waiting = await stack.enter_async_context(await raw_post(proxy, session, later))
                release.set()
                await receive_until(running, b"[DONE]\n\n")
                await receive_until(waiting, b": keep-alive")
                assert len(engine.requests) == 1
                assert session.in_flight == 1
            await receive_until(waiting, b"[DONE]\n\n")
    assert len(engine.requests) == 2


async def test_a_pause_always_reopens() -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, _, http):
        with pytest.raises(RuntimeError, match="update failed"):
            async with proxy.paused(), proxy.paused():
                raise RuntimeError("update failed")
        with anyio.fail_after(5):
            async with http.post(CHAT, json=HELLO) as response:
                assert response.status == 200


async def test_a_held_turn_runs_when_the_pause_ends_and_is_cancelled_when_its_session_does() -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, session, _), proxy.session("s2", engine) as doomed:
        async with proxy.paused():
            client = post_and_keep(proxy, session, HELLO)
            other = post_and_keep(proxy, doomed, HELLO)
            await until(lambda: session.in_flight == doomed.in_flight == 1)
            doomed.seal()
            await until(lambda: doomed.in_flight == 0)
            assert engine.requests == []
        with client, other:
            await until(lambda: len(session.completions) == 1)
            assert b"session_sealed" in await anyio.to_thread.run_sync(other.recv, 65536)


# --- connections -----------------------------------------------------------------------------------------------------


async def idle_for(seconds: float, config: ProxyConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """Connections that two calls with a pause between them take; the event loop's clock jumps over the pause."""
    loop = asyncio.get_running_loop()
    real, offset = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + offset)
    connections = 0

    async def opened(*_: object) -> None:
        nonlocal connections
        connections += 1

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(opened)
    connector = aiohttp.TCPConnector(keepalive_timeout=10_000)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Proxy(config).serving())
        session = await stack.enter_async_context(proxy.session("s1", Scripted()))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(proxy.url, connector=connector, trace_configs=[trace])
        )
        for _ in range(2):
            async with http.post(CHAT, json=HELLO, headers={"x-api-key": session.key}) as response:
                await response.read()
            offset += seconds
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
    return connections


async def test_case_36_an_idle_connection_outlives_a_long_tool_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await idle_for(600, ProxyConfig(), monkeypatch) == 1


async def test_control_an_idle_connection_ends_at_the_time_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await idle_for(600, ProxyConfig(idle_seconds=75), monkeypatch) == 2


async def test_case_89_a_character_cut_at_any_byte_arrives_whole_in_both_directions() -> None:
    engine = Scripted([say("got 😀 日本")])
    async with serving(engine) as (proxy, session, _):
        data = json.dumps(STREAM | {"messages": [{"role": "user", "content": "😀 é"}]}, ensure_ascii=False).encode()
        client = await anyio.connect_tcp("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        async with client:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(data)}\r\n\r\n"
            await client.send(head.encode())
            for byte in data:
                await client.send(bytes([byte]))
            with anyio.fail_after(5):
                raw = await receive_until(client, b"[DONE]\n\n")
    text = "".join(bytes([byte]).decode() for byte in raw)  # as a client would that decodes each byte by itself
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "got 😀 日本"
    assert engine.requests[0].messages[0].content == "😀 é"


async def test_200_streams_at_once_each_get_their_own_answer() -> None:
    everyone = anyio.Event()
    arrived = 0

    async def gather(request: ChatRequest) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 200:
            everyone.set()
        await everyone.wait()

    async with Proxy(HASTY).serving() as proxy:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(proxy.url, connector=connector) as http, anyio.create_task_group() as group:

            async def one(number: int) -> None:
                async with proxy.session(f"s{number}", Scripted([say(f"for {number}")], before=gather)) as session:
                    async with http.post(CHAT, json=STREAM, headers={"x-api-key": session.key}) as response:
                        assert f'"content":"for {number}"' in await response.text()
                    assert list(session.delivery.values()) == [Delivery.DELIVERED]

            with anyio.fail_after(60):
                for number in range(200):
                    group.start_soon(one, number)
                await everyone.wait()
