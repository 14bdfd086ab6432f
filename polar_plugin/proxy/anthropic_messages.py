"""Anthropic Messages: `POST /v1/messages`, whole and streamed, and the small endpoints around it.

Source: the API reference and the models of the `anthropic` package; deviations of real clients where a comment says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..errors import PolarError
from ..records import ChatRequest, Completion, JSONObject
from . import anthropic_events, sse
from .anthropic_request import chat_request
from .codec import Event, Framing, Incoming, Kind, Route

_PING = sse.encode(Event({"type": "ping"}, name="ping"))
"""The API's own sign of life. Clients skip it wherever it stands, before the reply's first event too."""
_FRAMING = Framing(sse.CONTENT_TYPE, sse.SSE.encode, _PING)
_ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicMessages:
    """The dialect. Stateless."""

    name: str = "anthropic_messages"
    routes: tuple[Route, ...] = (
        Route("POST", "/v1/messages"),
        Route("POST", "/v1/messages/count_tokens", Kind.COUNT),
        Route("GET", "/v1/models", Kind.MODELS),
        Route("GET", "/v1/models/{model:.+}", Kind.MODEL),
        Route("HEAD", "/", Kind.ALIVE),
    )

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        """By the API's version header, which its SDKs always send, by its own path, or by its way to send a key."""
        if "anthropic-version" in headers or path.startswith("/v1/messages"):
            return True
        return "x-api-key" in headers and path.startswith("/v1/models")

    def decode(self, incoming: Incoming) -> ChatRequest:
        return chat_request(incoming, self.name)

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        return anthropic_events.message(completion)

    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        return anthropic_events.events(completion)

    def framing(self, incoming: Incoming) -> Framing:
        return _FRAMING

    def counted(self, tokens: int, incoming: Incoming) -> JSONObject:
        return {"input_tokens": tokens}

    def error(self, error: PolarError) -> JSONObject:
        """An overflow is told by `ContextOverflow`'s own words, which clients know and answer by compacting."""
        kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def error_event(self, error: PolarError) -> Event:
        return Event(self.error(error), name="error")

    def models(self, names: Sequence[str]) -> JSONObject:
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        return {"data": [self.model(name) for name in names], "has_more": False} | ends

    def model(self, name: str) -> JSONObject:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
