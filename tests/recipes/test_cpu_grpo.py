"""The recipe that shows learning: a short run of it, its ablation, and its trainer held to slime's own."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from polar_plugin import slime_rollout
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.quickstart import Observed, Prompts
from polar_plugin.rewards import advantages
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import SampleLike

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "cpu_grpo"
SHORT = "--supervised-steps 700 --groups 8 --sessions 8 --held-out 24 --rollouts 5"
ONCE = "--supervised-steps 700 --groups 4 --sessions 8 --held-out 4 --rollouts 1"

pytestmark = pytest.mark.timeout(900)


def train(out: Path, options: str, name: str = "agent", **env: str) -> Any:
    """Run the recipe as its README says; what its file says of seed 0."""
    command = [sys.executable, str(RECIPE / "train.py"), "--out", str(out), *options.split()]
    told = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-3000:]
    return json.loads((out / "runs" / f"{name}-0.json").read_text())


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs go; they share one pre-trained model."""
    return tmp_path_factory.mktemp("cpu_grpo")


@pytest.fixture(scope="module")
def short(out: Path) -> Any:
    return train(out, SHORT)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe's modules by name; gone from `sys.modules` afterwards."""
    names = {path.stem for path in RECIPE.glob("*.py")}
    monkeypatch.syspath_prepend(str(RECIPE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names - {"slime_code"}})
    for name in names:
        sys.modules.pop(name, None)


def test_a_few_rollouts_teach_the_model(short: Any, figure: Any) -> None:
    rewards, held_out = short["rewards"], short["held_out"]
    figure("cpu_grpo, 5 rollouts of 64 sessions", f"training {rewards}, held out {held_out}, {short['seconds']:.0f} s")
    assert rewards[0] < 0.3
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.15
    assert held_out["5"] > held_out["0"]


def test_each_update_lowers_the_loss_of_its_rollout_and_supervision_its_own(short: Any, out: Path) -> None:
    assert all(step["loss_after"] < step["loss"] - 1e-3 for step in short["steps"])
    (path,) = out.glob("models/*/losses.json")
    losses = json.loads(path.read_text())
    assert losses[0] > 5
    assert np.mean(losses[400:480]) < 0.1


def test_each_rollout_is_sampled_by_the_weights_of_the_last_update_and_recorded_exactly(short: Any) -> None:
    assert short["versions"] == ["0", "1", "2", "3", "4"]
    assert max(step["gap_max"] for step in short["steps"]) < 1e-4


def test_a_table_and_a_plot_are_written(short: Any, out: Path) -> None:
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    row = (out / "table.md").read_text().splitlines()[2].split(" | ")
    assert row[:4] == ["| agent", "0", "recipe", "320"]


def test_a_rerendered_history_shows_in_the_log_probabilities(short: Any, out: Path, figure: Any) -> None:
    told = train(out, f"{ONCE} --ablate rerender", "rerender")
    figure("cpu_grpo, rerender", f"{told['respelt']:.0%} of later turns respelt, gap {told['steps'][0]}")
    assert told["respelt"] > 0
    assert told["steps"][0]["gap_max"] > 1e-2


@pytest.mark.slime
def test_slimes_own_code_takes_the_same_step(short: Any, out: Path, tmp_path: Path) -> None:
    """One seed, one rollout: the loss of the samples after the update says that the update was the same."""
    home = os.environ.get("SLIME_HOME")
    if not home:
        pytest.skip("SLIME_HOME is not set")
    (tmp_path / "models").symlink_to(out / "models")
    ours, slimes = train(tmp_path, ONCE), train(tmp_path, f"{ONCE} --slime-home {home}", "agent_slime")
    assert (ours["trainer"], slimes["trainer"]) == ("recipe", "slime")
    assert slimes["rewards"] == ours["rewards"]
    for key in ("loss", "loss_after", "gap"):
        assert_allclose(slimes["steps"][0][key], ours["steps"][0][key], atol=1e-5)


def test_demonstrations_are_what_a_session_of_the_harness_is_token_by_token(recipe: Any, tmp_path: Path) -> None:
    """So a model that has learned from them is at home in real sessions."""
    recipe.train.prepare()
    options = recipe.setting.Options(out=tmp_path, groups=1, sessions=1)
    frame = recipe.setting.watch(options)
    tokenizer = recipe.pretrain.make_tokenizer(frame)
    recipe.pretrain.save(tmp_path / "model", recipe.pretrain.make_model(tokenizer, 0), tokenizer)
    task = recipe.family.Task("olive", {"olive": "1234", "ivory": "6789"})
    told = recipe.family.Demonstration("olive", "ivory", "6789", "1357", compact=True)
    engine = TransformersEngine(tmp_path / "model", script=lambda _, turn, __: told.replies[turn])
    services: list[Observed] = []

    def factory(config: Any) -> Observed:
        services.append(Observed(config, engine))
        return services[-1]

    rows = recipe.setting.rows(options, "one", iter([task]), 1)
    with slime_rollout.use_service(factory):
        slime_rollout.generate(recipe.setting.arguments(options, tmp_path / "model"), 0, Prompts(rows, 1))
    (trace,) = services[0].trajectories[0].traces
    ids, labels = recipe.pretrain.encoded(tokenizer, frame, told)
    assert [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()] == ids
    trained = [label != recipe.pretrain.IGNORED for label in labels][len(trace.prompt_ids) :]
    assert trace.loss_mask.tolist() == trained


def test_held_out_numbers_are_never_trained_on(recipe: Any) -> None:
    family = recipe.family
    told = [next(family.tasks(seed, test=test)) for test in (False, True) for seed in range(200)]
    seen, unseen = ({n for task in half for n in task.numbers.values()} for half in (told[:200], told[200:]))
    assert len(seen) > 500 < len(unseen)
    assert not seen & unseen
    shown = itertools.islice(family.demonstrations(0), 300)
    assert not any(family.held_out(one.seen) or family.held_out(one.written) for one in shown)


def test_a_session_of_two_traces_weighs_as_much_as_one_of_one(recipe: Any) -> None:
    """The trainer's gradient is that of an ideal loss over sessions; one that was removed keeps its place."""
    import torch

    vocabulary, lengths = 7, [(0, 3), (0, 1), (1, 2), (2, 2), (3, 4)]
    rewards = {0: 1.0, 1: 0.0, 2: 1.0, 3: 0.0}
    samples = [
        SampleLike(
            group_index=0, rollout_id=session, tokens=list(range(length + 2)), response_length=length,
            loss_mask=[1] * length, rollout_log_probs=[-np.log(vocabulary)] * length, reward=rewards[session],
            remove_sample=session == 3,
        )
        for session, length in lengths
    ]  # fmt: skip
    model = _Table(torch.zeros(vocabulary, requires_grad=True))
    args = SlimeArgs(n_samples_per_prompt=4, global_batch_size=4)
    learner = recipe.learner.Learner(args, SimpleNamespace(logits=model.logits))
    shares = slime_rollout.post_process_rewards(args, samples)[1]
    learner._loss(list(zip(samples, shares, strict=True))).backward()
    votes = advantages([1.0, 0.0, 1.0, 0.0], [0] * 4, excluded=[False, False, False, True])
    ideal = np.zeros(vocabulary)
    trained = {session: sum(n for s, n in lengths if s == session) for session in rewards}
    for session, length in lengths:
        for token in range(2, length + 2):
            ideal -= (np.eye(vocabulary)[token] - 1 / vocabulary) * votes[session] / trained[session] / 4
    assert_allclose(model.weights.grad.numpy(), ideal, atol=1e-6)


class _Table:
    """A model that says the same distribution behind every token."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def logits(self, rows: Any) -> Any:
        return (self.weights.expand(len(row), -1) for row in rows)


def test_every_command_of_the_readme_is_understood(recipe: Any) -> None:
    lines = re.findall(r"^ *python recipes/cpu_grpo/train\.py(.*)$", (RECIPE / "README.md").read_text(), re.M)
    assert len(lines) >= 5
    for line in lines:
        options, seeds = recipe.train.parsed(shlex.split(line))
        assert min(options.rollouts, len(seeds)) > 0


def test_pi_without_its_folder_is_refused(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipe.train.parsed(["--harness", "pi"])
    assert "--pi-root" in capsys.readouterr().err
    assert replace(recipe.setting.Options(), harness="pi", pi_root="x").pi_root == "x"
