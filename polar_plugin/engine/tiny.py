"""A tiny random model with a tokenizer and chat template of its own, built in seconds without any download.

Its vocabulary has merges, so that sampled ids are seldom what re-tokenising their text would give, and its weights are
wide, so that a token in a wrong context shows in the log-probabilities.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT_LENGTH = 32768
_MERGED_VOCAB = 500

CHAT_TEMPLATE = Path(__file__).with_name("chatml_tools.jinja").read_text("utf-8")
"""ChatML with tools and reasoning, as the Qwen models write it, but append-only: every turn can be extended."""

_TEXT = """\
The agent reads the file, runs the tests and writes a patch; the tests pass and the task is done.
def add(a, b): return a + b
assert add(1, 2) == 3
{"name": "bash", "arguments": {"command": "ls -la /tmp && cat main.py | head -20"}}
for index, value in enumerate(values): print(f"{index}: {value}")
import json, os, sys; from pathlib import Path
What is the weather in Paris today? It is sunny, 22 degrees, with a light wind from the west.
You are a helpful assistant. The user asks a question and the assistant answers it.
""".splitlines()


def build_tiny(directory: Path) -> None:
    """Write the model, its tokenizer and its chat template to `directory`: equal bytes on every call."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    model = _model(len(tokenizer))
    model.config.save_pretrained(directory)
    GenerationConfig(eos_token_id=model.config.eos_token_id).save_pretrained(directory)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=_MERGED_VOCAB, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(_TEXT, trainer)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )


def _model(vocab_size: int) -> Qwen3ForCausalLM:
    end = vocab_size - len(MARKS) - 1
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=end - 2,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)
