"""The policy that reinforcement starts from: a tiny model, taught by supervision what sessions look like.

Nothing is known of the harness beforehand: it is run once, with scripted replies, and what it said around them, token
by token, is the frame into which demonstrations are put. So any harness will do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family
import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from polar_plugin.engine.tiny import CHAT_TEMPLATE, MARKS, SPECIAL

IGNORED = -100
LEARNING_RATE = 3e-3
VOCABULARY = 2048
CAREFUL = 0.7


@dataclass(frozen=True)
class Frame:
    """One session of the harness as text, in order: (whether the model said it, what), end marks included."""

    pieces: tuple[tuple[bool, str], ...]

    def filled(self, told: family.Demonstration) -> Iterator[tuple[bool, str]]:
        """The same session, had the demonstrator been there."""
        words = {family.PROBE.wanted: told.wanted, family.PROBE.read: told.read, family.PROBE.seen: told.seen}
        replies = iter(told.replies)
        for said, text in self.pieces:
            if said:
                yield True, f"{next(replies)}<|im_end|>"
                continue
            for old, new in words.items():
                text = text.replace(old, f"\0{old}") if old != new else text
            for old, new in words.items():
                text = text.replace(f"\0{old}", new)
            yield False, text


def make_tokenizer(frame: Frame) -> PreTrainedTokenizerFast:
    """File names and digits are tokens of their own; what the harness always says becomes few long ones."""
    core = Tokenizer(BPE())
    names = Split(Regex("|".join(family.FILES)), "isolated")
    core.pre_tokenizer = PreTokenizers([names, Digits(individual_digits=True), ByteLevel(False, use_regex=False)])
    core.decoder = ByteLevelDecoder()
    sessions = itertools.islice(family.demonstrations("tokenizer"), 200)
    text = ["".join(piece for _, piece in frame.filled(one)) for one in sessions]
    for mark in (*SPECIAL, *MARKS):
        text = [part for whole in text for part in whole.split(mark)]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, min_frequency=20, show_progress=False, initial_alphabet=ByteLevel.alphabet()
    )
    core.train_from_iterator(text, trainer)
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def make_model(tokenizer: Any, seed: int, *, layers: int = 2, width: int = 64) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def pretrain(
    model: Any, tokenizer: Any, frame: Frame, *, seed: int, steps: int, report: Callable[[str], None]
) -> list[float]:
    """Supervised steps over fresh demonstrations, on what the model says alone; the loss of each step."""
    first, then = family.demonstrations(seed, careful=True), family.demonstrations(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    losses: list[float] = []
    for step in range(steps):
        shown = itertools.islice(first if step < steps * CAREFUL else then, 32)
        ids, labels = padded([encoded(tokenizer, frame, one) for one in shown], tokenizer.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 100 == 99:
            report(f"supervised step {step + 1}: loss {sum(losses[-50:]) / 50:.3f}")
    return losses


def encoded(tokenizer: Any, frame: Frame, told: family.Demonstration) -> tuple[list[int], list[int]]:
    """Token ids, and labels that are the ids where the model speaks."""
    ids: list[int] = []
    labels: list[int] = []
    for said, text in frame.filled(told):
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        labels += piece if said else [IGNORED] * len(piece)
    return ids, labels


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """int64 [rows, longest] ids and labels; padding stands behind, where causal attention does not see it."""
    size = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad] * (size - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (size - len(labels)) for _, labels in rows])
    return ids, labels


def save(directory: Path, model: Any, tokenizer: Any) -> None:
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
