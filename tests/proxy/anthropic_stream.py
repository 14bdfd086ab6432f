"""A strict reader of Anthropic's event streams: bytes in any pieces, accepted only in the order of the API."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import RawMessageStreamEvent

from .oracle import exactly

LONGEST = 1024
"""Characters of one delta."""
RANKS = ["thinking", "text", "tool_use"]
DELTAS = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "tool_use"}


class StreamReader:
    """Feed it bytes; `finish` gives the whole message. Raises AssertionError or ValueError at the first wrong byte."""

    def __init__(self) -> None:
        self.pings = 0
        self.stopped = False
        self._pending = b""
        self._message: Any = None
        self._block: Any = None
        self._json = ""
        self._ended = False

    def feed(self, data: bytes) -> None:
        data.decode("ascii")  # a client may decode each piece by itself
        self._pending += data
        while b"\n\n" in self._pending:
            frame, _, self._pending = self._pending.partition(b"\n\n")
            self._frame(frame.decode("ascii"))

    def finish(self) -> Any:
        assert self._pending == b""
        assert self.stopped
        return self._message

    def _frame(self, frame: str) -> None:
        name, data = frame.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        assert not self.stopped, "nothing follows message_stop"
        if event == {"type": "ping"}:
            self.pings += 1
            return
        exactly(RawMessageStreamEvent, data.removeprefix("data: "))
        getattr(self, f"_{event['type']}")(event)

    def _message_start(self, event: Any) -> None:
        assert self._message is None
        self._message = event["message"]
        assert self._message["content"] == []
        assert self._message["stop_reason"] is None
        assert self._message["usage"]["output_tokens"] == 0

    def _content_block_start(self, event: Any) -> None:
        content = self._message["content"]
        assert self._block is None
        assert not self._ended
        assert event["index"] == len(content), "indexes are contiguous"
        self._block, self._json = event["content_block"], ""
        kind = self._block["type"]
        assert kind in RANKS
        assert not content or RANKS.index(content[-1]["type"]) <= RANKS.index(kind)
        if kind == "tool_use":
            assert self._block["id"]
            assert self._block["input"] == {}
        else:
            assert self._block[kind] == "", "what a block says comes in its deltas"
            assert kind not in [block["type"] for block in content], "one block of text, one of reasoning"
        content.append(self._block)

    def _content_block_delta(self, event: Any) -> None:
        assert self._block is not None
        assert event["index"] == len(self._message["content"]) - 1
        delta = event["delta"]
        if delta["type"] == "signature_delta":
            assert self._block["type"] == "thinking"
            assert self._block["thinking"]
            assert self._block["signature"] == "", "one signature"
            assert delta["signature"]
            self._block["signature"] = delta["signature"]
            return
        kind = DELTAS[delta["type"]]
        assert kind == self._block["type"]
        piece = delta["partial_json" if kind == "tool_use" else kind]
        assert 0 < len(piece) <= LONGEST
        if kind == "tool_use":
            self._json += piece
        else:
            assert not self._block.get("signature"), "the signature closes the reasoning"
            self._block[kind] += piece

    def _content_block_stop(self, event: Any) -> None:
        assert self._block is not None
        assert event["index"] == len(self._message["content"]) - 1
        kind = self._block["type"]
        if kind == "tool_use":
            self._block["input"] = json.loads(self._json)
            assert isinstance(self._block["input"], dict)
        else:
            assert self._block[kind].strip(), "no empty block"
            assert kind == "text" or self._block["signature"]
        self._block = None

    def _message_delta(self, event: Any) -> None:
        assert self._message is not None
        assert self._block is None
        assert not self._ended
        self._ended = True
        assert event["delta"]["stop_reason"]
        self._message |= event["delta"] | {"usage": event["usage"]}

    def _message_stop(self, event: Any) -> None:
        assert self._ended
        self.stopped = True


def read(data: bytes) -> Any:
    """The message of a whole stream."""
    reader = StreamReader()
    reader.feed(data)
    return reader.finish()
