"""vLLM's token endpoint: `POST /inference/v1/generate`, which needs `vllm serve --enable-scale-out`.

Written against vLLM 0.32.0 (`entrypoints/scale_out/token_in_token_out/protocol.py: GenerateRequest`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import EngineError
from ..records import FinishReason, Generation, JSONObject, SamplingParams, TokenIds, VersionSpan, token_ids
from .base import EngineInfo
from .http import KEEP_ALIVE, Upstream
from .limits import Limits
from .segments import Patience, Segment, sample_to_end, segment

_GENERATE = "/inference/v1/generate"
_ABORTS = ("/inference/v1/abort_requests", "/abort_requests")  # the second: RL control routes, or --tokens-only
_HINTS = {
    403: "start vLLM with --enable-scale-out",
    404: "this vLLM has no token endpoint, or serves no such model: use 0.32 or newer with --enable-scale-out",
}
_PROCESSED = "start vLLM with --logprobs-mode processed_logprobs"


class VLLMEngine:
    """Samples at a vLLM server. Use it within `async with`; any number of calls at a time."""

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
    ) -> None:
        """As `SGLangEngine`. model: the served model's name; default: the only one there is."""
        self._upstream = Upstream(
            url,
            headers=headers or {},
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            retries=retries,
            keep_alive=keep_alive,
            hints=_HINTS,
        )
        self._model = model
        self._limits = Limits(context_length, vocab_size)
        self._patience = Patience(request_timeout, reissues)
        self._processed: bool | None = None

    async def __aenter__(self) -> VLLMEngine:
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
    ) -> Generation:
        """See `Engine.generate`."""
        max_tokens = sampling.max_tokens or 0
        self._limits.check(prompt_ids, max_tokens)
        self._check_logprobs(sampling)
        params = _sampling_params(sampling, stop_ids)

        async def call(prompt: TokenIds, left: int, number: int) -> Segment:
            rid = f"{request_id}_{number:03d}"
            return read_segment(await self._call(prompt, {**params, "max_tokens": left}, rid, session_id), len(prompt))

        return await sample_to_end(call, prompt_ids, max_tokens, stop_ids, self._patience)

    async def _call(self, prompt: TokenIds, params: Mapping[str, Any], rid: str, session_id: str) -> JSONObject:
        payload = {"request_id": rid, "token_ids": prompt, "sampling_params": params, "stream": False}
        if self._model is not None:
            payload["model"] = self._model
        headers = {"X-SMG-Routing-Key": session_id, "X-Session-ID": session_id}
        answer = await self._upstream.post(_GENERATE, payload, headers=headers, abort=lambda: self._abort(rid))
        return answer.json()

    async def _abort(self, rid: str) -> None:
        for path in _ABORTS:
            # serving.py puts its prefix before the id that we gave.
            if await self._upstream.tell(self._upstream.url, path, {"request_ids": [f"generate-tokens-{rid}"]}):
                return

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        """Refuse where vLLM's log-probabilities are not those of the full vocabulary at the sampling temperature.

        Its default mode reports them before the temperature, the "processed" one after truncation by top_p and top_k.
        """
        if self._processed is False and sampling.temperature not in (0.0, 1.0):
            raise EngineError(
                f"this vLLM reports log-probabilities at temperature 1, not at {sampling.temperature:g}: {_PROCESSED}"
            )
        if self._processed and (sampling.top_p < 1.0 or sampling.top_k > 0):
            raise EngineError(
                "this vLLM reports log-probabilities over what top_p and top_k left: set top_p to 1 and top_k to -1"
            )

    async def probe(self) -> EngineInfo:
        """See `Engine.probe`. Also finds out which log-probabilities the server reports."""
        url = self._upstream.url
        await self._upstream.check_health()
        name, told = await self._served()
        context = self._limits.context_length or told
        if context is None:
            raise EngineError(f"{url} does not tell its context: set engine.context_length")
        self._limits = Limits(context, self._limits.vocab_size)
        self._processed = await self._reports_processed()
        return EngineInfo(name, context, await self._weight_version())

    async def _served(self) -> tuple[str, int | None]:
        """The model's name and context, of GET /v1/models."""
        answer = await self._upstream.get(self._upstream.url, "/v1/models")
        models: Any = [] if answer is None else answer.json().get("data", [])
        for model in models:
            if self._model in (None, model["id"]):
                return model["id"], model.get("max_model_len")
        served = ", ".join(model["id"] for model in models)
        raise EngineError(f"{self._upstream.url} does not serve {self._model!r} but: {served or 'nothing'}")

    async def _reports_processed(self) -> bool:
        """Sample the one id that is allowed: its log-probability is 0 after masking, and below 0 before it."""
        params = {**_sampling_params(SamplingParams(), ()), "max_tokens": 1, "allowed_token_ids": [0]}
        answer = await self._call(token_ids([0]), params, f"probe_{id(self):x}", "probe")
        one = read_segment(answer, 1)
        if one.output_ids.tolist() != [0]:
            raise EngineError(f"{self._upstream.url} was asked for token 0 and sampled {one.output_ids.tolist()}")
        return bool(one.logprobs[0] > -1e-6)

    async def _weight_version(self) -> str:
        """Only servers with RL control routes tell it (VLLM_SERVER_DEV_MODE=1)."""
        answer = await self._upstream.get(self._upstream.url, "/weight_info")
        if answer is None or answer.status != 200:
            return ""
        return str(answer.json().get("weight_version") or "")


def _sampling_params(sampling: SamplingParams, stop_ids: Sequence[int]) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 0,  # the sampled token's own
    }
    return params if sampling.seed is None else {**params, "seed": sampling.seed}


def read_segment(answer: JSONObject, prompt_tokens: int) -> Segment:
    """Parse one answer. Raises EngineError where ids or log-probabilities are missing or disagree."""
    usage: Any = answer.get("usage")
    read: Any = usage and usage.get("prompt_tokens")
    if read is not None and read != prompt_tokens:
        raise EngineError(f"{prompt_tokens} prompt tokens were sent but the engine read {read}")
    try:
        choice: Any = answer["choices"][0]
        finish, stop = _finish(choice["finish_reason"], choice.get("stop_reason"))
        versions = _versions(choice.get("weight_versions"))
        return segment(choice["token_ids"] or [], _scored(choice["logprobs"]), versions, finish, stop)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise EngineError(f"the answer of {_GENERATE} cannot be read: {error!r}") from error


def _scored(logprobs: Any) -> list[tuple[float, int]]:
    content: Any = logprobs["content"] if logprobs else None
    return [(entry["logprob"], entry["token_id"]) for entry in content or ()]


def _finish(reason: str | None, stop: str | int | None) -> tuple[FinishReason | None, str | None]:
    if reason == "stop":
        return FinishReason.STOP, stop if isinstance(stop, str) else None
    if reason == "length":
        return FinishReason.LENGTH, None
    if reason == "abort":
        return None, None
    raise EngineError(f"the engine ended the call with {reason!r}: its log says why")


def _versions(spans: Sequence[Mapping[str, Any]] | None) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(str(span["version"]), span["end"] - span["start"]) for span in spans or ())
