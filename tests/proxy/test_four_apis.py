"""What holds for all four model APIs alike, each in its own shape: keys, bodies, waiting, hang-ups, errors."""

from __future__ import annotations

import gzip
import importlib
import json
import socket
import threading
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
import zstandard

from polar_plugin.errors import ContextOverflow, EngineBusy, EngineError
from polar_plugin.proxy.resent import Resent
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Session
from polar_plugin.records import ChatRequest, Delivery

from .scripted import Scripted, forever, receive_until, say, serving, until
from .wires import COUNTS, ENDS, SIGNS, WireAPI, every_api, streamed_and_whole

pytestmark = pytest.mark.anyio

HASTY = ProxyConfig(header_grace_seconds=0, keepalive_seconds=0.01)
PLACES: dict[str, Callable[[str, str], tuple[str, dict[str, str]]]] = {
    "Authorization": lambda path, key: (path, {"Authorization": f"Bearer {key}"}),
    "x-api-key": lambda path, key: (path, {"x-api-key": key}),
    "x-goog-api-key": lambda path, key: (path, {"x-goog-api-key": key}),
    "?key": lambda path, key: (f"{path}{'&' if '?' in path else '?'}key={key}", {}),
    "/s/KEY/": lambda path, key: (f"/s/{key}{path}", {}),
    "/s/KEY/ with a placeholder": lambda path, key: (f"/s/{key}{path}", {"x-api-key": "sk-placeholder"}),
}
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())


@asynccontextmanager
async def posted(
    proxy: Proxy, session: Session, path: str, data: bytes, **headers: str
) -> AsyncGenerator[anyio.abc.SocketStream]:
    """A connection of its own, on which `data` was posted."""
    head = [f"POST {path} HTTP/1.1", "Host: x", f"x-api-key: {session.key}", f"Content-Length: {len(data)}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    async with await anyio.connect_tcp("127.0.0.1", int(proxy.url.rpartition(":")[2])) as stream:
        await stream.send("\r\n".join(head).encode() + b"\r\n\r\n" + data)
        yield stream


async def post(http: aiohttp.ClientSession, api: WireAPI, body: Any, path: str = "", **headers: str) -> tuple[int, str]:
    """Status and body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path or api.path(), data=data, headers={**api.headers, **headers}) as response:
        return response.status, await response.text()


# --- keys ------------------------------------------------------------------------------------------------------------


@every_api
@every_place
async def test_a_key_counts_wherever_it_stands(api: WireAPI, place: Callable[[str, str], Any]) -> None:
    async with serving(Scripted()) as (proxy, session, _), aiohttp.ClientSession(proxy.url) as http:
        for number, stream in enumerate((False, True)):
            path, headers = place(api.path(stream), session.key)
            status, _ = await post(http, api, api.asks(stream=stream), path, **headers)
            assert (status, len(session.completions)) == (200, number + 1)
    assert {completion.request.api for completion in session.completions} == {api.name}


@every_api
@every_place
async def test_a_key_of_nobody_is_401_in_the_apis_shape(api: WireAPI, place: Callable[[str, str], Any]) -> None:
    words = {"anthropic_messages": "authentication_error", "google_generate": "UNAUTHENTICATED"}
    engine = Scripted()
    async with serving(engine) as (proxy, _, _), aiohttp.ClientSession(proxy.url) as http:
        for target in filter(None, (api.path(), api.path(True), COUNTS.get(api.name))):
            path, headers = place(target, "not-a-key")
            status, raw = await post(http, api, api.asks(), path, **headers)
            assert (status, api.word(api.error(raw))) == (401, words.get(api.name, "invalid_api_key"))
    assert engine.requests == []


@every_api
async def test_a_sealed_session_is_409_in_the_apis_shape_and_not_to_be_tried_again(api: WireAPI) -> None:
    words = {"anthropic_messages": "invalid_request_error", "google_generate": "FAILED_PRECONDITION"}
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        session.seal()
        for path in filter(None, (api.path(), api.path(True), COUNTS.get(api.name))):
            async with http.post(path, json=api.asks(), headers=api.headers) as response:
                error = api.error(await response.read())
            assert (response.status, response.headers["x-should-retry"]) == (409, "false")
            assert api.word(error) == words.get(api.name, "session_sealed")
    assert engine.requests == []


@every_api
async def test_a_path_that_is_no_endpoint_is_404_in_the_apis_shape_and_nothing_is_generated(api: WireAPI) -> None:
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        for prefix in ("", f"/s/{session.key}"):
            for path in (f"{api.path()}/", f"{api.path()}/x", f"/x{api.path()}", api.path().replace("/v1", "/v9", 1)):
                status, raw = await post(http, api, api.asks(), prefix + path, **SPOKEN_BY.get(api.name, {}))
                assert status == 404, path
                api.error(raw)
    assert engine.requests == []


SPOKEN_BY = {"google_generate": {"x-goog-api-key": "k"}, "openai_responses": {"originator": "codex_exec"}}
"""How a client's API is known on a path of none."""


@pytest.mark.parametrize("path", ["/status", "/admin", "/metrics", "/health", "/sessions", "/s", "/docs", "/v1"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_a_session_key_reaches_nothing_but_model_apis(method: str, path: str) -> None:
    """There is no route to the proxy's own state: the trainer holds it as an object, in its own process."""
    async with serving(Scripted()) as (_, session, http):
        for url in (path, f"/s/{session.key}{path}"):
            async with http.request(method, url) as response:
                assert response.status == 404


# --- bodies ----------------------------------------------------------------------------------------------------------


def _packed(coding: str, data: bytes) -> bytes:
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "zstd": zstandard.compress,
        "br": lambda data: importlib.import_module("brotli").compress(data),
    }
    for name in coding.split(", "):
        data = pack[name](data)
    return data


CODINGS = [
    "gzip", "deflate", "zstd", "gzip, zstd", "zstd, deflate, gzip",
    pytest.param("br", marks=pytest.mark.skipif(not importlib.util.find_spec("brotli"), reason="no Brotli here")),
]  # fmt: skip


@every_api
@pytest.mark.parametrize("coding", CODINGS)
async def test_case_95_a_body_in_any_coding_is_read_and_a_damaged_one_is_400(api: WireAPI, coding: str) -> None:
    engine = Scripted()
    packed = _packed(coding, json.dumps(api.asks("été")).encode())
    async with serving(engine) as (_, session, http):
        for damaged in (packed[:-3], b"\xff\xfe" + packed, b""):
            status, raw = await post(http, api, damaged, **{"Content-Encoding": coding})
            assert status == 400
            api.error(raw)
        assert (await post(http, api, packed, **{"Content-Encoding": coding}))[0] == 200
        assert len(session.completions) == 1
    assert [request.messages[-1].content for request in engine.requests] == ["été"]


@every_api
async def test_a_body_too_large_as_sent_or_as_decoded_is_413_in_the_apis_shape(api: WireAPI) -> None:
    words = {"anthropic_messages": "request_too_large", "google_generate": "INVALID_ARGUMENT"}
    large = json.dumps(api.asks("x" * 50_000)).encode()
    engine = Scripted()
    async with serving(engine, ProxyConfig(max_body_bytes=10_000)) as (_, session, http):
        for coding in ("identity", "gzip", "zstd, gzip"):
            data = large if coding == "identity" else _packed(coding, large)
            status, raw = await post(http, api, data, **{"Content-Encoding": coding})
            assert (status, api.word(api.error(raw))) == (413, words.get(api.name))
        assert session.completions == ()
    assert engine.requests == []


@every_api
@pytest.mark.parametrize("depth", [300, 5000, 200_000])
async def test_nesting_without_end_is_400_in_the_apis_shape(api: WireAPI, depth: int) -> None:
    body = json.dumps(api.asks())[:-1] + ', "metadata": ' + "[" * depth + "]" * depth + "}"
    async with serving(Scripted()) as (_, session, http):
        status, raw = await post(http, api, body.encode())
        assert (status, session.completions) == (400, ())
        assert "nested deeper" in api.error(raw)["message"] or "not JSON" in api.error(raw)["message"]


@every_api
@streamed_and_whole
async def test_case_116_lone_surrogates_and_nuls_go_in_and_come_out(api: WireAPI, stream: bool) -> None:
    text = "half \ud83d of it \0 and é😀"
    engine = Scripted([say(text)])
    async with serving(engine) as (_, _, http):
        status, raw = await post(http, api, api.asks(text, stream=stream), api.path(stream))
    assert status == 200
    assert engine.requests[0].messages[-1].content == text
    said = json.dumps(text)[1:-1]  # all that leaves is ASCII; a text this short is in one piece
    assert raw.isascii()
    assert said in raw


# --- waiting ---------------------------------------------------------------------------------------------------------


@every_api
async def test_a_stream_that_waits_has_its_headers_and_then_what_its_client_takes(api: WireAPI) -> None:
    release = anyio.Event()

    async def hold(request: ChatRequest) -> None:
        await release.wait()

    engine = Scripted(before=hold)
    data = json.dumps(api.asks(stream=True)).encode()
    async with serving(engine, HASTY) as (proxy, session, _):
        async with posted(proxy, session, api.path(True), data) as stream:
            with anyio.fail_after(10):
                head, _, rest = (await receive_until(stream, b"\r\n\r\n")).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                if sign := SIGNS[api.name]:
                    for _ in range(2):
                        rest += await receive_until(stream, sign)
                    assert b"data: {" not in rest.replace(sign, b"")
                else:
                    with anyio.move_on_after(0.2):
                        pytest.fail(f"not silent: {rest + await stream.receive()!r}")
                assert session.completions == ()
                release.set()
                await receive_until(stream, ENDS[api.name])
            assert len(session.completions) == 1
        await until(lambda: session.delivery.get("c1") is Delivery.DELIVERED)


@every_api
@streamed_and_whole
async def test_the_record_is_there_before_the_first_byte_of_the_answer(api: WireAPI, stream: bool) -> None:
    engine = Scripted([say("the answer")])
    data = json.dumps(api.asks(stream=stream)).encode()
    async with serving(engine) as (proxy, session, _), posted(proxy, session, api.path(stream), data) as client:
        with anyio.fail_after(10):
            await client.receive(1)
        assert [completion.id for completion in session.completions] == ["c1"]


@every_api
@streamed_and_whole
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_hang_up_cancels_the_turn_at_once_and_nothing_is_recorded(
    api: WireAPI, stream: bool, reset: bool
) -> None:
    engine = Scripted(before=forever)
    data = json.dumps(api.asks(stream=stream)).encode()
    async with serving(engine, HASTY) as (proxy, session, _):
        async with posted(proxy, session, api.path(stream), data) as client:
            await engine.started.wait()
            if reset:
                raw: socket.socket = client.extra(anyio.abc.SocketAttribute.raw_socket)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        with anyio.fail_after(2):
            await engine.cancelled.wait()
        await until(lambda: session.in_flight == 0)
        assert (session.completions, session.counts["hangups"]) == ((), 1)


@every_api
async def test_cases_30_and_43_a_paused_proxy_holds_a_call_in_its_clients_form_and_answers_it_afterwards(
    api: WireAPI,
) -> None:
    engine = Scripted()
    data = json.dumps(api.asks(stream=True)).encode()
    async with serving(engine, HASTY) as (proxy, session, _):
        async with proxy.paused():
            opened = posted(proxy, session, api.path(True), data)
            client = await opened.__aenter__()
            with anyio.fail_after(10):
                for _ in range(30):
                    await receive_until(client, SIGNS[api.name] or b"200 OK")
                    if not SIGNS[api.name]:
                        break
            assert engine.requests == []
        with anyio.fail_after(10):
            await receive_until(client, ENDS[api.name])
        await opened.__aexit__(None, None, None)
    assert len(engine.requests) == 1


class Watched(Resent):
    """Notes in which thread bodies are read."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def parse(self, raw: bytes) -> dict[str, Any]:
        self.threads.append(threading.get_ident())
        return super().parse(raw)


@every_api
async def test_a_large_body_is_read_beside_the_event_loop_until_it_is_known(api: WireAPI) -> None:
    async with serving(Scripted()) as (_, session, http):
        session.resent = watched = Watched()
        history = [api.speaker.user("x" * 1_000_000)]
        for _ in range(2):
            code, raw = await post(http, api, api.body(*history))
            assert code == 200
            history += [*api.speaker.read(json.loads(raw)).echo, api.speaker.user("go on")]
        here = threading.get_ident()
        assert [one == here for one in watched.threads] == [False, True]
        assert session.completions[1].request.messages[1].content == "x" * 1_000_000


@every_api
async def test_a_header_may_be_as_long_as_programs_make_them(api: WireAPI) -> None:
    async with serving(Scripted()) as (_, session, http):
        code, _ = await post(http, api, api.asks(), **{"x-codex-turn-metadata": json.dumps({"a": "b" * 40_000})})
        assert (code, len(session.completions)) == (200, 1)


# --- errors ----------------------------------------------------------------------------------------------------------


def failing(error: Exception) -> Scripted:
    async def fail(request: ChatRequest) -> None:
        raise error

    return Scripted(before=fail)


FAILURES: dict[str, tuple[Exception, int, str | None, dict[str, str]]] = {
    "engine failed": (
        EngineError("/generate failed (500): CUDA"), 502, None,
        {"anthropic_messages": "api_error", "google_generate": "INTERNAL"},
    ),
    "engine busy": (
        EngineBusy("full", retry_after=6.2), 503, "7",
        {"anthropic_messages": "overloaded_error", "google_generate": "UNAVAILABLE"},
    ),
    "overflow": (
        ContextOverflow(8193, 8192), 400, None,
        {
            "anthropic_messages": "invalid_request_error", "google_generate": "INVALID_ARGUMENT",
            "openai_chat": "context_length_exceeded", "openai_responses": "context_length_exceeded",
        },
    ),
    "a defect": (
        ZeroDivisionError("ours"), 500, None, {"anthropic_messages": "api_error", "google_generate": "INTERNAL"},
    ),
}  # fmt: skip


@every_api
@streamed_and_whole
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_a_failure_has_the_apis_shape_and_a_status_that_tells_whether_to_try_again(
    api: WireAPI, stream: bool, failure: tuple[Exception, int, str | None, dict[str, str]]
) -> None:
    error, expected, retry_after, words = failure
    async with serving(failing(error)) as (_, session, http):
        async with http.post(api.path(stream), json=api.asks(stream=stream), headers=api.headers) as response:
            told = api.error(await response.read())
        assert (response.status, response.headers.get("Retry-After")) == (expected, retry_after)
        assert response.headers.get("x-should-retry") == ("false" if expected < 500 else None)
        assert session.completions == ()
    assert api.word(told) == words.get(api.name)
    if api.name == "google_generate":
        assert told["code"] == expected


OVERFLOWS = {
    "openai_chat": "maximum context length is 8192 tokens",
    "openai_responses": "exceeds the context window",
    "anthropic_messages": "prompt is too long: 8193 tokens > 8192 maximum",
    "google_generate": "exceeds the maximum number of tokens allowed (8192)",
}


@every_api
@streamed_and_whole
async def test_an_overflow_is_told_in_the_words_by_which_clients_know_to_compact(api: WireAPI, stream: bool) -> None:
    async with serving(failing(ContextOverflow(8193, 8192))) as (_, _, http):
        _, raw = await post(http, api, api.asks(stream=stream), api.path(stream))
    assert OVERFLOWS[api.name] in api.error(raw)["message"]


@every_api
@pytest.mark.parametrize("error", [EngineError("died"), EngineBusy("full")], ids=lambda error: type(error).__name__)
async def test_a_stream_that_fails_after_its_headers_says_so_and_never_ends_well(
    api: WireAPI, error: Exception
) -> None:
    fail = anyio.Event()

    async def later(request: ChatRequest) -> None:
        await fail.wait()
        raise error

    data = json.dumps(api.asks(stream=True)).encode()
    async with serving(Scripted(before=later), HASTY) as (proxy, session, _):
        async with posted(proxy, session, api.path(True), data) as client:
            with anyio.fail_after(10):
                await receive_until(client, b"200 OK")
                fail.set()
                raw = await receive_until(client, b"\r\n0\r\n\r\n")  # the body ends, and not its connection
                await client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
                await receive_until(client, b"200 OK")
        assert str(error).encode() in raw
        assert ENDS[api.name] not in raw
        assert session.completions == ()


@every_api
@streamed_and_whole
async def test_what_cannot_be_read_is_400_with_its_path_and_changes_nothing(api: WireAPI, stream: bool) -> None:
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        for wrong in (7, True, [5], None, []):
            status, raw = await post(http, api, api.asks(stream=stream) | {api.messages: wrong}, api.path(stream))
            assert status == 400, wrong
            assert api.messages in api.error(raw)["message"]
        assert (session.completions, session.first_call, session.in_flight) == ((), None, 0)
        assert session.counts == {"errors.BadRequest": 5}
    assert engine.requests == []
