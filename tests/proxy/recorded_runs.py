"""Recorded runs of real agent programs, as one dialect reads them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polar_plugin.engine.meaning import Meaning, message_digest, said
from polar_plugin.proxy.codec import Dialect, Incoming
from polar_plugin.records import ChatRequest, Message
from tests.recorded.replay import load, message_of, recordings

LOSSES = {
    "anthropic_messages": {
        "context_management", "messages.*.content.*.cache_control", "messages.*.output_config", "metadata",
        "output_config", "system.*.cache_control", "system.*.x-anthropic-billing-header", "thinking",
        "tools.*.cache_control", "tools.*.defer_loading", "tools.*.eager_input_streaming",
    },
    "google_generate": {
        "contents.*.parts.*.thoughtSignature", "generationConfig.responseJsonSchema",
        "generationConfig.responseMimeType", "generationConfig.thinkingConfig.thinkingBudget",
        "generationConfig.thinkingConfig.thinkingLevel",
    },
    "openai_chat": {"prompt_cache_key", "reasoning_effort", "store"},
    "openai_responses": {
        "client_metadata", "include.reasoning.encrypted_content", "input.*.reasoning.encrypted_content",
        "parallel_tool_calls", "prompt_cache_key", "reasoning.effort", "store", "text.verbosity",
        "tools.*.tool_search", "tools.*.web_search",
    },
}  # fmt: skip
"""All that these programs send and that means nothing here. Signatures and opaque content are the recorder's own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that was answered or failed."""

    body: dict[str, Any]
    request: ChatRequest
    reply: Message | None
    """What was said to it; None for a failure, or a stream that was cut."""
    thread: str
    """Whose turn it was by the script."""


def runs(dialect: Dialect, path: str) -> dict[str, list[Asked]]:
    """By name: those that have requests to a path with `path` in it."""
    found: dict[str, list[Asked]] = defaultdict(list)
    for name in recordings():
        for one in load(name):
            if one.method == "POST" and path in one.path:
                request = dialect.decode(_incoming(one.path, one.headers, one.body))
                reply = None if one.reply is None else message_of(one.reply)
                found[name].append(Asked(one.body, request, reply, one.thread))
    return dict(found)


def _incoming(path: str, headers: list[list[str]], body: dict[str, Any]) -> Incoming:
    path, _, query = path.partition("?")
    model = path.rpartition("/models/")[2].rpartition(":")[0]
    pairs = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)
    return Incoming(path, {name.lower(): value for name, value in headers}, pairs, body, {"model": model})


def gone_on(asked: Sequence[Asked]) -> list[bool]:
    """Of each request behind another of its thread: whether it tells that one's messages, and its reply, again.

    Calls are told as they were sampled; messages of the assistant that say nothing do not count.
    """
    threads: dict[str, list[Asked]] = defaultdict(list)
    for one in asked:
        threads[one.thread or one.request.thread].append(one)
    meaning = Meaning()
    out: list[bool] = []
    for thread in threads.values():
        for before, after in itertools.pairwise(thread):
            reply = [before.reply] if before.reply else []
            for message in reply:
                meaning.learn(message)
            told = list(_digests(meaning, [*before.request.messages, *reply]))
            out.append(list(_digests(meaning, after.request.messages))[: len(told)] == told)
    return out


def _digests(meaning: Meaning, messages: Sequence[Message]) -> Iterator[bytes]:
    for message in messages:
        if message.role != "assistant":
            yield message_digest(message)
        elif said(message):
            yield meaning.turn(message)
