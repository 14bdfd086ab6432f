"""GRPO on two CPU cores: `python train.py --seeds 0 1 2`. See README.md."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import family
import pretrain
import torch
import yaml
from learner import Learner, Policy, Step
from rerender import Respelling, RespellingEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_plugin import slime_rollout
from polar_plugin.config import RolloutConfig
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.merge.traces import spans
from polar_plugin.quickstart import Observed, Prompts
from polar_plugin.service import RolloutService, make_renderer
from polar_plugin.slime_args import SlimeArgs

HERE = Path(__file__).resolve().parent
ABLATIONS = ("shuffled_rewards", "rerender")


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path = Path("out/cpu_grpo")
    steps: int = 16
    groups: int = 8
    """Prompts a rollout."""
    sessions: int = 8
    """A prompt."""
    held_out: int = 64
    """Sessions of each evaluation, one a held-out task."""
    evaluate_every: int = 4
    supervised_steps: int = 1200
    learning_rate: float = 1e-3
    ablate: str = ""
    slime_home: str = ""
    harness: str = "agent"
    pi_root: str = ""
    isolation: str = "bubblewrap"


@dataclass
class Curve:
    """One run, as `runs.json` holds it. Mutable while it runs."""

    name: str
    seed: int
    trainer: str = ""
    rewards: list[float] = field(default_factory=list)
    """Mean of each training rollout."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Mean over held-out tasks, by how many rollouts had been trained on."""
    steps: list[Step] = field(default_factory=list)
    respelt: float | None = None
    """Share of later turns whose prompt the chat template spells in other ids; known by `--ablate rerender`."""
    seconds: float = 0.0


def polar(options: Options) -> dict[str, Any]:
    """polar.yaml, for the chosen harness and sandbox."""
    told = yaml.safe_load((HERE / "polar.yaml").read_text())["polar"]
    told["task"]["runtime"]["kwargs"]["isolation"] = options.isolation
    if options.harness == "pi":
        told["task"]["agent"] = {"harness": "pi", "settings": {"root": options.pi_root}}
        told["task"]["runtime"]["kwargs"]["ro_binds"] = [options.pi_root]
    return told


def arguments(options: Options, model: Path, **told: Any) -> SlimeArgs:
    """What slime would have parsed."""
    sessions = options.groups * options.sessions
    shape = {"rollout_batch_size": options.groups, "n_samples_per_prompt": options.sessions}
    whole = {"global_batch_size": sessions // 2 or 1, "rollout_temperature": 1.0, "rollout_top_p": 1.0, **shape, **told}
    return SlimeArgs(polar=polar(options), hf_checkpoint=str(model), rollout_max_response_len=48, **whole)


def rows(options: Options, name: str, tasks: Iterator[family.Task], count: int) -> list[dict[str, Any]]:
    """`count` tasks with their workspaces, as samples bring them."""
    agent = str(HERE.parent / "quickstart" / "agent.py")
    return [
        {**task.row(f"{name}-{i}", options.out / "tasks" / name / str(i)), "agent": agent}
        for i, task in enumerate(itertools.islice(tasks, count))
    ]


def watch(options: Options) -> pretrain.Frame:
    """Run the harness once with scripted replies, to see what it says around them."""
    directory = resolve_model("tiny", options.out / "models")
    replies = family.PROBE.replies
    engine = TransformersEngine(directory, script=lambda _, turn, __: replies[turn] if turn < len(replies) else None)
    services: list[Observed] = []

    def factory(config: RolloutConfig) -> Observed:
        services.append(Observed(config, engine))
        return services[-1]

    args = arguments(replace(options, groups=1, sessions=1), directory)
    prompts = Prompts(rows(options, "probe", iter([family.probe_task()]), 1), 1)
    with slime_rollout.use_service(factory):
        slime_rollout.generate(args, 0, prompts)
        (trajectory,) = services[0].trajectories
        decode = services[0].policy.renderer.decode
    pieces = tuple((said, decode(ids)) for said, ids in spans(trajectory.traces[0]))
    if len(trajectory.traces) != 1 or sum(said for said, _ in pieces) != len(replies):
        raise SystemExit(f"the harness {options.harness!r} did not go on as scripted: {trajectory.counts}")
    return pretrain.Frame(pieces)


def base_model(options: Options, report: Callable[[str], None]) -> Path:
    """The pre-trained model's directory; made where it is not there yet."""
    directory = options.out / "models" / f"{options.harness}-{options.supervised_steps}"
    if not (directory / "losses.json").is_file():
        frame = watch(options)
        tokenizer = pretrain.make_tokenizer(frame)
        model = pretrain.make_model(tokenizer, seed=0)
        losses = pretrain.pretrain(model, tokenizer, frame, seed=0, steps=options.supervised_steps, report=report)
        pretrain.save(directory, model, tokenizer)
        (directory / "losses.json").write_text(json.dumps(losses))
    return directory


class Run:
    """One GRPO run from the base model: engine, trainer, and what came of it."""

    def __init__(self, options: Options, seed: int, model: Path, report: Callable[[str], None]) -> None:
        self._options, self._seed, self._report = options, seed, report
        self._args = arguments(options, model, eval_datasets=[self._held_out()])
        torch.manual_seed(seed)
        self._engine = RespellingEngine(model, threads=1, max_batch=16, seed=seed)
        self._policy = Policy(AutoModelForCausalLM.from_pretrained(model), 0, options.learning_rate)
        self._learner = self._trainer()
        self.curve = Curve(options.ablate or options.harness, seed, self._learner.name)
        tasks = rows(options, f"train-{seed}", family.tasks(seed), options.steps * options.groups)
        self._prompts = Prompts(tasks, options.sessions, getattr(self._learner, "sample", slime_rollout.SampleLike))

    def go(self) -> Curve:
        started = time.monotonic()
        with slime_rollout.use_service(self._service):
            self._evaluate(0)
            for number in range(self._options.steps):
                self._step(number)
                if (number + 1) % self._options.evaluate_every == 0 or number + 1 == self._options.steps:
                    self._evaluate(number + 1)
        if self._engine.respelling:
            self.curve.respelt = self._engine.respelling.changed / max(1, self._engine.respelling.extended)
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
        self._engine.respelling = Respelling(make_renderer(config))
        return RolloutService(config, engine=self._engine, renderer=self._engine.respelling)

    def _step(self, number: int) -> None:
        """Rollout, optimiser steps, and the new weights to the engine under the next version."""
        step = self._learner.learn(number, self._generate, self._prompts)
        anyio.run(self._engine.load_weights, self._policy.state(), str(number + 1))
        self.curve.steps.append(step)
        self._report(
            f"seed {self._seed} rollout {number}: reward {self.curve.rewards[-1]:.2f}, loss {step.loss:+.4f} ->"
            f" {step.loss_after:+.4f}, log-probability gap {step.gap:.1e} (max {step.gap_max:.1e})"
        )

    def _generate(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        """`slime_rollout.generate`; under `--ablate shuffled_rewards` sessions get each other's rewards."""
        output = slime_rollout.generate(args, rollout_id, data_source, evaluation=evaluation)
        sessions = [session for group in output.samples for session in group]
        rewards = [session[0].reward for session in sessions]
        self.curve.rewards.append(sum(rewards) / len(rewards))
        if self._options.ablate == "shuffled_rewards":
            random.Random(f"{self._seed}/{rollout_id}").shuffle(rewards)
            for session, reward in zip(sessions, rewards, strict=True):
                for sample in session:
                    sample.reward = reward
        return output

    def _held_out(self) -> Any:
        """An evaluation dataset as slime describes one; a file of held-out tasks."""
        path = self._options.out / "tasks" / f"held_out-{self._seed}.jsonl"
        tasks = rows(self._options, f"held_out-{self._seed}", family.tasks(self._seed, test=True), self._options.held_out)
        lines = [json.dumps({"text": row["instruction"], "metadata": {"task": row}}) for row in tasks]
        path.write_text("\n".join(lines))
        return SimpleNamespace(
            name="held_out", path=str(path), input_key="text", metadata_key="metadata", n_samples_per_eval_prompt=1
        )

    def _evaluate(self, trained: int) -> None:
        told = slime_rollout.generate(self._args, trained, None, evaluation=True).data["held_out"]["rewards"]
        self.curve.held_out[trained] = sum(told) / len(told)
        self._report(f"seed {self._seed} after {trained} rollouts: held-out reward {self.curve.held_out[trained]:.2f}")


def main() -> None:
    options, seeds = parsed(sys.argv[1:])
    sys.path.insert(0, str(HERE))  # polar.yaml names grade:AnswerFile
    torch.set_num_threads(1)
    model = base_model(options, print)
    for seed in seeds:
        print(Run(options, seed, model, print).go())


def parsed(arguments: Sequence[str]):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ablate", default="")
    parser.add_argument("--slime-home", default="")
    parser.add_argument("--supervised-steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=Path("/tmp/g/out"))
    told = parser.parse_args(arguments)
    return Options(steps=told.steps, learning_rate=told.lr, ablate=told.ablate, slime_home=told.slime_home, out=told.out, supervised_steps=told.supervised_steps), told.seeds


if __name__ == "__main__":
    main()
