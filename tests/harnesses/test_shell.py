"""The shell harness: any program, told where its model is by the usual variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.shell import Shell
from polar_plugin.records import AgentSpec
from polar_plugin.runtimes.base import ExecResult

from ..runtimes.boxes import sandbox

pytestmark = pytest.mark.anyio

INSTRUCTION = "Fix 'it' in $HOME; é\n"


def context(home: str = "/home/agent", **agent: Any) -> LaunchContext:
    spec = AgentSpec("shell", model_name="m", **agent)
    return LaunchContext(spec, INSTRUCTION, "http://127.0.0.1:9", "key-1", 1000, 100, "/workspace", home)


async def started(**agent: Any) -> ExecResult:
    """What the agent's command does in a real sandbox."""
    async with sandbox() as box:
        launch = Shell().launch(context(box.home, **agent))
        for path, content in launch.files.items():
            await box.upload(content, path)
        return await box.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout=20)


async def test_every_model_api_leads_to_the_proxy_with_the_sessions_key() -> None:
    result = await started(command="env")
    told = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
    assert told["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1"
    assert told["ANTHROPIC_BASE_URL"] == told["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:9"
    assert {told[f"{name}_API_KEY"] for name in ("OPENAI", "ANTHROPIC", "GEMINI")} == {"key-1"}
    assert told["OPENAI_MODEL"] == "m"


async def test_the_instruction_is_a_file_and_stdin_is_empty() -> None:
    result = await started(command='cat "$INSTRUCTION_FILE"; wc -c')
    assert result.stdout.decode() == f"{INSTRUCTION}0\n"


async def test_the_instruction_is_stdin_too_where_asked() -> None:
    result = await started(command="cat", settings={"stdin": "instruction"})
    assert result.stdout.decode() == INSTRUCTION


def test_neither_instruction_nor_key_is_on_the_command_line() -> None:
    for command in ("run it", ("run", "it")):
        assert INSTRUCTION not in str(Shell().launch(context(command=command)).command)
        assert "key-1" not in str(Shell().launch(context(command=command)).command)


async def test_a_crash_before_a_pipe_is_seen() -> None:
    assert (await started(command="sh -c 'exit 3' | cat")).exit_code == 3


async def test_an_argument_vector_is_started_as_it_is() -> None:
    assert (await started(command=("printf", "%s|", "a b", "$HOME"))).stdout == b"a b|$HOME|"


async def test_files_are_there_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "tools" / "deep").mkdir(parents=True)
    (tmp_path / "tools" / "deep" / "t.txt").write_text("three")
    (tmp_path / "agent.py").write_text("two")
    settings = {
        "files": {"one.txt": "one", "/tmp/four": "four"},
        "agent_files": [str(tmp_path / "agent.py"), str(tmp_path / "tools")],
    }
    result = await started(command="cat ~/one.txt ~/agent.py ~/tools/deep/t.txt /tmp/four", settings=settings)
    assert result.stdout == b"onetwothreefour"


def test_the_agents_environment_goes_before_ours() -> None:
    launch = Shell().launch(context(command="x", env={"OPENAI_MODEL": "mine", "MORE": "1"}))
    assert (launch.env["OPENAI_MODEL"], launch.env["MORE"]) == ("mine", "1")


def test_exit_codes_that_are_no_failure_can_be_named() -> None:
    assert Shell().launch(context(command="x")).ok_exit_codes == {0}
    launch: Launch = Shell().launch(context(command="x", settings={"ok_exit_codes": [0, 2]}))
    assert launch.ok_exit_codes == {0, 2}


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ({}, "agent.command"),
        ({"command": "x", "settings": {"sdtin": "instruction"}}, "sdtin"),
        ({"command": "x", "settings": {"stdin": "yes"}}, "agent.settings.stdin"),
        ({"command": "x", "settings": {"agent_files": "/no/such/agent.py"}}, "/no/such/agent.py"),
    ],
)
def test_what_is_missing_or_unknown_is_refused(agent: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Shell().launch(context(**agent))
