"""Who is answered, where, and in what shape an error comes."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import zstandard

from polar_plugin.errors import ConfigError
from polar_plugin.proxy.server import Proxy, ProxyConfig

from .scripted import CHAT, HELLO, Scripted, forever, request_bytes, say, serving

pytestmark = pytest.mark.anyio


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, Mapping[str, Any]]:
    """Status and error, once it is sure that the shape is the dialect's."""
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status, body["error"]


PLACES = {
    "Authorization": lambda key: ({"Authorization": f"Bearer {key}"}, CHAT),
    "a lower-case scheme": lambda key: ({"Authorization": f"bearer {key}"}, CHAT),
    "x-api-key": lambda key: ({"x-api-key": key}, CHAT),
    "x-goog-api-key": lambda key: ({"x-goog-api-key": key}, CHAT),
    "query": lambda key: ({}, f"{CHAT}?key={key}"),
    "URL prefix, placeholder as key": lambda key: ({"Authorization": "Bearer sk-placeholder"}, f"/s/{key}{CHAT}"),
    "behind a placeholder": lambda key: ({"Authorization": "Bearer sk-placeholder", "x-api-key": key}, CHAT),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_a_session_key_counts_in_every_place_where_clients_put_one(place: Any) -> None:
    async with serving(Scripted()) as (proxy, session, _), aiohttp.ClientSession(proxy.url) as http:
        headers, path = place(session.key)
        async with http.post(path, json=HELLO, headers=headers) as response:
            assert response.status == 200
        assert len(session.completions) == 1


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_an_unknown_key_is_refused_and_generates_nothing(place: Any) -> None:
    engine = Scripted()
    async with serving(engine) as (proxy, _, _), aiohttp.ClientSession(proxy.url) as http:
        headers, path = place("not-a-key")
        async with http.post(path, json=HELLO, headers=headers) as response:
            status, error = await error_of(response)
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert engine.requests == []


async def test_no_key_at_all_is_refused_before_the_body_is_read() -> None:
    async with serving(Scripted()) as (proxy, _, _), aiohttp.ClientSession(proxy.url) as http:
        async with http.post(CHAT, data=b"no json") as response:
            assert (await error_of(response))[0] == 401
        async with http.get("/v1/models") as response:
            assert (await error_of(response))[0] == 401


async def test_keys_of_two_sessions_are_never_mixed_up() -> None:
    ours, theirs = Scripted([say("ours")]), Scripted([say("theirs")])
    async with serving(ours) as (proxy, session, http), proxy.session("s2", theirs) as other:
        headers = {"Authorization": f"Bearer {other.key}"}
        async with http.post(CHAT, json=HELLO, headers=headers) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "theirs"
        assert session.completions == ()
    assert session.key != other.key


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/"),
        ("POST", "/v1"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/chat/completions/count_tokens"),
        ("POST", "/x/v1/chat/completions"),
        ("POST", "/s/v1/chat/completions"),
        ("GET", "/v1/chat/completions"),
        ("PUT", "/v1/chat/completions"),
        ("DELETE", "/v1/models/policy"),
        ("POST", "/v1/models"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ],
)
async def test_an_unknown_route_is_not_found_and_never_a_generation(method: str, path: str) -> None:
    engine = Scripted()
    async with serving(engine) as (_, _, http), http.request(method, path, json=HELLO) as response:
        status, error = await error_of(response)
    assert status == 404
    assert path in error["message"]
    assert engine.requests == []


async def test_a_sealed_session_is_told_so_while_open_and_after() -> None:
    engine = Scripted()
    async with serving(engine) as (_, session, http):
        session.seal()
        async with http.post(CHAT, json=HELLO) as response:
            status, error = await error_of(response)
    assert (status, error["code"]) == (409, "session_sealed")
    async with Proxy().serving() as proxy, aiohttp.ClientSession(proxy.url) as http:
        async with proxy.session("s9", engine) as session:
            key = session.key
        async with http.post(CHAT, json=HELLO, headers={"x-api-key": key}) as response:
            status, error = await error_of(response)
            assert response.headers["x-should-retry"] == "false"
    assert (status, error["code"]) == (409, "session_sealed")
    assert "s9" in error["message"]
    assert engine.requests == []


MALFORMED = {
    "no JSON": (b"{", None),
    "no object": (b"[]", None),
    "no messages": ({}, "messages"),
    "messages as text": ({"messages": "hi"}, "messages"),
    "a message as text": ({"messages": ["hi"]}, "messages.0"),
    "an unknown role": ({"messages": [{"role": "user"}, {"role": "judge"}]}, "messages.1.role"),
    "a number as content": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "a number as part": ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
    "a call without a name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages.0.tool_calls.0.function.name",
    ),
    "two choices": (HELLO | {"n": 2}, "n"),
    "a tool without a name": (HELLO | {"tools": [{"type": "function", "function": {}}]}, "tools.0.name"),
    "a choice of no tool": (
        HELLO | {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    "a warm temperature": (HELLO | {"temperature": "warm"}, "temperature"),
    "no tokens": (HELLO | {"max_tokens": 0}, "max_tokens"),
    "half a token": (HELLO | {"max_completion_tokens": 1.5}, "max_completion_tokens"),
    "a huge number": (b'{"messages": [{"role": "user"}], "seed": 1' + b"0" * 400 + b"}", "seed"),
    "stream as text": (HELLO | {"stream": "yes"}, "stream"),
    "a stop number": (HELLO | {"stop": ["a", 3]}, "stop.1"),
}


@pytest.mark.parametrize(("body", "path"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_input_is_refused_with_its_path_and_changes_nothing(body: Any, path: str | None) -> None:
    engine = Scripted()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with serving(engine) as (_, session, http):
        async with http.post(CHAT, data=data) as response:
            status, error = await error_of(response)
        assert session.first_call is None
        assert session.completions == ()
        assert session.counts == {"errors.BadRequest": 1}
    assert (status, error["param"], error["type"]) == (400, path, "invalid_request_error")
    assert engine.requests == []


BODY = json.dumps(HELLO).encode()
CODED = {
    "gzip": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "zstd": zstandard.compress(BODY),
    "gzip, zstd": zstandard.compress(gzip.compress(BODY)),
}


@pytest.mark.parametrize("coding", CODED)
async def test_case_95_compressed_bodies_are_read(coding: str) -> None:
    engine = Scripted()
    coded = {"data": CODED[coding], "headers": {"Content-Encoding": coding}}
    async with serving(engine) as (_, _, http), http.post(CHAT, **coded) as response:
        assert response.status == 200
    assert engine.requests[0].messages[0].content == "hi"


@pytest.mark.parametrize("coding", CODED)
async def test_case_95_a_corrupt_compressed_body_is_a_bad_request(coding: str) -> None:
    engine = Scripted()
    async with serving(engine) as (_, _, http):
        for data in (CODED[coding][:-1], BODY):
            async with http.post(CHAT, data=data, headers={"Content-Encoding": coding}) as response:
                assert (await error_of(response))[0] == 400
        async with http.post(CHAT, data=CODED[coding]) as response:  # coded, and not declared so
            assert (await error_of(response))[0] == 400
    assert engine.requests == []


async def test_an_unknown_coding_is_unsupported() -> None:
    headers = {"Content-Encoding": "lzma"}
    async with serving(Scripted()) as (_, _, http), http.post(CHAT, data=BODY, headers=headers) as response:
        assert (await error_of(response))[0] == 415


async def test_a_large_body_is_refused_as_sent_as_streamed_and_as_decoded() -> None:
    large = json.dumps(HELLO | {"user": "x" * 5000}).encode()

    async def pieces() -> Any:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    async with serving(Scripted(), ProxyConfig(max_body_bytes=4000)) as (_, _, http):
        for data, headers in ((large, {}), (pieces(), {}), (gzip.compress(large), {"Content-Encoding": "gzip"})):
            async with http.post(CHAT, data=data, headers=headers) as response:
                assert (await error_of(response))[0] == 413
        async with http.post(CHAT, json=HELLO) as response:
            assert response.status == 200


async def test_a_body_announced_as_too_large_is_refused_before_it_is_sent() -> None:
    async with serving(Scripted(), ProxyConfig(max_body_bytes=4000)) as (proxy, session, _):
        head = request_bytes(session, {}).replace(b"Content-Length: 2", b"Content-Length: 4001")
        async with await anyio.connect_tcp("127.0.0.1", int(proxy.url.rpartition(":")[2])) as stream:
            await stream.send(head[:-2])
            with anyio.fail_after(5):
                assert b"413" in await stream.receive()


async def test_case_116_lone_surrogates_nuls_and_long_lines_reach_the_engine_and_come_back() -> None:
    output = "half \ud83d of it \0 and " + "x" * (5 << 20)
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "bash", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": output},
    ]
    engine = Scripted([say("you wrote \ud83d \0")])
    async with serving(engine) as (_, _, http):
        for stream in (False, True):
            data = io.BytesIO(json.dumps({"messages": messages, "stream": stream}).encode())
            async with http.post(CHAT, data=data) as response:
                raw = await response.read()
            assert response.status == 200
            lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line and b"[DONE]" not in line]
            choices = [json.loads(line)["choices"][0] for line in lines]
            texts = [(choice.get("message") or choice["delta"]).get("content") or "" for choice in choices]
            assert "".join(texts) == "you wrote \ud83d \0"
    assert [request.messages[2].content for request in engine.requests] == [output, output]
    assert engine.requests[0].messages[2].name == "bash"


async def test_a_unix_socket_serves_the_same_sessions_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    engine = Scripted()
    async with serving(engine, ProxyConfig(unix_socket=path)) as (proxy, session, http):
        unix = aiohttp.ClientSession("http://proxy", connector=aiohttp.UnixConnector(str(path)))
        async with unix, unix.post(CHAT, json=HELLO, headers={"x-api-key": session.key}) as response:
            assert response.status == 200
        async with http.post(CHAT, json=HELLO) as response:
            assert response.status == 200
        assert len(session.completions) == 2
        assert proxy.endpoint.unix_socket == path
    assert not path.exists()


async def test_the_advertised_host_is_what_harnesses_get() -> None:
    async with Proxy(ProxyConfig(host="0.0.0.0", advertise_host="trainer-7")).serving() as proxy:
        assert proxy.endpoint.url.startswith("http://trainer-7:")


async def test_an_address_that_cannot_be_listened_on_is_a_setting_gone_wrong(tmp_path: Path) -> None:
    async with Proxy().serving() as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"proxy.port {port}"):
            async with Proxy(ProxyConfig(port=port)).serving():
                pytest.fail("it listens twice")
    with pytest.raises(ConfigError, match=r"proxy\.unix_socket"):
        async with Proxy(ProxyConfig(unix_socket=tmp_path / ("x" * 200))).serving():
            pytest.fail("it listens on an impossible path")


async def test_leaving_the_proxy_seals_its_sessions_and_cancels_their_calls() -> None:
    engine = Scripted(before=forever)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group, serving(engine) as (_, session, http):

            async def call() -> None:
                with pytest.raises(aiohttp.ClientError):
                    await http.post(CHAT, json=HELLO)

            group.start_soon(call)
            await engine.started.wait()
            async with http.get("/v1/models") as response:
                assert response.status == 200
            session.seal()
        await engine.cancelled.wait()
    assert session.sealed
