"""Requests that are sent again: one generation, one record, and an engine that is left alone when nobody waits."""

from __future__ import annotations

import gc
import json
import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import anyio
import pytest

from polar_plugin.errors import BadRequest, EngineBusy, PolarError
from polar_plugin.proxy.server import ProxyConfig
from polar_plugin.records import ChatRequest, Delivery

from .scripted import CHAT, HELLO, STREAM, Scripted, forever, raw_post, receive_until, say, serving, until

pytestmark = pytest.mark.anyio

HASTY = ProxyConfig(header_grace_seconds=0, keepalive_seconds=0.01)
RETRIED = {"x-stainless-retry-count": "1"}
pairs = pytest.mark.parametrize(
    ("first", "second"),
    [(HELLO, HELLO), (STREAM, STREAM), (STREAM, HELLO), (HELLO, STREAM)],
    ids=["whole", "streamed", "streamed then whole", "whole then streamed"],
)


class Held(Scripted):
    """A model that answers once it is let."""

    def __init__(self) -> None:
        super().__init__([say("the one"), say("another")])
        self.release = anyio.Event()
        self.before = self._hold

    async def _hold(self, request: ChatRequest) -> None:
        await self.release.wait()


async def post(http: aiohttp.ClientSession, body: object, into: list[tuple[int, str]], **headers: str) -> None:
    async with http.post(CHAT, json=body, headers=headers) as response:
        into.append((response.status, await response.text()))


def id_of(text: str) -> str:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    return json.loads(lines[0])["id"]


@pairs
async def test_the_same_request_under_way_twice_is_one_generation_with_one_record(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    engine, answers = Held(), list[tuple[int, str]]()
    async with serving(engine) as (_, session, http):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(post, http, first, answers)
                await engine.started.wait()
                group.start_soon(post, http, second, answers)
                await until(lambda: session.counts["joined"] == 1)
                engine.release.set()
        assert len(engine.requests) == 1
        assert [status for status, _ in answers] == [200, 200]
        assert [id_of(text) for _, text in answers] == ["chatcmpl-c1"] * 2
        assert all("the one" in text for _, text in answers)
        assert session.delivery == {"c1": Delivery.DELIVERED}
        assert session.seal().counts == {"calls": 2, "joined": 1, "recorded": 1}


@pairs
async def test_the_generation_goes_on_while_one_of_its_callers_still_waits(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    for leaves in (0, 1):
        engine = Held()
        async with serving(engine, HASTY) as (proxy, session, _), AsyncExitStack() as stack:
            callers = [await raw_post(proxy, session, first)]
            await engine.started.wait()
            callers.append(await raw_post(proxy, session, second))
            await until(lambda: session.counts["joined"] == 1)
            stays = await stack.enter_async_context(callers[1 - leaves])
            await callers[leaves].aclose()
            await until(lambda: session.counts["hangups"] == 1)
            assert session.in_flight == 1
            assert not engine.cancelled.is_set()
            engine.release.set()
            with anyio.fail_after(5):
                await receive_until(stays, b"the one")
            await until(lambda: session.delivery.get("c1") is Delivery.DELIVERED)
            assert len(engine.requests) == 1


async def test_the_engine_is_told_when_the_last_caller_is_gone_and_a_later_one_begins_anew() -> None:
    engine = Held()
    async with serving(engine, HASTY) as (proxy, session, http):
        callers = [await raw_post(proxy, session, STREAM) for _ in range(3)]
        await until(lambda: session.counts["joined"] == 2)
        for caller in callers:
            assert not engine.cancelled.is_set()
            await caller.aclose()
        with anyio.fail_after(2):
            await engine.cancelled.wait()
        await until(lambda: session.in_flight == 0)
        engine.release.set()
        async with http.post(CHAT, json=HELLO) as response:
            assert response.status == 200
        assert len(engine.requests) == 2
        assert [completion.id for completion in session.completions] == ["c2"]
        assert session.counts["hangups"] == 3


OTHERS: dict[str, dict[str, Any]] = {
    "another message": HELLO | {"messages": [{"role": "user", "content": "hi!"}]},
    "one more message": HELLO | {"messages": [*HELLO["messages"], {"role": "user", "content": "and"}]},
    "a tool": HELLO | {"tools": [{"type": "function", "function": {"name": "bash"}}]},
    "another model": HELLO | {"model": "other"},
    "more tokens": HELLO | {"max_tokens": 64_000},
    "another temperature": HELLO | {"temperature": 0.5},
    "a stop string": HELLO | {"stop": ["x"]},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
async def test_a_request_that_asks_for_something_else_is_a_generation_of_its_own(other: dict[str, Any]) -> None:
    engine, answers = Held(), list[tuple[int, str]]()
    async with serving(engine) as (_, session, http):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(post, http, HELLO, answers)
                group.start_soon(post, http, other, answers)
                await until(lambda: len(engine.requests) == 2)
                engine.release.set()
        assert len(session.completions) == 2
        assert session.counts["joined"] == 0


async def test_two_sessions_that_ask_the_same_never_share_an_answer() -> None:
    ours, theirs, answers = Held(), Held(), list[tuple[int, str]]()
    async with serving(ours) as (proxy, session, http), proxy.session("s2", theirs) as other:
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(post, http, HELLO, answers)
                group.start_soon(lambda: post(http, HELLO, answers, Authorization=f"Bearer {other.key}"))
                await until(lambda: len(ours.requests) == len(theirs.requests) == 1)
                ours.release.set()
                theirs.release.set()
        assert len(session.completions) == len(other.completions) == 1


@pytest.mark.parametrize(("error", "status"), [(EngineBusy("full"), 503), (BadRequest("cannot say it"), 400)])
async def test_a_failure_reaches_everybody_who_waits_is_counted_once_and_is_not_kept(
    error: PolarError, status: int
) -> None:
    engine, answers = Held(), list[tuple[int, str]]()

    async def fail(request: ChatRequest) -> None:
        await engine.release.wait()
        if len(engine.requests) == 1:
            raise error

    engine.before = fail
    async with serving(engine) as (_, session, http):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(post, http, HELLO, answers)
                await until(lambda: session.counts["joined"] == 2)
                engine.release.set()
        assert [code for code, _ in answers] == [status] * 3
        assert session.counts[f"errors.{type(error).__name__}"] == 1
        await post(http, HELLO, answers)
        assert answers[-1][0] == 200
        assert session.last_error is None


async def test_a_seal_ends_a_shared_generation_for_everybody() -> None:
    engine = Scripted(before=forever)
    async with serving(engine) as (proxy, session, _), AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(await raw_post(proxy, session, HELLO)) for _ in range(2)]
        await until(lambda: session.counts["joined"] == 1)
        session.seal()
        with anyio.fail_after(2):
            await engine.cancelled.wait()
            for caller in callers:
                assert b"session_sealed" in await receive_until(caller, b"}}")


async def test_case_77_a_client_that_loses_patience_over_and_over_causes_one_upstream_call() -> None:
    """Its watchdog fires before the answer is there; each new try comes before the old connection is closed."""
    engine = Held()
    async with serving(engine, HASTY) as (proxy, session, _):
        current = await raw_post(proxy, session, STREAM)
        for tries in range(1, 6):
            pings = b""
            while pings.count(b": keep-alive\n\n") < 3:
                pings += await receive_until(current, b": keep-alive\n\n")
            assert b"data:" not in pings
            following = await raw_post(proxy, session, STREAM)
            await until(lambda: session.counts["joined"] == tries)  # noqa: B023
            await current.aclose()
            current = following
        async with current:
            engine.release.set()
            with anyio.fail_after(5):
                await receive_until(current, b"[DONE]\n\n")
        await until(lambda: session.delivery.get("c1") is Delivery.DELIVERED)
        assert len(engine.requests) == 1
        assert not engine.cancelled.is_set()


async def test_case_28_retries_after_cuts_leave_no_memory_of_their_own_behind() -> None:
    """What a retry costs is its record on the ledger; the body it came with is not kept."""
    body = HELLO | {"messages": [{"role": "user", "content": "x" * 200_000}]}
    engine = Scripted(before=forever)
    async with serving(engine, HASTY) as (proxy, session, _):

        async def cut() -> None:
            before = session.counts["hangups"]
            async with await raw_post(proxy, session, body):
                await until(lambda: session.in_flight == 1)
            await until(lambda: session.counts["hangups"] == before + 1 and session.in_flight == 0)
            engine.requests.clear()

        await cut()
        gc.collect()
        tracemalloc.start()
        for _ in range(30):
            await cut()
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 1_000_000  # one body a retry would be 6 MB
        assert session.completions == ()


async def test_an_sdks_own_retry_is_counted_and_joins_like_any_other() -> None:
    engine, answers = Held(), list[tuple[int, str]]()
    async with serving(engine) as (_, session, http):
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(post, http, HELLO, answers)
                await engine.started.wait()
                group.start_soon(lambda: post(http, HELLO, answers, **RETRIED))
                await until(lambda: session.counts["joined"] == 1)
                engine.release.set()
        assert session.counts["retries"] == 1
        assert len(engine.requests) == len(session.completions) == 1
