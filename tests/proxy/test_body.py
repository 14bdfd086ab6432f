"""Request bodies: what is undone, what is refused, and that nothing is lost."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_plugin.errors import BadRequest
from polar_plugin.proxy.body import MAX_BRACKETS, MAX_DEPTH, BodyTooLarge, UnsupportedCoding, decompress, parse

LIMIT = 1 << 20
BODY = json.dumps({"model": "policy", "messages": ["hi " * 40]}).encode()


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "Deflate": bare_deflate(BODY),
    "zstd": zstandard.compress(BODY),
    "gzip, zstd": zstandard.compress(gzip.compress(BODY)),
    "zstd,identity, gzip": gzip.compress(zstandard.compress(BODY)),
    "identity": BODY,
    "": BODY,
}
COMPRESSED = {name: packed for name, packed in PACKED.items() if packed != BODY}


@pytest.mark.parametrize("codings", PACKED)
def test_every_coding_is_undone_last_one_first(codings: str) -> None:
    assert decompress(PACKED[codings], codings, LIMIT) == BODY


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_a_body_of_several_members_is_read_to_its_end(pack: object) -> None:
    coding = "gzip" if pack is gzip.compress else "zstd"
    assert decompress(pack(BODY[:20]) + pack(BODY[20:]), coding, LIMIT) == BODY  # type: ignore[operator]


@settings(deadline=None)
@given(st.binary(max_size=3000), st.sampled_from(["gzip", "deflate", "zstd"]))
def test_any_bytes_survive_any_coding(data: bytes, coding: str) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}[coding]
    assert decompress(pack(data), coding, LIMIT) == data


@pytest.mark.parametrize("codings", COMPRESSED)
def test_a_body_cut_anywhere_is_refused(codings: str) -> None:
    packed = COMPRESSED[codings]
    for length in range(len(packed)):
        with pytest.raises(BadRequest):
            decompress(packed[:length], codings, LIMIT)


@pytest.mark.parametrize("codings", COMPRESSED)
def test_a_body_that_is_no_such_thing_is_refused(codings: str) -> None:
    with pytest.raises(BadRequest, match="corrupt"):
        decompress(b"\xff\xfe" + BODY, codings, LIMIT)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, zstandard.compress])
def test_a_bomb_stops_at_the_cap(pack: object) -> None:
    coding = {gzip.compress: "gzip", zlib.compress: "deflate", zstandard.compress: "zstd"}[pack]  # type: ignore[index]
    bomb = pack(bytes(64 << 20))  # type: ignore[operator]
    assert len(bomb) < LIMIT
    with pytest.raises(BodyTooLarge) as caught:
        decompress(bomb, coding, LIMIT)
    assert caught.value.status == 413


def test_a_bomb_inside_a_bomb_stops_at_the_cap() -> None:
    with pytest.raises(BodyTooLarge):
        decompress(gzip.compress(zstandard.compress(bytes(64 << 20))), "zstd, gzip", LIMIT)


def test_the_cap_is_exact() -> None:
    assert decompress(gzip.compress(BODY), "gzip", len(BODY)) == BODY
    with pytest.raises(BodyTooLarge):
        decompress(gzip.compress(BODY), "gzip", len(BODY) - 1)


def test_too_many_codings_are_refused_before_any_is_undone() -> None:
    with pytest.raises(BadRequest, match="4 content codings") as caught:
        decompress(b"", "gzip, gzip, gzip, gzip", LIMIT)
    assert caught.value.status == 400


def test_an_unknown_coding_is_unsupported_and_the_message_lists_the_known() -> None:
    with pytest.raises(UnsupportedCoding, match="'lzma' is not supported; send gzip") as caught:
        decompress(b"", "lzma", LIMIT)
    assert caught.value.status == 415


@pytest.mark.skipif(importlib.util.find_spec("brotli") is not None, reason="Brotli is installed")
def test_brotli_without_its_library_is_unsupported_and_the_message_says_what_to_install() -> None:
    with pytest.raises(UnsupportedCoding, match=r"pip install 'Brotli>=1\.2'"):
        decompress(b"", "br", LIMIT)


@pytest.mark.skipif(importlib.util.find_spec("brotli") is None, reason="Brotli is not installed")
def test_brotli_is_undone_capped_and_refused_when_cut() -> None:
    brotli = importlib.import_module("brotli")
    packed = brotli.compress(BODY)
    assert decompress(packed, "br", LIMIT) == BODY
    with pytest.raises(BadRequest, match="cut short"):
        decompress(packed[:-4], "br", LIMIT)
    with pytest.raises(BadRequest, match="corrupt"):
        decompress(b"\xff\xfe" + packed, "br", LIMIT)
    with pytest.raises(BodyTooLarge):
        decompress(brotli.compress(bytes(64 << 20)), "br", LIMIT)


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'{"a": "\ud83d"}', "\ud83d"),
        (b'{"a": "\xed\xa0\xbd"}', "\ud83d"),
        (rb'{"a": "\ud83d\ude00 \u0000"}', "\U0001f600 \0"),
        (rb'{"a": "\ud83d \ud83d\ude00"}', "\ud83d \U0001f600"),
        ("\ufeff".encode() + b'{"a": "x"}', "x"),
        (b'{"a": "' + b"x" * (5 << 20) + b'"}', "x" * (5 << 20)),
    ],
    ids=["escaped surrogate", "raw surrogate", "pair and NUL", "half before a pair", "byte order mark", "5 MB line"],
)
def test_text_comes_out_as_it_went_in(body: bytes, text: str) -> None:
    assert parse(body) == {"a": text}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b'{"a": \xff}', b'{"a": "\xff"}', b"\x28\xb5\x2f\xfd{}", b'{"a": 1}x'],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(body)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 200_000])
def test_deep_nesting_is_refused_however_deep(opening: str, closing: str, depth: int) -> None:
    body = '{"a":' + opening * depth + "1" + closing * depth + "}"
    with pytest.raises(BadRequest, match=r"nested deeper|not JSON"):
        parse(body.encode())


@pytest.mark.parametrize("one", [b"[]", b"{}", b'{"role":"user","content":[]}'])
def test_a_body_of_nothing_but_brackets_is_refused_before_it_is_read(one: bytes) -> None:
    """Each list costs a thousand times its two bytes: 60 MB of them would hold up every session for a minute."""
    with pytest.raises(BadRequest, match="more than 1000000 lists and objects"):
        parse(b'{"messages":[' + b",".join([one] * (MAX_BRACKETS + 1)) + b"]}")


def test_a_long_text_with_brackets_passes() -> None:
    assert len(parse(b'{"a":"' + b"[0] = x{1};" * 400_000 + b'"}')["a"]) == 4_400_000


def test_nesting_below_the_cap_passes() -> None:
    inner = MAX_DEPTH - 1
    assert "a" in parse(('{"a":' + "[" * inner + "]" * inner + "}").encode())


@pytest.mark.parametrize(
    "digits", ["18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" + "0" * 40]
)
def test_a_long_integer_is_the_same_number_whatever_stands_beside_it(digits: str) -> None:
    clean, odd = (parse(b'{"n": %s, "text": %s}' % (digits.encode(), text)) for text in (b'"x"', b'"\\ud800"'))
    assert repr(clean["n"]) == repr(odd["n"])
