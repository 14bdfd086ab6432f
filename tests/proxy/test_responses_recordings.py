"""Recorded Responses requests of real agent programs: read whole, each reply known again in its echo."""

from __future__ import annotations

import pytest

from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.records import Role

from .recorded_runs import LOSSES, Asked, gone_on, runs

DIALECT = OpenAIResponses()
RUNS = runs(DIALECT, "/responses")
every_run = pytest.mark.parametrize("asked", RUNS.values(), ids=RUNS.keys())


@every_run
def test_every_request_is_read_and_only_known_fields_are_dropped(asked: list[Asked]) -> None:
    for one in asked:
        assert set(one.request.ignored) <= LOSSES[DIALECT.name]
        assert one.request.messages[0].role == "system"
        assert one.request.stream
        assert not any("omitted]" in message.content for message in one.request.messages)


@every_run
def test_the_requests_of_one_thread_have_one_role_and_keep_their_tools(asked: list[Asked]) -> None:
    tools = {one.request.thread: one.request.tools for one in asked}
    for one in asked:
        assert one.request.role is (Role.SUB_AGENT if one.request.thread else Role.MAIN)
        assert one.request.tools == tools[one.request.thread]


@every_run
def test_within_a_thread_every_request_goes_on_from_the_one_before_and_its_reply(asked: list[Asked]) -> None:
    assert all(gone_on(asked))


def test_the_recordings_have_what_this_suite_is_about() -> None:
    assert {name.split("-")[0] for name in RUNS} == {"codex", "pi"}
    bodies = [one.body for asked in RUNS.values() for one in asked]
    kinds = {tool["type"] for body in bodies for tool in body.get("tools", ())}
    assert {"function", "custom", "namespace"} <= kinds
    assert any(one.request.thread for asked in RUNS.values() for one in asked)
    assert sum(len(gone_on(asked)) for asked in RUNS.values()) > 20
