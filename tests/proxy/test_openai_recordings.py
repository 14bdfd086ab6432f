"""Recorded OpenAI Chat requests of real agent programs: read whole, each reply known again in its echo."""

from __future__ import annotations

import pytest

from polar_plugin.proxy.openai_chat import OpenAIChat

from .recorded_runs import LOSSES, Asked, gone_on, runs

DIALECT = OpenAIChat()
PATH = "/chat/completions"
RUNS = runs(DIALECT, PATH)
every_run = pytest.mark.parametrize("asked", RUNS.values(), ids=RUNS.keys())
ASKS_AGAIN = {
    "qwen-code-0.24.4/fbadjson": [False, True],
    "qwen-code-0.24.4/flen": [False, True],
    "qwen-code-0.24.4/fdrop": [False, True],
}
"""Where a reply was no good, this program leaves it out, or begins anew with other tools."""


@every_run
def test_every_recorded_request_is_read_and_nothing_unexpected_is_dropped(asked: list[Asked]) -> None:
    for one in asked:
        assert set(one.request.ignored) <= LOSSES[DIALECT.name]
        assert len(one.request.messages) == len(one.body["messages"])
        assert len(one.request.tools) == len(one.body.get("tools", ()))
        assert one.request.stream is bool(one.body.get("stream"))
        assert not any("omitted]" in message.content for message in one.request.messages)


@every_run
def test_results_of_recorded_calls_know_their_function(asked: list[Asked]) -> None:
    for one in asked:
        calls = {call.id: call.name for message in one.request.messages for call in message.tool_calls}
        results = [message for message in one.request.messages if message.role == "tool"]
        assert [calls[message.tool_call_id] for message in results] == [message.name for message in results]


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_request_goes_on_from_the_one_before_and_its_reply(name: str) -> None:
    told = gone_on(RUNS[name])
    assert told == ASKS_AGAIN.get(name, [True] * len(told))


def test_the_recordings_have_what_this_suite_is_about() -> None:
    programs = {"qwen-code-0.24.4", "opencode-1.18.33", "pi-1.6.0", "mini-swe-agent-2.4.6", "openhands-1.16.0"}
    assert {name.split("/")[0] for name in RUNS} == programs
    requests = [one.request for asked in RUNS.values() for one in asked]
    assert any(len(message.tool_calls) > 1 for request in requests for message in request.messages)
    assert any(message.reasoning for request in requests for message in request.messages)
    assert any(one.thread == "SUBTASK" for asked in RUNS.values() for one in asked)
    assert {request.stream for request in requests} == {True, False}
    assert sum(len(gone_on(asked)) for asked in RUNS.values()) > 60
