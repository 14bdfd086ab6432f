"""What an answer to a fuzzed request must be: the dialect's own shape, by its SDK's models and our stream readers."""

from __future__ import annotations

import json
import re
from typing import Any

from anthropic.types import Message as AnthropicMessage
from google.genai import types
from openai.types.responses import CompactedResponse, Response

from polar_plugin.records import Completion

from . import anthropic_stream, google_stream, openai_stream, responses_stream
from .oracle import exactly

_UNREADABLE = (
    "the request body", "the compressed request body", "content coding",
)  # fmt: skip
"""How refusals begin where the body could not be read at all, so that there is no path."""
_WHOLE = ("cannot say this conversation",)
"""What is wrong with a conversation as a whole has no path either."""
_PATH = re.compile(r"[A-Za-z$_][\w$-]*(\.(\d+|[A-Za-z$_][\w$-]*))*")


class Wrong(AssertionError):
    """An answer that the dialect does not have."""


def check_refusal(dialect: str, path: str, status: int, answer: bytes, *, scripted: bool, with_path: bool) -> None:
    """The error's shape; its path where the request could be read. Raises AssertionError."""
    allowed = {503} if scripted else {400, 413, 415}
    assert status in allowed, f"a status of {status}"
    message, param = _ERRORS[dialect](json.loads(answer), status)
    if scripted or status in (413, 415):
        return
    if not with_path and re.search("|".join(_UNREADABLE), message):
        return
    if any(words in message for words in _WHOLE):
        return
    found = re.match(r"(\S+): .", message)
    assert found, "no path"
    assert _PATH.fullmatch(found[1]), f"an odd path: {found[1]}"
    assert param in (None, found[1]) if dialect in ("anthropic_messages", "google_generate") else param == found[1]


def _anthropic_error(told: Any, status: int) -> tuple[str, None]:
    assert told.keys() == {"type", "error"}
    assert told["type"] == "error"
    assert told["error"].keys() == {"type", "message"}
    kinds = {400: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error"}
    assert told["error"]["type"] == kinds.get(status, "overloaded_error")
    return told["error"]["message"], None


def _openai_error(told: Any, status: int) -> tuple[str, str | None]:
    assert told.keys() == {"error"}
    assert told["error"].keys() == {"message", "type", "param", "code"}
    assert told["error"]["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return told["error"]["message"], told["error"]["param"]


def _google_error(told: Any, status: int) -> tuple[str, None]:
    assert told.keys() == {"error"}
    assert told["error"].keys() == {"code", "message", "status"}
    assert told["error"]["code"] == status
    assert told["error"]["status"] == ("UNAVAILABLE" if status >= 500 else "INVALID_ARGUMENT")
    return told["error"]["message"], None


_ERRORS: dict[str, Any] = {
    "anthropic_messages": _anthropic_error,
    "openai_chat": _openai_error,
    "openai_responses": _openai_error,
    "google_generate": _google_error,
}


def check_answer(dialect: str, path: str, told: Any, completion: Completion | None, raw: bytes, coding: str) -> None:
    """An answer of status 200: a dict or list that was read, or the bytes of a stream. Raises AssertionError or
    ValueError."""
    counts = {"/count_tokens": "input_tokens", "/input_tokens": "input_tokens", ":countTokens": "totalTokens"}
    for end, key in counts.items():
        if path.partition("?")[0].endswith(end):
            assert completion is None, "a count is no turn"
            assert type(told[key]) is int
            assert told[key] > 0
            return
    assert completion is not None, "an answer that is not on the ledger"
    assert completion.request.stream == (isinstance(told, bytes | list))
    _ANSWERS[dialect](told, completion)


def _anthropic_answer(told: Any, completion: Completion) -> None:
    message = anthropic_stream.read(told) if isinstance(told, bytes) else told
    exactly(AnthropicMessage, json.dumps(message))
    assert message["usage"]["input_tokens"] == len(completion.prompt_ids)
    assert message["usage"]["output_tokens"] == len(completion.generation.output_ids)


def _chat_answer(told: Any, completion: Completion) -> None:
    if isinstance(told, bytes):
        openai_stream.read(told, usage=b'"usage":' in told)
        return
    openai_stream.check_whole(told)
    assert told["usage"]["prompt_tokens"] == len(completion.prompt_ids)


def _responses_answer(told: Any, completion: Completion) -> None:
    if isinstance(told, bytes):
        told = responses_stream.check(responses_stream.parse(told.decode("ascii").split("\n")))
    compact = told["object"] == "response.compaction"
    exactly(CompactedResponse if compact else Response, json.dumps(told))
    assert told["usage"]["input_tokens"] == len(completion.prompt_ids)


def _google_answer(told: Any, completion: Completion) -> None:
    if isinstance(told, bytes):
        chunks = google_stream.read(told, google_stream.SSEReader())
    else:
        chunks = told if isinstance(told, list) else [told]
    if isinstance(told, bytes | list):
        google_stream.follow(chunks)
    types.GenerateContentResponse.model_validate(chunks[-1], by_alias=True, by_name=False)
    assert chunks[-1]["usageMetadata"]["promptTokenCount"] == len(completion.prompt_ids)


_ANSWERS: dict[str, Any] = {
    "anthropic_messages": _anthropic_answer,
    "openai_chat": _chat_answer,
    "openai_responses": _responses_answer,
    "google_generate": _google_answer,
}
