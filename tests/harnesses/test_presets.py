"""What holds for the preset of every agent program: where the key and the prompt go, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polar_plugin import plugins
from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.mcp import mcp_servers
from polar_plugin.harnesses.preset import skill_files, start
from polar_plugin.records import AgentSpec

from ..runtimes.boxes import sandbox

PRESETS = sorted(set(plugins.HARNESSES) - {"shell"})
KEY = "session-key-1"
every_preset = pytest.mark.parametrize("name", PRESETS)
WITHOUT_MCP = ("pi", "mini_swe_agent")
WITH_MCP = sorted(set(PRESETS) - set(WITHOUT_MCP))
PROGRAMS = {
    "pi": "pi",
    "claude_code": "claude",
    "codex": "codex",
    "gemini_cli": "gemini",
    "qwen_code": "qwen",
    "opencode": "opencode",
}
"""Those that read the prompt from their standard input."""


def launched(name: str, instruction: str = "Fix it.", *, context_length: int = 40_000, **agent: Any) -> Launch:
    spec = AgentSpec(name, **{"model_name": "rl-model", **agent})
    context = LaunchContext(
        spec, instruction, "http://127.0.0.1:9", KEY, context_length, 2_000, "/workspace", "/home/agent"
    )
    return plugins.create(name, plugins.HARNESSES, "harness", {}).launch(context)


def argv_of(launch: Launch) -> str:
    return launch.command if isinstance(launch.command, str) else " ".join(launch.command)


@every_preset
def test_the_command_line_has_neither_the_key_nor_the_prompt_however_long(name: str) -> None:
    launch = launched(name, "word " * 100_000)
    assert KEY not in argv_of(launch)
    assert len(argv_of(launch)) < 4000
    assert KEY in launch.env.values() or any(KEY.encode() in content for content in launch.files.values())
    assert b"word word" in launch.stdin or any(b"word word" in content for content in launch.files.values())


@every_preset
def test_a_prompt_of_any_characters_arrives_as_it_is(name: str) -> None:
    prompt = "Größe $HOME `id` \"quoted\" 'too' 🙂\n\\n --flag\x7f"
    launch = launched(name, prompt)
    told = [content.decode() for content in (launch.stdin, *launch.files.values())]
    assert prompt in told or prompt in [yaml.safe_load(text)["run"]["task"] for text in told if "task:" in text]


@every_preset
def test_an_unknown_setting_is_refused_and_the_known_ones_are_told(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"agent\.settings: .*{name}.* knows .*root.*\['rot'\]"):
        launched(name, settings={"rot": "/opt"})


@every_preset
def test_a_setting_of_a_wrong_type_is_refused_with_its_path(name: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.settings\.root"):
        launched(name, settings={"root": 7})


@every_preset
def test_the_programs_root_is_first_on_path_and_the_tasks_environment_has_the_last_word(name: str) -> None:
    plain = launched(name, settings={"root": "/opt/my tools"})
    assert "/opt/my tools" in argv_of(plain).replace("'", "")
    variable = next(iter(plain.env))
    assert launched(name, env={variable: "mine", "MORE": "1"}).env.items() >= {variable: "mine", "MORE": "1"}.items()


@every_preset
def test_it_says_which_versions_were_run(name: str) -> None:
    oldest, newest = plugins.resolve(name, plugins.HARNESSES, "harness").tested
    assert oldest
    assert newest


@pytest.mark.parametrize("name", WITH_MCP)
@pytest.mark.parametrize(
    ("servers", "path"),
    [
        ([{"command": "x"}], r"agent\.mcp_servers\.0\.name"),
        ([{"name": "a b", "command": "x"}], r"agent\.mcp_servers\.0\.name"),
        ([{"name": "a", "command": "x"}, {"name": "b"}], r"agent\.mcp_servers\.1\.command"),
        ([{"name": "a", "transport": "streamable-http"}], r"agent\.mcp_servers\.0\.url"),
        ([{"name": "a", "transport": "telepathy"}], r"agent\.mcp_servers\.0\.transport"),
        ([{"name": "a", "command": "x", "args": "y"}], r"agent\.mcp_servers\.0\.args"),
        ([{"name": "a", "command": "x", "comand": "y"}], r"agent\.mcp_servers\.0\.comand"),
        ([{"name": "a", "command": "x"}, {"name": "a", "command": "y"}], r"agent\.mcp_servers: two"),
    ],
)
def test_a_bad_mcp_server_is_refused_with_its_path(name: str, servers: list[dict[str, Any]], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        launched(name, mcp_servers=tuple(servers))


def test_an_mcp_server_takes_what_a_task_says_of_it() -> None:
    (server,) = mcp_servers(AgentSpec("x", mcp_servers=({"name": "a", "command": "b", "args": ["c"]},)))
    assert (server.name, server.local, server.command, server.args) == ("a", True, "b", ["c"])


@pytest.mark.parametrize("name", WITHOUT_MCP)
def test_mcp_servers_are_refused_where_the_program_has_no_mcp(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"agent\.mcp_servers: the {name} harness has no MCP"):
        launched(name, mcp_servers=({"name": "a", "command": "b"},))


def test_skills_are_copied_whole_and_a_directory_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.skills_path"):
        skill_files(AgentSpec("x", skills_path=str(tmp_path)), "/skills")
    (tmp_path / "mending" / "more").mkdir(parents=True)
    (tmp_path / "mending" / "SKILL.md").write_text("how")
    (tmp_path / "mending" / "more" / "table.bin").write_bytes(b"\xff")
    assert skill_files(AgentSpec("x", skills_path=str(tmp_path)), "/skills") == {
        "/skills/mending/SKILL.md": b"how",
        "/skills/mending/more/table.bin": b"\xff",
    }


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.anyio
async def test_case_101_a_program_that_reads_its_input_to_the_end_ends(name: str, tmp_path: Path) -> None:
    """A stand-in of the program's name: it gets the whole prompt, then the end of its input, and no terminal."""
    bin_directory = tmp_path / "node_modules" / ".bin"
    bin_directory.mkdir(parents=True)
    (bin_directory / PROGRAMS[name]).write_text("#!/bin/sh\ntest -t 0 && exit 9\nwc -c\n")
    (bin_directory / "node").write_text("#!/bin/sh\necho v22.19.0\n")
    for path in bin_directory.iterdir():
        path.chmod(0o755)
    prompt = "word " * 50_000
    launch = launched(name, prompt, settings={"root": str(tmp_path)})
    async with sandbox(network="none", kwargs={"ro_binds": [str(tmp_path)]}) as box:
        for path, content in launch.files.items():
            await box.upload(content, path)
        result = await box.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout=60)
    assert (result.exit_code, result.stdout.split()) == (0, [str(len(prompt)).encode()]), result.text


def test_a_start_without_a_root_relies_on_path() -> None:
    assert start(("pi", "--model", "a b"), None) == "exec pi --model 'a b'\n"


LAST_LINES = {
    "claude_code": (
        '{"duration_api_ms":1741,"stop_reason":"end_turn","total_cost_usd":0.19,"result":"Done.","type":"result"}',
        '{"type":"result","subtype":"success","result":"Done."}',
    ),
    "codex": ('{"type":"turn.completed","usage":{"input_tokens":10790}}',),
    "gemini_cli": ("}",),
    "opencode": ('{"type":"step_finish","part":{"id":"prt_22b62bb9","reason":"stop","type":"step-finish"}}',),
    "pi": ('{"type":"agent_settled","aborted":false}', '{"type":"agent_end","messages":[],"willRetry":false}'),
}
"""What the tested versions print when they are done; mini-swe-agent prints for people, and ends.

Qwen Code ends too, but on a busy machine long after its result: to be ended for that would cost its exit code.
"""
EARLIER_LINES = (
    "",
    "{",
    '{"type":"system","subtype":"init"}',
    '{"type":"assistant","text":"it prints \\"total_cost_usd\\": and {\\"type\\":\\"result\\"}"}',
    '{"type":"turn.started"}',
    '{"type":"turn_end"}',
    '{"type":"agent_start"}',
    '{"type":"item.completed","item":{"text":"{\\"type\\":\\"turn.completed\\"}"}}',
    '{"type":"step_finish","part":{"reason":"tool-calls"}}',
)


@every_preset
def test_case_85_the_line_with_which_it_is_done_is_known_and_no_earlier_one_is_taken_for_it(name: str) -> None:
    finished, last = launched(name).finished, LAST_LINES.get(name, ())
    assert bool(finished) == bool(last)
    assert all(re.search(finished, line) for line in last)
    assert not last or not any(re.search(finished, line) for line in EARLIER_LINES)
