"""Recorded Google requests of real agent programs: read whole, and each reply known again where it is said back."""

from __future__ import annotations

import pytest

from polar_plugin.proxy.google_generate import GoogleGenerate

from .recorded_runs import LOSSES, Asked, gone_on, runs

DIALECT = GoogleGenerate()
RUNS = runs(DIALECT, "enerateContent")
every_run = pytest.mark.parametrize("asked", RUNS.values(), ids=RUNS.keys())
STARTS_ANEW = {"gemini-cli-0.61.0/fempty", "gemini-cli-0.61.0/basic"}
"""Behind an empty reply a part is added to the user's message; a router asks for one reply each time."""


@every_run
def test_every_recorded_request_is_read_and_nothing_unexpected_is_dropped(asked: list[Asked]) -> None:
    for one in asked:
        assert set(one.request.ignored) <= LOSSES[DIALECT.name]
        assert one.request.messages[0].role == "system"
        assert one.request.messages[-1].role != "assistant"
        assert not any("omitted]" in message.content for message in one.request.messages)
        assert len(one.request.tools) == sum(len(t["functionDeclarations"]) for t in one.body.get("tools", ()))


@every_run
def test_case_103_results_of_recorded_calls_know_their_function_and_id(asked: list[Asked]) -> None:
    for one in asked:
        calls = {call.id: call.name for message in one.request.messages for call in message.tool_calls}
        results = [message for message in one.request.messages if message.role == "tool"]
        assert [calls[message.tool_call_id] for message in results] == [message.name for message in results]


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_request_goes_on_from_the_one_before_and_its_reply(name: str) -> None:
    assert all(went_on is (name not in STARTS_ANEW) for went_on in gone_on(RUNS[name]))


def test_the_recordings_have_what_this_suite_is_about() -> None:
    assert {name.split("-")[0] for name in RUNS} == {"gemini", "pi"}
    requests = [one.request for asked in RUNS.values() for one in asked]
    assert any(len(message.tool_calls) > 1 for request in requests for message in request.messages)
    assert any(one.thread == "SUBTASK" for asked in RUNS.values() for one in asked)
    assert sum(len(gone_on(asked)) for asked in RUNS.values()) > 25
