"""SGLang's `/generate` as data: its body to a request, what was sampled to its answer. Pure.

Defaults and shapes are those of SGLang 0.5.23. Where its API can say what the embedded engine cannot do, the request is
refused, never answered as if it had not asked.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..errors import BadRequest
from ..records import FinishReason, Generation, JSONObject, LogProbs, SamplingParams, TokenIds, log_probs, token_ids
from .scheduler import Sampled
from .transformers import TransformersEngine

_HONOURED = {
    "max_new_tokens": 128,
    "stop": None,
    "stop_token_ids": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "sampling_seed": None,
}
# SGLang has these; asking for anything but what they are anyway would be answered wrongly.
_ONLY_DEFAULT: Mapping[str, Any] = {
    "stop_regex": None,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "beam_width": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stream_interval": None,
    "logit_bias": None,
    "custom_params": None,
    "watermark": None,
}
_ALL_TOKENS = 1 << 30
_NOTHING = Generation(token_ids([]), log_probs([]), FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One body of /generate, read."""

    rid: str
    session_id: str
    prompt: TokenIds
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    logprobs: bool
    score_from: int
    """The prompt's log-probabilities are wanted from this position on; -1: none."""
    skip_special_tokens: bool
    trim: bool


def read_request(body: JSONObject, headers: Mapping[str, str], engine: TransformersEngine) -> GenerateRequest:
    """Raises BadRequest with the path of what is wrong, or of what this engine does not do."""
    if body.get("stream"):
        raise BadRequest("this server does not stream /generate", path="stream")
    params = _sampling(body.get("sampling_params") or {})
    rid = str(body.get("rid") or uuid.uuid4().hex)
    prompt = _prompt(body, engine)
    limit = engine.info.context_length
    if len(prompt) >= limit:
        raise BadRequest(f"the input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)")
    logprobs, start = bool(body.get("return_logprob")), body.get("logprob_start_len")
    if start is not None and not (isinstance(start, int) and -1 <= start < len(prompt)):
        raise BadRequest(f"{start!r} is no position in the prompt", path="logprob_start_len")
    return GenerateRequest(
        rid=rid,
        session_id=str(body.get("routing_key") or headers.get("X-SMG-Routing-Key") or rid),
        prompt=prompt,
        sampling=_sampling_params(params, has_tokenizer=engine.tokenizer is not None),
        stop_ids=(*_ids(params["stop_token_ids"] or (), "stop_token_ids"), *_eos(params, engine)),
        logprobs=logprobs,
        score_from=-1 if start is None or not logprobs else start,
        skip_special_tokens=bool(params["skip_special_tokens"]),
        trim=not params["no_stop_trim"],
    )


def _eos(params: JSONObject, engine: TransformersEngine) -> tuple[int, ...]:
    return () if params["ignore_eos"] else engine.eos_ids


def _prompt(body: JSONObject, engine: TransformersEngine) -> TokenIds:
    ids: Any = body.get("input_ids")
    if ids is None and isinstance(body.get("text"), str) and engine.tokenizer is not None:
        ids = engine.tokenizer.encode(body["text"])
    checked = _ids(ids, "input_ids")
    if not len(checked):
        raise BadRequest("a non-empty list of token ids is needed", path="input_ids")
    if int(checked.max()) >= engine.vocab_size:
        raise BadRequest(f"{checked.max()} is out of the vocabulary ({engine.vocab_size})", path="input_ids")
    return checked


def _ids(values: Any, path: str) -> TokenIds:
    try:
        array = np.asarray(values)
        if array.ndim != 1:
            raise ValueError("one flat list of token ids is needed")
        return token_ids(array)
    except (ValueError, TypeError) as error:
        raise BadRequest(str(error), path=path) from error


def _sampling(given: Any) -> JSONObject:
    """Sampling parameters with SGLang's defaults; null means the default."""
    if not isinstance(given, dict):
        raise BadRequest("one object is needed; a list of prompts is not served", path="sampling_params")
    told = {str(key): value for key, value in cast("JSONObject", given).items() if value is not None}
    if unknown := sorted(set(cast("JSONObject", given)) - set(_HONOURED) - set(_ONLY_DEFAULT)):
        raise BadRequest(f"unknown: {', '.join(unknown)}", path="sampling_params")
    if odd := [key for key, value in _ONLY_DEFAULT.items() if told.get(key, value) != value]:
        raise BadRequest(f"not supported by the embedded engine: {', '.join(odd)}", path="sampling_params")
    unbounded = "max_new_tokens" in given and "max_new_tokens" not in told
    return {**_HONOURED, **told, **({"max_new_tokens": None} if unbounded else {})}


def _sampling_params(params: JSONObject, *, has_tokenizer: bool) -> SamplingParams:
    stop: Any = params["stop"] or ()
    if stop and not has_tokenizer:
        raise BadRequest("stop strings need a tokenizer, which this server has not", path="sampling_params.stop")
    limit, seed = params["max_new_tokens"], params["sampling_seed"]
    top_k = int(_number(params, "top_k", lambda value: value == -1 or value >= 1))
    return SamplingParams(
        temperature=_number(params, "temperature", lambda value: 0 <= value < float("inf")),
        top_p=_number(params, "top_p", lambda value: 0 < value <= 1),
        top_k=-1 if top_k >= _ALL_TOKENS else top_k,
        max_tokens=None if limit is None else int(_number(params, "max_new_tokens", lambda value: value >= 0)),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        seed=None if seed is None else int(_number(params, "sampling_seed", lambda _: True)),
    )


def _number(params: JSONObject, name: str, fits: Callable[[float], bool]) -> float:
    value: Any = params[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise BadRequest(f"{value!r} is out of range", path=f"sampling_params.{name}")
    return value


def answer(
    asked: GenerateRequest, sampled: Sampled | None, scored: LogProbs | None, engine: TransformersEngine, seconds: float
) -> JSONObject:
    """`sampled` is None where only the prompt was to be scored; `scored` is float32 [p - 1] where it was."""
    generation = sampled.generation if sampled else _NOTHING
    ids = generation.output_ids.tolist()
    meta: JSONObject = {
        "id": asked.rid,
        "finish_reason": _finish(generation, sampled is not None and sampled.aborted),
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": len(ids),
        "cached_tokens": sampled.cached_tokens if sampled else 0,
        "weight_version": engine.info.weight_version,
        "weight_versions": _spans(generation),
        "num_retractions": sampled.retractions if sampled else 0,
        "e2e_latency": seconds,
    }
    if asked.logprobs:
        meta["output_token_logprobs"] = [[lp, i, None] for lp, i in zip(generation.logprobs.tolist(), ids, strict=True)]
        meta["output_token_logprobs_length"] = len(ids)
        meta["input_token_logprobs"] = _input_logprobs(asked, scored)
    return {"text": _text(asked, generation, engine.tokenizer), "output_ids": ids, "meta_info": meta}


def _finish(generation: Generation, aborted: bool) -> JSONObject:
    if aborted:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if generation.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(generation.output_ids)}
    return {"type": "stop", "matched": generation.stop or int(generation.output_ids[-1])}


def _spans(generation: Generation) -> Sequence[JSONObject]:
    spans: list[JSONObject] = []
    start = 0
    for span in generation.versions:
        spans.append({"version": span.version, "start": start, "end": start + span.count})
        start += span.count
    return spans


def _input_logprobs(asked: GenerateRequest, scored: LogProbs | None) -> list[list[Any]]:
    """From `score_from` on; the first has none, as in SGLang."""
    if scored is None:
        return []
    logprobs: list[float | None] = [None, *scored.tolist()]
    logprobs[asked.score_from] = None
    return [[lp, int(i), None] for lp, i in zip(logprobs, asked.prompt, strict=True)][asked.score_from :]


def _text(asked: GenerateRequest, generation: Generation, tokenizer: Any) -> str:
    """Decoded output; the stop id or stop string is cut off, unless asked to stay."""
    if tokenizer is None:
        return ""
    ids = generation.output_ids.tolist()
    stopped = generation.finish_reason is FinishReason.STOP
    if asked.trim and stopped and generation.stop is None:
        ids = ids[:-1]
    text = str(tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens))
    return text.partition(generation.stop)[0] if asked.trim and generation.stop else text
