"""One HTTP exchange: a request read, a turn generated, its answer written, and whether the harness got it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
from aiohttp import web

from ..errors import PolarError
from ..records import ChatRequest, Completion, Delivery, JSONObject
from . import body, sse
from .codec import Dialect, Framing, Incoming
from .resent import Resent
from .session import Session

logger = logging.getLogger(__name__)

_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_INLINE_BYTES = 500_000
"""About 5 ms of reading: beyond it the event loop is left."""
_RETRYABLE = frozenset({429, 503})


class Limits(Protocol):
    """What an exchange takes from the proxy's configuration."""

    @property
    def keepalive_seconds(self) -> float: ...

    @property
    def header_grace_seconds(self) -> float: ...

    @property
    def max_body_bytes(self) -> int: ...


class _SignsOfLife:
    """Headers after a short grace, in which a failure still gets its own HTTP status; then comments."""

    def __init__(self, request: web.Request, response: web.StreamResponse, sign: bytes, limits: Limits) -> None:
        """`sign`: b"" for silence behind the headers."""
        self.seconds = limits.header_grace_seconds
        self._request, self._response, self._sign = request, response, sign
        self._later = limits.keepalive_seconds if sign else math.inf

    async def give(self) -> None:
        self.seconds = self._later
        try:
            if self._response.prepared:
                await self._response.write(self._sign)
            else:
                await self._response.prepare(self._request)
        except ConnectionError:  # the server is about to cancel this exchange
            self.seconds = math.inf


@dataclass(slots=True)
class Exchange:
    """The answer to one generation request of one session."""

    request: web.Request
    session: Session
    dialect: Dialect
    limits: Limits
    completion: Completion | None = None
    delivery: Delivery = Delivery.UNDELIVERED

    async def run(self) -> web.StreamResponse:
        """The response, written out. Raises PolarError where nothing is written yet.

        The completion is on the ledger before the first byte of it is written, and is marked on every way out:
        delivered once the last byte has left this process over an open connection, undelivered otherwise.
        """
        try:
            incoming = await read(self.request, self.limits.max_body_bytes, self.session)
            with unexpected_as_polar_error():
                chat = self.dialect.decode(incoming)
        except PolarError as error:
            self.session.refused(error)
            raise
        try:
            return await (self._stream if chat.stream else self._whole)(incoming, chat)
        finally:
            if self.completion is not None:
                self.session.mark(self.completion.id, self.delivery)

    async def _whole(self, incoming: Incoming, chat: ChatRequest) -> web.StreamResponse:
        with unexpected_as_polar_error():
            self.completion = await self.session.turn(chat)
            payload = sse.to_json(self.dialect.encode(self.completion, incoming))
        response = web.Response(body=payload, content_type="application/json")
        await self._open(response)
        await response.write_eof()
        self._flushed()
        return response

    async def _stream(self, incoming: Incoming, chat: ChatRequest) -> web.StreamResponse:
        framing = self.dialect.framing(incoming)
        response = web.StreamResponse(headers={**_STREAM_HEADERS, "Content-Type": framing.content_type})
        signs = _SignsOfLife(self.request, response, framing.keepalive, self.limits)
        try:
            with unexpected_as_polar_error():
                self.completion = await self.session.turn(chat, signs)
                payload = framing.encode(self.dialect.events(self.completion, incoming))
        except PolarError as error:
            if not response.prepared:
                raise
            return await self._break_off(response, framing, error)
        await self._open(response)
        await response.write(payload)
        await self.request.writer.drain()
        self._flushed()
        return response

    async def _open(self, response: web.StreamResponse) -> None:
        """Make sure that somebody is there. Raises ConnectionError if not.

        A hang-up that has reached this machine is seen by the event loop within two rounds. With a high-water mark of 0
        a drained connection is an empty one.
        """
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        transport = self.request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client hung up before the answer was written")
        transport.set_write_buffer_limits(high=0)
        await response.prepare(self.request)

    def _flushed(self) -> None:
        """A connection that broke under the write is closing by now; what its client does later changes nothing."""
        transport = self.request.transport
        if transport is not None and not transport.is_closing():
            self.delivery = Delivery.DELIVERED

    async def _break_off(self, response: web.StreamResponse, framing: Framing, error: PolarError) -> web.StreamResponse:
        """The error as an event, and the end of the stream: no terminal event, so nobody takes it for a reply."""
        await response.write(framing.encode([self.dialect.error_event(_in_words(error))]))
        return response


def _in_words(error: PolarError) -> PolarError:
    """Within a stream there is no HTTP status: clients that would retry a 5xx look for it in the message."""
    if error.status < 500:
        return error
    told = copy.copy(error)
    told.args = (f"server error {error.status}: {error}",)
    return told


async def read(request: web.Request, limit: int, session: Session) -> Incoming:
    """The request with its body decoded; `limit` caps the body in bytes, as sent and as decoded.

    Raises BadRequest, or a subclass with a status of its own.
    """
    if (request.content_length or 0) > limit:
        raise body.BodyTooLarge(limit)
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise body.BodyTooLarge(limit) from error
    codings = ",".join(request.headers.getall("Content-Encoding", ()))
    with unexpected_as_polar_error():
        if codings:
            raw = await anyio.to_thread.run_sync(body.decompress, raw, codings, limit)
        parsed = await _parsed(session.resent, raw)
    headers = {name.lower(): value for name, value in request.headers.items()}
    query, variables = dict(request.query), dict(request.match_info)
    return Incoming(request.path, headers, query, parsed, variables, session.recall, session.memory)


async def _parsed(resent: Resent, raw: bytes) -> JSONObject:
    if len(raw) <= _INLINE_BYTES or resent.news(raw) <= _INLINE_BYTES:
        return resent.parse(raw)
    return await anyio.to_thread.run_sync(resent.parse, raw)


def refusal(dialect: Dialect, error: PolarError) -> web.Response:
    """An error that nothing was written before, in the dialect's shape."""
    response = web.Response(
        status=error.status, body=sse.to_json(dialect.error(error)), content_type="application/json"
    )
    if error.status in _RETRYABLE:
        seconds = float(getattr(error, "retry_after", 1.0))
        response.headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    elif error.status < 500:  # SDKs retry 409 by themselves; nothing below 500 gets better here by waiting
        response.headers["x-should-retry"] = "false"
    return response


@contextmanager
def unexpected_as_polar_error() -> Generator[None]:
    """A defect behind the proxy becomes an answer of status 500 and a traceback in the log, at this one place."""
    try:
        yield
    except PolarError:
        raise
    except Exception as error:
        logger.exception("a model call failed unexpectedly")
        raise PolarError(f"internal error: {type(error).__name__}; see the trainer's log") from error
