"""The HTTP shell: routes, session keys, listening sockets. All meaning lives in the dialects and the session."""

from __future__ import annotations

import gc
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web

from ..errors import BadRequest, ConfigError, PolarError
from ..runtimes.base import ProxyEndpoint
from .anthropic_messages import AnthropicMessages
from .codec import Dialect, Kind
from .exchange import Exchange, read, refusal, unexpected_as_polar_error
from .google_generate import GoogleGenerate
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses
from .session import Reply, Session, SessionTable

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PREFIXES = ("", "/s/{key:[A-Za-z0-9_-]+}")
_SHUTDOWN_SECONDS = 2.0
_HEADER_BYTES = 64 * 1024
"""Of one header or of the request line: programs put JSON of their own into headers, and keys into URLs."""
_DIALECTS: tuple[Dialect, ...] = (AnthropicMessages(), OpenAIResponses(), GoogleGenerate(), OpenAIChat())
"""OpenAI Chat is last: it takes what no other one knows."""


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Where the proxy listens and what it takes."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: one that is free."""
    unix_socket: Path | None = None
    """Listen here as well, for sandboxes without a network."""
    advertise_host: str | None = None
    """The host in the URL that harnesses get, where it is not `host`: a bridge's address, a machine's name."""
    keepalive_seconds: float = 5.0
    """Between signs of life on a stream that waits; the strictest client known gives up after 10 s of silence."""
    header_grace_seconds: float = 1.0
    """A stream's headers are sent after this long at the latest; a failure within it gets an HTTP status of its own."""
    idle_seconds: float = 3600.0
    """How long an idle connection is kept: a tool may run for long between two calls."""
    max_body_bytes: int = 64 * 2**20
    """Cap on a request body, as sent and as decoded."""


class UnknownRoute(BadRequest):
    """No endpoint of a model API has this path and method: nothing is generated."""

    status = 404


class UpgradeRequired(BadRequest):
    """A WebSocket was asked for. This status makes clients fall back to HTTP without another try."""

    status = 426


class Proxy:
    """Speaks the model APIs to harnesses, one session key an attempt. Lives on one event loop."""

    def __init__(self, config: ProxyConfig | None = None, dialects: Sequence[Dialect] = _DIALECTS) -> None:
        self.config = config or ProxyConfig()
        self.url = ""
        """Base URL without "/v1"; set while serving."""
        self._dialects = tuple(dialects)
        self._table = SessionTable()

    @property
    def unix_socket(self) -> Path | None:
        return self.config.unix_socket

    @property
    def endpoint(self) -> ProxyEndpoint:
        """Where it listens; only while serving."""
        return ProxyEndpoint(self.url, self.unix_socket)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[Proxy]:
        """Listen on TCP and, where set, on the Unix socket. On exit all sessions are sealed and all calls cancelled.

        Raises ConfigError where an address cannot be listened on.
        """
        async with self._table.running():
            frozen = gc.get_freeze_count()
            gc.freeze()  # a full collection of all that a trainer has loaded would stop every stream for 0.3 s
            runner = web.AppRunner(
                self._application(),
                handler_cancellation=True,  # a hang-up cancels the turn
                auto_decompress=False,  # bodies are decoded here, under a cap
                keepalive_timeout=self.config.idle_seconds,
                shutdown_timeout=_SHUTDOWN_SECONDS,
                access_log=None,  # paths may hold session keys
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
            )
            await runner.setup()
            try:
                await self._listen(runner)
                yield self
            finally:
                self._table.close_all()
                with anyio.CancelScope(shield=True):
                    await runner.cleanup()
                if self.unix_socket is not None:
                    self.unix_socket.unlink(missing_ok=True)
                self.url = ""
                if not frozen:  # what the trainer froze by itself stays so
                    gc.unfreeze()

    @asynccontextmanager
    async def session(self, session_id: str, reply: Reply, /, **metadata: Any) -> AsyncGenerator[Session]:
        """An open session; sealed on exit. `metadata` goes on the ledger; its `model` names the model in listings."""
        session = self._table.open(session_id, reply, metadata)
        try:
            yield session
        finally:
            self._table.close(session)

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Within it new turns of all sessions are held, their streams kept alive; turns in flight go on."""
        return self._table.gate.closed()

    async def _listen(self, runner: web.AppRunner) -> None:
        config = self.config
        site = web.TCPSite(runner, config.host, config.port)
        with _as_config_error(f"proxy.host {config.host!r}, proxy.port {config.port}"):
            await site.start()
        host = config.advertise_host or config.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
        if config.unix_socket is not None:
            with _as_config_error(f"proxy.unix_socket {str(config.unix_socket)!r} (at most 107 bytes long)"):
                await web.UnixSite(runner, config.unix_socket).start()
                config.unix_socket.chmod(0o666)  # containers connect as whoever their image says; keys decide

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self.config.max_body_bytes)
        answers = {
            Kind.GENERATE: self._generate,
            Kind.COUNT: self._count,
            Kind.MODELS: self._models,
            Kind.MODEL: self._model,
            Kind.ALIVE: self._alive,
            Kind.WEBSOCKET: self._no_websocket,
        }
        for prefix in _PREFIXES:
            for (method, path), (kind, dialects) in self._routes().items():
                app.router.add_route(method, prefix + path, self._guarded(dialects, answers[kind]))
        app.router.add_route("*", "/{path:.*}", self._guarded(self._dialects, self._unknown))
        return app

    def _routes(self) -> dict[tuple[str, str], tuple[Kind, list[Dialect]]]:
        """By method and path: what it is for, and the dialects that have it."""
        routes: dict[tuple[str, str], tuple[Kind, list[Dialect]]] = {}
        for dialect in self._dialects:
            for route in dialect.routes:
                routes.setdefault((route.method, route.path), (route.kind, []))[1].append(dialect)
        return routes

    def _guarded(
        self, dialects: Sequence[Dialect], answer: Callable[[web.Request, Dialect], Awaitable[web.StreamResponse]]
    ) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            dialect = _spoken(dialects, request)
            try:
                if not _as_written(request):
                    return await self._unknown(request, dialect)
                return await answer(request, dialect)
            except PolarError as error:
                return refusal(dialect, error)

        return handle

    async def _generate(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._table.find(_keys(request))
        return await Exchange(request, session, dialect, self.config).run()

    async def _count(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._table.find(_keys(request))
        incoming = await read(request, self.config.max_body_bytes, session)
        with unexpected_as_polar_error():
            tokens = await session.count(dialect.decode(incoming))
        return web.json_response(dialect.counted(tokens, incoming))

    async def _alive(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        return web.Response()

    async def _no_websocket(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        self._table.find(_keys(request))
        raise UpgradeRequired("this API is served over HTTP; POST to the same path")

    async def _models(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._table.find(_keys(request))
        return web.json_response(dialect.models([str(session.metadata.get("model", "policy"))]))

    async def _model(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        self._table.find(_keys(request))
        return web.json_response(dialect.model(request.match_info["model"]))

    async def _unknown(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        raise UnknownRoute(f"no model API has {request.method} {request.path}")


def _spoken(dialects: Sequence[Dialect], request: web.Request) -> Dialect:
    """Whose client this is, where several dialects share a path."""
    path = request.path.removeprefix(f"/s/{request.match_info.get('key', '')}")
    headers = {name.lower(): value for name, value in request.headers.items()}
    return next((dialect for dialect in dialects if dialect.speaks(path, headers)), dialects[-1])


def _as_written(request: web.Request) -> bool:
    """Whether the path is spelled as its route is: only within a model's name may characters be escaped."""
    written, resource = request.rel_url.raw_path, request.match_info.route.resource
    if "%" not in written or resource is None:
        return True
    route = resource.canonical.replace("{key}", request.match_info.get("key", ""))
    return bool(re.fullmatch(".+".join(map(re.escape, re.split(r"\{\w+\}", route))), written))


def _keys(request: web.Request) -> Iterator[str]:
    """Every place where a session key may stand, the most deliberate first."""
    if "key" in request.match_info:
        yield request.match_info["key"]
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    yield from (request.headers[name] for name in ("x-api-key", "x-goog-api-key") if name in request.headers)
    yield from request.query.getall("key", ())


@contextmanager
def _as_config_error(setting: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting}: cannot listen there ({error})") from error
