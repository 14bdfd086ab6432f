"""Codex: what its configuration looks like."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.codex import Codex
from polar_plugin.records import AgentSpec

CONFIG = "/home/agent/.codex/config.toml"


def launched(length: int = 40_000, **agent: Any) -> Launch:
    spec = AgentSpec("codex", **{"model_name": 'rl "model" 🙂', **agent})
    context = LaunchContext(spec, "Fix it.", "http://127.0.0.1:9", "key-1", length, 2_000, "/workspace", "/home/agent")
    return Codex().launch(context)


def config_of(length: int = 40_000, **agent: Any) -> dict[str, Any]:
    return tomllib.loads(launched(length, **agent).files[CONFIG].decode())


def test_case_91_its_provider_is_the_proxy_by_the_responses_api() -> None:
    config = config_of()
    provider = config["model_providers"][config["model_provider"]]
    assert provider["wire_api"] == "responses"
    assert provider["base_url"] == "http://127.0.0.1:9/v1"
    assert launched().env[provider["env_key"]] == "key-1"
    assert launched().env["CODEX_HOME"] == "/home/agent/.codex"
    assert config["model"] == 'rl "model" 🙂'


def test_what_reaches_for_other_hosts_or_never_gives_up_is_off() -> None:
    config = config_of()
    assert config["analytics"]["enabled"] is False
    assert config["web_search"] == "disabled"
    assert config["check_for_update_on_startup"] is False
    assert set(config["features"].values()) == {False}
    assert config["features"].keys() >= {"plugins", "remote_plugin", "apps", "unbounded_connection_retries"}


def test_it_may_start_agents_of_its_own_only_where_it_is_told_so() -> None:
    assert config_of()["agents"]["enabled"] is False
    assert config_of(settings={"multi_agent": True})["agents"]["enabled"] is True


@pytest.mark.parametrize("length", [8_000, 40_000, 262_144])
def test_it_compacts_while_a_turn_and_two_tools_outputs_still_fit(length: int) -> None:
    config = config_of(length)
    limit, output = config["model_auto_compact_token_limit"], config["tool_output_token_limit"]
    assert config["model_context_window"] == length
    assert length // 2 <= limit <= length - 2_000 - 2 * output
    assert output <= 10_000


@pytest.mark.parametrize("model", ["gpt-5.5", "openai/gpt-6", "codex-mini", "o3"])
def test_a_model_name_that_codex_knows_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.model_name"):
        launched(model_name=model)


def test_mcp_servers_are_in_its_configuration() -> None:
    servers = (
        {"name": "mender", "command": "python3", "args": ["server.py"], "env": {"A": "b"}},
        {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:1/mcp", "headers": {"X": "y"}},
    )
    assert config_of(mcp_servers=servers)["mcp_servers"] == {
        "mender": {"command": "python3", "args": ["server.py"], "env": {"A": "b"}},
        "far": {"url": "http://127.0.0.1:1/mcp", "http_headers": {"X": "y"}},
    }
    with pytest.raises(ConfigError, match="sse"):
        launched(mcp_servers=({"name": "old", "transport": "sse", "url": "http://127.0.0.1:1"},))
