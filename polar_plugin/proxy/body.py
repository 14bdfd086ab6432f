"""A request body: content codings undone under a cap, then JSON. Pure.

Nothing that the harness wrote is lost on the way: lone surrogates and NULs come out as they went in.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import orjson

from ..errors import BadRequest
from ..records import JSONObject

MAX_CODINGS = 3
"""Codings laid over one another; honest clients use one."""
MAX_DEPTH = 128
"""Nesting of JSON: schemas stay far below it, recursive readers behind us stay safe."""
MAX_BRACKETS = 1_000_000
"""Opening brackets, those within texts too: each may be an object or a list, whose making and reading holds up all
sessions. What fits a model's context stays far below it; pictures have none."""
_STEP = 256
"""Compressed bytes fed at a time: zlib inflates at most 1032-fold and a zstd block to 128 KiB, so the output passes its
cap by a few MiB at most before it is seen."""


class BodyTooLarge(BadRequest):
    """The body, as sent or as decoded, is larger than the proxy takes."""

    status = 413

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes once decoded; raise `max_body_bytes`")


class UnsupportedCoding(BadRequest):
    """A content coding that is unknown, or whose library is not installed."""

    status = 415


def decompress(raw: bytes, codings: str, limit: int) -> bytes:
    """Undo the codings of a Content-Encoding header, last one first; `limit` caps each decoded size in bytes.

    Raises UnsupportedCoding (415), BodyTooLarge (413), or BadRequest for a corrupt, cut or too often coded body.
    """
    names = [name.strip().lower() for name in codings.split(",") if name.strip()]
    names = [name for name in names if name != "identity"]
    if len(names) > MAX_CODINGS:
        raise BadRequest(f"{len(names)} content codings over one another; at most {MAX_CODINGS} are undone")
    for name in reversed(names):
        if name not in _DECODERS:
            raise UnsupportedCoding(f"content coding {name!r} is not supported; send {', '.join(_DECODERS)} or none")
        raw = _DECODERS[name](raw, limit)
    return raw


def parse(body: bytes) -> JSONObject:
    """A JSON object. Raises BadRequest where it is none, is nested deeper than MAX_DEPTH, or has too many brackets."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise BadRequest(f"the request body has more than {MAX_BRACKETS} lists and objects")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = _parse_liberally(body)
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object")
    if _deeper_than(MAX_DEPTH, value):
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels")
    return cast("JSONObject", value)


def _parse_liberally(body: bytes) -> Any:
    """The standard library takes what orjson does not: lone surrogates (escaped or raw), NaN, a byte order mark."""
    try:
        return json.loads(body, parse_int=_integer)
    except RecursionError as error:
        raise BadRequest(f"the request body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both of its kind
        raise BadRequest(f"the request body is not JSON: {error}") from error


def _integer(digits: str) -> int | float:
    """As orjson has it, so that an item means the same whatever stands beside it: beyond 64 bits a float."""
    number = int(digits) if len(digits) <= 20 else 1 << 64
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


def _deeper_than(limit: int, value: Any) -> bool:
    """Of JSON as its parsers make it, so that types need no more than identity: this walks whole histories."""
    level: list[Any] = [value]
    for _ in range(limit):
        rows: list[Any] = [cast("Any", node).values() if type(node) is dict else node for node in level]
        level = [child for row in rows for child in row if type(child) is dict or type(child) is list]
        if not level:
            return False
    return True


class _Inflater(Protocol):
    """What zlib's and zstandard's decompression objects share."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _inflate(raw: bytes, limit: int, inflater: Callable[[], _Inflater], corrupt: type[Exception]) -> bytes:
    """All members (frames) of a compressed body, one behind the other."""
    decoded, current = bytearray(), inflater()
    try:
        for start in range(0, len(raw), _STEP):
            piece = raw[start : start + _STEP]
            while piece:
                current = inflater() if current.eof else current
                decoded += current.decompress(piece)
                piece = current.unused_data if current.eof else b""
            if len(decoded) > limit:
                raise BodyTooLarge(limit)
    except corrupt as error:
        raise BadRequest(f"the compressed request body is corrupt: {error}") from error
    if not current.eof:
        raise BadRequest("the compressed request body is cut short")
    return bytes(decoded)


def _gzip(raw: bytes, limit: int) -> bytes:
    return _inflate(raw, limit, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS), zlib.error)


def _deflate(raw: bytes, limit: int) -> bytes:
    """RFC 9110 means zlib's wrapping by "deflate"; some clients send the bare stream."""
    wrapped = len(raw) >= 2 and raw[0] & 0x0F == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
    return _inflate(raw, limit, lambda: zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS), zlib.error)


def _zstd(raw: bytes, limit: int) -> bytes:
    zstandard = _library("zstd", "zstandard", "polar-plugin[zstd]")
    return _inflate(raw, limit, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)


def _brotli(raw: bytes, limit: int) -> bytes:
    """Brotli has no bound on its ratio, so only a library that bounds its output is used (Brotli >= 1.2)."""
    brotli = _library("br", "brotli", "'Brotli>=1.2'")
    decoder = brotli.Decompressor()
    try:
        decoded = cast("bytes", decoder.process(raw, output_buffer_limit=limit + 1))
        while not decoder.is_finished() and not decoder.can_accept_more_data() and len(decoded) <= limit:
            decoded += decoder.process(b"", output_buffer_limit=limit + 1 - len(decoded))
    except TypeError as error:
        raise UnsupportedCoding("content coding 'br' needs 'Brotli>=1.2' in the proxy's environment") from error
    except brotli.error as error:
        raise BadRequest(f"the compressed request body is corrupt: {error}") from error
    if len(decoded) > limit:
        raise BodyTooLarge(limit)
    if not decoder.is_finished():
        raise BadRequest("the compressed request body is cut short")
    return decoded


def _library(coding: str, module: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedCoding(
            f"content coding {coding!r} needs `pip install {install}`; send gzip or none"
        ) from error


_DECODERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
    "br": _brotli,
}
