"""Server-sent events as bytes. Pure.

All JSON that leaves the proxy is ASCII: other characters are written as \\u escapes. A harness that decodes each
network chunk by itself then cannot damage a character that lies across two of them, a reader that breaks lines at
U+2028 stays in step, and a lone surrogate, which UTF-8 cannot carry, is carried.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .codec import Event, Framing

COMMENT = b": keep-alive\n\n"
"""A comment: every conforming reader skips it, and its bytes keep idle timers from firing."""

DONE = "[DONE]"
_JSON = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def to_json(value: Any) -> bytes:
    """Compact ASCII JSON. Raises ValueError on NaN and infinity, which JSON does not have."""
    return _JSON.encode(value).encode("ascii")


def encode(event: Event) -> bytes:
    """One event with its `event:` line, where it has a name, and the blank line that ends it."""
    data = event.data.encode() if isinstance(event.data, str) else to_json(event.data)
    name = f"event: {event.name}\n".encode() if event.name else b""
    return name + b"data: " + data + b"\n\n"


def _joined(events: Iterable[Event]) -> bytes:
    return b"".join(map(encode, events))


CONTENT_TYPE = "text/event-stream; charset=utf-8"
SSE = Framing(CONTENT_TYPE, _joined, COMMENT)
"""Server-sent events, kept alive by comments."""
