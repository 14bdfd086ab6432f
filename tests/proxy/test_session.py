"""The ledger: append-only while open, then sealed for good."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Callable

import anyio
import pytest

from polar_plugin.errors import EngineBusy, SessionSealed, UnknownSession
from polar_plugin.proxy.server import Proxy
from polar_plugin.proxy.session import Session, SessionTable
from polar_plugin.records import ChatRequest, Delivery, Message

from .scripted import Scripted, forever, say

pytestmark = pytest.mark.anyio

REQUEST = ChatRequest((Message("user", "hi"),))


Opened = Callable[..., Session]


@pytest.fixture
async def opened() -> AsyncGenerator[Opened]:
    async with SessionTable().running() as table:
        yield lambda engine, **metadata: table.open("s1", engine, metadata)


async def test_turns_are_recorded_in_order_and_sealed_with_what_is_known_of_them(opened: Opened) -> None:
    session = opened(Scripted([say("a"), say("b")]), task_id="t1", harness="shell")
    first, second = await session.turn(REQUEST), await session.turn(REQUEST)
    session.mark(first.id, Delivery.DELIVERED)
    ledger = session.seal()
    assert ledger.completions == (first, second)
    assert ledger.delivery == {"c1": Delivery.DELIVERED, "c2": Delivery.UNDELIVERED}
    assert (ledger.session_id, ledger.task_id, ledger.metadata["harness"]) == ("s1", "t1", "shell")
    assert ledger.counts == {"calls": 2, "recorded": 2, "undelivered": 1}


async def test_sealing_twice_gives_the_same_ledger(opened: Opened) -> None:
    session = opened(Scripted())
    await session.turn(REQUEST)
    assert session.seal() is session.seal()


async def test_nothing_is_generated_recorded_or_marked_once_sealed(opened: Opened) -> None:
    engine = Scripted()
    session = opened(engine)
    await session.turn(REQUEST)
    ledger = session.seal()
    with pytest.raises(SessionSealed):
        await session.turn(REQUEST)
    session.mark("c1", Delivery.DELIVERED)
    assert len(engine.requests) == 1
    assert session.completions == ledger.completions
    assert ledger.delivery == session.seal().delivery == {"c1": Delivery.UNDELIVERED}


async def test_sealing_cancels_every_turn_under_way_and_each_caller_is_told(opened: Opened) -> None:
    engine = Scripted(before=forever)
    session = opened(engine)
    told = 0

    async def call(request: ChatRequest) -> None:
        nonlocal told
        with pytest.raises(SessionSealed):
            await session.turn(request)
        told += 1

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(call, ChatRequest((Message("user", str(number)),)))
            while session.in_flight < 3:
                await anyio.lowlevel.checkpoint()
            ledger = session.seal()
    assert (told, ledger.completions, session.in_flight) == (3, (), 0)


async def test_a_reply_that_comes_as_the_session_is_sealed_is_not_recorded(opened: Opened) -> None:
    async def seal_meanwhile(request: ChatRequest) -> None:
        session.seal()

    session = opened(Scripted(before=seal_meanwhile))
    with pytest.raises(SessionSealed):
        await session.turn(REQUEST)
    assert session.seal().completions == session.completions == ()


async def test_an_outer_deadline_is_a_hang_up_and_records_nothing(opened: Opened) -> None:
    session = opened(Scripted(before=forever))
    with anyio.move_on_after(0.01) as scope:
        await session.turn(REQUEST)
    assert scope.cancelled_caught
    assert session.completions == ()
    assert session.seal().counts == {"calls": 1, "hangups": 1}


async def test_a_delivered_answer_stays_delivered(opened: Opened) -> None:
    session = opened(Scripted())
    completion = await session.turn(REQUEST)
    for delivery in (Delivery.UNDELIVERED, Delivery.DELIVERED, Delivery.UNDELIVERED):
        session.mark(completion.id, delivery)
    assert session.delivery == {"c1": Delivery.DELIVERED}


async def test_the_first_call_can_be_waited_for(opened: Opened) -> None:
    session = opened(Scripted())
    assert (session.first_call, session.called.is_set()) == (None, False)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(session.called.wait)
            await session.turn(REQUEST)
    assert session.first_call is not None
    first, latest = session.first_call, session.last_activity
    await session.turn(REQUEST)
    assert session.first_call == first
    assert session.last_activity is not None
    assert latest is not None
    assert session.last_activity >= latest >= first


async def test_what_is_dropped_retried_or_failed_is_counted(opened: Opened) -> None:
    async def busy(request: ChatRequest) -> None:
        if len(engine.requests) > 1:
            raise EngineBusy("full")

    engine = Scripted(before=busy)
    session = opened(engine)
    await session.turn(ChatRequest(REQUEST.messages, ignored=("store", "user")))
    with pytest.raises(EngineBusy):
        await session.turn(ChatRequest(REQUEST.messages, retry=True, ignored=("store",)))
    assert session.seal().counts == {
        "calls": 2,
        "recorded": 1,
        "retries": 1,
        "errors.EngineBusy": 1,
        "ignored.store": 2,
        "ignored.user": 1,
        "undelivered": 1,
    }


async def test_a_closed_session_is_known_by_its_key_and_the_memory_of_it_is_bounded() -> None:
    table = SessionTable(remembered=2)
    sessions = [table.open(f"s{i}", Scripted()) for i in range(3)]
    assert len({session.key for session in sessions}) == 3
    assert all(table.get(session.key) is session for session in sessions)
    for session in sessions:
        table.close(session)
        table.close(session)
        assert session.sealed
    with pytest.raises(UnknownSession, match="send the session's key"):
        table.get(sessions[0].key)
    for session in sessions[1:]:
        with pytest.raises(SessionSealed, match=session.session_id):
            table.get(session.key)


async def test_what_a_trainer_keeps_from_collection_stays_so_after_serving() -> None:
    gc.unfreeze()
    async with Proxy().serving():
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.freeze()
    async with Proxy().serving():
        pass
    assert gc.get_freeze_count()
