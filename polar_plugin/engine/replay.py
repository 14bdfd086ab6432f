"""What SGLang tells beside the tokens, for trainers that replay it: experts and the choices that top-p left. Pure.

Written against SGLang 0.5.23: `return_routed_experts` (base64 int32 over the positions from `routed_experts_start_len`
to the last token but one) and `return_sampling_mask` (for each output token a list of ids, and its log-probability
among them).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import EngineError
from ..records import Experts, JSONObject, Nucleus, Routing, token_ids

_MOST_EXPERTS = np.iinfo(np.int16).max


def read_experts(meta: JSONObject, start: int, length: int, *, aborted: bool) -> Experts | None:
    """int16 [length - 1 - start, width]; None where there are no rows, or an aborted call told none.

    `length` is prompt and output. Raises EngineError where they are missing or their number does not fit.
    """
    told: Any = meta.get("routed_experts")
    rows = length - 1 - start
    if rows <= 0 or (told is None and aborted):
        return None
    if told is None:
        raise EngineError(
            "the answer has no `meta_info.routed_experts`: start SGLang with --enable-return-routed-experts and a"
            " mixture-of-experts model, or take routed_experts out of engine.replay"
        )
    if int(meta.get("routed_experts_start_len") or start) != start:
        raise EngineError(f"experts were asked for from token {start} but begin at {meta['routed_experts_start_len']}")
    flat = np.frombuffer(base64.b64decode(told), "<i4") if isinstance(told, str) else np.asarray(told, np.int32).ravel()
    if not flat.size or flat.size % rows:
        raise EngineError(f"the engine told {flat.size} experts, which is no multiple of {rows} tokens")
    if flat.min() < 0 or flat.max() > _MOST_EXPERTS:
        raise EngineError(f"the engine told experts from {flat.min()} to {flat.max()}: such there are not")
    experts = flat.astype(np.int16).reshape(rows, -1)
    experts.flags.writeable = False
    return experts


def read_nucleus(meta: JSONObject, ids: Sequence[int]) -> tuple[Nucleus, list[float]]:
    """The choices that each output token was drawn from, and its log-probability among them.

    Raises EngineError where they are missing or do not hold what was sampled.
    """
    choices: Any = meta.get("output_token_sampling_mask")
    logprobs: Any = meta.get("output_token_sampling_logprobs")
    if (choices is None or logprobs is None) and not ids:
        choices, logprobs = [], []
    if choices is None or logprobs is None:
        raise EngineError(
            "the answer has no `meta_info.output_token_sampling_mask`: use an SGLang with return_sampling_mask"
            " (0.5.23 has it), or set top_p to 1 and take top_p out of engine.replay"
        )
    if not len(ids) == len(choices) == len(logprobs):
        raise EngineError(f"{len(ids)} output ids, but choices of {len(choices)} and {len(logprobs)} probabilities")
    for position, (sampled, choice) in enumerate(zip(ids, choices, strict=True)):
        if sampled not in choice:
            raise EngineError(f"output token {position} is {sampled}, which is not among what it was drawn from")
    offsets = np.cumsum([0, *(len(choice) for choice in choices)])
    flat = [one for choice in choices for one in choice]
    return Nucleus(token_ids(np.array(flat, np.int64)), token_ids(offsets)), list(logprobs)


def joined_routing(parts: Sequence[Experts | None], start: int, length: int) -> Routing:
    """Of the calls that made one generation; raises EngineError where a row is missing."""
    known = [part for part in parts if part is not None]
    experts = np.concatenate(known) if known else np.empty((0, 0), np.int16)
    if len(experts) != max(0, length - 1 - start):
        raise EngineError(f"the engine told experts of {len(experts)} tokens, but of {length - 1 - start} it must")
    experts.flags.writeable = False
    return Routing(experts, start)


def joined_nucleus(parts: Sequence[Nucleus]) -> Nucleus:
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    return Nucleus(
        token_ids(np.concatenate([part.ids for part in parts])), token_ids(np.concatenate(([0], np.cumsum(counts))))
    )
