"""OpenAI Chat Completions: `POST /v1/chat/completions`, whole and streamed.

Source: the API reference and the models of the `openai` package; deviations of real clients where a comment says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..errors import BadRequest, ContextOverflow, PolarError, SessionSealed, UnknownSession
from ..records import ChatRequest, Completion, FinishReason, JSONObject, Message
from . import fields, sse
from .codec import Event, Framing, Incoming, Kind, Route
from .openai_chat_request import chat_request

_PIECE = 1024
"""Characters a delta carries at most: some clients read lines into buffers of 64 KiB."""
_LOGPROBS_PIECE = 256
_NO_LOGPROB = -9999.0
"""What the API writes for a probability of zero."""


class OpenAIChat:
    """The dialect. Stateless."""

    name: str = "openai_chat"
    routes: tuple[Route, ...] = (
        Route("POST", "/v1/chat/completions"),
        Route("GET", "/v1/models", Kind.MODELS),
        Route("GET", "/v1/models/{model:.+}", Kind.MODEL),
    )

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return True  # it comes last: what no other dialect knows

    def decode(self, incoming: Incoming) -> ChatRequest:
        return chat_request(incoming, self.name)

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        choice: JSONObject = {
            "index": 0,
            "message": _wire_message(completion.reply),
            "finish_reason": _finish_reason(completion),
            "logprobs": None,
        }
        if incoming.body.get("logprobs"):
            choice["logprobs"] = {"content": _token_logprobs(completion), "refusal": None}
        return _envelope(completion, "chat.completion", [choice]) | {"usage": _usage(completion)}

    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        wants_usage = bool(fields.mapping(incoming.body, "stream_options").get("include_usage"))
        extra: JSONObject = {"usage": None} if wants_usage else {}
        for choice in _choices(completion, logprobs=bool(incoming.body.get("logprobs"))):
            yield Event(_envelope(completion, "chat.completion.chunk", [choice]) | extra)
        if wants_usage:
            yield Event(_envelope(completion, "chat.completion.chunk", []) | {"usage": _usage(completion)})
        yield Event(sse.DONE)

    def framing(self, incoming: Incoming) -> Framing:
        return sse.SSE

    def counted(self, tokens: int, incoming: Incoming) -> JSONObject:
        return {"total_tokens": tokens}

    def error(self, error: PolarError) -> JSONObject:
        message, param, code = _wording(error)
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def error_event(self, error: PolarError) -> Event:
        """With the HTTP status as its code: Qwen Code asks again by it, as it would by a status."""
        told = self.error(error)["error"]
        return Event({"error": {**told, "code": told["code"] or (str(error.status) if error.status >= 500 else None)}})

    def models(self, names: Sequence[str]) -> JSONObject:
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> JSONObject:
        return {"id": name, "object": "model", "created": 0, "owned_by": "polar_plugin"}


def _envelope(completion: Completion, kind: str, choices: list[JSONObject]) -> JSONObject:
    return {
        "id": completion.id if completion.id.startswith("chatcmpl-") else f"chatcmpl-{completion.id}",
        "object": kind,
        "created": int(completion.ended),
        "model": completion.request.model,
        "system_fingerprint": None,
        "choices": choices,
    }


def _wire_message(reply: Message) -> JSONObject:
    message: JSONObject = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in reply.tool_calls
        ]
    return message


def _choices(completion: Completion, *, logprobs: bool) -> Iterator[JSONObject]:
    for delta in _deltas(completion.reply):
        yield _choice(delta)
    tokens = _token_logprobs(completion) if logprobs else []
    for start in range(0, len(tokens), _LOGPROBS_PIECE):
        yield _choice({}) | {"logprobs": {"content": tokens[start : start + _LOGPROBS_PIECE], "refusal": None}}
    yield _choice({}) | {"finish_reason": _finish_reason(completion)}


def _choice(delta: JSONObject) -> JSONObject:
    return {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}


def _deltas(reply: Message) -> Iterator[JSONObject]:
    only_calls = bool(reply.tool_calls) and not reply.content
    yield {"role": "assistant", "content": None if only_calls else ""}
    for piece in _pieces(reply.reasoning):
        yield {"reasoning_content": piece}
    for piece in _pieces(reply.content):
        yield {"content": piece}
    for i, call in enumerate(reply.tool_calls):
        head = {"index": i, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        yield {"tool_calls": [head]}
        for piece in _pieces(call.arguments or "{}"):  # "" for no arguments makes clients drop the call
            yield {"tool_calls": [{"index": i, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _finish_reason(completion: Completion) -> str:
    """A cut turn says so even where it holds whole calls: a client then knows that more was meant."""
    if completion.generation.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if completion.reply.tool_calls else "stop"


def _usage(completion: Completion) -> JSONObject:
    """True counts of ids. Details that nobody here counts are left out rather than written as 0."""
    prompt, output = len(completion.prompt_ids), len(completion.generation.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _token_logprobs(completion: Completion) -> list[JSONObject]:
    """Tokens by id: the text of one token need not be text at all, and the ids are what was sampled."""
    generation = completion.generation
    pairs = zip(generation.output_ids.tolist(), generation.logprobs.tolist(), strict=True)
    return [
        {
            "token": f"token_id:{token}",
            "logprob": value if math.isfinite(value) else _NO_LOGPROB,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, value in pairs
    ]


def _wording(error: PolarError) -> tuple[str, str | None, str | None]:
    """Message, parameter, code. Clients recognise an overflow by its message or its code, and compact their history."""
    if isinstance(error, ContextOverflow):
        message = (
            f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
            f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
        return message, "messages", "context_length_exceeded"
    if isinstance(error, BadRequest):
        return str(error), error.path or None, None
    codes: dict[type[PolarError], str] = {UnknownSession: "invalid_api_key", SessionSealed: "session_sealed"}
    return str(error), None, codes.get(type(error))
