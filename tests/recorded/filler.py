"""Filler for texts that may not be shared: of the same number of tokens, and equal where the texts were equal.

A text is filled word by word from a small vocabulary of nonsense; white space, punctuation, numbers, ids and a few
technical words stay. The filler of a word depends on all words before it, so

* equal texts stay equal, and a text that another begins with keeps being its beginning;
* texts that differ in a word differ from there on, those that differ in a number or an id differ only there;
* nothing can be read back: each filler stands for thousands of words.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence

import regex

Encode = Callable[[str], Sequence[int]]
# The pieces that Qwen's byte-pair encoding never crosses: a piece that keeps its token count keeps the text's.
_PIECES = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?P<before>[^\r\n\p{L}\p{N}]?)(?P<word>\p{L}+)|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TECHNICAL = (
    r"</?[A-Za-z][\w:-]*>",  # tags
    r"\b\p{L}+_[\w-]*|\b(?=\w*\d)(?=\w*\p{L})[\w-]{6,}\b",  # identifiers: of functions, calls, sessions
    r"\b\d{4}-\d\d-\d\dT[\d:.]+Z?",
    r"(?<![\w/])~?(?:/[\w.@-]+)+/?",  # paths
    r"\b[\w-]+\.(?:txt|json|md|toml)\b",
)
_VOCABULARY = (
    "lorem", "ipsum", "dolor", "sit", "amet", "elit", "sed", "do", "magna", "aliqua", "quis", "nisi", "ex",
    "ea", "in", "est", "sunt", "culpa", "id", "non", "pro", "de", "re", "vel", "per",
)  # fmt: skip
_CHOICES = 16


class Filler:
    """`encode` gives a text's tokens without special ones; `kept` are patterns of spans that stay as they are."""

    def __init__(self, encode: Encode, kept: Sequence[str] = ()) -> None:
        self._encode = encode
        self._kept = regex.compile("|".join((*kept, *_TECHNICAL)))
        self._tokens = functools.cache(lambda piece: len(encode(piece)))
        self._choices = functools.cache(self._search)

    def __call__(self, text: str) -> str:
        return "".join(self._filled(text))

    def _filled(self, text: str) -> Iterator[str]:
        kept = iter([match.span() for match in self._kept.finditer(text)])
        begin, end = next(kept, (len(text), len(text)))
        state = 0
        for piece in _PIECES.finditer(text):
            while end <= piece.start():
                begin, end = next(kept, (len(text), len(text) + 1))
            word = piece["word"]
            if not word or len(word) == 1 or begin < piece.end():
                yield piece[0]
                continue
            state = zlib.crc32(word.encode(), state)
            choices = self._choices(piece["before"], self._tokens(piece[0])) or [word]
            yield piece["before"] + choices[state % len(choices)]

    def _search(self, before: str, tokens: int) -> list[str]:
        """Up to `_CHOICES` words that make `tokens` tokens behind `before`; none where only a rare word does."""
        found: list[str] = []
        for length in range(max(1, tokens - 1), 3 * tokens + 2):
            for words in itertools.islice(itertools.product(_VOCABULARY, repeat=length), 3000):
                word = "".join(words)
                if self._tokens(before + word) == tokens:
                    found.append(word)
                if len(found) == _CHOICES:
                    return found
        return found
