"""Every recorded Responses request of real agent programs, where a folder of recordings is at hand."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar_plugin.engine.meaning import message_digest
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.proxy.responses_tools import offers_of
from polar_plugin.records import ChatRequest, Message, Role, ToolCall

from .responses_wire import Wire

FOLDER = os.environ.get("POLAR_CLI_RECORDINGS", "")
pytestmark = pytest.mark.skipif(
    not FOLDER,
    reason="POLAR_CLI_RECORDINGS names no folder of recorded agent programs (<program>-<version>/<run>.jsonl)",
)
DIALECT = OpenAIResponses()
KNOWN_LOSSES = {
    "client_metadata", "include.reasoning.encrypted_content", "input.*.reasoning.encrypted_content",
    "parallel_tool_calls", "prompt_cache_key", "reasoning.effort", "store", "text.verbosity", "tools.*.tool_search",
    "tools.*.web_search",
}  # fmt: skip
"""Fields without a meaning here. The recorder made up opaque content of its own, which is foreign to us."""


def recorded() -> Iterator[tuple[str, list[Wire]]]:
    for path in sorted(Path(FOLDER).glob("*/*.jsonl")) if FOLDER else ():
        exchanges = [json.loads(line) for line in path.read_text().splitlines()]
        asked = [
            one for one in exchanges if one["method"] == "POST" and one["path"].split("?")[0].endswith("/responses")
        ]
        if asked:
            yield f"{path.parent.name}/{path.stem}", asked


RUNS = dict(recorded())


def incoming_of(exchange: Wire) -> Incoming:
    headers = {name.lower(): value for name, value in exchange["headers"]}
    return Incoming("/v1/responses", headers, {}, exchange["body"])


def threads_of(exchanges: list[Wire]) -> dict[str, list[tuple[Wire, ChatRequest]]]:
    threads: dict[str, list[tuple[Wire, ChatRequest]]] = defaultdict(list)
    for exchange in exchanges:
        request = DIALECT.decode(incoming_of(exchange))
        threads[request.thread].append((exchange, request))
    return threads


def replied(exchange: Wire, names: dict[tuple[str, str], str]) -> Message | None:
    """The reply that the recorder streamed; None for a failure or a stream that was cut."""
    data = [line for event in exchange["response"].get("sse", ()) for line in event.splitlines() if line[:5] == "data:"]
    events = [json.loads(line[5:]) for line in data]
    if not any(event["type"] in ("response.completed", "response.incomplete") for event in events):
        return None
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    calls = tuple(
        ToolCall(names.get((item.get("namespace", ""), item["name"]), item["name"]), item["arguments"])
        for item in items
        if item["type"] == "function_call"
    )
    return Message("assistant", text, tool_calls=calls)


@pytest.mark.parametrize("exchanges", RUNS.values(), ids=RUNS.keys())
def test_every_request_is_read_and_only_known_fields_are_dropped(exchanges: list[Wire]) -> None:
    for exchange in exchanges:
        request = DIALECT.decode(incoming_of(exchange))
        assert set(request.ignored) <= KNOWN_LOSSES
        assert request.messages[0].role == "system"
        assert request.stream
        text = json.dumps([[m.content, [c.arguments for c in m.tool_calls]] for m in request.messages])
        assert "omitted]" not in text


@pytest.mark.parametrize("exchanges", RUNS.values(), ids=RUNS.keys())
def test_within_a_thread_every_request_goes_on_from_the_one_before_and_its_reply(exchanges: list[Wire]) -> None:
    for thread, asked in threads_of(exchanges).items():
        assert {request.role for _, request in asked} == {Role.SUB_AGENT if thread else Role.MAIN}
        for (exchange, before), (_, after) in itertools.pairwise(asked):
            names = {offer.key[1:]: offer.tool.name for offer in offers_of(exchange["body"]).offers}
            reply = replied(exchange, names)
            said = [*before.messages, *([reply] if reply else [])]
            assert [message_digest(m) for m in after.messages[: len(said)]] == [message_digest(m) for m in said]
            assert after.tools == before.tools


def test_the_recordings_have_what_this_suite_is_about() -> None:
    assert {name.split("-")[0] for name in RUNS} >= {"codex", "pi"}
    bodies = [exchange["body"] for exchanges in RUNS.values() for exchange in exchanges]
    kinds = {tool["type"] for body in bodies for tool in body.get("tools", ())}
    assert {"function", "custom", "namespace"} <= kinds
    assert any(len(threads_of(exchanges)) > 1 for exchanges in RUNS.values())
