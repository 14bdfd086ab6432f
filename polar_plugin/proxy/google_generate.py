"""Google generateContent: `POST /v1beta/models/{model}:generateContent`, and streamed as events or as a JSON array.

Source: the API's REST reference and the models of the `google-genai` package; deviations of real clients where a
comment says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from ..errors import ContextOverflow, PolarError, SessionSealed
from ..records import ChatRequest, Completion, FinishReason, JSONObject, Message
from . import sse
from .codec import Event, Framing, Incoming, Kind, Route
from .google_request import COUNT, STREAM, UNPARSED, chat_request, wants_thoughts
from .google_signature import signature

_VERSIONS = ("v1beta", "v1", "v1alpha", "v1beta1")
_NAMES = ("models/{model:.+}", "{model:(tunedModels|publishers|projects)/.+}")
_PIECE = 8192
"""Characters of text a part carries at most: some clients read lines into buffers of 64 KiB."""
_MAX_DEPTH = 64
"""Nesting of arguments that are told as an object: a request that holds them must stay readable."""
_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


class GoogleGenerate:
    """The dialect. Stateless."""

    name: str = "google_generate"
    routes: tuple[Route, ...] = (
        *(
            Route("POST", f"/{version}/{name}{method}", kind)
            for version in _VERSIONS
            for name in _NAMES
            for method, kind in ((":generateContent", Kind.GENERATE), (STREAM, Kind.GENERATE), (COUNT, Kind.COUNT))
        ),
        *(Route("GET", f"/{version}/models", Kind.MODELS) for version in _VERSIONS),
        *(Route("GET", f"/{version}/models/{{model:.+}}", Kind.MODEL) for version in _VERSIONS),
    )

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith(("/v1beta", "/v1alpha")) or "x-goog-api-key" in headers

    def decode(self, incoming: Incoming) -> ChatRequest:
        return chat_request(incoming, self.name)

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        parts = list(_parts(completion.reply, thoughts=wants_thoughts(incoming)))
        return _last(completion, parts)

    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        """One part a chunk. The last one has the reason of the end and the usage: clients ask again without it."""
        parts = list(_parts(completion.reply, thoughts=wants_thoughts(incoming), piece=_PIECE))
        for part in parts[:-1]:
            yield Event(_chunk(completion, [part]))
        yield Event(_last(completion, parts[-1:]))

    def framing(self, incoming: Incoming) -> Framing:
        """Both in silence: a comment corrupts what Gemini CLI reads, and an array has none."""
        alt = incoming.query.get("alt") or incoming.query.get("$alt") or ""
        return _SSE if alt.lower() == "sse" else _ARRAY

    def counted(self, tokens: int, incoming: Incoming) -> JSONObject:
        return {"totalTokens": tokens}

    def error(self, error: PolarError) -> JSONObject:
        return {"error": {"code": error.status, "message": _wording(error), "status": _status(error)}}

    def error_event(self, error: PolarError) -> Event:
        return Event(self.error(error))

    def models(self, names: Sequence[str]) -> JSONObject:
        return {"models": [self.model(name) for name in names]}

    def model(self, name: str) -> JSONObject:
        return {
            "name": name if name.startswith(("models/", "tunedModels/")) else f"models/{name}",
            "version": "1",
            "displayName": name.removeprefix("models/"),
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }


def _chunk(completion: Completion, parts: Sequence[JSONObject]) -> JSONObject:
    return {
        "candidates": [{"content": {"parts": list(parts), "role": "model"}, "index": 0}],
        "modelVersion": completion.request.model,
        "responseId": completion.id,
    }


def _last(completion: Completion, parts: Sequence[JSONObject]) -> JSONObject:
    told = _chunk(completion, parts)
    cut = completion.generation.finish_reason is FinishReason.LENGTH
    told["candidates"][0]["finishReason"] = "MAX_TOKENS" if cut else "STOP"
    return told | {"usageMetadata": _usage(completion)}


def _usage(completion: Completion) -> JSONObject:
    """True counts of ids. Nobody here counts those of the reasoning: they are among the candidate's."""
    prompt, output = len(completion.prompt_ids), len(completion.generation.output_ids)
    return {"promptTokenCount": prompt, "candidatesTokenCount": output, "totalTokenCount": prompt + output}


def _parts(reply: Message, *, thoughts: bool, piece: int | None = None) -> Iterator[JSONObject]:
    """Thoughts, text, calls; none of them empty.

    The signature stands beside the first call, or with the last piece of a text without calls.
    """
    if thoughts:
        yield from ({"text": text, "thought": True} for text in _pieces(reply.reasoning, piece))
    texts: list[JSONObject] = [{"text": text} for text in _pieces(reply.content, piece)]
    calls: list[JSONObject] = [
        {"functionCall": {"name": call.name, "args": _args(call.arguments)} | ({"id": call.id} if call.id else {})}
        for call in reply.tool_calls
    ]
    if calls:
        calls[0]["thoughtSignature"] = signature(reply.reasoning)
    elif texts and reply.reasoning:
        texts[-1]["thoughtSignature"] = signature(reply.reasoning)
    yield from texts
    yield from calls


def _pieces(text: str, piece: int | None) -> Iterator[str]:
    size = piece or max(1, len(text))
    return (text[start : start + size] for start in range(0, len(text), size))


def _args(arguments: str) -> JSONObject:
    """The arguments as the object the API wants; what is none is told as text, and known again when it comes back."""
    as_text: JSONObject = {UNPARSED: arguments}
    try:
        value = json.loads(arguments or "{}")
        if not isinstance(value, dict) or set(cast("JSONObject", value)) == {UNPARSED}:
            return as_text
        sse.to_json(value)  # a number beyond the range of a double is none that JSON has
    except (ValueError, RecursionError):
        return as_text
    return as_text if _deeper(_MAX_DEPTH, value) else cast("JSONObject", value)


def _deeper(limit: int, value: Any) -> bool:
    """Whether there are more than `limit` levels."""
    if not isinstance(value, dict | list):
        return False
    inner = cast("JSONObject", value).values() if isinstance(value, dict) else cast("list[Any]", value)
    return limit == 0 or any(_deeper(limit - 1, one) for one in inner)


def _wording(error: PolarError) -> str:
    """Clients recognise an overflow by its message."""
    if isinstance(error, ContextOverflow):
        return (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed"
            f" ({error.limit})."
        )
    return str(error)


def _status(error: PolarError) -> str:
    if isinstance(error, SessionSealed):
        return "FAILED_PRECONDITION"
    return _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")


def _events(events: Iterable[Event]) -> bytes:
    return b"".join(_framed(event) for event in events)


def _framed(event: Event) -> bytes:
    """An error is plain JSON, as the API writes it amid events: vendor SDKs look for it there and nowhere else."""
    if isinstance(event.data, dict) and "error" in event.data:
        return sse.to_json(event.data) + b"\n"
    return sse.encode(event)


def _array(events: Iterable[Event]) -> bytes:
    """One line an element, so that each can be read as it comes."""
    return b"[" + b",\n".join(sse.to_json(event.data) for event in events) + b"]\n"


_SSE = Framing(sse.CONTENT_TYPE, _events, b"")
_ARRAY = Framing("application/json; charset=utf-8", _array, b"")
