"""Bytes between a thread, which reads and writes files, and the event loop, which sends and receives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.abc import ObjectReceiveStream

from . import archive


class Reader:
    """A stream of pieces, read from a thread."""

    def __init__(self, receive: ObjectReceiveStream[bytes]) -> None:
        self._receive = receive
        self._held = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        if not self._held:
            try:
                self._held = anyio.from_thread.run(self._receive.receive)
            except anyio.EndOfStream:
                return b""
        piece, self._held = self._held[:size], self._held[size:]
        return piece


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), archive.PIECE):
        yield data[at : at + archive.PIECE]


async def streamed(made: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Made in a thread: files are read on the way."""
    while (piece := await anyio.to_thread.run_sync(next, made, None)) is not None:
        yield piece
