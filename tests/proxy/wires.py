"""The four model APIs as bytes on a socket: where each is asked, and what each answer must look like.

Nothing here reads with the library's own code: what a client is told is looked up where that API's clients look.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.speakers import SPEAKERS, Speaker, Wire

ERROR_FIELDS = {
    "openai_chat": {"message", "type", "param", "code"},
    "openai_responses": {"message", "type", "param", "code"},
    "anthropic_messages": {"type", "message"},
    "google_generate": {"code", "message", "status"},
}
STREAMS = {"google_generate": "/v1beta/models/m:streamGenerateContent?alt=sse"}
COUNTS = {
    "anthropic_messages": "/v1/messages/count_tokens",
    "openai_responses": "/v1/responses/input_tokens",
    "google_generate": "/v1beta/models/m:countTokens",
}
"""OpenAI Chat has no such endpoint."""
HEADERS: Mapping[str, Mapping[str, str]] = {"anthropic_messages": {"anthropic-version": "2023-06-01"}}
ENDS = {
    "openai_chat": b"data: [DONE]\n\n",
    "openai_responses": b"event: response.completed",
    "anthropic_messages": b"event: message_stop",
    "google_generate": b'"finishReason"',
}
"""What of a stream tells its client that it is over and well."""
SIGNS = {
    "openai_chat": b": keep-alive\n\n",
    "openai_responses": b": keep-alive\n\n",
    "anthropic_messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    "google_generate": b"",
}
"""What a stream that waits sends; its client takes no other."""
MESSAGES = {"openai_responses": "input", "google_generate": "contents"}


@dataclass(frozen=True)
class WireAPI:
    """One model API."""

    name: str
    speaker: Speaker

    @property
    def headers(self) -> Mapping[str, str]:
        return HEADERS.get(self.name, {})

    @property
    def messages(self) -> str:
        """The field that holds the conversation: the path of what is wrong in it begins with this."""
        return MESSAGES.get(self.name, "messages")

    def path(self, stream: bool = False) -> str:
        return STREAMS.get(self.name, self.speaker.path) if stream else self.speaker.path

    def body(self, *history: Wire, stream: bool = False, max_tokens: int = 100) -> Wire:
        """A request; `history` begins behind the system prompt."""
        body = self.speaker.body([self.speaker.system("Work in a shell."), *history], max_tokens)
        return body | ({"stream": True} if stream and self.name not in STREAMS else {})

    def asks(self, text: str = "hi", *, stream: bool = False, max_tokens: int = 100) -> Wire:
        return self.body(self.speaker.user(text), stream=stream, max_tokens=max_tokens)

    def picture(self, data: str) -> Wire:
        """A user's message: a word and a PNG."""
        url = f"data:image/png;base64,{data}"
        if self.name == "openai_chat":
            parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
            return {"role": "user", "content": parts}
        if self.name == "openai_responses":
            parts = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": url}]
            return {"type": "message", "role": "user", "content": parts}
        if self.name == "anthropic_messages":
            source = {"type": "base64", "media_type": "image/png", "data": data}
            return {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "source": source}]}
        return {"role": "user", "parts": [{"text": "look"}, {"inlineData": {"mimeType": "image/png", "data": data}}]}

    def error(self, raw: bytes | str) -> Wire:
        """The error of a refused call, once it is sure that it has the API's shape and nothing else."""
        told = json.loads(raw)
        if self.name == "anthropic_messages":
            assert told.pop("type") == "error"
        assert set(told) == {"error"}
        assert set(told["error"]) == ERROR_FIELDS[self.name]
        return told["error"]

    def word(self, error: Wire) -> Any:
        """What this API's clients tell errors apart by, besides the HTTP status."""
        field = {"anthropic_messages": "type", "google_generate": "status"}.get(self.name, "code")
        return error[field]

    def usage(self, raw: str, *, stream: bool) -> tuple[int, int]:
        """Tokens of the prompt and of the answer, where this API's clients look for them."""
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        if self.name == "anthropic_messages":
            told = events[0]["message"]["usage"] | events[-2]["usage"] if stream else json.loads(raw)["usage"]
            return told["input_tokens"], told["output_tokens"]
        if self.name == "openai_responses":
            told = (events[-1]["response"] if stream else json.loads(raw))["usage"]
            return told["input_tokens"], told["output_tokens"]
        if self.name == "google_generate":
            told = (events[-1] if stream else json.loads(raw))["usageMetadata"]
            return told["promptTokenCount"], told["candidatesTokenCount"]
        told = (events[-1] if stream else json.loads(raw))["usage"]
        return told["prompt_tokens"], told["completion_tokens"]

    def finish(self, raw: str, *, stream: bool) -> str:
        """Why the answer ended, in this API's word for it."""
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        if self.name == "anthropic_messages":
            return events[-2]["delta"]["stop_reason"] if stream else json.loads(raw)["stop_reason"]
        if self.name == "openai_responses":
            return (events[-1]["response"] if stream else json.loads(raw))["status"]
        if self.name == "google_generate":
            return (events[-1] if stream else json.loads(raw))["candidates"][0]["finishReason"]
        chosen: Sequence[Any] = [event["choices"][0] for event in events if event["choices"]]
        return (chosen[-1] if stream else json.loads(raw)["choices"][0])["finish_reason"]


WIRES = tuple(WireAPI(name, speaker) for name, speaker in SPEAKERS.items())
every_api = pytest.mark.parametrize("api", WIRES, ids=lambda api: api.name)
streamed_and_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
