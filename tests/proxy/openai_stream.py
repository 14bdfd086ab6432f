"""A strict reader of OpenAI Chat's event streams: bytes in any pieces, accepted only in the order of the API."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .oracle import exactly_but

LONGEST = 1024
"""Characters of one delta."""
_EVENT = re.compile(r"data: (.*)\n\n")
_ORDER = ("reasoning_content", "content", "tool_calls")


def check_chunk(chunk: Any) -> None:
    """By the SDK's own model, without coercion; `reasoning_content` alone is not the API's. Raises ValueError."""
    exactly_but({".choices.0.delta.reasoning_content"}, ChatCompletionChunk, json.dumps(chunk))


def check_whole(reply: Any) -> None:
    exactly_but({".choices.0.message.reasoning_content"}, ChatCompletion, json.dumps(reply))


@dataclass
class Told:
    """A reply as a stream tells it."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, int] | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    starts_empty: bool = False
    """Whether the content begins as null."""


class StreamReader:
    """Feed it bytes; `finish` gives what they told. Raises AssertionError or ValueError at the first wrong byte."""

    def __init__(self, *, usage: bool) -> None:
        self._told = Told()
        self._wants_usage = usage
        self._rest = ""
        self._envelope: Any = None
        self._stage = -1
        self._done = False

    def feed(self, data: bytes) -> None:
        self._rest += data.decode("ascii")  # a client may decode each piece by itself
        while found := _EVENT.match(self._rest):
            assert not self._done, "nothing follows [DONE]"
            if found[1] == "[DONE]":
                self._done = True
            else:
                self._chunk(json.loads(found[1]))
            self._rest = self._rest[found.end() :]
        begun = self._rest[: len("data: ")]
        assert "data: ".startswith(begun) or begun == "data: ", f"no data line: {self._rest[:40]!r}"

    def finish(self) -> Told:
        assert self._rest == "", "an event is cut off"
        assert self._done, "no [DONE]"
        assert self._told.finish, "no finish reason"
        assert (self._told.usage is not None) == self._wants_usage
        return self._told

    def _chunk(self, chunk: Any) -> None:
        check_chunk(chunk)
        envelope = {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        assert envelope.keys() == {"id", "object", "created", "model", "system_fingerprint"}
        assert self._envelope in (None, envelope), "another reply's chunk"
        self._envelope = envelope
        if self._told.finish:
            assert self._wants_usage, "something after the finish reason"
            assert self._told.usage is None, "two usages"
            assert chunk["choices"] == []
            self._told.usage = chunk["usage"]
            return
        assert ("usage" in chunk) == self._wants_usage
        assert chunk.get("usage") is None
        (choice,) = chunk["choices"]
        self._choice(choice)

    def _choice(self, choice: Any) -> None:
        assert choice.keys() == {"index", "delta", "finish_reason", "logprobs"}
        assert choice["index"] == 0
        if self._stage < 0:
            assert choice["delta"] in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None})
            self._told.starts_empty = choice["delta"]["content"] is None
            self._stage = 0
        elif choice["delta"]:
            self._delta(choice["delta"])
            assert choice["finish_reason"] is None
        else:
            assert (choice["logprobs"] is None) != (choice["finish_reason"] is None)
            self._told.finish = choice["finish_reason"] or ""
        if choice["logprobs"] is not None:
            self._told.logprobs += choice["logprobs"]["content"]

    def _delta(self, delta: Any) -> None:
        ((kind, value),) = delta.items()
        stage = _ORDER.index(kind)
        assert stage >= self._stage, "reasoning, text and calls are out of order"
        assert not self._told.logprobs, "text behind its log-probabilities"
        self._stage = stage
        if kind == "tool_calls":
            self._call(*value)
            return
        assert 0 < len(value) <= LONGEST
        if kind == "content":
            self._told.content += value
        else:
            self._told.reasoning += value

    def _call(self, piece: Any) -> None:
        function, calls = piece["function"], self._told.calls
        if piece["index"] == len(calls):
            assert not calls or calls[-1]["arguments"], "a call without arguments"
            assert piece.keys() == {"index", "id", "type", "function"}
            assert piece["type"] == "function"
            assert function == {"name": function["name"], "arguments": ""}
            assert function["name"]
            calls.append({"id": piece["id"], "name": function["name"], "arguments": ""})
            return
        assert piece["index"] == len(calls) - 1
        assert piece.keys() == {"index", "function"}
        assert function.keys() == {"arguments"}
        assert 0 < len(function["arguments"]) <= LONGEST
        calls[-1]["arguments"] += function["arguments"]


def read(data: bytes, *, usage: bool = False) -> Told:
    reader = StreamReader(usage=usage)
    reader.feed(data)
    return reader.finish()
