"""SGLang's token endpoint: `POST /generate` with `input_ids`, at a server or behind its router.

Written against SGLang 0.5.23 (`managers/io_struct.py: GenerateReqInput`, `entrypoints/http_server.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import anyio

from ..errors import EngineError
from ..records import (
    Experts,
    FinishReason,
    Generation,
    JSONObject,
    SamplingParams,
    TokenIds,
    VersionSpan,
    log_probs,
    token_ids,
)
from .base import EngineInfo
from .http import KEEP_ALIVE, Upstream
from .limits import Limits
from .replay import joined_routing, read_experts, read_nucleus
from .segments import Patience, Segment, sample_to_end, segment

_log = logging.getLogger(__name__)

_WORKERS_SECONDS = 30.0  # how long a router's list of workers is believed
_STRIPPED = (
    "a proxy or router in between drops fields (sglang-router 0.3.2 does so on its chat routes)."
    " Set engine.url to a SGLang server itself, or to a router that passes /generate through unchanged"
)


class SGLangEngine:
    """Samples at an SGLang server or router. Use it within `async with`; any number of calls at a time."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        context_length: int | None = None,
        vocab_size: int | None = None,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 1024,
        connect_timeout: float = 10.0,
        request_timeout: float = 3600.0,
        retries: int = 10,
        reissues: int = 20,
        keep_alive: float = KEEP_ALIVE,
        replay: Sequence[str] = (),
    ) -> None:
        """`url` is the address before "/generate".

        model: a name to show; default: the server's own.
        context_length: prompt and output tokens together; default: what `probe` finds.
        vocab_size: ids at or above it are refused here, since one of them kills the server. The server does not tell
            it, so pass the renderer's.
        headers: sent with each request, as for an API key.
        max_connections: sockets; further calls wait for one.
        connect_timeout: seconds to connect.
        request_timeout: seconds for one `generate`, retries and re-issues included; then EngineBusy.
        retries: how often a call that the engine did not begin is sent again.
        reissues: how often in a row a call may be aborted before it sampled anything.
        keep_alive: seconds an idle socket is kept; must be less than the server's (5 s).
        replay: what to tell beside the tokens: "routed_experts" (`Generation.routing`) and "top_p"
            (`Generation.nucleus`, and log-probabilities over what it holds).
        """
        self.replay = tuple(replay)
        self._upstream = Upstream(
            url,
            headers=headers or {},
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            retries=retries,
            keep_alive=keep_alive,
        )
        self._model = model
        self._limits = Limits(context_length, vocab_size)
        self._patience = Patience(request_timeout, reissues)
        self._workers: tuple[str, ...] = ()
        self._workers_until = 0.0

    async def __aenter__(self) -> SGLangEngine:
        await self._upstream.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._upstream.__aexit__(*exc)

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
        replay_from: int = 0,
    ) -> Generation:
        """See `Engine.generate` and `Replaying.generate`.

        No `request_id` may be the beginning of another: SGLang aborts by prefix.
        """
        max_tokens = sampling.max_tokens or 0
        self._limits.check(prompt_ids, max_tokens)
        params = _sampling_params(sampling, stop_ids)
        experts: list[Experts | None] = []

        async def call(prompt: TokenIds, left: int, number: int) -> Segment:
            rid = f"{request_id}_{number:03d}"
            known = replay_from + sum(len(part) for part in experts if part is not None)
            segment, rows = await self._call(prompt, {**params, "max_new_tokens": left}, rid, session_id, known)
            experts.append(rows)
            return segment

        generation = await sample_to_end(call, prompt_ids, max_tokens, stop_ids, self._patience)
        if "routed_experts" not in self.replay:
            return generation
        length = len(prompt_ids) + len(generation.output_ids)
        return replace(generation, routing=joined_routing(experts, replay_from, length))

    async def _call(
        self, prompt: TokenIds, params: Mapping[str, Any], rid: str, session_id: str, known: int = 0
    ) -> tuple[Segment, Experts | None]:
        """What was sampled, and the experts of the tokens from `known` on where they are told."""
        payload: JSONObject = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if "routed_experts" in self.replay:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": known}
        if "top_p" in self.replay:
            payload["return_sampling_mask"] = True
        answer = await self._upstream.post(
            "/generate", payload, headers={"X-SMG-Routing-Key": session_id}, abort=lambda: self._abort(rid)
        )
        told = answer.json()
        segment = read_segment(told, len(prompt), choices="top_p" in self.replay)
        if "routed_experts" not in self.replay:
            return segment, None
        length = len(prompt) + len(segment.output_ids)
        return segment, read_experts(told["meta_info"], known, length, aborted=segment.finish is None)

    async def _abort(self, rid: str) -> None:
        """Tell the server, or each worker behind a router that has no such route."""
        if anyio.current_time() > self._workers_until or not self._workers:
            if await self._upstream.tell(self._upstream.url, "/abort_request", {"rid": rid}):
                return
            self._workers = await self._list_workers()
            self._workers_until = anyio.current_time() + _WORKERS_SECONDS
        async with anyio.create_task_group() as group:
            for worker in self._workers:
                group.start_soon(self._upstream.tell, worker, "/abort_request", {"rid": rid})

    async def _list_workers(self) -> tuple[str, ...]:
        answer = await self._upstream.get(self._upstream.url, "/workers")
        if answer is None:
            return ()
        return tuple(_worker_url(worker["url"]) for worker in answer.json().get("workers", ()))

    async def probe(self) -> EngineInfo:
        """See `Engine.probe`. What it finds out also bounds later calls, where the constructor was told nothing."""
        url = self._upstream.url
        await self._upstream.check_health()
        model = await self._info(url, "model_info")
        # A router's own /get_server_info is about the router, so the workers are asked.
        servers = [await self._info(base, "server_info") for base in await self._list_workers() or (url,)]
        contexts = [known for known in map(_context_length, servers) if known]
        context = self._limits.context_length or min(contexts, default=None)
        if context is None:
            raise EngineError(f"{url} and its workers do not tell their context: set engine.context_length")
        self._limits = Limits(context, self._limits.vocab_size or model.get("vocab_size"))
        await self._sample_one()
        name = self._model or model.get("served_model_name") or model.get("model_path") or ""
        return EngineInfo(name, context, str(model.get("weight_version") or ""))

    async def _sample_one(self) -> None:
        sampling = SamplingParams(max_tokens=1)
        params = {**_sampling_params(sampling, ()), "max_new_tokens": 1}
        one, _ = await self._call(token_ids([0]), params, f"probe_{id(self):x}", "probe")
        if len(one.output_ids) != 1:
            raise EngineError(f"{self._upstream.url} was asked for one token and sampled {len(one.output_ids)}")

    async def _info(self, base: str, name: str) -> JSONObject:
        """What `base` says of itself, by either of the route's two names; empty where it says nothing."""
        for path in (f"/{name}", f"/get_{name}"):
            try:
                answer = await self._upstream.get(base, path)
            except EngineError as error:  # a worker that only its router can reach
                _log.warning("%s", error)
                return {}
            if answer is not None and answer.status == 200:
                return answer.json()
        return {}


def _sampling_params(sampling: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    return params if sampling.seed is None else {**params, "sampling_seed": sampling.seed}


def read_segment(answer: JSONObject, prompt_tokens: int, *, choices: bool = False) -> Segment:
    """Parse one answer of /generate, with what each token was drawn from where there are `choices`.

    Raises EngineError where ids or log-probabilities are missing or disagree.
    """
    meta: Any = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError(f"the answer has no `meta_info`: {_STRIPPED}")
    segment = _read(answer.get("output_ids"), cast("JSONObject", meta), prompt_tokens)
    if not choices:
        return segment
    nucleus, logprobs = read_nucleus(cast("JSONObject", meta), segment.output_ids.tolist())
    return replace(segment, nucleus=nucleus, logprobs=log_probs(logprobs))


def _read(ids: Any, meta: JSONObject, prompt_tokens: int) -> Segment:
    pairs: Any = meta.get("output_token_logprobs")
    if ids is None or pairs is None:
        missing = "output_ids" if ids is None else "meta_info.output_token_logprobs"
        raise EngineError(f"the answer has no `{missing}`: {_STRIPPED}")
    _check_prompt(meta, prompt_tokens)
    try:
        return _segment(list(ids), [(pair[0], pair[1]) for pair in pairs], meta)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise EngineError(f"the answer of /generate cannot be read: {error!r}") from error


def _segment(ids: list[int], pairs: list[tuple[float, int]], meta: JSONObject) -> Segment:
    finish, stop = _finish(meta["finish_reason"])
    return segment(ids, pairs, _versions(meta, len(ids)), finish, stop)


def _check_prompt(meta: JSONObject, sent: int) -> None:
    """A server with --allow-auto-truncate samples under another context than the one that is recorded."""
    read = meta.get("prompt_tokens")
    if read is not None and read != sent:
        raise EngineError(f"{sent} prompt tokens were sent but the engine read {read}: switch its truncation off")


def _finish(reason: JSONObject) -> tuple[FinishReason | None, str | None]:
    kind, matched = reason["type"], reason.get("matched")
    if kind == "stop":
        return FinishReason.STOP, matched if isinstance(matched, str) else None
    if kind == "length":
        return FinishReason.LENGTH, None
    if kind == "abort" and reason.get("status_code") is None:
        return None, None
    raise EngineError(f"the engine ended the call with {kind}: {reason.get('message')}")


def _versions(meta: JSONObject, count: int) -> tuple[VersionSpan, ...]:
    spans = meta.get("weight_versions")
    if spans:
        return tuple(VersionSpan(str(span["version"]), span["end"] - span["start"]) for span in spans)
    version = meta.get("weight_version")
    return () if version is None or not count else (VersionSpan(str(version), count),)


def _context_length(server: JSONObject) -> int | None:
    """Of a request that is served whole: SGLang keeps a few tokens back, and its KV pool may be the smaller bound."""
    # It refuses a prompt of `max_req_input_len` tokens (tp_worker.py) and takes one less.
    known = [bound for bound in (server.get("context_length"), server.get("max_req_input_len")) if bound]
    return min(known) if known else None


def _worker_url(url: str) -> str:
    """A data-parallel worker is listed as "http://host:port@rank"."""
    address, _, rank = url.rpartition("@")
    return (address if rank.isdigit() and address else url).rstrip("/")
