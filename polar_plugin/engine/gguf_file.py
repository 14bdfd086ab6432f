"""Reads a GGUF file: its metadata, and its tensors as float32. Only the few tensor types that we meet.

The `gguf` package reads all of them, several times slower: the quickstart waits for this.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

Floats = NDArray[np.float32]
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUF:
    """A whole file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Floats]
    """float32, row-major: the slowest dimension first, as PyTorch has it."""


def read_gguf(path: Path) -> GGUF:
    """Raises ConfigError where the file is no GGUF, or uses a tensor type that is not read here."""
    reader = _Reader(path.read_bytes())
    if reader.take("4s") != b"GGUF" or reader.take("I") not in (2, 3):
        raise ConfigError(f"{path} is no GGUF file of version 2 or 3")
    tensor_count, field_count = reader.take("Q"), reader.take("Q")
    metadata = {reader.string(): reader.value(reader.take("I")) for _ in range(field_count)}
    infos = [_TensorInfo.read(reader) for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-reader.at // alignment) * alignment
    return GGUF(metadata, {info.name: info.floats(reader.raw, start, path) for info in infos})


class _Reader:
    """A cursor over the file's bytes."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def take(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.raw, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def string(self) -> str:
        length = self.take("Q")
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        inner, count = self.take("I"), self.take("Q")
        return [self.value(inner) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, reader: _Reader) -> _TensorInfo:
        name = reader.string()
        shape = tuple(reader.take("Q") for _ in range(reader.take("I")))
        return cls(name, shape[::-1], reader.take("I"), reader.take("Q"))

    def floats(self, raw: bytes, start: int, path: Path) -> Floats:
        if self.kind not in _TYPES:
            raise ConfigError(
                f"{path}: tensor {self.name} has type {self.kind}; {', '.join(map(str, _TYPES))} are read"
            )
        block, size, decode = _TYPES[self.kind]
        count = math.prod(self.shape) // block
        blocks = np.frombuffer(raw, np.uint8, count * size, start + self.offset).reshape(count, size)
        return decode(blocks).reshape(self.shape)


def _f32(blocks: NDArray[np.uint8]) -> Floats:
    return blocks.reshape(-1).view(np.float32).copy()


def _f16(blocks: NDArray[np.uint8]) -> Floats:
    return blocks.reshape(-1).view(np.float16).astype(np.float32)


def _q4_1(blocks: NDArray[np.uint8]) -> Floats:
    """32 weights a block: a scale, a minimum (float16), then 16 bytes whose low halves come before their high ones."""
    scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return quants * scale + minimum


def _q8_0(blocks: NDArray[np.uint8]) -> Floats:
    """32 weights a block: a scale (float16), then 32 signed bytes."""
    return blocks[:, 2:].view(np.int8) * blocks[:, :2].copy().view(np.float16).astype(np.float32)


_TYPES: Mapping[int, tuple[int, int, Callable[[NDArray[np.uint8]], Floats]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
"""GGML type: weights a block, bytes a block, decoder."""
