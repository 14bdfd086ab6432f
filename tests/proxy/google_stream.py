"""A strict reader of what the Google dialect streams: bytes to chunks, and chunks to a reply.

The readers are as unforgiving as the clients': an SSE comment, an `event:` line or a stray byte is an error.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from typing import Any

from google.genai import types

Chunk = dict[str, Any]
_EVENT = re.compile(r"data: (.*)\n\n")


class SSEReader:
    """`data:` lines as Gemini CLI takes them: one a block, from the very first byte."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, data: bytes) -> list[Chunk]:
        self._rest += data.decode("ascii")
        read: list[Chunk] = []
        while found := _EVENT.match(self._rest):
            read.append(json.loads(found[1]))
            self._rest = self._rest[found.end() :]
        begun = self._rest[: len("data: ")]
        assert "data: ".startswith(begun) or begun == "data: ", f"no data line: {self._rest[:40]!r}"
        return read

    def close(self) -> None:
        assert self._rest == "", "an event is cut off"


class ArrayReader:
    """The elements of one JSON array as soon as each is whole; the whole is checked to be JSON at the end."""

    def __init__(self) -> None:
        self._all = self._rest = ""
        self._read: list[Chunk] = []
        self._next = "["

    def feed(self, data: bytes) -> list[Chunk]:
        self._all += data.decode("ascii")
        self._rest += data.decode("ascii")
        read: list[Chunk] = []
        while rest := self._rest.lstrip():
            self._rest = rest
            if self._next == "end":
                assert self._rest.startswith(("]", ",")), f"neither the next element nor the end: {self._rest[:40]!r}"
                self._next = "over" if self._rest[0] == "]" else "{"
                self._rest = self._rest[1:]
            elif self._next == "[":
                assert self._rest.startswith("["), "no array"
                self._rest, self._next = self._rest[1:], "{"
            else:
                assert self._next == "{", f"something after the array: {self._rest[:40]!r}"
                try:
                    value, end = json.JSONDecoder().raw_decode(self._rest)
                except ValueError:
                    break
                read.append(value)
                self._rest, self._next = self._rest[end:], "end"
        self._read += read
        return read

    def close(self) -> None:
        assert self._next == "over", "the array does not end"
        assert json.loads(self._all) == self._read


def read(data: bytes, reader: SSEReader | ArrayReader) -> list[Chunk]:
    chunks = reader.feed(data)
    reader.close()
    return chunks


@dataclass
class Told:
    """A reply as a stream tells it."""

    reasoning: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    signature: str | None = None
    finish: str = ""
    usage: dict[str, int] = field(default_factory=dict)


def check_chunk(chunk: Chunk) -> None:
    """By the SDK's own models, at every depth, by the API's spelling alone. Raises ValidationError."""
    types.GenerateContentResponse.model_validate(chunk, by_alias=True, by_name=False)


def follow(chunks: list[Chunk]) -> Told:
    """Raises AssertionError or ValidationError at the first chunk that breaks a rule of the stream."""
    assert chunks, "an empty stream"
    told, stage = Told(), 0
    for i, chunk in enumerate(chunks):
        check_chunk(chunk)
        last = i == len(chunks) - 1
        assert set(chunk) == {"candidates", "modelVersion", "responseId"} | ({"usageMetadata"} if last else set())
        assert (chunk["modelVersion"], chunk["responseId"]) == (chunks[0]["modelVersion"], chunks[0]["responseId"])
        (candidate,) = chunk["candidates"]
        assert set(candidate) == {"content", "index"} | ({"finishReason"} if last else set())
        assert candidate["index"] == 0
        assert set(candidate["content"]) == {"role", "parts"}
        assert candidate["content"]["role"] == "model"
        parts = candidate["content"]["parts"]
        assert len(parts) == 1 or (parts == [] and len(chunks) == 1)
        for part in parts:
            reached = _part(part, told)
            assert reached >= stage, "thoughts, text and calls are out of order"
            stage = reached
    told.finish, told.usage = chunks[-1]["candidates"][0]["finishReason"], chunks[-1]["usageMetadata"]
    assert told.finish in ("STOP", "MAX_TOKENS")
    assert set(told.usage) == {"promptTokenCount", "candidatesTokenCount", "totalTokenCount"}
    assert told.usage["totalTokenCount"] == told.usage["promptTokenCount"] + told.usage["candidatesTokenCount"]
    return told


def _part(part: dict[str, Any], told: Told) -> int:
    """Adds it; tells its stage: thought, text or call."""
    signature = part.pop("thoughtSignature", None)
    if signature is not None:
        assert base64.b64decode(signature, validate=True)
        assert told.signature is None, "a second signature"
        assert "thought" not in part
        told.signature = signature
    if "functionCall" in part:
        assert set(part) == {"functionCall"}
        call = part["functionCall"]
        assert set(call) == {"name", "args", "id"}
        assert call["name"]
        assert isinstance(call["args"], dict)
        assert told.calls or signature is not None, "the first call is not signed"
        assert not told.calls or signature is None, "a later call is signed"
        told.calls.append(call)
        return 2
    assert isinstance(part["text"], str)
    assert part["text"], "an empty text"
    if "thought" in part:
        assert part.keys() == {"text", "thought"}
        assert part["thought"] is True
        told.reasoning += part["text"]
        return 0
    assert set(part) == {"text"}
    told.text += part["text"]
    return 1
