"""The SGLang client's sockets: what is sent twice and what is not, and what a hang-up reaches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import orjson
import pytest
from aiohttp import web

from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.errors import EngineBusy, EngineError
from polar_plugin.records import Generation
from tests.engine.fake_server import listening
from tests.engine.fake_sglang import FakeSGLang, sample, sampled

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fake() -> FakeSGLang:
    return FakeSGLang()


@pytest.fixture
async def url(fake: FakeSGLang) -> AsyncIterator[str]:
    async with listening(fake.app()) as address:
        yield address


@pytest.fixture
async def engine(url: str) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(url, retries=4, reissues=3) as engine:
        yield engine


# --- connections ---------------------------------------------------------------------------------------------------


class RawServer:
    """A server that decides, connection by connection, when to close. `serve` gets (request number, number on it)."""

    def __init__(self, serve: Callable[[int, int], bool]) -> None:
        self.serve = serve
        self.requests = 0
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for number in itertools.count():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
                body = orjson.loads(await reader.readexactly(length))
                self.requests += 1
                if not self.serve(self.requests, number):
                    break
                payload = orjson.dumps(sampled(body))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload))
                await writer.drain()
        writer.close()


@asynccontextmanager
async def raw(serve: Callable[[int, int], bool]) -> AsyncIterator[tuple[RawServer, str]]:
    behaviour = RawServer(serve)
    server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
    async with server:
        yield behaviour, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_engine_that_is_not_there_yet_is_waited_for(fake: FakeSGLang) -> None:
    async with listening(fake.app()) as address:
        pass
    port = int(address.rpartition(":")[2])
    async with SGLangEngine(address, retries=6) as engine, anyio.create_task_group() as group:
        calls: list[Generation] = []

        async def call() -> None:
            calls.append(await sample(engine))

        group.start_soon(call)
        runner = web.AppRunner(fake.app(), shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        with anyio.fail_after(20):
            while not calls:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    await runner.cleanup()
    assert len(fake.bodies) == 1


async def test_an_engine_that_is_not_there_at_all_is_busy_and_names_the_address(fake: FakeSGLang) -> None:
    async with listening(fake.app()) as address:
        pass
    async with SGLangEngine(address, retries=2) as engine:
        with pytest.raises(EngineBusy, match=f"no engine can be reached at {address}"):
            await sample(engine)


async def test_case_37_a_fresh_connection_that_drops_before_the_answer_is_not_sent_again() -> None:
    async with raw(lambda request, number: False) as (server, address), SGLangEngine(address) as engine:
        with pytest.raises(EngineError, match="broke before the answer was complete") as caught:
            await sample(engine)
    assert not isinstance(caught.value, EngineBusy)
    assert server.requests == 1


async def test_a_pooled_connection_that_the_server_just_closed_is_replaced_and_generates_once() -> None:
    """The race of a keep-alive: the server closes while the next request is on its way."""
    async with raw(lambda request, number: number == 0) as (server, address), SGLangEngine(address) as engine:
        for _ in range(3):
            assert len((await sample(engine)).output_ids) == 4
    assert server.connections == 3


async def test_an_answer_that_breaks_off_is_an_error_and_not_sent_again(engine: SGLangEngine, fake: FakeSGLang) -> None:
    answers = []

    async def cut(request: web.Request) -> web.StreamResponse:
        answers.append(request.path)
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"output_ids"')
        request.transport.close()  # pyright: ignore[reportOptionalMemberAccess]
        return response

    app = web.Application()
    app.router.add_post("/generate", cut)
    async with listening(app) as address, SGLangEngine(address) as cut_engine:
        with pytest.raises(EngineError, match="broke before the answer was complete"):
            await sample(cut_engine)
    assert len(answers) == 1


async def test_case_36_idling_past_the_servers_keep_alive_loses_and_repeats_nothing(fake: FakeSGLang) -> None:
    async with (
        listening(fake.app(), keepalive_timeout=0.2) as address,
        SGLangEngine(address, keep_alive=60) as careless,
        SGLangEngine(address, keep_alive=0.1) as careful,
    ):
        for engine in (careless, careful):
            for _ in range(3):
                await sample(engine)
                await anyio.sleep(0.4)  # the case itself: idle for longer than the server keeps a socket
    assert len(fake.bodies) == 6


async def test_case_37_200_sessions_of_20_turns_share_a_bounded_number_of_sockets(url: str, fake: FakeSGLang) -> None:
    async with SGLangEngine(url, max_connections=8) as engine, anyio.create_task_group() as group:

        async def session(name: str) -> None:
            for _ in range(20):
                assert len((await sample(engine, 1, session_id=name)).output_ids) == 1
                await anyio.lowlevel.checkpoint()  # a tool runs

        for number in range(200):
            group.start_soon(session, f"session{number}")
    assert len(fake.bodies) == 4000
    assert len(fake.sockets) <= 8


# --- hanging up ----------------------------------------------------------------------------------------------------


async def _hang_up(engine: SGLangEngine, fake: FakeSGLang) -> None:
    """Cancel a call in mid-generation, and wait until its end has arrived."""
    fake.started, fake.was_aborted, fake.hung_up = anyio.Event(), anyio.Event(), anyio.Event()
    fake.answers.append(fake.hold)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(sample, engine, request_id="the-call"))
            await fake.started.wait()
            group.cancel_scope.cancel()
    with anyio.fail_after(2):
        await fake.was_aborted.wait()
        await fake.hung_up.wait()


async def test_hanging_up_aborts_the_call_once_and_closes_its_socket(engine: SGLangEngine, fake: FakeSGLang) -> None:
    await _hang_up(engine, fake)
    assert fake.aborts == [fake.bodies[0]["rid"]]
    assert fake.aborts[0].startswith("the-call")


@asynccontextmanager
async def routed(*workers: FakeSGLang) -> AsyncIterator[tuple[str, list[str]]]:
    """A router that has no /abort_request, in front of `workers`; and who asked it for them."""
    asked: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(listening(worker.app())) for worker in workers]
        listed = {"workers": [{"id": str(rank), "url": f"{url}@{rank}"} for rank, url in enumerate(urls)]}

        async def list_workers(request: web.Request) -> web.Response:
            asked.append(request.path)
            return web.json_response(listed)

        app = web.Application()
        app.router.add_post("/generate", workers[0].generate)
        app.router.add_get("/workers", list_workers)
        yield await stack.enter_async_context(listening(app)), asked


async def test_hanging_up_behind_a_router_without_an_abort_route_tells_each_worker(fake: FakeSGLang) -> None:
    other = FakeSGLang()
    async with routed(fake, other) as (url, asked), SGLangEngine(url) as engine:
        await _hang_up(engine, fake)
        await _hang_up(engine, fake)
    rids = [body["rid"] for body in fake.bodies]
    assert len(rids) == 2
    assert fake.aborts == other.aborts == rids
    assert len(asked) == 1


async def test_aborts_get_through_when_every_socket_waits_for_a_generation(fake: FakeSGLang) -> None:
    other = FakeSGLang()
    fake.answers += [fake.hold, fake.hold]
    async with (
        routed(fake, other) as (url, _),
        SGLangEngine(url, max_connections=1) as engine,
        anyio.create_task_group() as group,
    ):
        first = anyio.CancelScope()

        async def cancellable() -> None:
            with first:
                await sample(engine)

        group.start_soon(cancellable)
        with anyio.fail_after(5):
            await fake.started.wait()
        group.start_soon(sample, engine)  # takes the socket that the first one gives back
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        with anyio.fail_after(1.5):
            await fake.was_aborted.wait()
            await other.was_aborted.wait()
        group.cancel_scope.cancel()


async def test_a_call_cancelled_before_it_was_sent_aborts_nothing(url: str, fake: FakeSGLang) -> None:
    fake.answers += [fake.hold, fake.hold]
    async with SGLangEngine(url, max_connections=1) as engine, anyio.create_task_group() as group:
        group.start_soon(functools.partial(sample, engine, request_id="first"))
        with anyio.fail_after(5):
            await fake.started.wait()
        with anyio.move_on_after(0.1):
            await sample(engine, request_id="waits-for-a-socket")
        assert fake.aborts == []
        group.cancel_scope.cancel()
    assert [rid.startswith("first") for rid in fake.aborts] == [True]


async def test_an_abort_that_is_not_answered_does_not_hold_up_the_caller(fake: FakeSGLang) -> None:
    async def never(request: web.Request) -> web.Response:
        fake.was_aborted.set()
        await anyio.sleep_forever()
        raise AssertionError

    app = web.Application()
    app.router.add_post("/generate", fake.generate)
    app.router.add_post("/abort_request", never)
    async with listening(app) as address, SGLangEngine(address) as engine:
        started = anyio.current_time()
        await _hang_up(engine, fake)
    assert anyio.current_time() - started < 5
