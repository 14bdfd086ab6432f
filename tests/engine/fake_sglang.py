"""A small strict stand-in of SGLang 0.5.23's server, for what a real one does rarely or never."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import orjson
from aiohttp import web

from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.records import Generation, SamplingParams, TokenIds, token_ids

PROMPT = token_ids([5, 6, 7])
_TOP = {
    *("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream"),
    *("return_routed_experts", "routed_experts_start_len", "return_sampling_mask"),
}
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


_numbers = itertools.count()


async def sample(
    engine: SGLangEngine,
    max_tokens: int = 4,
    *,
    prompt: TokenIds = PROMPT,
    stop_ids: tuple[int, ...] = (),
    request_id: str | None = None,
    session_id: str = "session",
    replay_from: int = 0,
    **sampling: Any,
) -> Generation:
    with anyio.fail_after(20):
        return await engine.generate(
            prompt,
            SamplingParams(max_tokens=max_tokens, **sampling),
            request_id=request_id or f"request{next(_numbers)}",
            session_id=session_id,
            stop_ids=stop_ids,
            replay_from=replay_from,
        )
