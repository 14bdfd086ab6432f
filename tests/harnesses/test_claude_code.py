"""Claude Code: what its preset tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.claude_code import ClaudeCode
from polar_plugin.harnesses.noise import stands_for
from polar_plugin.records import AgentSpec, ToolCall


def launched(**agent: Any) -> Launch:
    spec = AgentSpec("claude_code", model_name="rl model", **agent)
    context = LaunchContext(spec, "Fix it.", "http://127.0.0.1:9", "key-1", 40_000, 2_000, "/workspace", "/home/agent")
    return ClaudeCode().launch(context)


def test_it_finds_the_proxy_and_calls_every_model_by_the_policys_name() -> None:
    env = launched().env
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_API_KEY"]) == ("http://127.0.0.1:9", "key-1")
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"rl model"}
    assert "--model 'rl model'" in str(launched().command)


def test_it_is_told_the_true_window_and_output_limit() -> None:
    env = launched().env
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2000"


def test_it_runs_as_root_writes_no_changing_line_into_the_prompt_and_reaches_for_no_other_host() -> None:
    env = launched().env
    assert env["IS_SANDBOX"] == "1"
    assert env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"


def test_case_84_its_tools_are_never_loaded_on_demand_and_can_be_chosen() -> None:
    assert launched().env["ENABLE_TOOL_SEARCH"] == "0"
    assert "--tools" not in str(launched().command)
    assert "--tools Bash,Read" in str(launched(settings={"tools": ["Bash", "Read"]}).command)


def test_mcp_servers_are_those_of_the_task_alone() -> None:
    launch = launched(
        mcp_servers=(
            {"name": "mender", "command": "python3", "args": ["server.py"], "env": {"A": "b"}},
            {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:1/mcp"},
            {"name": "old", "transport": "sse", "url": "http://127.0.0.1:1/sse", "headers": {"X": "y"}},
        )
    )
    assert "--mcp-config /home/agent/.polar/mcp.json --strict-mcp-config" in str(launch.command)
    assert json.loads(launch.files["/home/agent/.polar/mcp.json"])["mcpServers"] == {
        "mender": {"type": "stdio", "command": "python3", "args": ["server.py"], "env": {"A": "b"}},
        "far": {"type": "http", "url": "http://127.0.0.1:1/mcp", "headers": {}},
        "old": {"type": "sse", "url": "http://127.0.0.1:1/sse", "headers": {"X": "y"}},
    }


def test_more_arguments_come_last() -> None:
    assert str(launched(settings={"args": ["--max-turns", "5"]}).command).endswith("--max-turns 5\n")


@pytest.mark.parametrize(
    ("echoed", "same"),
    [
        ('{"all": false, "path": "a", "edits": [{"old": 1, "new": [2]}]}', True),
        ('{"path": "a", "edits": [{"old": 1.0, "new": [2], "times": null}]}', True),
        ('{"path": "b", "edits": [{"old": 1, "new": [2]}], "all": false}', False),
        ('{"path": "a", "edits": [{"old": 1, "new": [2]}, {}]}', False),
        ('{"path": "a", "all": false}', False),
        ("{}", False),
        ("no JSON", False),
    ],
)
def test_an_echoed_call_whose_defaults_are_filled_in_is_the_sampled_one(echoed: str, same: bool) -> None:
    sampled = ToolCall("Edit", '{"path": "a", "edits": [{"old": 1, "new": [2]}]}', "call_1")
    assert stands_for(ToolCall("Edit", echoed, "call_1"), sampled) is same
    assert not stands_for(ToolCall("Write", echoed, "call_1"), sampled)
