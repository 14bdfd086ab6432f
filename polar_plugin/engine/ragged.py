"""One forward pass over sequences of different lengths, without padding: exact, and as cheap as one batch.

The new tokens of every sequence are laid end to end in one row, so that all matrix products are shared; only attention
goes sequence by sequence, each against its own keys and values. It plugs into transformers' attention interface, so
any causal LM whose layers are plain or sliding-window attention works unchanged.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from ..errors import EngineError
from ..records import LogProbs, log_probs

ATTENTION = "polar_ragged"
_STOCK = "sdpa"
_BLOCK = 256
_SCORE_ROWS = 64
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class KeyValues:
    """The keys and values of one sequence: a pair of [heads, capacity, head_dim] per layer, `length` of them valid."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def capacity(self) -> int:
        """Tokens that memory is held for."""
        return next((keys.shape[1] for keys, _ in self._layers.values()), 0)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put new [heads, n, head_dim] behind the valid ones; returns all `length + n` of the layer.

        `length` moves by `commit`, once every layer has been written.
        """
        end = self.length + keys.shape[1]
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < end:
            held = self._layers[layer] = (_grown(held and held[0], keys, end), _grown(held and held[1], values, end))
        held[0][:, self.length : end] = keys
        held[1][:, self.length : end] = values
        return held[0][:, :end], held[1][:, :end]

    def commit(self, count: int) -> None:
        self.length += count

    def cut(self, length: int) -> None:
        """Forget all behind the first `length` tokens."""
        self.length = min(self.length, length)

    def fork(self, length: int) -> KeyValues:
        """A copy of the first `length` tokens."""
        copy = KeyValues()
        copy.length = length
        copy._layers = {
            layer: (_grown(keys[:, :length], keys, length), _grown(values[:, :length], values, length))
            for layer, (keys, values) in self._layers.items()
        }
        return copy


def _grown(old: Tensor | None, like: Tensor, needed: int) -> Tensor:
    held = 0 if old is None else old.shape[1]
    capacity = -(-max(needed, min(2 * held, held + 4096)) // _BLOCK) * _BLOCK
    new = like.new_empty((like.shape[0], capacity, like.shape[2]))
    if old is not None:
        new[:, :held] = old
    return new


@dataclass(eq=False)
class Row:
    """The next tokens of one sequence, which follow those in `kv`."""

    kv: KeyValues
    ids: Sequence[int]
    wanted: int
    """Behind how many of them, the last ones, logits are wanted."""
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict[int | None, Tensor | None])

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Bool [n, length + n], True where a token may look; None where it may look everywhere."""
        if window not in self._masks:
            self._masks[window] = _mask(self.kv.length, len(self.ids), window, device)
        return self._masks[window]


def _mask(past: int, new: int, window: int | None, device: torch.device) -> Tensor | None:
    if new == 1 and (window is None or past < window):
        return None
    keys = torch.arange(past + new, device=device)
    queries = torch.arange(past, past + new, device=device)[:, None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    rows: Sequence[Row] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls: query [1, heads, tokens, head_dim] to [1, tokens, heads, head_dim]."""
    if odd := [name for name in _UNSUPPORTED if kwargs.get(name) is not None]:
        raise EngineError(f"{type(module).__name__} needs {', '.join(odd)}, which the embedded engine does not compute")
    out: list[Tensor] = []
    start = 0
    for row in rows:
        end = start + len(row.ids)
        keys, values = row.kv.write(module.layer_idx, key[0, :, start:end], value[0, :, start:end])
        seen = scaled_dot_product_attention(
            query[:, :, start:end],
            keys[None],
            values[None],
            attn_mask=row.mask(sliding_window, query.device),
            scale=scaling,
            enable_gqa=keys.shape[0] != query.shape[1],
        )
        out.append(seen)
        start = end
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


def adopt(model: PreTrainedModel) -> None:
    """Make `model` compute attention by rows. Raises EngineError where its architecture does not allow it."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    before: Any = getattr(model.config, "_attn_implementation", None)
    try:
        model.set_attn_implementation(ATTENTION)
        fits = getattr(model.config, "_attn_implementation", None) == ATTENTION
    except ValueError:
        fits = False
    if not fits or kinds - {"full_attention", "sliding_attention"}:
        if fits:
            model.set_attn_implementation(before)
        raise EngineError(
            f"the embedded engine runs causal LMs of plain or sliding-window attention, not {type(model).__name__}"
            f" (layers: {', '.join(sorted(kinds)) or 'unknown'}); serve it with SGLang or vLLM"
        )
    model.eval()


def release(model: PreTrainedModel) -> None:
    """Undo `adopt`."""
    model.set_attn_implementation(_STOCK)


@torch.inference_mode()
def forward(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """Logits behind each row's `wanted` tokens, float32 [wanted of all rows, vocab]; keys and values are kept."""
    ids = [token for row in rows for token in row.ids]
    positions = [row.kv.length + i for row in rows for i in range(len(row.ids))]
    ends = np.cumsum([len(row.ids) for row in rows]).tolist()
    wanted = [i for row, end in zip(rows, ends, strict=True) for i in range(end - row.wanted, end)]
    logits = model(
        input_ids=torch.tensor([ids], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        use_cache=False,
        logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=model.device),
        rows=rows,
    ).logits[0]
    for row in rows:
        row.kv.commit(len(row.ids))
    return logits.float()


@torch.inference_mode()
def score(model: PreTrainedModel, ids: Sequence[int], temperature: float) -> LogProbs:
    """float32 [n - 1]: the log-probability of each id after the ids before it, by one stock forward pass.

    It shares no cache and no attention code with `forward`, so that one can prove the other. Logits are made of a few
    rows at a time: of all they would take many times the memory of everything else.
    """
    tokens = torch.tensor([list(ids)], device=model.device)
    parts = [np.empty(0, np.float32)]
    with _stock_attention(model), _hidden_states_kept(model, tokens):
        for start in range(0, len(ids) - 1, _SCORE_ROWS):
            rows = torch.arange(start, min(start + _SCORE_ROWS, len(ids) - 1), device=model.device)
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=rows).logits[0]
            scaled = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
            parts.append(scaled.gather(1, tokens[0, rows + 1, None])[:, 0].cpu().numpy())
    return log_probs(np.concatenate(parts))


@contextmanager
def _hidden_states_kept(model: PreTrainedModel, tokens: Tensor) -> Generator[None]:
    """The layers go over `tokens` once; inside, every call of `model` is its head over what they gave."""
    base: Any = model.base_model
    outputs = base(input_ids=tokens, use_cache=False)

    def kept(*_: Any, **__: Any) -> Any:
        return outputs

    base.forward = kept
    try:
        yield
    finally:
        del base.forward


@contextmanager
def _stock_attention(model: PreTrainedModel) -> Generator[None]:
    model.set_attn_implementation(_STOCK)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
