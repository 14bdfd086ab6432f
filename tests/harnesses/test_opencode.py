"""opencode: what its configuration looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.opencode import OpenCode
from polar_plugin.records import AgentSpec


def launched(**agent: Any) -> Launch:
    spec = AgentSpec("opencode", **{"model_name": "rl-model", **agent})
    url, home = "http://127.0.0.1:9", "/home/agent"
    return OpenCode().launch(LaunchContext(spec, "Fix it.", url, "key-1", 40_000, 2_000, "/workspace", home))


def config_of(**more: Any) -> dict[str, Any]:
    return json.loads(launched(**more).files["/home/agent/.config/opencode/opencode.json"])


def test_its_only_provider_is_the_proxy_and_its_model_is_told_its_true_limits() -> None:
    config = config_of()
    (name,) = config["enabled_providers"]
    provider = config["provider"][name]
    assert config["model"] == config["small_model"] == f"{name}/rl-model"
    assert provider["options"]["baseURL"] == "http://127.0.0.1:9/v1"
    assert provider["models"]["rl-model"]["limit"] == {"context": 40_000, "output": 2_000}
    assert provider["options"]["timeout"] is False


def test_the_key_is_in_the_environment_alone() -> None:
    launch = launched()
    assert config_of()["provider"]["polar"]["options"]["apiKey"] == "{env:POLAR_SESSION_KEY}"
    assert launch.env["POLAR_SESSION_KEY"] == "key-1"
    assert b"key-1" not in b"".join(launch.files.values())


def test_case_110_the_prompt_comes_by_an_input_that_ends_and_nothing_is_fetched_before_the_first_call() -> None:
    """An argument would arrive in double quotes. What else kept it from its first call is seen by the stages: no call
    within `first_call_timeout` is a failure of the infrastructure."""
    launch = launched()
    assert launch.stdin == b"Fix it."
    assert "Fix it." not in str(launch.command)
    assert launch.env["OPENCODE_DISABLE_MODELS_FETCH"] == launch.env["OPENCODE_DISABLE_LSP_DOWNLOAD"] == "1"
    assert config_of()["autoupdate"] is False
    home = "/home/agent/.config/opencode"
    assert f"{home}/node_modules/.keep" in launch.files
    assert (
        "@opencode-ai/plugin" in json.loads(launch.files[f"{home}/package-lock.json"])["packages"][""]["dependencies"]
    )


def test_case_112_it_asks_for_no_title() -> None:
    assert "--title" in str(launched().command).split()


def test_old_tool_outputs_stay_as_they_are() -> None:
    assert config_of()["compaction"] == {"auto": True, "prune": False}
    assert launched().env["OPENCODE_DISABLE_PRUNE"] == "1"


@pytest.mark.parametrize(
    ("api", "package"),
    [
        ("openai-completions", "@ai-sdk/openai-compatible"),
        ("openai-responses", "@ai-sdk/openai"),
        ("anthropic-messages", "@ai-sdk/anthropic"),
    ],
)
def test_each_api_has_its_own_client(api: str, package: str) -> None:
    assert config_of(settings={"api": api})["provider"]["polar"]["npm"] == package


def test_an_unknown_api_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent\.settings\.api is one of openai-completions, .*'telepathy'"):
        launched(settings={"api": "telepathy"})


def test_mcp_servers_and_skills_are_where_it_looks_for_them(tmp_path: Path) -> None:
    (tmp_path / "mending").mkdir()
    (tmp_path / "mending" / "SKILL.md").write_text("how")
    servers = (
        {"name": "mender", "command": "python3", "args": ["server.py"], "env": {"A": "b"}},
        {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:1/mcp", "headers": {"X": "y"}},
    )
    assert config_of(mcp_servers=servers)["mcp"] == {
        "mender": {"type": "local", "command": ["python3", "server.py"], "environment": {"A": "b"}},
        "far": {"type": "remote", "url": "http://127.0.0.1:1/mcp", "headers": {"X": "y"}},
    }
    assert launched(skills_path=str(tmp_path)).files["/home/agent/.config/opencode/skills/mending/SKILL.md"] == b"how"
