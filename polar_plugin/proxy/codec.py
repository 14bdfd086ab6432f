"""A dialect: how one provider's API writes requests and replies. Pure: no I/O, no clock, no vendor SDK.

Decoding is liberal (unknown fields are dropped and listed in `ChatRequest.ignored`), encoding is strict (what the
vendor's own SDK accepts with strict validation).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import PolarError
from ..records import ChatRequest, Completion, JSONObject
from .memory import Memory


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: `data` is JSON, or a literal such as "[DONE]"; `name` is its `event:` line, if any."""

    data: JSONObject | str
    name: str = ""


class Kind(enum.Enum):
    """What an endpoint is for."""

    GENERATE = enum.auto()
    """`decode`, a turn, `encode` or `events`."""
    COUNT = enum.auto()
    """`decode`, then the number of prompt tokens that a turn would have, in the shape of `counted`."""
    MODELS = enum.auto()
    MODEL = enum.auto()
    """The path's variable `model` is the one asked for."""
    ALIVE = enum.auto()
    """Answered with an empty 200 and no key: clients ask before they begin."""
    WEBSOCKET = enum.auto()
    """An upgrade that is declined with 426, so that the client falls back to HTTP at once."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint: an exact path, in aiohttp's pattern language."""

    method: str
    path: str
    kind: Kind = Kind.GENERATE


def _nothing(name: str) -> Completion | None:
    return None


@dataclass(frozen=True, slots=True)
class Incoming:
    """One HTTP request, read and decompressed. Header names are lower-case."""

    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: JSONObject
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """The values of the route's path variables."""
    recall: Callable[[str], Completion | None] = _nothing
    """The session's completion of that id: for requests that name an earlier response instead of repeating it."""
    memory: Memory = field(default_factory=Memory)
    """The session's: what earlier requests told is not read again."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How a stream's events become bytes."""

    content_type: str
    encode: Callable[[Iterable[Event]], bytes]
    """All events of a reply, or the one error event that ends a stream without one."""
    keepalive: bytes
    """What to send while a stream waits; b"" for silence."""


class Dialect(Protocol):
    """One provider API. Stateless."""

    name: str
    """`openai_chat`, `openai_responses`, `anthropic_messages` or `google_generate`: `ChatRequest.api`."""
    routes: tuple[Route, ...]

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request to a path of no dialect alone, or of none, comes from a client of this one."""
        ...

    def decode(self, incoming: Incoming) -> ChatRequest:
        """Raises BadRequest with the path of what is wrong."""
        ...

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        """The whole reply to `incoming`, which says what of it was asked for (log-probabilities, usage, ...)."""
        ...

    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        """The reply as a stream; the last event is the terminal one."""
        ...

    def framing(self, incoming: Incoming) -> Framing:
        """How the events of the reply to `incoming` are written."""
        ...

    def counted(self, tokens: int, incoming: Incoming) -> JSONObject:
        """The answer of a COUNT endpoint; never asked for where there is none."""
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
