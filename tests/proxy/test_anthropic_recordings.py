"""Recorded Anthropic requests of real agent programs: read whole, each reply known again in its echo."""

from __future__ import annotations

import pytest

from polar_plugin.proxy.anthropic_messages import AnthropicMessages

from .recorded_runs import LOSSES, Asked, gone_on, runs

DIALECT = AnthropicMessages()
RUNS = runs(DIALECT, "/v1/messages")
every_run = pytest.mark.parametrize("asked", RUNS.values(), ids=RUNS.keys())
STARTS_ANEW = {"claude-code-2.1.332/fempty": [False, True]}
"""Behind an empty reply it rewrites its first message by itself."""


@every_run
def test_every_recorded_request_is_read_and_nothing_unexpected_is_dropped(asked: list[Asked]) -> None:
    for one in asked:
        assert set(one.request.ignored) <= LOSSES[DIALECT.name]
        assert one.request.messages[-1].role != "assistant"
        assert "x-anthropic-billing-header" not in "".join(message.content for message in one.request.messages)
        assert one.request.stream == one.body["stream"]
        assert not any("omitted]" in message.content for message in one.request.messages)


@every_run
def test_the_requests_of_one_thread_keep_their_tools(asked: list[Asked]) -> None:
    tools = {one.request.thread: one.request.tools for one in asked}
    assert "" in tools
    assert all(one.request.tools == tools[one.request.thread] for one in asked)


@pytest.mark.parametrize("name", RUNS)
def test_every_recorded_request_goes_on_from_the_one_before_and_its_reply(name: str) -> None:
    told = gone_on(RUNS[name])
    assert told == STARTS_ANEW.get(name, [True] * len(told))


def test_the_recordings_have_what_this_suite_is_about() -> None:
    assert {name.split("-")[0] for name in RUNS} == {"claude", "pi"}
    assert any(one.request.thread for asked in RUNS.values() for one in asked)
    assert sum(len(gone_on(asked)) for asked in RUNS.values()) > 25
