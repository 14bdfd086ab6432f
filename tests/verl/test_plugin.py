"""verl's plugin entry point: light, and told of where it did not load. And the five lines of the README, in verl."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import yaml
from verl.trainer.ppo.v1 import get_trainer_cls

from polar_plugin.config import load_config
from polar_plugin.errors import ConfigError
from polar_plugin.verl_args import MODES, VerlArgs, preflight
from polar_plugin.verl_plugin import check_loaded

from .parts import configuration, copy_of

pytestmark = pytest.mark.verl
ROOT = Path(__file__).parents[2]


def child(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_verl_knows_our_trainers_by_its_own_plugin_mechanism() -> None:
    for name, base in MODES.items():
        trainer = get_trainer_cls(name)
        assert issubclass(trainer, get_trainer_cls(base))
        check_loaded(name)


def test_importing_verl_alone_loads_none_of_verls_trainers() -> None:
    code = (
        "import sys, verl;"
        "print('polar_plugin.verl_plugin' in sys.modules,"
        " {'verl.trainer.ppo.v1', 'polar_plugin.verl_trainer', 'polar_plugin.service', 'renderers'} & set(sys.modules))"
    )
    assert child(code) == "True set()"


def test_verl_refuses_our_mode_by_name_where_the_plugin_is_switched_off() -> None:
    code = """
import verl.trainer.ppo.v1 as v1
try:
    v1.get_trainer_cls("polar_sync")
except ValueError as error:
    print(error)
"""
    assert child(code, VERL_USE_EXTERNAL_PLUGINS="none").startswith("Unknown trainer 'polar_sync'")


def test_the_check_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = __import__("verl.trainer.ppo.v1.trainer_base", fromlist=["x"]).TRAINER_REGISTRY
    monkeypatch.delitem(registry, "polar_sync")
    with pytest.raises(ConfigError, match="VERL_USE_EXTERNAL_PLUGINS"):
        check_loaded("polar_sync")
    check_loaded("sync")


def block(page: str, heading: str) -> str:
    return re.findall(rf"```{heading}\n(.*?)```", (ROOT / page).read_text(), re.S)[0]


def test_the_five_lines_are_a_configuration_of_verl_that_passes_the_preflight(tiny: Path, tmp_path: Path) -> None:
    settings = block("docs/verl.md", "sh verl-settings").split()
    assert len(settings) == 5
    assert "\n".join(settings) in (ROOT / "README.md").read_text()
    told = dict(line.split("=") for line in settings)
    config = configuration(copy_of(tiny, tmp_path), None, **told)
    args = VerlArgs.of(config)
    assert (args.ours, args.use_v1) == (True, True)
    preflight(args)
    entries: list[dict[str, Any]] = yaml.safe_load(block("docs/verl.md", "yaml verl-agent"))
    assert entries[0]["name"] == config.actor_rollout_ref.rollout.agent.default_agent_loop
    module, _, name = entries[0]["_target_"].rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)
    load_config(yaml.safe_load(block("README.md", "yaml")))
