"""Pi: what its configuration looks like, and, where it is installed, that it works in a sandbox without network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import LaunchContext
from polar_plugin.harnesses.pi import Pi
from polar_plugin.records import AgentSpec

from ..model_api import bash, model_api, says
from ..runtimes.boxes import sandbox

pytestmark = pytest.mark.anyio


def context(base_url: str = "http://127.0.0.1:9", **agent: Any) -> LaunchContext:
    spec = AgentSpec("pi", model_name="rl model", **agent)
    return LaunchContext(spec, "Fix it.", base_url, "key-1", 4096, 512, "/workspace", "/home/agent")


def models_of(**agent: Any) -> dict[str, Any]:
    return json.loads(Pi().launch(context(**agent)).files["/home/agent/.pi/agent/models.json"])


def test_the_provider_is_the_proxy_and_the_model_is_told_its_true_context() -> None:
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
    assert "exec pi --print --mode json --no-session --provider polar --model 'rl model' --tools bash" in command


@pytest.mark.parametrize("settings", [{"api": "telepathy"}, {"rot": "/opt"}])
def test_an_unknown_setting_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.settings"):
        Pi().launch(context(settings=settings))


@pytest.mark.cli
@pytest.mark.skipif("PI_ROOT" not in os.environ, reason="PI_ROOT is not set: npm install --prefix PI_ROOT node@22 ...")
async def test_pi_runs_its_tool_and_ends(tmp_path: Path) -> None:
    replies = (says("I write it.", bash("echo mended > result")), says("Done."))
    async with (
        model_api(tmp_path, *replies) as api,
        sandbox(proxy=api.endpoint, kwargs={"ro_binds": [f"{os.environ['PI_ROOT']}:/opt/pi"]}) as box,
    ):
        launch = Pi().launch(context(box.proxy_url, settings={"root": "/opt/pi"}))
        for path, content in launch.files.items():
            await box.upload(content, path)
        with anyio.fail_after(120):
            result = await box.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout=100)
        assert result.exit_code == 0, result.text
        assert (await box.exec("cat result")).stdout == b"mended\n"
    assert set(api.keys) == {"Bearer key-1"}
    assert len(api.requests) == 2
    assert "Fix it." in json.dumps(api.requests[0]["messages"])
    assert api.requests[1]["messages"][-1]["role"] == "tool"
