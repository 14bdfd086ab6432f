"""Drawing one token from logits, and the log-probability it is recorded with."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..records import SamplingParams


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """float32 log-probabilities over the last axis, at `temperature`; at 0 (greedy) those of temperature 1.

    Over the full vocabulary: top_k and top_p choose among tokens and do not renormalise, as in SGLang.
    """
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def draw(logprobs: Tensor, sampling: SamplingParams, generator: torch.Generator) -> int:
    """One token id from log-probabilities [vocab], truncated to top_k and then top_p."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return int(logprobs.argmax())
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    values, ids = logprobs.sort(descending=True, stable=True)
    weights = _truncate(values.exp(), sampling)
    return int(ids[torch.multinomial(weights, 1, generator=generator)])


def _truncate(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """The head of descending `probs` that top_k and top_p keep; never empty."""
    if sampling.top_k > 0:
        probs = probs[: sampling.top_k]
    before = probs.cumsum(0) - probs
    keep = before < sampling.top_p * probs.sum()
    keep[0] = True
    return probs[keep]


def seeded(*parts: object) -> torch.Generator:
    """A generator whose stream depends on `parts` alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
