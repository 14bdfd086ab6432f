"""Serve an aiohttp application on a free port, for stand-ins of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def listening(app: web.Application, **runner: Any) -> AsyncIterator[str]:
    """Its URL. Handlers are cancelled when their client hangs up."""
    site_runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, **runner)
    await site_runner.setup()
    await web.TCPSite(site_runner, "127.0.0.1", 0).start()
    host, port = site_runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await site_runner.cleanup()
