"""Text to ids, the short way round `transformers`: the very ids that it would give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from polar_plugin.engine.tokenizer import Plain, Tokenizer, load_tokenizer, scrub
from tests import tokenizers

NAMES = (*tokenizers.NAMES, *tokenizers.WITHOUT_TEMPLATE)
LOADED = {name: load_tokenizer(tokenizers.load(name)) for name in NAMES}
PIECES = [
    " ",
    "\n",
    "<|im_start|>",
    "<｜User｜>",
    "<start_of_turn>",
    "</think>",
    "naïve",
    "你好",
    "\ud800",
    "0x1F",
    "\x00",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=8).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_the_ids_are_those_of_transformers(name: str, text: str) -> None:
    tokenizer = LOADED[name]
    assert tokenizer.encode(text) == tokenizer.hf.encode(scrub(text), add_special_tokens=False)
    assert Plain(tokenizer).encode(scrub(text), add_special_tokens=False) == tokenizer.encode(text)
    assert Plain(tokenizer).encode(scrub(text)) == tokenizer.hf.encode(scrub(text))


@pytest.mark.parametrize("size", [1, 32, 33, 2000, 9000])
def test_texts_that_are_told_again_have_the_same_ids_whatever_is_done_with_them(size: int) -> None:
    tokenizer = LOADED["qwen3"]
    plain, text = Plain(tokenizer), ("é<|im_end|>\n12 " * size)[:size]
    for _ in range(4):
        ids = plain.encode(text, add_special_tokens=False)
        assert ids == tokenizer.encode(text)
        ids.append(0)


def test_what_somebody_else_set_on_the_same_tokenizer_cuts_and_pads_nothing() -> None:
    shared: Any = AutoTokenizer.from_pretrained(tokenizers.load("qwen3"))
    tokenizer = Tokenizer(shared)
    whole = tokenizer.encode("one two three four five")
    shared("one two three four five", truncation=True, max_length=2)
    shared("one", padding="max_length", max_length=32)
    assert tokenizer.encode("one two three four five") == whole
