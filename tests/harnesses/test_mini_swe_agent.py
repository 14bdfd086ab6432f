"""mini-swe-agent: what its configuration looks like."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from polar_plugin.errors import ConfigError
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.mini_swe_agent import MiniSWEAgent
from polar_plugin.records import AgentSpec

CONFIG = "/home/agent/.polar/mini.yaml"


def launched(instruction: str = "Fix it.", **agent: Any) -> Launch:
    spec = AgentSpec("mini_swe_agent", **{"model_name": "rl-model", **agent})
    url, home = "http://127.0.0.1:9", "/home/agent"
    return MiniSWEAgent().launch(LaunchContext(spec, instruction, url, "key-1", 40_000, 2_000, "/workspace", home))


def config_of(instruction: str = "Fix it.", **agent: Any) -> dict[str, Any]:
    return yaml.safe_load(launched(instruction, **agent).files[CONFIG])


def argv_of(**agent: Any) -> list[str]:
    return shlex.split(str(launched(**agent).command).splitlines()[-1])


def test_its_model_is_the_proxys_by_the_openai_api() -> None:
    model = config_of()["model"]
    assert (model["model_name"], model["model_kwargs"]["api_base"]) == ("openai/rl-model", "http://127.0.0.1:9/v1")
    assert launched().env["OPENAI_API_KEY"] == "key-1"
    assert b"key-1" not in b"".join(launched().files.values())


def test_it_asks_nothing_and_has_no_limit_of_cost_or_steps_but_what_it_is_told() -> None:
    assert {"--yolo", "--exit-immediately"} <= set(argv_of())
    assert launched().env["MSWEA_CONFIGURED"] == "true"
    assert config_of()["agent"] == {"cost_limit": 0.0, "step_limit": 0}
    assert config_of(settings={"step_limit": 40})["agent"]["step_limit"] == 40
    assert launched().env["MSWEA_COST_TRACKING"] == config_of()["model"]["cost_tracking"] == "ignore_errors"
    assert launched().env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


def test_its_own_configuration_comes_first_and_ours_lies_over_it() -> None:
    argv = argv_of()
    first, second = [argv[at + 1] for at, one in enumerate(argv) if one == "-c"]
    assert (first, second) == ("mini.yaml", CONFIG)
    argv = argv_of(settings={"config": "swebench.yaml", "args": ["-c", "environment.timeout=120"]})
    assert [argv[at + 1] for at, one in enumerate(argv) if one == "-c"] == [
        "swebench.yaml", CONFIG, "environment.timeout=120",
    ]  # fmt: skip


@pytest.mark.parametrize("instruction", ["a: b\n- c", "{{ task }} 🙂 \ud83d", "x\x00\x7f\x85\u2028", "", "null"])
def test_any_instruction_is_read_back_as_it_is(instruction: str) -> None:
    assert config_of(instruction)["run"]["task"] == instruction


def test_skills_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"agent\.skills_path: the mini_swe_agent harness has no skills"):
        launched(skills_path="/skills")
