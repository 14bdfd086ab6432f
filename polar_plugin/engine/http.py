"""HTTP to one engine: pooled sockets, what may be sent twice and what may not, and aborts that arrive."""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import anyio
import orjson

from ..errors import ConfigError, EngineBusy, EngineError
from ..records import JSONObject

_log = logging.getLogger(__name__)

KEEP_ALIVE = 3.0
"""Seconds an idle socket stays pooled: less than the 5 s after which SGLang and vLLM (uvicorn) close theirs."""
CONTROL_SECONDS = 2.0
"""How long an abort may take; the caller waits for it while it is being cancelled."""
_GET_SECONDS = 30.0  # SGLang's /health takes up to 20
_STALE_SECONDS = 1.0
_BUSY = frozenset({429, 503})
_CONTROL_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP response."""

    url: str
    status: int
    body: bytes
    retry_after: float = 0.0

    def json(self) -> JSONObject:
        """The body as a JSON object; raises EngineError where it is none."""
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.url} answered {self.status} with no JSON: {self._text()}") from error
        if not isinstance(value, dict):
            raise EngineError(f"{self.url} answered {self.status} with no JSON object: {self._text()}")
        return cast("JSONObject", value)

    @property
    def message(self) -> str:
        """The engine's own words for what went wrong, wherever its dialect puts them."""
        try:
            value: Any = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return self._text()
        for key in ("error", "detail", "message"):
            value = cast("JSONObject", value).get(key, value) if isinstance(value, dict) else value
        return value if isinstance(value, str) else self._text()

    def _text(self) -> str:
        return self.body[:500].decode(errors="replace").strip() or "(an empty body)"


@dataclass(slots=True)
class _Trip:
    """How far one request came, as aiohttp's tracing tells."""

    reused: bool = False
    sent: bool = False
    answered: bool = False


class _NotSentError(Exception):
    """The engine cannot have begun on this request: it may be sent again."""


class Upstream:
    """One engine's address and its sockets. An async context manager; all calls within it."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        max_connections: int,
        connect_timeout: float,
        retries: int,
        keep_alive: float = KEEP_ALIVE,
        hints: Mapping[int, str] | None = None,
    ) -> None:
        """`hints`: by status of a refused call, what to change."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url: {url!r} is no address: write it as in 'http://host:30000'")
        self.url = url.rstrip("/")
        self._headers = {**headers, "Content-Type": "application/json"}
        self._max_connections = max_connections
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
        self._retries = retries
        self._keep_alive = keep_alive
        self._hints = hints or {}
        self._calls: aiohttp.ClientSession | None = None
        self._control: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        # Aborts have sockets of their own: they must get through when every other socket waits for a generation.
        self._calls = self._session(self._max_connections)
        self._control = self._session(_CONTROL_CONNECTIONS)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for session in (self._calls, self._control):
            if session is not None:
                await session.close()
        self._calls = self._control = None

    def _session(self, connections: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=connections, keepalive_timeout=self._keep_alive, socket_factory=_probed_socket
            ),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            trace_configs=[_tracing()],
        )

    async def post(
        self, path: str, payload: Mapping[str, Any], *, headers: Mapping[str, str], abort: Callable[[], Awaitable[None]]
    ) -> Answer:
        """The answer of status 200 to a POST that starts work; numpy arrays in `payload` become JSON lists.

        Sent again, with growing pauses, only where the engine cannot have begun or says that it is busy; the payload
        should carry an id of its own, so that even then no engine runs it twice. `abort` is awaited (shielded, bounded)
        when the call is cancelled after it was sent. Raises EngineBusy or EngineError.
        """
        body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
        pauses = _pauses(self._retries)
        while True:
            try:
                answer = await self._send(path, body, headers, abort)
            except _NotSentError as error:
                trouble = EngineBusy(str(error))
                trouble.__cause__ = error.__cause__
                asked = 0.0
            else:
                if answer.status not in _BUSY:
                    return self._accepted(answer)
                asked = answer.retry_after
                words = f"{answer.url} is busy ({answer.status}): {answer.message}"
                trouble = EngineBusy(words, retry_after=max(1.0, asked))
            pause = next(pauses, None)
            if pause is None:
                raise trouble
            await anyio.sleep(max(pause, asked))

    async def _send(
        self, path: str, body: bytes, headers: Mapping[str, str], abort: Callable[[], Awaitable[None]]
    ) -> Answer:
        trip, url, started = _Trip(), self.url + path, anyio.current_time()
        try:
            # A file, since aiohttp warns of bytes beyond 1 MiB: a prompt of 200 000 ids.
            async with _open(self._calls).post(
                url, data=io.BytesIO(body), headers=headers, trace_request_ctx=trip
            ) as response:
                trip.answered = True
                return await _read(response)
        except anyio.get_cancelled_exc_class():
            if trip.sent:  # leaving the block above has closed the socket
                with anyio.move_on_after(CONTROL_SECONDS, shield=True):
                    await abort()
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotSentError(f"no engine can be reached at {self.url} ({error})") from error
        except aiohttp.ClientError as error:
            stale = trip.reused and not trip.answered and anyio.current_time() - started < _STALE_SECONDS
            if stale and isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
                raise _NotSentError(f"{self.url} closed its idle connections") from error
            raise EngineError(
                f"the connection to {url} broke before the answer was complete ({error!r}): the engine or a router"
                " may have restarted; its log says why"
            ) from error

    def _accepted(self, answer: Answer) -> Answer:
        if answer.status == 200:
            return answer
        blame = "refused the call" if answer.status < 500 else "failed"
        hint = f" ({self._hints[answer.status]})" if answer.status in self._hints else ""
        raise EngineError(f"{answer.url} {blame} ({answer.status}): {answer.message}{hint}")

    async def get(self, base: str, path: str) -> Answer | None:
        """The answer to a GET, whatever its status; None where `base` has no such route (404, 405).

        Raises EngineError where nobody answers.
        """
        url = base + path
        try:
            with anyio.fail_after(_GET_SECONDS):
                async with _open(self._control).get(url) as response:
                    return None if response.status in (404, 405) else await _read(response)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"no engine can be reached at {url} ({error!r}): start it, or mend engine.url") from error

    async def check_health(self) -> None:
        """Raises EngineError where the engine is away, starting or sick."""
        answer = await self.get(self.url, "/health")
        if answer is not None and answer.status != 200:
            raise EngineError(f"{answer.url} answered {answer.status}: the engine is still starting, or has failed")

    async def tell(self, base: str, path: str, payload: Mapping[str, Any]) -> bool:
        """POST a control message once; False where the address has no such route. A failure is logged, not raised."""
        url = base + path
        try:
            async with _open(self._control).post(url, data=orjson.dumps(payload)) as response:
                if response.status in (404, 405):
                    return False
                if response.status != 200:
                    _log.warning("%s answered %d to %s", url, response.status, payload)
        except aiohttp.ClientError as error:
            _log.warning("%s did not take %s: %r", url, payload, error)
        return True


def _open(session: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
    if session is None:
        raise EngineError("the engine client is not open: use it within `async with engine:`")
    return session


def _probed_socket(address: Any) -> socket.socket:
    """A generation may be silent for minutes: the kernel's probes keep routers from dropping its connection."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 30)):  # not on every system
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return made


def _tracing() -> aiohttp.TraceConfig:
    tracing = aiohttp.TraceConfig()

    async def reused(_session: object, context: Any, _params: object) -> None:
        if isinstance(context.trace_request_ctx, _Trip):
            context.trace_request_ctx.reused = True

    async def sent(_session: object, context: Any, _params: object) -> None:
        if isinstance(context.trace_request_ctx, _Trip):
            context.trace_request_ctx.sent = True

    tracing.on_connection_reuseconn.append(reused)
    tracing.on_request_headers_sent.append(sent)
    return tracing


async def _read(response: aiohttp.ClientResponse) -> Answer:
    try:
        retry_after = float(response.headers.get("Retry-After", "0"))
    except ValueError:  # a date
        retry_after = 0.0
    return Answer(str(response.url), response.status, await response.read(), retry_after)


def _pauses(retries: int) -> Iterator[float]:
    """0.1, 0.2, 0.4, ... seconds, at most 8: a dozen retries sit out a weight update of a minute."""
    return (min(0.1 * 2**number, 8.0) for number in range(retries))
