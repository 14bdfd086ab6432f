"""When a program that does not end is ended: before its first call, after its result, after an error. On a clock that
jumps, over a session of the proxy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from polar_plugin.errors import BadRequest, EngineError
from polar_plugin.execution import Ledger
from polar_plugin.proxy.session import Ready, Session, SessionTable
from polar_plugin.records import ChatRequest, Completion, Message
from polar_plugin.stages.parts import Budgets
from polar_plugin.stages.verdict import Stopped
from polar_plugin.stages.watch import Watchdog

from ..proxy.scripted import completion_of
from .clock import JUMPING

pytestmark = pytest.mark.anyio
RESULT = rb'{"type":"result"'
Program = Callable[[Watchdog, Session], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> object:
    return JUMPING


class Model:
    """A call's text says how long it takes and whether it fails: "5", "0 refused", "2 broken"."""

    async def __call__(self, request: ChatRequest, ready: Ready) -> Completion:
        seconds, _, outcome = request.messages[0].content.partition(" ")
        await anyio.sleep(float(seconds))
        if outcome:
            raise BadRequest("unreadable") if outcome == "refused" else EngineError("died")
        return completion_of(Message("assistant", "ok"), request, number=id(request))

    async def count(self, request: ChatRequest) -> int:
        return 1


async def call(session: Session, text: str) -> None:
    try:
        await session.turn(ChatRequest((Message("user", text),)))
    except (BadRequest, EngineError):
        return


@asynccontextmanager
async def opened() -> AsyncGenerator[Session]:
    async with SessionTable().running() as table:
        yield table.open("s", Model())


async def ended(program: Program, **budgets: float) -> tuple[Stopped | None, float]:
    """Why, and when, the program was ended."""
    async with opened() as session:
        watchdog = Watchdog(Ledger(session), Budgets(**budgets), r'^\{"type":"result"')
        started = anyio.current_time()
        async with anyio.create_task_group() as group:

            async def run() -> None:
                await program(watchdog, session)
                await anyio.sleep(1000)
                group.cancel_scope.cancel()

            group.start_soon(run)
            await watchdog.over()
            group.cancel_scope.cancel()
        return watchdog.stopped, anyio.current_time() - started


async def silent(watchdog: Watchdog, session: Session) -> None:
    await anyio.sleep_forever()


async def test_a_program_that_makes_no_call_is_ended_at_the_time_set() -> None:
    assert await ended(silent, first_call=60) == (Stopped.NO_FIRST_CALL, 60)


async def test_a_program_that_only_prints_has_made_no_call() -> None:
    async def prints(watchdog: Watchdog, session: Session) -> None:
        for _ in range(20):
            await anyio.sleep(10)
            watchdog.saw(1, b"loading\n")

    assert await ended(prints, first_call=60) == (Stopped.NO_FIRST_CALL, 60)


async def test_a_call_in_time_ends_the_watch_for_the_first_one() -> None:
    async def calls(watchdog: Watchdog, session: Session) -> None:
        await anyio.sleep(59)
        await call(session, "500")

    assert await ended(calls, first_call=60) == (None, 1559)


@pytest.mark.parametrize(
    "pieces",
    [(RESULT + b"}\n",), (b"{", b'"type":', b'"result"'), (b"some\nlines\n" + RESULT,), (b"x" * 9000 + b"\n", RESULT)],
    ids=["whole", "in pieces", "behind others", "behind a long one"],
)
async def test_case_85_a_program_that_printed_its_result_is_ended_after_a_grace(pieces: tuple[bytes, ...]) -> None:
    async def prints(watchdog: Watchdog, session: Session) -> None:
        await call(session, "5")
        for piece in pieces:
            watchdog.saw(1, piece)

    assert await ended(prints, linger=20) == (Stopped.LINGERED, 25)


@pytest.mark.parametrize(
    ("stream", "text"),
    [(2, RESULT), (1, b" " + RESULT), (1, b"x" * 5000 + RESULT), (1, b'{"type":"res\nult"')],
    ids=["on stderr", "within a line", "far within a line", "over two lines"],
)
async def test_control_what_is_no_result_ends_nothing(stream: int, text: bytes) -> None:
    async def prints(watchdog: Watchdog, session: Session) -> None:
        watchdog.saw(stream, text)

    assert await ended(prints, linger=20) == (None, 1000)


async def test_calls_after_the_result_put_the_end_off_until_they_are_over() -> None:
    """A sub-agent in the background may work on behind the result of the main thread."""

    async def works_on(watchdog: Watchdog, session: Session) -> None:
        watchdog.saw(1, RESULT)
        await anyio.sleep(15)
        await call(session, "100")

    assert await ended(works_on, linger=20) == (Stopped.LINGERED, 135)


async def test_a_program_that_prints_on_after_a_result_is_at_work_until_it_prints_another_one() -> None:
    """Some compact behind a turn that looked like the last one, and go on; a command of theirs may take long."""

    async def works_on(watchdog: Watchdog, session: Session) -> None:
        watchdog.saw(1, RESULT + b"}\n")
        await call(session, "15")
        watchdog.saw(1, b'{"type":"tool"}\n')
        await anyio.sleep(400)
        watchdog.saw(1, RESULT + b"}\n")

    assert await ended(works_on, linger=20) == (Stopped.LINGERED, 435)


@pytest.mark.parametrize("outcome", ["refused", "broken"])
async def test_case_111_a_program_that_does_not_end_after_a_fatal_error_is_ended(outcome: str) -> None:
    async def gives_up(watchdog: Watchdog, session: Session) -> None:
        await call(session, "3")
        await call(session, f"2 {outcome}")
        watchdog.saw(2, b"fatal\n")

    assert await ended(gives_up, idle=300) == (Stopped.HUNG, 305)


async def test_output_after_an_error_is_a_sign_of_life() -> None:
    async def retries(watchdog: Watchdog, session: Session) -> None:
        await call(session, "0 refused")
        for _ in range(3):
            await anyio.sleep(200)
            watchdog.saw(2, b"retrying\n")

    assert await ended(retries, idle=300) == (Stopped.HUNG, 900)


async def test_a_call_that_is_answered_after_an_error_is_no_hang_however_long_its_tools_take() -> None:
    async def recovers(watchdog: Watchdog, session: Session) -> None:
        await call(session, "0 broken")
        await anyio.sleep(250)
        await call(session, "100")

    assert await ended(recovers, idle=300) == (None, 1350)


async def test_what_is_not_watched_ends_nothing() -> None:
    async def all_of_it(watchdog: Watchdog, session: Session) -> None:
        watchdog.saw(1, RESULT)
        await call(session, "0 refused")

    assert await ended(all_of_it) == (None, 1000)


async def test_a_call_within_the_grace_puts_the_end_off_too_where_none_was_made_for_long() -> None:
    async def works_on(watchdog: Watchdog, session: Session) -> None:
        await call(session, "0")
        await anyio.sleep(100)
        watchdog.saw(1, RESULT)
        await anyio.sleep(19)
        await call(session, "50")

    assert await ended(works_on, linger=20) == (Stopped.LINGERED, 189)
