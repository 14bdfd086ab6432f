"""Pi: what its configuration looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import LaunchContext
from polar_plugin.harnesses.pi import Pi
from polar_plugin.records import AgentSpec

from ..runtimes.boxes import sandbox

pytestmark = pytest.mark.anyio


def context(base_url: str = "http://127.0.0.1:9", **agent: Any) -> LaunchContext:
    spec = AgentSpec("pi", model_name="rl model", **agent)
    return LaunchContext(spec, "Fix it.", base_url, "key-1", 4096, 512, "/workspace", "/home/agent")


def models_of(**agent: Any) -> dict[str, Any]:
    return json.loads(Pi().launch(context(**agent)).files["/home/agent/.pi/agent/models.json"])


def test_case_113_the_provider_is_the_proxy_and_the_model_is_told_its_true_context() -> None:
    provider = models_of()["providers"]["polar"]
    assert provider["baseUrl"] == "http://127.0.0.1:9/v1"
    assert provider["api"] == "openai-completions"
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"], model["maxTokens"]) == ("rl model", 4096, 512)
    assert model["compat"] == {"supportsDeveloperRole": False, "supportsReasoningEffort": False}


def test_the_key_is_in_the_environment_alone_and_the_prompt_on_stdin_alone() -> None:
    launch = Pi().launch(context())
    provider = models_of()["providers"]["polar"]
    assert launch.env[provider["apiKey"].removeprefix("$")] == "key-1"
    assert "key-1" not in str(launch.command) + json.dumps(provider)
    assert launch.stdin == b"Fix it."
    assert "Fix it." not in str(launch.command)


@pytest.mark.parametrize(
    ("api", "url"),
    [
        ("openai-responses", "http://127.0.0.1:9/v1"),
        ("anthropic-messages", "http://127.0.0.1:9"),
        ("google-generative-ai", "http://127.0.0.1:9/v1beta"),
    ],
)
def test_each_api_has_its_own_base(api: str, url: str) -> None:
    provider = models_of(settings={"api": api})["providers"]["polar"]
    assert (provider["api"], provider["baseUrl"]) == (api, url)


def test_the_command_starts_pi_from_its_root_with_more_arguments() -> None:
    command = Pi().launch(context(settings={"root": "/opt/pi", "args": ["--tools", "bash"]})).command
    assert isinstance(command, str)
    assert "PATH=/opt/pi/node_modules/.bin:/opt/pi/bin:" in command
    assert "\nexec pi --print --mode json --no-session --provider polar --model 'rl model' --tools bash" in command


@pytest.mark.parametrize("settings", [{"api": "telepathy"}, {"rot": "/opt"}])
def test_an_unknown_setting_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.settings"):
        Pi().launch(context(settings=settings))


@pytest.mark.parametrize(
    ("node", "exit_code"), [("echo v20.20.2", 127), ("echo v22.9.0", 127), ("exit 1", 127), ("echo v22.19.0", 0)]
)
async def test_case_113_a_node_that_is_too_old_is_said_and_counts_as_not_started(
    tmp_path: Path, node: str, exit_code: int
) -> None:
    """Exit code 127 before any model call is an infrastructure error: it says nothing about the policy."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"node": node, "pi": "echo started"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    launch = Pi().launch(context(settings={"root": str(tmp_path)}))
    async with sandbox(network="none", kwargs={"ro_binds": [str(tmp_path)]}) as box:
        result = await box.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout=60)
    assert result.exit_code == exit_code, result.text
    assert ("started" in result.text) is (exit_code == 0)
    assert ("needs Node.js >= 22.19" in result.text) is (exit_code == 127)


@pytest.mark.parametrize(("length", "numbers"), [(8_000, (2_000, 2_000)), (200_000, (16_384, 20_000))])
def test_a_small_context_can_be_compacted_too(length: int, numbers: tuple[int, int]) -> None:
    spec = AgentSpec("pi", model_name="m")
    launch = Pi().launch(LaunchContext(spec, "x", "http://127.0.0.1:9", "k", length, 512, "/workspace", "/home/agent"))
    told = json.loads(launch.files["/home/agent/.pi/agent/settings.json"])["compaction"]
    assert (told["reserveTokens"], told["keepRecentTokens"]) == numbers
