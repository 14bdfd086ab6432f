"""Qwen Code: what its configuration looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.qwen_code import QwenCode
from polar_plugin.records import AgentSpec


def launched(instruction: str = "Fix it.", **agent: Any) -> Launch:
    spec = AgentSpec("qwen_code", **{"model_name": "rl-model", **agent})
    url, home = "http://127.0.0.1:9", "/home/agent"
    return QwenCode().launch(LaunchContext(spec, instruction, url, "key-1", 40_000, 2_000, "/workspace", home))


def config_of(**more: Any) -> dict[str, Any]:
    return json.loads(launched(**more).files["/home/agent/.qwen/settings.json"])


def test_its_model_is_the_policy_by_the_openai_api_and_its_window_and_turn_are_the_trainers() -> None:
    launch, model = launched(), config_of()["model"]
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert (launch.env["OPENAI_API_KEY"], launch.env["OPENAI_MODEL"]) == ("key-1", "rl-model")
    assert "--auth-type openai" in str(launch.command)
    assert model["generationConfig"]["contextWindowSize"] == 40_000
    assert model["generationConfig"]["samplingParams"] == {"max_tokens": 2_000}


def test_commands_run_in_a_terminal_without_which_their_output_is_lost() -> None:
    assert config_of()["tools"]["shell"]["enableInteractiveShell"] is True


def test_nothing_calls_the_model_or_rewrites_the_conversation_by_itself() -> None:
    config = config_of()
    assert set(config["memory"].values()) == {False}
    assert config["memory"].keys() >= {"enableManagedAutoMemory", "enableManagedAutoDream"}
    assert set(config["context"]["clearContextOnIdle"].values()) == {-1}
    assert config["model"]["skipLoopDetection"] is True


def test_it_reports_to_nobody_and_no_http_proxy_stands_between() -> None:
    config, first = config_of(), str(launched().command).splitlines()[0].split()
    assert (config["privacy"]["usageStatisticsEnabled"], config["telemetry"]["enabled"]) == (False, False)
    assert config["general"]["enableAutoUpdate"] is False
    assert first[0] == "unset"
    assert {"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"} <= set(first)


@pytest.mark.parametrize("instruction", ["/help is broken: mend it", "/"])
def test_an_instruction_that_begins_with_a_slash_is_no_command(instruction: str) -> None:
    assert launched(instruction).stdin == f"\n{instruction}".encode()


def test_more_arguments_and_mcp_servers_and_skills_reach_it(tmp_path: Path) -> None:
    (tmp_path / "mending").mkdir()
    (tmp_path / "mending" / "SKILL.md").write_text("how")
    servers = ({"name": "mender", "command": "python3", "args": ["server.py"]},)
    assert config_of(mcp_servers=servers)["mcpServers"]["mender"]["args"] == ["server.py"]
    assert launched(skills_path=str(tmp_path)).files["/home/agent/.qwen/skills/mending/SKILL.md"] == b"how"
    assert str(launched(settings={"args": ["--bare"]}).command).endswith("--bare\n")
