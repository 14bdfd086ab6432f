"""A Hugging Face tokenizer as the renderers need it: text to ids and back, and its chat template as text."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..errors import ConfigError
from ..records import JSONObject, TokenIds, token_ids

_SHORT, _SHORT_KEPT = 32, 512
_LONG, _LONG_KEPT, _SEEN_KEPT = 2000, 64, 100_000
"""Characters of texts that are kept, and how many texts."""
_LOSSLESS = "a b .\n\n  def f(x):\n\treturn 'é' 你好 12345 😀"


class Tokenizer:
    """Wraps a `transformers` tokenizer (or anything with its surface). Read-only after construction; thread-safe."""

    def __init__(self, hf: Any, *, vocab_size: int | None = None, stop_ids: Sequence[int] = ()) -> None:
        """`vocab_size` is the model's where it is known (embeddings are often padded), else the tokenizer's.

        `stop_ids` are ids that end a turn beside the tokenizer's own `eos_token` (a generation_config's list).
        Raises ConfigError where the tokenizer cannot give text back.
        """
        self.hf = copy.copy(hf)
        self.hf.clean_up_tokenization_spaces = False  # some configurations ask for it: it eats sampled spaces
        self.vocab_size = vocab_size or len(hf)
        self._backend = _backend(self.hf)
        self.special = _special_tokens(hf)
        eos = hf.eos_token_id
        ends: list[int] = [*([] if eos is None else [int(eos)]), *stop_ids]
        self.stop_ids = tuple(dict.fromkeys(ends))
        if self.decode(self.encode("a b")).strip() != "a b":
            raise ConfigError(
                "tokenizer: text does not survive encode and decode ('a b' comes back as "
                f"{self.decode(self.encode('a b'))!r}); pass the directory with tokenizer.json instead of the object"
            )

    @property
    def chat_template(self) -> str:
        """The Jinja text of the chat template; "" where there is none."""
        template = self.hf.chat_template
        if isinstance(template, Mapping):
            named = cast("Mapping[str, str]", template)
            return named.get("tool_use") or named.get("default", "")
        return template or ""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it become their ids, none are added. Lone surrogates become U+FFFD."""
        text = scrub(text)
        if self._backend is None:
            return self.hf.encode(text, add_special_tokens=False, verbose=False)
        if self._backend.truncation or self._backend.padding:  # somebody else's settings: the object may be shared
            self._backend.no_truncation()
            self._backend.no_padding()
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: TokenIds | Sequence[int]) -> str:
        """Text of `ids`, special tokens shown. Ids that no token has are skipped."""
        values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self.hf.decode(values, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token(self, text: str) -> int | None:
        """The id of the one token that is `text`; None where there is none."""
        index: int | None = self.hf.convert_tokens_to_ids(text)
        return index if index is not None and self.hf.convert_ids_to_tokens(index) == text else None

    def checked(self, ids: Sequence[int]) -> TokenIds:
        """`ids` as an array; raises ConfigError where one lies outside the model's vocabulary."""
        array = token_ids(ids)
        if array.size and int(array.max()) >= self.vocab_size:
            raise ConfigError(
                f"tokenizer: id {int(array.max())} is outside the model's vocabulary of {self.vocab_size}; "
                "use the tokenizer that belongs to the model, or resize the model's embeddings"
            )
        return array

    def apply(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], prompt: bool, options: Mapping[str, Any]
    ) -> str:
        """The chat template's text; `prompt` adds the generation prompt. Raises whatever the template raises."""
        return self.hf.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=prompt, tokenize=False, **options
        )

    def prompt(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], options: Mapping[str, Any]
    ) -> list[int]:
        """Ids of the chat template's text with the generation prompt."""
        return self.encode(self.apply(messages, tools, True, options))


class Plain:
    """A tokenizer as `renderers` needs it to make ids, and no more.

    Of one that tells where in the text each id begins, the library asks it for every text, to attribute ids in a way
    that nothing here reads: that is most of the cost of a turn's new tokens. The pieces of its format, which it asks
    for with every turn, are kept, and so are long texts from the second time on: a program's system prompt and tools
    are those of each of its sessions.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short: dict[str, tuple[int, ...]] = {}
        self._long: dict[str, TokenIds] = {}
        self._once: set[int] = set()
        """Hashes of the long texts that were seen so far."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `__call__` would be the offsets
            raise AttributeError(name)
        return getattr(self._tokenizer.hf, name)

    def encode(self, text: str, *_: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if add_special_tokens or options:
            return self._tokenizer.hf.encode(text, add_special_tokens=add_special_tokens, **options)
        if len(text) <= _SHORT:
            return list(self._piece(text))
        return self._tokenizer.encode(text) if len(text) < _LONG else self._told(text)

    def _piece(self, text: str) -> tuple[int, ...]:
        known = self._short.get(text)
        if known is None:
            self._short = {} if len(self._short) >= _SHORT_KEPT else self._short
            known = self._short[text] = tuple(self._tokenizer.encode(text))
        return known

    def _told(self, text: str) -> list[int]:
        known = self._long.get(text)
        if known is not None:
            return known.tolist()
        ids, mark = self._tokenizer.encode(text), hash(text)
        if mark in self._once:
            self._long = {} if len(self._long) >= _LONG_KEPT else self._long
            self._long[text] = token_ids(ids)
        else:
            self._once = set() if len(self._once) >= _SEEN_KEPT else self._once
            self._once.add(mark)
        return ids


def load_tokenizer(directory: str | Path, *, vocab_size: int | None = None, stop_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a model directory, with the vocabulary size and stop ids that the files beside it tell.

    Where `AutoTokenizer` rebuilds a tokenizer that loses text although tokenizer.json does not, tokenizer.json is
    taken as it stands (transformers 5 maps some byte-level tokenizers to a class that drops their spaces).
    Raises ConfigError.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(directory)
    if not path.is_dir():
        raise ConfigError(f"tokenizer: {str(directory)!r} is no directory; give one that has tokenizer.json in it")
    try:
        hf: Any = AutoTokenizer.from_pretrained(path)
        if not _lossless(hf) and (path / "tokenizer.json").exists():
            plain: Any = PreTrainedTokenizerFast.from_pretrained(path)
            hf = plain if _lossless(plain) else hf
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"tokenizer: cannot load {str(directory)!r}: {error}") from error
    config = _read_json(path / "config.json")
    inner: JSONObject = config.get("text_config") or {}
    model: int | None = config.get("vocab_size") or inner.get("vocab_size")
    ends: Any = _read_json(path / "generation_config.json").get("eos_token_id") or []
    extra: list[int] = ends if isinstance(ends, list) else [ends]
    return Tokenizer(hf, vocab_size=vocab_size or model, stop_ids=[*stop_ids, *extra])


def scrub(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD: no tokenizer takes them, and tool outputs have them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _backend(hf: Any) -> Any:
    """The `tokenizers` object of a `transformers` tokenizer that makes ids with nothing else; None for any other."""
    from transformers import PreTrainedTokenizerFast

    makers = ("encode", "_encode_plus", "_batch_encode_plus")
    if not isinstance(hf, PreTrainedTokenizerFast) or getattr(hf, "split_special_tokens", False):
        return None
    stock = all(getattr(type(hf), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in makers)
    return hf.backend_tokenizer if stock else None


def _lossless(hf: Any) -> bool:
    ids = hf.encode(_LOSSLESS, add_special_tokens=False)
    return hf.decode(ids, clean_up_tokenization_spaces=False) == _LOSSLESS


def _special_tokens(hf: Any) -> dict[str, int]:
    """Text to id of the tokens that a tokenizer marks as special."""
    added = cast("Mapping[int, Any]", getattr(hf, "added_tokens_decoder", {}))
    special = {str(token): int(index) for index, token in added.items() if getattr(token, "special", True)}
    return special | {str(token): int(hf.convert_tokens_to_ids(token)) for token in hf.all_special_tokens}


def _read_json(path: Path) -> JSONObject:
    return json.loads(path.read_text()) if path.exists() else {}
