"""Recorded HTTP exchanges of a real agent program, with the vendor's texts replaced: safe to share.

    python -m tests.recorded.redact_http SOURCE.jsonl... DIRECTORY

A source has one JSON object a line and exchange: seq, t (Unix seconds), method, path, headers [[name, value]...], body,
kind (chat, anthropic, responses or gemini), thread, and response: {status, sse: [text...] | body}. The result is
DIRECTORY/NAME.jsonl.xz with the same lines, where

* each text of a request that is not the script's own is filler of the same token length (`filler.py`): system prompts,
  descriptions of tools and parameters, reminders, results; so is a key, and the recording machine's paths;
* a response is what it says ({content, reasoning, tool_calls, finish}) and the script's own words;
* ids, times, order, structure, names of tools and parameters stay.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from polar_plugin.engine.tokenizer import load_tokenizer

from .. import tokenizers
from .filler import Filler
from .replies import reply_of

JSON = dict[str, Any]
# What is no vendor's: the script's prompts. And the words by which a call's purpose or a harness's own words are known.
_KEPT = (
    r"MAINTASK: create a file hello\.txt that contains hi\.",
    r"SUBTASK: count the lines of data\.txt and report the number\.",
    r"\w+\.txt",
    r"x-anthropic-billing-header: [^\n]*",
    r"You are a title generator",
    r"Generate a title for this conversation:",
    r"Got it\. Thanks for the additional context!",
    r"\[The previous response was interrupted before it completed\.\]",
    r"\[System: You previously returned an empty response",
    r"Task Routing AI",
    r"Chunk ID|Wall time",
)
_NAMES = frozenset({
    "id", "type", "role", "name", "model", "call_id", "tool_use_id", "tool_call_id", "status", "signature",
    "encrypted_content", "thoughtSignature", "prompt_cache_key", "$schema", "namespace", "phase",
})  # fmt: skip
_KEYS = {"authorization": "Bearer session-key", "x-api-key": "session-key", "x-goog-api-key": "session-key"}
_NAME = re.compile(r"[\w./:@+=#-]{0,120}")
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_PATHS = (
    (re.compile(r"(?:/ws|/tmp/harness)/runs/[\w.-]+/ws\b"), "/workspace"),
    (re.compile(r"(?:/ws|/tmp/harness)/runs/[\w.-]+/home\b"), "/home/agent"),
    (re.compile(r"(?:/ws|/tmp/harness)/runs/[\w.-]+/tmp\b"), "/tmp"),
    (re.compile(r"-tmp-harness-runs-[\w.-]+-ws\b"), "-workspace"),
    (re.compile(r"/ws/[\w-]+(?=/node_modules|/bin)"), "/opt/agent"),
    (re.compile(r"\bws-runs-[\w.-]+-ws\b"), "workspace"),
)


class Redactor:
    """Of one recording: what its script said stays, wherever a harness repeats it."""

    def __init__(self, fill: Callable[[str], str], exchanges: list[JSON]) -> None:
        self._fill = fill
        self._ours = {text.strip() for one in exchanges for text in _said(reply_of(one["kind"], one["response"]))}

    def exchange(self, raw: JSON) -> JSON:
        reply = reply_of(raw["kind"], raw["response"])
        status = raw["response"]["status"]
        kept = {name: raw[name] for name in ("seq", "t", "method", "path")}
        return kept | {
            "headers": [[name, _KEYS.get(name.lower(), value)] for name, value in raw["headers"] if _stays(name)],
            "thread": raw["thread"],
            "body": self.value("", raw["body"]),
            "response": {"status": status} | ({"reply": reply} if reply else {}),
        }

    def value(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self.value(name, item) for name, item in cast("JSON", value).items()}
        if isinstance(value, list):
            return [self.value(key, item) for item in cast("list[Any]", value)]
        return self._text(key, value) if isinstance(value, str) else value

    def _text(self, key: str, text: str) -> str:
        if key in _NAMES or text.strip() in self._ours or _NAME.fullmatch(text):
            return text
        if key == "arguments" or _is_json(text):
            return _LITERAL.sub(self._literal, text)
        return self._fill(text)

    def _literal(self, match: re.Match[str]) -> str:
        text = cast("str", json.loads(match[0], strict=False))
        filled = self._text("", text)
        return match[0] if filled == text else json.dumps(filled, ensure_ascii=False)


def _said(reply: JSON | None) -> Iterator[str]:
    """Each text of a scripted reply, that is, of our own."""
    if reply is None:
        return
    yield reply["content"]
    yield reply["reasoning"]
    for call in reply["tool_calls"]:
        yield call["arguments"]
        yield from (json.loads(one, strict=False) for one in _LITERAL.findall(call["arguments"]))


def _stays(header: str) -> bool:
    return header.lower() not in ("content-length", "host", "connection")


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _moved(value: Any) -> Any:
    """With the recording machine's paths replaced."""
    if isinstance(value, dict):
        return {name: _moved(item) for name, item in cast("JSON", value).items()}
    if isinstance(value, list):
        return [_moved(item) for item in cast("list[Any]", value)]
    if isinstance(value, str):
        for pattern, path in _PATHS:
            value = pattern.sub(path, value)
    return value


def redact(source: Path, target: Path, fill: Callable[[str], str]) -> None:
    exchanges = [json.loads(line) for line in source.read_text().splitlines()]
    redactor = Redactor(fill, exchanges)
    lines = [json.dumps(_moved(redactor.exchange(one)), ensure_ascii=False) for one in exchanges]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode(), preset=9))


def main(arguments: list[str]) -> None:
    *sources, directory = map(Path, arguments)
    tokenizer = load_tokenizer(tokenizers.load("qwen3")).hf
    fill = Filler(lambda text: tokenizer.encode(text, add_special_tokens=False), _KEPT)
    for source in sources:
        redact(source, directory / f"{source.stem}.jsonl.xz", fill)


if __name__ == "__main__":
    main(sys.argv[1:])
