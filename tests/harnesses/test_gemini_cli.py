"""Gemini CLI: what its configuration looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.gemini_cli import GeminiCLI
from polar_plugin.records import AgentSpec

WINDOW = 2**20


def launched(instruction: str = "Fix it.", *, length: int = 40_000, max_tokens: int = 2_000, **agent: Any) -> Launch:
    spec = AgentSpec("gemini_cli", **{"model_name": "rl-model", **agent})
    url, home = "http://127.0.0.1:9", "/home/agent"
    return GeminiCLI().launch(LaunchContext(spec, instruction, url, "key-1", length, max_tokens, "/workspace", home))


def config_of(**more: Any) -> dict[str, Any]:
    return json.loads(launched(**more).files["/home/agent/.gemini/settings.json"])


def test_case_107_its_base_url_is_the_loopback_proxy_which_may_be_plain_http() -> None:
    """It refuses plain http to any other host. The sandbox's forwarder listens on the loopback interface inside."""
    launch = launched()
    assert launch.env["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"
    assert launch.env["GEMINI_API_KEY"] == "key-1"
    assert config_of()["security"]["auth"]["selectedType"] == "gemini-api-key"


def test_it_trusts_the_workspace_asks_no_router_and_reports_to_nobody() -> None:
    launch, config = launched(), config_of()
    assert launch.env["GEMINI_CLI_TRUST_WORKSPACE"] == "true"
    assert "--yolo --model rl-model" in str(launch.command)
    assert (config["privacy"]["usageStatisticsEnabled"], config["telemetry"]["enabled"]) == (False, False)
    assert config["general"]["enableAutoUpdate"] is False


def test_nothing_rewrites_the_conversation_behind_the_models_back() -> None:
    launch = launched()
    assert config_of()["model"]["disableLoopDetection"] is True
    flags = json.loads(launch.files[launch.env["GEMINI_EXP"]])["flags"]
    assert {flag["flagId"] for flag in flags} == {45758817, 45758818}  # the two limits of its masking
    assert all(int(flag["intValue"]) > 10**9 for flag in flags)


@pytest.mark.parametrize("length", [8_000, 40_000, 262_144])
def test_it_compacts_while_a_turn_and_two_tools_outputs_still_fit(length: int) -> None:
    config = config_of(length=length, max_tokens=1_000)
    full = config["model"]["compressionThreshold"] * WINDOW
    output = config["tools"]["truncateToolOutputThreshold"] / 4
    assert length // 2 <= round(full) <= max(length // 2, length - 1_000 - 2 * output)


@pytest.mark.parametrize("instruction", ["/help is broken: mend it", "/"])
def test_an_instruction_that_begins_with_a_slash_is_no_command(instruction: str) -> None:
    assert launched(instruction).stdin == f"\n{instruction}".encode()
    assert launched("Fix /help.").stdin == b"Fix /help."


def test_no_http_proxy_stands_between_it_and_the_loopback_interface() -> None:
    first = str(launched().command).splitlines()[0].split()
    assert first[0] == "unset"
    assert {"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"} <= set(first)


def test_mcp_servers_and_skills_are_where_it_looks_for_them(tmp_path: Path) -> None:
    (tmp_path / "mending").mkdir()
    (tmp_path / "mending" / "SKILL.md").write_text("how")
    servers = (
        {"name": "mender", "command": "python3", "args": ["server.py"], "env": {"A": "b"}},
        {"name": "far", "transport": "streamable-http", "url": "http://127.0.0.1:1/mcp", "headers": {"X": "y"}},
        {"name": "old", "transport": "sse", "url": "http://127.0.0.1:1/sse"},
    )
    assert config_of(mcp_servers=servers)["mcpServers"] == {
        "mender": {"command": "python3", "args": ["server.py"], "env": {"A": "b"}},
        "far": {"httpUrl": "http://127.0.0.1:1/mcp", "headers": {"X": "y"}},
        "old": {"url": "http://127.0.0.1:1/sse", "headers": {}},
    }
    assert launched(skills_path=str(tmp_path)).files["/home/agent/.gemini/skills/mending/SKILL.md"] == b"how"
