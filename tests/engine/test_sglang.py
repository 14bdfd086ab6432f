"""The SGLang client against a small strict stand-in of SGLang's server, for what a real one does rarely or never."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import orjson
import pytest
from aiohttp import web

from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.errors import ConfigError, EngineBusy, EngineError
from polar_plugin.records import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan, token_ids

pytestmark = pytest.mark.anyio

PROMPT = token_ids([5, 6, 7])
_TOP = {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"}
_SAMPLING = {
    *("max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "sampling_seed"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
}

Answer = Callable[[dict[str, Any]], dict[str, Any] | Awaitable[web.StreamResponse]]


def sampled(
    body: dict[str, Any], ids: list[int] | None = None, *, finish: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    """SGLang's answer to `body`: by default `max_new_tokens` ids that count on from the prompt's length."""
    first = len(body["input_ids"])
    ids = list(range(first, first + body["sampling_params"]["max_new_tokens"])) if ids is None else ids
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": body["rid"],
            "finish_reason": finish or {"type": "length", "length": len(ids)},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": "1",
            "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.25 * (token % 4 + 1), token, None] for token in ids],
            **meta,
        },
    }


def aborted(body: dict[str, Any], ids: list[int], **meta: Any) -> dict[str, Any]:
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return sampled(body, ids, finish=finish, **meta)


class FakeSGLang:
    """Answers with what is queued in `answers`, else with `sampled`. Refuses what the real one would refuse."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self.live: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[str] = []
        self.sockets: Counter[Any] = Counter()
        self.routes: Counter[str] = Counter()
        self.started = anyio.Event()
        self.was_aborted = anyio.Event()
        self.hung_up = anyio.Event()
        self.info: dict[str, Any] = {"served_model_name": "tiny", "weight_version": "7"}
        self.server_info: dict[str, Any] = {"context_length": 64, "max_req_input_len": 58}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/health", self.health)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.get_server_info)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.sockets[request.transport] += 1
        refusal = self._refusal(body)
        if refusal:
            return web.json_response({"error": {"message": refusal}}, status=400)
        self.live.add(body["rid"])
        try:
            made = (self.answers.popleft() if self.answers else sampled)(body)
            return _json(made) if isinstance(made, dict) else await made
        finally:
            self.live.remove(body["rid"])

    def _refusal(self, body: dict[str, Any]) -> str:
        unknown = (set(body) - _TOP) | (set(body["sampling_params"]) - _SAMPLING)
        if unknown:
            return f"unknown field {sorted(unknown)}"
        if body["rid"] in self.live:
            return f"Duplicate request ID detected: {body['rid']}"
        asked = (body["return_logprob"], body["logprob_start_len"], body["stream"])
        ids = all(type(token) is int for token in body["input_ids"])
        return "" if asked == (True, -1, False) and ids else f"unexpected request {body}"

    async def hold(self, body: dict[str, Any]) -> web.StreamResponse:
        """An answer that never comes."""
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.hung_up.set()
        return web.Response()

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.append((await request.json())["rid"])
        self.was_aborted.set()
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def get_server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.server_info)


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def status(code: int, message: str, **headers: str) -> Answer:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=code, headers=headers)

    return answer


@asynccontextmanager
async def listening(app: web.Application, **runner: Any) -> AsyncIterator[str]:
    site_runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, **runner)
    await site_runner.setup()
    site = web.TCPSite(site_runner, "127.0.0.1", 0)
    await site.start()
    host, port = site_runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await site_runner.cleanup()


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


_numbers = itertools.count()


async def sample(
    engine: SGLangEngine,
    max_tokens: int = 4,
    *,
    prompt: TokenIds = PROMPT,
    stop_ids: tuple[int, ...] = (),
    request_id: str | None = None,
    session_id: str = "session",
    **sampling: Any,
) -> Generation:
    with anyio.fail_after(20):
        return await engine.generate(
            prompt,
            SamplingParams(max_tokens=max_tokens, **sampling),
            request_id=request_id or f"request{next(_numbers)}",
            session_id=session_id,
            stop_ids=stop_ids,
        )


# --- what is sent, and what is read --------------------------------------------------------------------------------


async def test_a_call_carries_ids_sampling_and_the_sessions_routing_key(engine: SGLangEngine, fake: FakeSGLang) -> None:
    await sample(
        engine, 9, stop_ids=(2, 3), stop=("END",), temperature=0.5, top_p=0.9, top_k=40, session_id="a-session"
    )
    body = fake.bodies[0]
    assert body["input_ids"] == [5, 6, 7]
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["END"],
        "stop_token_ids": [2, 3],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert fake.headers[0]["X-SMG-Routing-Key"] == "a-session"


async def test_a_seed_is_sent_only_where_one_is_given(engine: SGLangEngine, fake: FakeSGLang) -> None:
    await sample(engine)
    await sample(engine, seed=3)
    assert [body["sampling_params"].get("sampling_seed") for body in fake.bodies] == [None, 3]


async def test_ids_logprobs_and_versions_are_the_engines(engine: SGLangEngine) -> None:
    generation = await sample(engine, 3)
    assert generation.output_ids.tolist() == [3, 4, 5]
    assert generation.logprobs.tolist() == [-1.0, -0.25, -0.5]
    assert generation.versions == (VersionSpan("1", 3),)
    assert (generation.finish_reason, generation.stop) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize(("matched", "stop"), [(2, None), ("END", "END"), (None, None)])
async def test_a_stop_names_the_string_that_ended_it(
    engine: SGLangEngine, fake: FakeSGLang, matched: object, stop: str | None
) -> None:
    fake.answers.append(lambda body: sampled(body, [9, 2], finish={"type": "stop", "matched": matched}))
    generation = await sample(engine)
    assert (generation.finish_reason, generation.stop) == (FinishReason.STOP, stop)


async def test_version_spans_over_a_bump_cover_the_output(engine: SGLangEngine, fake: FakeSGLang) -> None:
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 4}]
    fake.answers.append(lambda body: sampled(body, weight_versions=spans))
    assert (await sample(engine)).versions == (VersionSpan("7", 3), VersionSpan("8", 1))


async def test_a_server_that_tells_one_version_only_has_one_span(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(lambda body: sampled(body, weight_versions=None, weight_version="5"))
    assert (await sample(engine)).versions == (VersionSpan("5", 4),)


async def test_a_prompt_of_a_quarter_million_ids_goes_out_whole(engine: SGLangEngine, fake: FakeSGLang) -> None:
    prompt = token_ids(np.arange(250_000) % 150_000)
    fake_app_limit = 1024**2
    assert len(orjson.dumps(prompt.tolist())) > fake_app_limit
    async with listening(_large(fake)) as address, SGLangEngine(address) as large:
        assert len((await sample(large, 2, prompt=prompt)).output_ids) == 2
    assert fake.bodies[0]["input_ids"] == prompt.tolist()


def _large(fake: FakeSGLang) -> web.Application:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", fake.generate)
    return app


# --- answers that cannot be trusted --------------------------------------------------------------------------------


def _edit(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        good = sampled(body)
        meta = {**good["meta_info"], **changes.pop("meta_info", {})} if changes.get("meta_info", 1) else None
        return {**good, "meta_info": meta, **{key: value for key, value in changes.items() if key != "meta_info"}}

    return answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta_info": None}, "no `meta_info`: a proxy or router in between drops fields"),
        ({"meta_info": {"output_token_logprobs": None}}, "no `meta_info.output_token_logprobs`: a proxy or router"),
        ({"output_ids": None}, "no `output_ids`: a proxy or router"),
        ({"output_ids": [3, 4, 5]}, "3 output ids but 4 log-probabilities"),
        ({"output_ids": [3, 4, 5, 6, 7]}, "5 output ids but 4 log-probabilities"),
        ({"output_ids": [3, 4, 9, 6]}, "disagree at 2: 9 against 5"),
        ({"output_ids": ["3", 4, 5, 6]}, "disagree at 0: 3 against 3"),
        ({"output_ids": [-3, 4, 5, 6]}, "disagree at 0: -3 against 3"),
        (
            {"meta_info": {"output_token_logprobs": [[-1, 3], [None, 4], [-1, 5], [-1, 6]]}},
            "no finite log-prob.* token 1",
        ),
        ({"meta_info": {"output_token_logprobs": [-1.0, -1.0, -1.0, -1.0]}}, "cannot be read"),
        ({"meta_info": {"weight_versions": [{"version": "1", "start": 0, "end": 3}]}}, "spans cover 3 tokens of 4"),
        ({"meta_info": {"finish_reason": None}}, "cannot be read"),
        ({"meta_info": {"prompt_tokens": 2}}, "3 prompt tokens were sent but the engine read 2"),
        ({"meta_info": {"finish_reason": {"type": "abort", "status_code": 500, "message": "boom"}}}, "abort: boom"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error_and_is_not_asked_for_again(
    engine: SGLangEngine, fake: FakeSGLang, changes: dict[str, Any], message: str
) -> None:
    fake.answers.append(_edit(**changes))
    with pytest.raises(EngineError, match=message):
        await sample(engine)
    assert len(fake.bodies) == 1


async def test_an_answer_that_is_no_json_is_an_error_that_shows_it(engine: SGLangEngine, fake: FakeSGLang) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="<html>gateway</html>")

    fake.answers.append(answer)
    with pytest.raises(EngineError, match="no JSON: <html>gateway"):
        await sample(engine)


# --- what never leaves us ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([1, 100], 4, "token id 100 is out of the vocabulary of 100 ids"),
        ([], 4, "the prompt is empty"),
        ([1] * 60, 5, "60 prompt tokens and max_tokens 5 exceed the context of 64 tokens"),
        ([1], 0, "max_tokens is 0"),
    ],
)
async def test_what_no_engine_can_serve_is_refused_before_it_is_sent(
    url: str, fake: FakeSGLang, prompt: list[int], max_tokens: int, message: str
) -> None:
    async with SGLangEngine(url, vocab_size=100, context_length=64) as engine:
        with pytest.raises(EngineError, match=message):
            await sample(engine, max_tokens, prompt=token_ids(prompt))
    assert fake.bodies == []


def test_an_address_without_a_scheme_is_refused_by_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"engine.url: '127.0.0.1:30000' is no address"):
        SGLangEngine("127.0.0.1:30000")


# --- aborts by the engine: weight updates --------------------------------------------------------------------------


async def test_an_abort_in_mid_request_is_continued_into_one_generation(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers += [
        lambda body: aborted(body, [3, 4], weight_versions=[{"version": "1", "start": 0, "end": 2}]),
        lambda body: sampled(body, weight_version="2", weight_versions=[{"version": "2", "start": 0, "end": 4}]),
    ]
    generation = await sample(engine, 6)
    assert [body["input_ids"] for body in fake.bodies] == [[5, 6, 7], [5, 6, 7, 3, 4]]
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [6, 4]
    assert generation.output_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert generation.logprobs.tolist() == [-1.0, -0.25, -0.5, -0.75, -1.0, -0.25]
    assert generation.versions == (VersionSpan("1", 2), VersionSpan("2", 4))
    assert generation.finish_reason is FinishReason.LENGTH


async def test_spans_of_one_version_join_over_a_reissue(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(lambda body: aborted(body, [3, 4]))
    assert (await sample(engine, 6)).versions == (VersionSpan("1", 6),)


async def test_an_abort_in_the_waiting_queue_starts_again_from_the_prompt(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    def queued(body: dict[str, Any]) -> dict[str, Any]:
        answer = aborted(body, [], weight_versions=[{"version": "1", "start": 0, "end": 0}])
        del answer["meta_info"]["prompt_tokens"]
        return answer

    fake.answers.append(queued)
    assert len((await sample(engine)).output_ids) == 4
    assert [body["input_ids"] for body in fake.bodies] == [[5, 6, 7]] * 2


@pytest.mark.parametrize(("ids", "reason"), [([3, 2], FinishReason.STOP), ([3, 4, 5, 6], FinishReason.LENGTH)])
async def test_an_abort_that_lands_on_the_last_token_samples_nothing_beyond_it(
    engine: SGLangEngine, fake: FakeSGLang, ids: list[int], reason: FinishReason
) -> None:
    fake.answers.append(lambda body: aborted(body, ids))
    generation = await sample(engine, 4, stop_ids=(2,))
    assert (generation.output_ids.tolist(), generation.finish_reason) == (ids, reason)
    assert len(fake.bodies) == 1


async def test_a_call_that_is_aborted_again_and_again_is_busy(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers += [lambda body: aborted(body, [])] * 4
    with pytest.raises(EngineBusy, match="aborted this call 4 times in a row"):
        await sample(engine)
    assert len(fake.bodies) == 4


async def test_progress_between_aborts_resets_their_count(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers += [lambda body: aborted(body, []), lambda body: aborted(body, [1])] * 4
    assert len((await sample(engine, 10)).output_ids) == 10


async def test_what_takes_longer_than_the_deadline_is_busy_and_aborted(url: str, fake: FakeSGLang) -> None:
    fake.answers.append(fake.hold)
    async with SGLangEngine(url, request_timeout=0.2) as engine:
        with pytest.raises(EngineBusy, match=r"no whole answer from .* in 0.2 s"):
            await sample(engine)
    assert len(fake.aborts) == 1


# --- what is sent again, and what is not ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [503, 429])
async def test_a_busy_engine_is_asked_again_until_it_takes_the_call(
    engine: SGLangEngine, fake: FakeSGLang, code: int
) -> None:
    fake.answers += [status(code, "paused for a weight update")] * 2
    assert len((await sample(engine)).output_ids) == 4
    assert len(fake.bodies) == 3


async def test_an_engine_that_stays_busy_says_so_with_its_own_words(url: str, fake: FakeSGLang) -> None:
    fake.answers.append(status(503, "circuit breaker open", **{"Retry-After": "7"}))
    async with SGLangEngine(url, retries=0) as engine:
        with pytest.raises(EngineBusy, match=r"is busy \(503\): circuit breaker open") as caught:
            await sample(engine)
    assert caught.value.retry_after == 7.0


@pytest.mark.parametrize("code", [400, 401, 404, 422, 500, 502])
async def test_any_other_refusal_is_an_error_at_once(engine: SGLangEngine, fake: FakeSGLang, code: int) -> None:
    fake.answers.append(status(code, "the engine's own words"))
    with pytest.raises(EngineError, match=rf"\({code}\): the engine's own words") as caught:
        await sample(engine)
    assert not isinstance(caught.value, EngineBusy)
    assert len(fake.bodies) == 1


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


async def test_a_fresh_connection_that_drops_before_the_answer_is_not_sent_again() -> None:
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


async def test_idling_past_the_servers_keep_alive_loses_and_repeats_nothing(fake: FakeSGLang) -> None:
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


async def test_two_hundred_sessions_share_a_bounded_number_of_sockets(url: str, fake: FakeSGLang) -> None:
    async with SGLangEngine(url, max_connections=8) as engine, anyio.create_task_group() as group:

        async def session(name: str) -> None:
            for _ in range(20):
                assert len((await sample(engine, 1, session_id=name)).output_ids) == 1

        for number in range(200):
            group.start_soon(session, f"session{number}")
    assert len(fake.bodies) == 4000
    assert len(fake.sockets) <= 8


# --- hanging up ----------------------------------------------------------------------------------------------------


async def _hang_up(engine: SGLangEngine, fake: FakeSGLang) -> None:
    """Cancel a call in mid-generation, and wait until its end has arrived."""
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


async def test_hanging_up_behind_a_router_without_an_abort_route_tells_each_worker(fake: FakeSGLang) -> None:
    other = FakeSGLang()
    async with listening(fake.app()) as first, listening(other.app()) as second:
        listed = {"workers": [{"id": "a", "url": first}, {"id": "b", "url": f"{second}@0"}]}
        app = web.Application()
        asked: list[str] = []

        async def workers(request: web.Request) -> web.Response:
            asked.append(request.path)
            return web.json_response(listed)

        app.router.add_post("/generate", fake.generate)
        app.router.add_get("/workers", workers)
        async with listening(app) as router, SGLangEngine(router) as engine:
            await _hang_up(engine, fake)
            await _hang_up(engine, fake)
    rids = [body["rid"] for body in fake.bodies]
    assert fake.aborts == other.aborts == rids
    assert len(asked) == 1


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


# --- the probe -----------------------------------------------------------------------------------------------------


async def test_the_probe_tells_model_context_and_version_and_bounds_later_calls(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    info = await engine.probe()
    assert (info.model, info.context_length, info.weight_version) == ("tiny", 58, "7")
    with pytest.raises(EngineError, match="exceed the context of 58"):
        await sample(engine, 56)
    assert fake.bodies[0]["sampling_params"]["max_new_tokens"] == 1


async def test_the_probe_fails_where_a_router_strips_ids_and_says_what_to_set(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    fake.answers.append(lambda body: {"text": "x"})
    with pytest.raises(EngineError, match=r"no `meta_info`.*Set engine.url to a SGLang server itself"):
        await engine.probe()


async def test_the_probe_of_an_engine_that_does_not_tell_its_context_asks_for_it(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    fake.server_info = {}
    with pytest.raises(EngineError, match=r"set engine.context_length"):
        await engine.probe()


async def test_the_probe_of_an_absent_engine_names_the_setting(fake: FakeSGLang) -> None:
    async with listening(fake.app()) as address:
        pass
    async with SGLangEngine(address) as engine:
        with pytest.raises(EngineError, match=r"no engine can be reached at .*/health .*mend engine.url"):
            await engine.probe()


async def test_a_vocabulary_that_the_server_tells_is_kept_to(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.info["vocab_size"] = 7
    await engine.probe()
    with pytest.raises(EngineError, match="token id 7 is out of the vocabulary of 7"):
        await sample(engine)
