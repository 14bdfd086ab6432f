"""Requests spoiled in their structure and in their bytes, by a seeded source of chance. Pure."""

from __future__ import annotations

import gzip
import json
import marshal
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import zstandard

JSON = dict[str, Any]
Holder = Any
"""A dict or list that is changed in place."""
NUMBERS: Sequence[Any] = (
    0, -1, 1, -0.0, 0.5, 1.0, 4096.0, 2**31, 2**53 + 1, 2**63, -(2**64), 10**400, 1e308, 5e-324, True, False,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\x00", "\ud83d", "\ude00\ud83d", "\ufeff", "\u2028", "é" * 50, "x" * 3000, "=", "====",
    "AAA", "%%%", "{}", "{", "[]", "null",
    '{"a": NaN}', '{"a": 1e999}', "[" * 300, '{"a":' * 200, "0", "-1", "true", "1e5", "..", "/",
    "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    '<tool_call>\n{"name": "bash"}\n</tool_call>', "data:image/png;base64,%%", "data:;base64,", "data:", "a\r\nb",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bank:
    """What is put in the place of something else: keys, short texts and whole pieces of all good requests."""

    keys: tuple[str, ...]
    words: tuple[str, ...]
    pieces: tuple[Any, ...]

    @classmethod
    def of(cls, bodies: Iterable[Any], words: Iterable[str] = ()) -> Bank:
        values = [value for body in bodies for value in _within(body)]
        keys = {key for value in values if isinstance(value, dict) for key in value}
        texts = {value for value in values if isinstance(value, str) and len(value) < 30}
        pieces = {json.dumps(value): value for value in values if isinstance(value, dict | list)}
        small = tuple(pieces[told] for told in sorted(pieces) if len(told) < 2000)
        return cls(tuple(sorted(keys)), tuple(sorted(texts | set(words))), small)


def _copy(value: Any) -> Any:
    """Of JSON, in a fraction of the time of `copy.deepcopy`."""
    return marshal.loads(marshal.dumps(value))


def _within(value: Any) -> Iterator[Any]:
    yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _within(child)


def children(value: Any) -> list[Any]:
    """The keys or positions of what a value holds."""
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def spoiled(body: JSON, bank: Bank, chance: Random) -> Any:
    """A copy with one to four changes."""
    root = {"body": _copy(body)}
    for _ in range(chance.choice((1, 1, 1, 1, 2, 2, 4))):
        holder, key = _place(root["body"], chance) or (root, "body")
        chance.choice(_CHANGES)(holder, key, bank, chance)
        if not root:  # the whole body was taken away
            return None
        root = {"body": next(iter(root.values()))}
    return root["body"]


def _place(value: Any, chance: Random) -> tuple[Holder, Any] | None:
    """Somewhere within; shallow places are likelier than their number."""
    found = None
    while keys := children(value):
        found = (value, chance.choice(keys))
        value = value[found[1]]
        if chance.random() < 0.15:
            break
    return found


# --- changes of one place: (what holds it, key or position, bank, chance) ---------------------------------------------


def _delete(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    del holder[key]


def _empty(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    holder[key] = chance.choice((None, "", [], {}, [None], [[]], [{}], {"": None}))


def _repeat(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    again = _copy(holder[key])
    if isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), again)
    else:
        holder[chance.choice(bank.keys)] = again


def _retype(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    value = holder[key]
    others = (None, True, chance.choice(NUMBERS), chance.choice(bank.words), [], {}, [value], {"x": value}, str(value))
    holder[key] = _copy(chance.choice(others))


def _number(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    holder[key] = chance.choice(NUMBERS)


def _text(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    value, odd = holder[key], chance.choice(TEXTS)
    if isinstance(value, str) and chance.random() < 0.6:
        at = chance.randrange(len(value) + 1)
        odd = chance.choice((value[:at] + odd + value[at:], value[:at], value[::-1], value.upper()))
    holder[key] = odd


def _word(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    holder[key] = chance.choice(bank.words)


def _nest(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    value = holder[key]
    for _ in range(chance.choice((1, 1, 2, 30, 120, 140, 600))):
        value = [value] if chance.random() < 0.5 else {chance.choice(bank.keys): value}
    holder[key] = value


def _unnest(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    if inner := children(holder[key]):
        holder[key] = holder[key][chance.choice(inner)]


def _rename(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    if isinstance(holder, dict):
        spelled = (key.upper(), re.sub("([A-Z])", r"_\1", key).lower(), f"{key}s", chance.choice(bank.keys), "")
        holder[chance.choice(spelled)] = holder.pop(key)
    else:
        holder.reverse()


def _graft(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    holder[key] = _copy(chance.choice(bank.pieces))


def _add(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    value = _copy(chance.choice((chance.choice(bank.pieces), chance.choice(bank.words), None)))
    if isinstance(holder[key], dict):
        holder[key][chance.choice(bank.keys)] = value
    elif isinstance(holder[key], list):
        holder[key].insert(chance.randrange(len(holder[key]) + 1), value)
    else:
        holder[key] = value


def _swap(holder: Holder, key: Any, bank: Bank, chance: Random) -> None:
    other = chance.choice(children(holder))
    holder[key], holder[other] = holder[other], holder[key]


_CHANGES: Sequence[Callable[[Holder, Any, Bank, Random], None]] = (
    _delete, _empty, _repeat, _retype, _number, _text, _text, _word, _word, _nest, _unnest, _rename, _graft, _add,
    _swap,
)  # fmt: skip


# --- bytes ------------------------------------------------------------------------------------------------------------


def written(body: Any, chance: Random) -> bytes:
    """JSON in one of the ways in which clients write it."""
    separators = chance.choice(((",", ":"), (", ", ": ")))
    text = json.dumps(body, ensure_ascii=chance.random() < 0.5, separators=separators)
    return text.encode("utf-8", "surrogatepass")


def damaged(raw: bytes, chance: Random) -> tuple[bytes, str]:
    """The bytes with one fault, and the Content-Encoding that is told of them."""
    return chance.choice(_DAMAGES)(raw, chance)


def _cut_off(raw: bytes, chance: Random) -> tuple[bytes, str]:
    return raw[: chance.randrange(len(raw) + 1)], ""


def _flipped(raw: bytes, chance: Random) -> tuple[bytes, str]:
    out = bytearray(raw)
    for _ in range(chance.choice((1, 1, 3))):
        out[chance.randrange(len(out))] = chance.randrange(256)
    return bytes(out), ""


def _inserted(raw: bytes, chance: Random) -> tuple[bytes, str]:
    at = chance.randrange(len(raw) + 1)
    odd = (
        b"\xff",
        b"\xed\xa0\xbd",
        b"\x00",
        b"\xf0\x9f",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b'"',
        b"}",
        b"\\ud83d",
        b"\x85",
    )
    return raw[:at] + chance.choice(odd) + raw[at:], ""


def _not_a_number(raw: bytes, chance: Random) -> tuple[bytes, str]:
    found = list(re.finditer(rb"(?<=[:\[,] )-?\d+|(?<=[:\[,])(true|false|null|-?\d+)", raw))
    if not found:
        return b"NaN", ""
    one = chance.choice(found)
    odd = chance.choice((b"NaN", b"Infinity", b"-Infinity", b"9" * 5000, b"1e400", b"-1e-400", b"01", b"0x1"))
    return raw[: one.start()] + odd + raw[one.end() :], ""


def _twice(raw: bytes, chance: Random) -> tuple[bytes, str]:
    """A key that stands twice: the later one counts."""
    return (b'{"messages":[],"input":1,"contents":{},"stream":"x",' + raw[1:] if raw[:1] == b"{" else raw * 2), ""


def _recoded(raw: bytes, chance: Random) -> tuple[bytes, str]:
    text = raw.decode("utf-8", "surrogatepass")
    coded = text.encode(chance.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")), "surrogatepass")
    return chance.choice((coded, text.encode("latin-1", "replace"), raw + raw, b" \n" + raw + b"\n", b"")), ""


def _compressed(raw: bytes, chance: Random) -> tuple[bytes, str]:
    """Compressed, and told so rightly or wrongly; whole or damaged."""
    coding = chance.choice(("gzip", "deflate", "zstd"))
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}[coding](raw)
    if chance.random() < 0.4:
        packed = chance.choice((_cut_off, _flipped))(packed, chance)[0]
    odd = ("gzip", "deflate", "zstd", "br", "identity", "gzip, gzip", "gzip,deflate,zstd,br", "snappy", "", ",", "GZIP")
    return packed, coding if chance.random() < 0.6 else chance.choice(odd)


def _miscoded(raw: bytes, chance: Random) -> tuple[bytes, str]:
    return raw, chance.choice(("gzip", "deflate", "br", "zstd", "compress", "identity", "gzip, identity", "x" * 500))


_DAMAGES = (_cut_off, _flipped, _inserted, _not_a_number, _twice, _recoded, _compressed, _miscoded)
