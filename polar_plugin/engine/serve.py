"""The embedded engine behind SGLang's HTTP surface, as far as a token-in, token-out client uses it.

Shapes and defaults are those of SGLang 0.5.23 (`/generate`, aborts, pauses, weight versions). What it would do and this
engine cannot (grammars, penalties, streaming, n > 1) is refused with 400, never ignored.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast, get_args

import anyio
import orjson
from aiohttp import web
from anyio.abc import TaskStatus

from ..errors import BadRequest, EngineError
from ..records import JSONObject
from .generate_api import GenerateRequest, answer, read_request
from .scheduler import PauseMode, Sampled
from .transformers import TransformersEngine


def create_app(engine: TransformersEngine) -> web.Application:
    """The routes over an engine that is open. Serve it with `handler_cancellation=True`, so that a hang-up aborts."""
    api = _Api(engine)
    app = web.Application(client_max_size=256 * 2**20, middlewares=[_errors])
    app.router.add_post("/generate", api.generate)
    app.router.add_post("/abort_request", api.abort)
    app.router.add_post("/pause_generation", api.pause)
    app.router.add_post("/continue_generation", api.resume)
    app.router.add_post("/update_weight_version", api.update_weight_version)
    app.router.add_get("/health", _empty)
    app.router.add_get("/health_generate", api.health_generate)
    app.router.add_get("/workers", api.workers)
    for name, handler in (("model_info", api.model_info), ("server_info", api.server_info)):
        app.router.add_get(f"/{name}", handler)
        app.router.add_get(f"/get_{name}", handler)
    return app


async def serve(
    engine: TransformersEngine,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Open the engine, serve until cancelled, close both. `task_status` is told the base URL; port 0 picks one."""
    async with engine, _running(create_app(engine), host, port) as url:
        task_status.started(url)
        await anyio.sleep_forever()


@asynccontextmanager
async def _running(app: web.Application, host: str, port: int) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2)
    try:
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


class _Api:
    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._in_flight: set[str] = set()

    async def generate(self, request: web.Request) -> web.Response:
        asked = read_request(await _body(request), request.headers, self._engine)
        if asked.rid in self._in_flight:
            raise BadRequest(f"a request with the id {asked.rid!r} is running", path="rid")
        self._in_flight.add(asked.rid)
        started = time.monotonic()
        try:
            scored = await self._engine.score(asked.prompt) if asked.score_from >= 0 else None
            sampled = await self._sample(asked)
        finally:
            self._in_flight.discard(asked.rid)
        return _json(answer(asked, sampled, scored, self._engine, time.monotonic() - started))

    async def _sample(self, asked: GenerateRequest) -> Sampled | None:
        """None where only the prompt is scored."""
        if asked.sampling.max_tokens == 0:
            return None
        return await self._engine.sample(
            asked.prompt, asked.sampling, request_id=asked.rid, session_id=asked.session_id, stop_ids=asked.stop_ids
        )

    async def abort(self, request: web.Request) -> web.Response:
        body = await _body(request)
        rid = body.get("rid") or ""
        if rid or body.get("abort_all"):
            await self._engine.abort("" if body.get("abort_all") else str(rid))
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise BadRequest(f"{mode!r} is none of {', '.join(get_args(PauseMode))}", path="mode")
        await self._engine.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await _body(request)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequest("a string is needed", path="new_version")
        if body.get("abort_all_requests", True):
            await self._engine.abort()
        await self._engine.set_version(version)
        return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def health_generate(self, request: web.Request) -> web.Response:
        await self._engine.probe()
        return web.Response()

    async def workers(self, request: web.Request) -> web.Response:
        """What a router answers; this server is its own one worker."""
        url = f"http://{request.host}"
        worker = {"id": url, "url": url, "model_id": self._engine.info.model, "is_healthy": True, "load": 0}
        return _json({"workers": [{**worker, "worker_type": "regular", "connection_mode": "http"}], "total": 1})

    async def model_info(self, request: web.Request) -> web.Response:
        info = self._engine.info
        return _json(
            {
                "model_path": info.model,
                "served_model_name": info.model,
                "tokenizer_path": info.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": info.weight_version,
                "vocab_size": self._engine.vocab_size,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        info = self._engine.info
        limit = info.context_length
        return _json(
            {
                "served_model_name": info.model,
                "context_length": limit,
                "max_req_input_len": limit - 1,
                "max_total_num_tokens": limit,
                "weight_version": info.weight_version,
                "version": "polar-plugin",
            }
        )


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as SGLang words them; 400 for what the caller can mend."""
    try:
        return await handler(request)
    except (BadRequest, EngineError) as error:
        kind = "invalid_request_error" if error.status == 400 else "internal_error"
        return _json({"error": {"message": str(error), "type": kind, "code": error.status}}, status=error.status)


async def _empty(request: web.Request) -> web.Response:
    return web.Response()


async def _body(request: web.Request) -> JSONObject:
    raw = await request.read()
    try:
        body: Any = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return cast("JSONObject", body)


def _json(body: JSONObject, status: int = 200) -> web.Response:
    raw = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=raw, status=status, content_type="application/json")
