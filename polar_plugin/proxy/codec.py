"""A dialect: how one provider's API writes requests and replies. Pure: no I/O, no clock, no vendor SDK.

Decoding is liberal (unknown fields are dropped and listed in `ChatRequest.ignored`), encoding is strict (what the
vendor's own SDK accepts with strict validation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import PolarError
from ..records import ChatRequest, Completion, JSONObject


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: `data` is JSON, or a literal such as "[DONE]"; `name` is its `event:` line, if any."""

    data: JSONObject | str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One HTTP request, read and decompressed. Header names are lower-case."""

    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: JSONObject


class Dialect(Protocol):
    """One provider API."""

    name: str
    """`openai_chat`, `openai_responses`, `anthropic_messages` or `google_generate`: `ChatRequest.api`."""
    routes: tuple[str, ...]
    """aiohttp route patterns of its generation endpoints."""

    def decode(self, incoming: Incoming) -> ChatRequest:
        """Raises BadRequest with the path of what is wrong."""
        ...

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        """The whole reply to `incoming`, which says what of it was asked for (log-probabilities, usage, ...)."""
        ...

    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        """The reply as a stream; the last event is the terminal one."""
        ...

    def error(self, error: PolarError) -> JSONObject:
        """The error's body; its HTTP status is `error.status`."""
        ...

    def error_event(self, error: PolarError) -> Event:
        """The same within a stream whose headers are sent; no terminal event follows it."""
        ...

    def models(self, names: Sequence[str]) -> JSONObject:
        """The answer to a listing of models."""
        ...

    def model(self, name: str) -> JSONObject:
        """The answer to a question for one model. Any name is served: all of them mean the policy."""
        ...

    keepalive: bytes
    """What to send while a stream waits; b"" for silence."""
