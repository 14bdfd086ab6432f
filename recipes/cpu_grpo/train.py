"""GRPO on two CPU cores, no GPU library: `python recipes/cpu_grpo/train.py --seeds 0 1 2`. See README.md."""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import anyio
import family
import report
import torch
from engine import Respelling, SeededEngine
from learner import Learner, Policy, Step
from setting import ABLATIONS, HERE, Options, arguments, base_model, held_out, rows
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from polar_plugin import slime_rollout
from polar_plugin.config import RolloutConfig
from polar_plugin.quickstart import Prompts
from polar_plugin.service import RolloutService
from polar_plugin.wiring import make_renderer


@dataclass
class Curve:
    """What one run gave, as its file holds it. Mutable while it runs."""

    name: str
    """The harness, or the ablation; slime's trainer adds its name."""
    seed: int
    trainer: str
    sessions: int
    """A rollout."""
    rewards: list[float] = field(default_factory=list[float])
    """Mean of each training rollout."""
    held_out: dict[int, float] = field(default_factory=dict[int, float])
    """Mean over held-out tasks, by how many rollouts had been trained on."""
    steps: list[Step] = field(default_factory=list[Step])
    respelt: float | None = None
    """Share of later turns whose prompt the chat template spells in other ids; only `--ablate rerender` looks."""
    versions: list[str] = field(default_factory=list[str])
    """Of the weights that sampled each training rollout, as the engine told them."""
    seconds: float = 0.0


class Run:
    """One GRPO run from the base model: engine, trainer, and what comes of it."""

    def __init__(self, options: Options, seed: int, model: Path, tell: Callable[[str], None]) -> None:
        self._options, self._seed, self._tell = options, seed, tell
        self._args = arguments(options, model, eval_datasets=[held_out(options, seed)])
        self._engine = SeededEngine(model, seed)
        self._respelling: Respelling | None = None
        weights = AutoModelForCausalLM.from_pretrained(model)
        self._policy = Policy(weights, options.learning_rate, steps=2 * options.rollouts)
        self._learner = self._trainer()
        sessions = options.groups * options.sessions
        self.curve = Curve(_name(options), seed, self._learner.name, sessions)
        tasks = rows(options, f"train-{seed}", family.tasks(seed), options.rollouts * options.groups)
        self._prompts = Prompts(tasks, options.sessions, self._learner.sample)

    def go(self) -> Curve:
        """Rollout, optimiser steps, new weights to the engine, again and again; held-out tasks now and then."""
        started, options = time.monotonic(), self._options
        with slime_rollout.use_service(self._service):
            self._evaluate(0)
            for number in range(options.rollouts):
                self._step(number)
                if (number + 1) % options.evaluate_every == 0 or number + 1 == options.rollouts:
                    self._evaluate(number + 1)
        if self._respelling:
            self.curve.respelt = self._respelling.changed / max(1, self._respelling.extended)
        self.curve.seconds = time.monotonic() - started
        return self.curve

    def _trainer(self) -> Any:
        if not self._options.slime_home:
            return Learner(self._args, self._policy)
        from slime_code import SlimeLearner

        return SlimeLearner(self._args, self._policy, self._options.slime_home)

    def _service(self, config: RolloutConfig) -> RolloutService:
        if self._options.ablate != "rerender":
            return RolloutService(config, engine=self._engine)
        self._respelling = Respelling(make_renderer(config))
        self._engine.spelt = self._respelling.spelt
        return RolloutService(config, engine=self._engine, renderer=self._respelling)

    def _step(self, number: int) -> None:
        step = self._learner.learn(number, self._generate, self._prompts)
        anyio.run(self._engine.load_weights, self._policy.state(), str(number + 1))
        self.curve.steps.append(step)
        self._tell(
            f"seed {self._seed} rollout {number}: reward {self.curve.rewards[-1]:.2f}, loss {step.loss:+.4f} to"
            f" {step.loss_after:+.4f}, log-probability gap {step.gap:.1e}, at most {step.gap_max:.1e}"
        )

    def _generate(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        """`slime_rollout.generate`; under `--ablate shuffled_rewards` sessions get each other's rewards."""
        output = slime_rollout.generate(args, rollout_id, data_source, evaluation=evaluation)
        sessions = [session for group in output.samples for session in group]
        rewards = [session[0].reward for session in sessions]
        self.curve.rewards.append(sum(rewards) / len(rewards))
        self.curve.versions.append(
            "+".join(sorted({v for session in sessions for s in session for v in s.weight_versions}))
        )
        if self._options.ablate == "shuffled_rewards":
            random.Random(f"{self._seed}/{rollout_id}").shuffle(rewards)
            for session, reward in zip(sessions, rewards, strict=True):
                for sample in session:
                    sample.reward = reward
        return output

    def _evaluate(self, trained: int) -> None:
        told = slime_rollout.generate(self._args, trained, None, evaluation=True).data["held_out"]["rewards"]
        self.curve.held_out[trained] = sum(told) / len(told)
        self._tell(f"seed {self._seed} after {trained} rollouts: held-out reward {self.curve.held_out[trained]:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    options, seeds = parsed(argv)
    prepare()
    model = base_model(options, print)
    for seed in seeds:
        curve = Run(options, seed, model, print).go()
        path = options.out / "runs" / f"{curve.name}-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(curve)))
    report.write(options.out)


def _name(options: Options) -> str:
    return (options.ablate or options.harness) + ("_slime" if options.slime_home else "")


def prepare() -> None:
    """One thread for the trainer beside the engine's; this folder importable, since polar.yaml names `grade`."""
    torch.set_num_threads(1)
    disable_progress_bar()
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))


def parsed(argv: Sequence[str] | None) -> tuple[Options, list[int]]:
    """An option a field of Options, and the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    for one in fields(Options):
        choices = {"ablate": ABLATIONS, "harness": ("agent", "pi")}.get(one.name)
        parser.add_argument(
            f"--{one.name.replace('_', '-')}", type=type(one.default), default=one.default, choices=choices
        )
    told = vars(parser.parse_args(argv))
    seeds = told.pop("seeds")
    if told["harness"] == "pi" and not told["pi_root"]:
        parser.error("--harness pi needs --pi-root, the folder that npm installed Pi into")
    return Options(**told), seeds


if __name__ == "__main__":
    logging.getLogger("polar_plugin").setLevel(logging.ERROR)
    main()
