"""Every code block of README and docs runs, and every command they name exists."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from polar_plugin import slime_rollout
from polar_plugin.cli import app
from polar_plugin.config import RolloutConfig, load_config, load_task
from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import LaunchContext
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.untrained import Untrained
from polar_plugin.plugins import HARNESSES, RUNTIMES, resolve
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.records import AgentSpec
from polar_plugin.runtimes.apptainer_options import ApptainerOptions
from polar_plugin.runtimes.local import LocalOptions
from polar_plugin.slime_args import SlimeArgs, preflight, rollout_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md")]
)
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[object]:
    found: list[object] = []
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)):
            found.append(pytest.param(text, id=f"{page.name}-{language}-{number}"))
    return found


@pytest.mark.parametrize("text", blocks("python"))
def test_a_python_block_runs(text: str) -> None:
    exec(compile(text, "block", "exec"), {"__name__": "block"})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_is_a_config_whose_task_loads(text: str) -> None:
    config = load_config(yaml.safe_load(text))
    metadata = {"instance_id": "a-1", "workspace": "/tasks/a-1"}
    task = load_task(config.task, {"sample": {"prompt": "Fix it.", "metadata": metadata}})
    assert task.runtime.image == "/tasks/a-1"


def test_the_three_flags_for_slime_name_what_exists_and_pass_the_preflight() -> None:
    flags = dict(line.split() for line in README.splitlines() if line.startswith("--"))
    assert set(flags) == {"--rollout-function-path", "--custom-reward-post-process-path", "--custom-config-path"}
    for path in list(flags.values())[:2]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(__import__(module, fromlist=[name]), name))
    polar = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", README, re.S)[0])["polar"]
    args = SlimeArgs(
        polar=polar, hf_checkpoint="model", rollout_batch_size=4, n_samples_per_prompt=8, global_batch_size=32,
        sglang_router_ip="127.0.0.1", sglang_router_port=3000,
        custom_reward_post_process_path=flags["--custom-reward-post-process-path"],
    )  # fmt: skip
    config = rollout_config(args)
    preflight(args, config)
    assert config.engine.url == "http://127.0.0.1:3000"


def test_the_page_on_slime_names_hooks_that_exist_and_leaves_out_none() -> None:
    told = {cells[1].strip("`") for cells in rows("slime.md", "flag")}
    assert all(callable(getattr(slime_rollout, name)) for name in told)
    flags = [line for line in README.splitlines() if line.startswith("--")]
    assert [line for line in (ROOT / "docs" / "slime.md").read_text().splitlines() if line.startswith("--")] == flags
    hooks = {"generate", "post_process_rewards"} | told
    others = {"EvalOutput", "SampleLike", "SlimeArgs", "TrainOutput", "close", "use_service"}
    assert hooks == set(slime_rollout.__all__) - others


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first heading is `heading`."""
    text = (ROOT / "docs" / page).read_text()
    table = re.search(rf"^\| {re.escape(heading)} \|(.+\n)+", text, re.M)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_the_page_of_agent_programs_has_every_preset_and_the_version_that_was_tested() -> None:
    told = {cells[0].strip("`"): cells[3] for cells in rows("agents.md", "`harness`")}
    presets = {name: resolve(name, HARNESSES, "harness") for name in HARNESSES}
    assert told == {name: getattr(preset, "tested", ("", ""))[1] for name, preset in presets.items()}


def test_the_page_of_agent_programs_tells_every_setting_of_a_preset() -> None:
    told = {cells[0].strip("`"): set(re.findall(r"`(\w+)`:", cells[1])) for cells in rows("agents.md", "`settings` of")}
    for name in HARNESSES.keys() - {"shell"}:
        context = LaunchContext(AgentSpec(settings={"no such": 1}), "", "", "", 8192, 1024, "/", "/")
        with pytest.raises(ConfigError, match=r"knows .*, not") as caught:
            resolve(name, HARNESSES, "harness")().launch(context)
        known = set(re.findall(r"knows (.*), not", str(caught.value))[0].split(", "))
        assert known == told.get(name, set()) | {"root", "args"}, name


@pytest.mark.parametrize(("backend", "options"), [("apptainer", ApptainerOptions), ("local", LocalOptions)])
def test_the_page_of_sandboxes_tells_every_option_of_a_backend(backend: str, options: Any) -> None:
    told = [cells[0].strip("`") for cells in rows("sandboxes.md", f"`kwargs` of `{backend}`")]
    assert sorted(told) == sorted(options.__slots__)


def test_the_page_of_sandboxes_has_every_backend() -> None:
    told = {cells[0].strip("`") for cells in rows("sandboxes.md", "`backend`")}
    assert told == RUNTIMES.keys() | {"pkg.mod:Class"}


def test_the_page_of_model_apis_has_every_route() -> None:
    told = {cells[0]: set(re.findall(r"`(\w+) (/[^`]*)`", cells[1])) for cells in rows("model-apis.md", "API")}
    for name, dialect in {
        "Anthropic Messages": AnthropicMessages(), "OpenAI Chat": OpenAIChat(),
        "OpenAI Responses": OpenAIResponses(), "Google generateContent": GoogleGenerate(),
    }.items():  # fmt: skip
        exact = {(route.method, re.sub(r"\{model:.+?\}", "{model}", route.path)) for route in dialect.routes}
        elsewhere = re.compile(r"/(v1|v1alpha|v1beta1)/|/v1beta/\{model\}:")  # told in a sentence below the table
        assert told[name] == {route for route in exact if name[:6] != "Google" or not elsewhere.match(route[1])}


def test_every_make_target_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named >= {"quickstart", "test", "test-sglang", "test-cli", "test-slime", "test-vllm"}
    for target in named:
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False).returncode == 0, (
            target
        )


def test_every_command_that_the_readme_names_takes_its_options() -> None:
    lines = re.findall(r"`polar-plugin ([^`]+)`", README)
    assert len(lines) >= 5
    for line in lines:
        command, *options = shlex.split(line)
        within = options[:1] if command == "harness" else []
        told = CliRunner().invoke(app, [command, *within, "--help"], env={"COLUMNS": "200"})
        assert told.exit_code == 0, line
        assert all(option in told.output for option in options if option.startswith("--")), line


def test_the_readme_says_how_every_marked_suite_is_run() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    for marker in re.findall(r'^  "(\w+): ', config, re.M):
        assert marker == "model" or f"test-{marker}" in README, marker


def test_the_page_on_traces_names_each_setting_of_the_builder_and_each_reason_not_to_train() -> None:
    page = (ROOT / "docs" / "traces.md").read_text()
    settings = list(inspect.signature(PrefixMerging).parameters)
    for name in (*settings, *Untrained, *RolloutConfig.model_fields["verify"].annotation.__args__):  # type: ignore[union-attr]
        assert re.search(rf"\b{name}\b", page), name


def test_the_security_page_names_tests_that_there_are() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    written = {name for path in (ROOT / "tests").rglob("test_*.py") for name in _tests(path)}
    assert len(named) > 20
    assert named <= written


def _tests(path: Path) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
