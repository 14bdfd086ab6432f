"""The admin listener: `GET /status`, on a port and under a token of its own. No session key opens it."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from aiohttp import web

from .config import AdminConfig
from .errors import ConfigError


class Admin:
    """Serves what `status` returns, as JSON, to whoever sends `Authorization: Bearer TOKEN`; 401 to anybody else."""

    def __init__(self, config: AdminConfig, status: Callable[[], dict[str, Any]]) -> None:
        self.token = config.token or secrets.token_urlsafe(24)
        self.url = ""
        """As in "http://127.0.0.1:PORT/status"; set while serving, "" where no port is configured."""
        self._config = config
        self._status = status

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[Admin]:
        """Raises ConfigError where the address cannot be listened on."""
        if self._config.port is None:
            yield self
            return
        app = web.Application()
        app.router.add_get("/status", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await self._listen(runner, self._config.port)
            yield self
        finally:
            self.url = ""
            with anyio.CancelScope(shield=True):
                await runner.cleanup()

    async def _listen(self, runner: web.AppRunner, port: int) -> None:
        host = self._config.host
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"admin.host {host!r}, admin.port {port}: cannot listen there ({error})") from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}/status"

    async def _answer(self, request: web.Request) -> web.Response:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self.token.encode()):
            raise web.HTTPUnauthorized(text="send the admin token as `Authorization: Bearer TOKEN`")
        return web.json_response(self._status())
