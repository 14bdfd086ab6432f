"""verl's server client as an engine: token ids in, token ids out, at whichever replica verl's load balancer picks.

The client is the `server_manager` that verl hands an agent loop (`verl/workers/rollout/llm_server.py` of 0.9.1).
Its resumption after a weight update and its load balancing stay verl's: the session's id is the request id, so that the
calls of a session go where their prefix is cached. Nothing here imports verl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .engine.base import EngineInfo
from .engine.limits import Limits
from .engine.segments import Patience, Segment, sample_to_end, segment
from .errors import EngineBusy, EngineError
from .records import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan, token_ids

_ABORTED = frozenset({"aborted", "abort"})
_NO_SERVER = "No available servers"


class TokenOutput(Protocol):
    """verl's, as far as it is read (`verl/workers/rollout/replica.py`)."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    """vLLM says "completed" of a stop and of a length alike, SGLang tells them apart."""
    extra_fields: dict[str, Any]
    """`min_global_steps` and `max_global_steps`: the weights that sampled it, all tokens together."""


class ServerClient(Protocol):
    """verl's `LLMServerClient`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput: ...


class VerlEngine:
    """An `Engine` over verl's client. `probe` samples one token, so it waits until verl's servers are awake."""

    def __init__(
        self,
        client: ServerClient,
        *,
        model: str,
        context_length: int,
        vocab_size: int,
        decode: Callable[[list[int]], str],
        stop_strings: bool = True,
        request_timeout: float = 7200.0,
        reissues: int = 20,
    ) -> None:
        """`context_length` is the servers' (`rollout.max_model_len`).

        decode: ids to text; it finds the stop string that ended a call, which verl does not tell.
        stop_strings: whether the servers can stop at strings; SGLang as verl starts it has no tokenizer, so they are
            looked for here, in what was sampled until a stop id.
        request_timeout: seconds for one call; a weight update in its midst takes a training step.
        """
        self._client = client
        self._model = model
        self._context_length = context_length
        self._limits = Limits(context_length, vocab_size)
        self._decode = decode
        self._stop_strings = stop_strings
        self._patience = Patience(request_timeout, reissues)

    async def __aenter__(self) -> VerlEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def probe(self) -> EngineInfo:
        one = await self._call("probe", token_ids([0]), SamplingParams(max_tokens=1), 1, ())
        if len(one.output_ids) != 1:
            raise EngineError(f"verl's server was asked for one token and sampled {len(one.output_ids)}")
        return EngineInfo(self._model, self._context_length, one.versions[0].version if one.versions else "")

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        """See `Engine.generate`. A cancelled call samples on: verl gives no way to abort a single one."""
        max_tokens = sampling.max_tokens or 0
        self._limits.check(prompt_ids, max_tokens)

        async def call(prompt: TokenIds, left: int, number: int) -> Segment:
            return await self._call(session_id, prompt, sampling, left, stop_ids)

        return await sample_to_end(call, prompt_ids, max_tokens, stop_ids, self._patience)

    async def _call(
        self, session_id: str, prompt: TokenIds, sampling: SamplingParams, left: int, stop_ids: Sequence[int]
    ) -> Segment:
        params = _sampling_params(sampling, left, stop_ids)
        if not self._stop_strings:
            params.pop("stop", None)
        try:
            output = await self._client.generate(session_id, prompt_ids=prompt.tolist(), sampling_params=params)
        except Exception as error:  # whatever a remote server raises: Ray wraps it in classes of its own
            if _NO_SERVER in str(error):
                raise EngineBusy(f"verl's load balancer has no server: {error}") from error
            raise EngineError(f"verl's server failed: {type(error).__name__}: {error}") from error
        return self._segment(output, sampling.stop, left, stop_ids)

    def _segment(self, output: TokenOutput, stops: Sequence[str], left: int, stop_ids: Sequence[int]) -> Segment:
        ids = list(output.token_ids)
        if output.log_probs is None:
            raise EngineError("no log-probabilities came: set actor_rollout_ref.rollout.calculate_log_probs=True")
        if len(output.log_probs) != len(ids):
            raise EngineError(f"verl's server told {len(ids)} ids but {len(output.log_probs)} log-probabilities")
        if output.stop_reason in _ABORTED:
            return segment(ids, list(zip(output.log_probs, ids, strict=True)), _versions(output, len(ids)), None)
        if not ids:
            raise EngineError("verl's server sampled nothing: its log says why")
        ended = ids[-1] in stop_ids
        stop = None if ended and self._stop_strings else self._stop_string(ids, stops)
        length = not ended and stop is None and (output.stop_reason == "length" or len(ids) >= left)
        finish = FinishReason.LENGTH if length else FinishReason.STOP
        return segment(ids, list(zip(output.log_probs, ids, strict=True)), _versions(output, len(ids)), finish, stop)

    def _stop_string(self, ids: list[int], stops: Sequence[str]) -> str | None:
        """The one that comes first in the text."""
        if not stops:
            return None
        text = self._decode(ids)
        return min((stop for stop in stops if stop in text), key=text.index, default=None)


def _sampling_params(sampling: SamplingParams, left: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """What both servers of verl take. `logprobs` is a bool for them; without `max_tokens` they would guess."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": left,
        "stop_token_ids": list(stop_ids),
    }
    return {**params, "stop": list(sampling.stop)} if sampling.stop else params


def _versions(output: TokenOutput, count: int) -> tuple[VersionSpan, ...]:
    """One span: "7", or "7-8" where a weight update came in its midst, since verl does not say after which token."""
    low, high = (output.extra_fields.get(f"{end}_global_steps") for end in ("min", "max"))
    if low is None or high is None or not count:
        return ()
    return (VersionSpan(str(low) if low == high else f"{low}-{high}", count),)


def global_steps(versions: Sequence[VersionSpan], default: int) -> tuple[int, int]:
    """The oldest and the newest weights among `versions`; (`default`, `default`) where none is told."""
    told = [int(part) for span in versions if span.version and span.count for part in span.version.split("-")]
    return (min(told), max(told)) if told else (default, default)
