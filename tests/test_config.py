"""Config and the task payload: read whole or refused with a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_plugin.config import load_config, load_task
from polar_plugin.errors import ConfigError
from polar_plugin.placeholders import fill

PAPER_PAYLOAD: dict[str, Any] = {
    "task_id": "swe-{sample.metadata.instance_id}",
    "instruction": "{sample.prompt}",
    "num_samples": 8,
    "timeout_seconds": 1200,
    "runtime": {
        "backend": "docker",
        "image": "swe/{sample.metadata.instance_id}:latest",
        "network": "proxy_only",
        "workdir": "/testbed",
        "env": {"PYTHONDONTWRITEBYTECODE": "1"},
        "cpus": 2,
        "memory_mb": 4096,
        "gpus": 0,
        "prepare": [
            {"type": "exec", "command": "git config --global user.email ${{EMAIL}}", "cwd": "/testbed"},
            {"type": "upload_dir", "source": "tools", "target": "/opt/tools"},
        ],
    },
    "agent": {
        "harness": "shell",
        "model_name": "policy",
        "settings": {"max_turns": "{sample.metadata.max_turns}"},
        "env": {"A": "b"},
        "mcp_servers": [{"name": "files", "transport": "stdio", "command": "mcp", "args": []}],
        "skills_path": "skills",
        "command": ["python3", "agent.py"],
    },
    "builder": {"strategy": "prefix_merging", "config": {"max_trace_tokens": 30000}},
    "evaluator": {"strategy": "test_on_output", "refresh_runtime": True, "config": {"test_command": "pytest -rA"}},
    "callback_url": None,
    "metadata": {"step": "{rollout_id}", "group": "{group_index}", "policy": "{policy_version}"},
}
VALUES: dict[str, Any] = {
    "sample": {"prompt": "fix it", "metadata": {"instance_id": "a__b-1", "max_turns": 30}},
    "rollout_id": 7,
    "group_index": 3,
    "policy_version": 7,
}


def test_the_papers_task_payload_loads_whole() -> None:
    task = load_task(PAPER_PAYLOAD, VALUES)
    assert task.task_id == "swe-a__b-1"
    assert task.runtime.image == "swe/a__b-1:latest"
    assert task.runtime.prepare[0].command == "git config --global user.email ${EMAIL}"
    assert task.agent.command == ("python3", "agent.py")
    assert task.evaluator.refresh_runtime
    assert task.builder.config == {"max_trace_tokens": 30000}


def test_a_value_that_is_only_a_placeholder_keeps_its_type() -> None:
    task = load_task(PAPER_PAYLOAD, VALUES)
    assert task.agent.settings == {"max_turns": 30}
    assert task.metadata == {"step": 7, "group": 3, "policy": 7}


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{{rollout_id}}", "{rollout_id}"),
        ("step {rollout_id} of {sample.prompt}", "step 7 of fix it"),
        ("awk '{ print $1 }'", "awk '{ print $1 }'"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ('{{"step": {rollout_id}}}', '{"step": 7}'),
        ("${{HOME}}/{group_index}", "${HOME}/3"),
    ],
)
def test_literal_braces_survive(template: str, filled: str) -> None:
    task = load_task({"task_id": "t", "instruction": template, "agent": {"harness": "shell"}}, VALUES)
    assert task.instruction == filled


def test_a_key_that_yaml_reads_as_a_number_can_be_named() -> None:
    assert fill("{limits.5}", {"limits": {5: "five"}}) == "five"


def test_an_unknown_placeholder_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"task\.instruction: unknown placeholder \{sample\.metadata\.instance\}"
    ) as told:
        load_task({"task_id": "t", "instruction": "{sample.metadata.instance}", "agent": {"harness": "shell"}}, VALUES)
    assert "sample.metadata.instance_id, sample.metadata.max_turns" in str(told.value)
    assert "{{sample.metadata.instance}}" in str(told.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent": {"harnes": "shell"}}, "task: unknown key `agent.harnes`"),
        ({"agent": {}}, "exactly one of `harness` and `import_path`"),
        ({"agent": {"harness": "shell", "import_path": "a:B"}}, "exactly one of `harness` and `import_path`"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"timeout_seconds": -1}, "timeout_seconds must be positive"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be positive"),
        ({"runtime": {"prepare": [{"type": "copy"}]}}, "runtime.prepare.0.type"),
        ({"instruction": None}, "`instruction`"),
    ],
)
def test_a_wrong_payload_is_refused_with_its_path(change: dict[str, Any], message: str) -> None:
    payload = {"task_id": "t", "instruction": "i", "agent": {"harness": "shell"}, **change}
    with pytest.raises(ConfigError) as told:
        load_task(payload)
    assert message in str(told.value)


def test_a_config_file_is_read_bare_or_under_its_key(tmp_path: Path) -> None:
    bare, keyed = tmp_path / "bare.yaml", tmp_path / "keyed.yaml"
    bare.write_text("stages: {run: 3}\n")
    keyed.write_text("polar:\n  stages: {run: 3}\n")
    assert load_config(bare) == load_config(keyed)
    assert load_config(bare).stages.run == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stagez: {}", "unknown key `stagez`"),
        ("stages: {run: 0}", "`stages.run`"),
        ("polar: [1]", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("polar", "must be a mapping"),
        ("7", "must be a mapping"),
    ],
)
def test_a_wrong_config_says_what_and_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        load_config(path)
    assert message in str(told.value)


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_config(tmp_path / "nowhere.yaml")
