"""Recorded requests of real agent programs, read by the Anthropic dialect.

They hold the programs' own texts, so that they are no part of this repository: POLAR_CLI_RECORDINGS names the folder.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.engine.meaning import message_digest
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.codec import Incoming
from polar_plugin.records import ChatRequest, Message

FOLDER = Path(os.environ.get("POLAR_CLI_RECORDINGS") or "/nowhere")
FILES = sorted([*FOLDER.glob("claude-code-*/*.jsonl"), *FOLDER.glob("pi-*/*anthropic*.jsonl")])
pytestmark = pytest.mark.skipif(not FILES, reason="POLAR_CLI_RECORDINGS names no folder with recordings of Claude Code")
DIALECT = AnthropicMessages()
IGNORED = {
    "context_management",
    "messages.*.content.*.cache_control",
    "messages.*.output_config",
    "metadata",
    "output_config",
    "system.*.cache_control",
    "system.*.x-anthropic-billing-header",
    "thinking",
    "tools.*.cache_control",
    "tools.*.defer_loading",
    "tools.*.eager_input_streaming",
}
"""All that these programs send and that means nothing here."""


def exchanges(path: Path) -> Iterator[tuple[dict[str, Any], ChatRequest]]:
    for line in path.read_text().splitlines():
        one = json.loads(line)
        if one["method"] == "POST":
            headers = {name.lower(): value for name, value in one["headers"]}
            yield one, DIALECT.decode(Incoming(one["path"].partition("?")[0], headers, {}, one["body"]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recorded_request_is_read_and_nothing_unexpected_is_dropped(path: Path) -> None:
    read = list(exchanges(path))
    assert read
    for raw, request in read:
        assert set(request.ignored) <= IGNORED
        assert request.messages[-1].role != "assistant"
        assert "x-anthropic-billing-header" not in "".join(message.content for message in request.messages)
        assert request.stream == raw["body"]["stream"]
        assert not any("omitted]" in message.content for message in request.messages)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_requests_of_one_thread_extend_one_another_and_keep_their_tools(path: Path) -> None:
    threads: dict[str, list[ChatRequest]] = defaultdict(list)
    for _, request in exchanges(path):
        threads[request.thread].append(request)
    assert "" in threads
    for requests in threads.values():
        for before, after in itertools.pairwise(requests):
            assert after.tools == before.tools
            old, new = ([message_digest(m) for m in request.messages] for request in (before, after))
            if "fempty" not in path.stem or _has_assistant(before):  # there it rewrites its first message by itself
                assert new[: len(old)] == old


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recorded_reply_is_known_again_where_it_is_said_back(path: Path) -> None:
    said = {
        message_digest(message)
        for _, request in exchanges(path)
        for message in request.messages
        if message.role == "assistant"
    }
    replies = [reply for one, _ in exchanges(path) if (reply := _reply(one["response"])) is not None]
    known = [message_digest(reply) in said for reply in replies]
    assert sum(known) >= len(said) > 0 or path.stem == "fbadjson", "each turn said back is one that was recorded"


def _has_assistant(request: ChatRequest) -> bool:
    return any(message.role == "assistant" for message in request.messages)


def _reply(response: dict[str, Any]) -> Message | None:
    """The message that a recorded stream said, read as its echo would be."""
    blocks: dict[int, dict[str, Any]] = {}
    for frame in response.get("sse", ()):
        event = json.loads(frame.partition("data: ")[2])
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"input_text": ""}
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for key in ("text", "thinking"):
                block[key] = block.get(key, "") + delta.get(key, "")
            block["input_text"] += delta.get("partial_json", "")
    content = [_echoed(block) for _, block in sorted(blocks.items())]
    if not content or None in content:
        return None
    body = {"messages": [{"role": "assistant", "content": content}, {"role": "user", "content": "x"}]}
    return DIALECT.decode(Incoming("", {}, {}, body)).messages[0]


def _echoed(block: dict[str, Any]) -> dict[str, Any] | None:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": block["thinking"], "signature": ""}
    try:
        return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": json.loads(block["input_text"])}
    except ValueError:
        return None
