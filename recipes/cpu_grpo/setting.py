"""What a run consists of: options, slime's arguments, tasks on disk, and the pre-trained model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family
import pretrain
import yaml

from polar_plugin import slime_rollout
from polar_plugin.config import RolloutConfig
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.merge.traces import spans
from polar_plugin.quickstart import Observed, Prompts
from polar_plugin.slime_args import SlimeArgs

HERE = Path(__file__).resolve().parent
ABLATIONS = ("shuffled_rewards", "rerender")


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    out: Path = Path("out/cpu_grpo")
    rollouts: int = 24
    groups: int = 8
    """Tasks a rollout."""
    sessions: int = 8
    """A task."""
    held_out: int = 96
    """Held-out tasks of an evaluation, one session each."""
    evaluate_every: int = 6
    supervised_steps: int = 1000
    learning_rate: float = 1e-3
    ablate: str = ""
    harness: str = "agent"
    """`agent`: that of recipes/quickstart; `pi`: Pi, installed by npm into `pi_root`."""
    pi_root: str = ""
    slime_home: str = ""
    """A checkout of slime, whose code then trains."""
    isolation: str = "bubblewrap"


def polar(options: Options) -> dict[str, Any]:
    """polar.yaml, for the chosen harness and sandbox."""
    told = yaml.safe_load((HERE / "polar.yaml").read_text())["polar"]
    told["task"]["runtime"]["kwargs"]["isolation"] = options.isolation
    if options.harness == "pi":
        told["task"]["agent"] = {"harness": "pi", "settings": {"root": options.pi_root}}
        told["task"]["runtime"]["kwargs"]["ro_binds"] = [options.pi_root]
    return told


def arguments(options: Options, model: Path, **told: Any) -> SlimeArgs:
    """What slime would have parsed from its command line. Two optimiser steps a rollout."""
    return SlimeArgs(
        polar=polar(options),
        hf_checkpoint=str(model),
        rollout_batch_size=options.groups,
        n_samples_per_prompt=options.sessions,
        global_batch_size=max(1, options.groups * options.sessions // 2),
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        **told,
    )


def rows(options: Options, name: str, tasks: Iterator[family.Task], count: int) -> list[dict[str, Any]]:
    """`count` tasks with their workspaces, as samples bring them."""
    agent = str(HERE.parent / "quickstart" / "agent.py")
    return [
        {**task.row(f"{name}-{i}", (options.out / "tasks" / name / str(i)).resolve()), "agent": agent}
        for i, task in enumerate(itertools.islice(tasks, count))
    ]


def held_out(options: Options, seed: int) -> Any:
    """A file of held-out tasks, as slime describes an evaluation's dataset."""
    told = rows(options, f"held_out-{seed}", family.tasks(seed, test=True), options.held_out)
    path = options.out / "tasks" / f"held_out-{seed}.jsonl"
    path.write_text("".join(json.dumps({"text": row["instruction"], "metadata": {"task": row}}) + "\n" for row in told))
    keys = {"input_key": "text", "metadata_key": "metadata", "n_samples_per_eval_prompt": 1}
    return SimpleNamespace(name="held_out", path=str(path), **keys)


def watch(options: Options) -> pretrain.Frame:
    """Run the harness once with scripted replies, to see what it says around them."""
    directory, replies = resolve_model("tiny", options.out / "models"), family.PROBE.replies
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
    """The pre-trained model's directory, with `losses.json`; made where it is not there yet."""
    directory = options.out / "models" / f"{options.harness}-{options.supervised_steps}"
    if not (directory / "losses.json").is_file():
        frame = watch(options)
        tokenizer = pretrain.make_tokenizer(frame)
        model = pretrain.make_model(tokenizer, seed=0)
        losses = pretrain.pretrain(model, tokenizer, frame, seed=0, steps=options.supervised_steps, report=report)
        pretrain.save(directory, model, tokenizer)
        (directory / "losses.json").write_text(json.dumps(losses))
    return directory
