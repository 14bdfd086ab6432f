"""What the tests of exact context measure with: a small model, and its log-probabilities by one plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from polar_plugin.engine.base import Renderer
from polar_plugin.records import Completion, LogProbs, TokenIds, Trace, log_probs, token_ids

LIMIT = 1e-4
"""Recomputed and recorded log-probabilities differ by no more, in float32."""


def random_model(renderer: Renderer) -> PreTrainedModel:
    """Two float32 layers of width 32 with one head over the renderer's vocabulary, for up to 32 768 tokens.

    The weights are wide (0.2) so that what stands in the context shows: one other token among 12 000 moves some nine
    in ten of the log-probabilities behind it by more than `LIMIT`, rounding by a fifth of it.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=renderer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16, max_position_embeddings=32768,
        tie_word_embeddings=True, initializer_range=0.2, eos_token_id=renderer.stop_ids[0], bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def scored(model: PreTrainedModel, ids: TokenIds, positions: Sequence[int] | npt.NDArray[np.int64]) -> LogProbs:
    """float32 [len(positions)]: of the ids there (not 0), by one full forward pass of transformers' own.

    The model is in no engine's hands. Logits are made of a few positions at a time.
    """
    tokens, wanted = torch.from_numpy(ids.astype(np.int64)), torch.as_tensor(np.asarray(positions, np.int64))
    hidden = model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    head, parts = model.get_output_embeddings(), [np.empty(0, np.float32)]
    for some in wanted.split(32):
        logits = head(hidden[some - 1]).float()
        chosen = logits.gather(1, tokens[some, None])[:, 0]
        parts.append((chosen - logits.logsumexp(dim=-1)).numpy())
    return log_probs(np.concatenate(parts))


def gaps(model: PreTrainedModel, trace: Trace) -> npt.NDArray[np.float32]:
    """|recomputed - recorded| of each trained token of a trace."""
    ids = token_ids(np.concatenate((trace.prompt_ids, trace.response_ids)))
    again = scored(model, ids, len(trace.prompt_ids) + np.flatnonzero(trace.loss_mask))
    return np.abs(again - trace.response_logprobs[trace.loss_mask])


def drift(model: PreTrainedModel, renderer: Renderer, completion: Completion) -> npt.NDArray[np.float32]:
    """|recorded - as if the prompt had been rendered anew from the request| of what one call sampled."""
    request, output = completion.request, completion.generation.output_ids
    anew = renderer.render(request.messages, request.tools)
    if np.array_equal(anew, completion.prompt_ids):
        return np.zeros(len(output), np.float32)
    scores = scored(model, token_ids(np.concatenate((anew, output))), len(anew) + np.arange(len(output)))
    return np.abs(scores - completion.generation.logprobs)
