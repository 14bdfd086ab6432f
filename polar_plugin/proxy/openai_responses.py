"""OpenAI Responses: `POST /v1/responses`, whole and streamed, token counts, and compaction.

Source: the API reference and the models of the `openai` package; deviations of real clients where a comment says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import BadRequest, ContextOverflow, PolarError, SessionSealed, UnknownSession
from ..records import ChatRequest, Completion, JSONObject
from . import sse
from .codec import Event, Framing, Incoming, Kind, Route
from .responses_events import blank, failed, output, response, stream, usage
from .responses_items import response_id
from .responses_request import UnknownResponse, chat_request

_NOBODY = Incoming("", {}, {}, {})


class OpenAIResponses:
    """The dialect. Stateless."""

    name: str = "openai_responses"
    routes: tuple[Route, ...] = (
        Route("POST", "/v1/responses"),
        Route("POST", "/v1/responses/compact"),
        Route("POST", "/v1/responses/input_tokens", Kind.COUNT),
        Route("GET", "/v1/responses", Kind.WEBSOCKET),
        Route("GET", "/v1/models", Kind.MODELS),
        Route("GET", "/v1/models/{model:.+}", Kind.MODEL),
    )

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        """Codex speaks nothing else, and tells who it is."""
        told = (headers.get("originator", ""), headers.get("user-agent", ""))
        return path.startswith("/v1/responses") or any(text.lower().startswith("codex") for text in told)

    def decode(self, incoming: Incoming) -> ChatRequest:
        return chat_request(incoming, self.name)

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        if not incoming.path.rstrip("/").endswith("/compact"):
            return response(completion, incoming)
        return {
            "id": response_id(completion),
            "object": "response.compaction",
            "created_at": int(completion.started),
            "output": output(completion, incoming),
            "usage": usage(completion),
        }

    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        return stream(completion, incoming)

    def framing(self, incoming: Incoming) -> Framing:
        """A stream without a reply is told from its beginning: accumulators refuse one that begins with its end."""

        def encode(events: Iterable[Event]) -> bytes:
            told = list(events)
            first = told[0].data if told else ""
            if isinstance(first, dict) and first["type"] == "response.failed":
                told = list(failed(incoming, first["response"]))
            return sse.SSE.encode(told)

        return Framing(sse.SSE.content_type, encode, sse.SSE.keepalive)

    def counted(self, tokens: int, incoming: Incoming) -> JSONObject:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, error: PolarError) -> JSONObject:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        param = "input" if isinstance(error, ContextOverflow) else getattr(error, "path", "") or None
        return {"error": {"message": _message(error), "type": kind, "param": param, "code": _code(error)}}

    def error_event(self, error: PolarError) -> Event:
        code = "server_error"
        if isinstance(
            error, BadRequest
        ):  # the same call would fail again: clients repeat what they know as the server's
            code = _code(error) or "invalid_prompt"
        told = {"id": "resp_failed", "status": "failed", "error": {"code": code, "message": _message(error)}}
        data: JSONObject = {"type": "response.failed", "sequence_number": 0, "response": blank(_NOBODY) | told}
        return Event(data, "response.failed")

    def models(self, names: Sequence[str]) -> JSONObject:
        """Codex reads a list of its own beside the API's, and keeps to what it knows where that one is empty."""
        return {"object": "list", "data": [self.model(name) for name in names], "models": []}

    def model(self, name: str) -> JSONObject:
        return {"id": name, "object": "model", "created": 0, "owned_by": "polar_plugin"}


def _message(error: PolarError) -> str:
    """Clients recognise an overflow by its code or by either of these sentences, and compact their history."""
    if not isinstance(error, ContextOverflow):
        return str(error)
    return (
        f"Your input exceeds the context window of this model. The model's maximum context length is {error.limit} "
        f"tokens. However, your input has {error.prompt_tokens} tokens. Please shorten it and try again."
    )


def _code(error: PolarError) -> str | None:
    codes: dict[type[PolarError], str] = {
        ContextOverflow: "context_length_exceeded",
        UnknownResponse: "previous_response_not_found",
        UnknownSession: "invalid_api_key",
        SessionSealed: "session_sealed",
    }
    return codes.get(type(error))
