"""The main job on one CPU: a black-box agent, sandboxes, grading, slime's samples, and a proof that they are exact.

Everything goes the way a trainer goes: through `polar_plugin.slime_rollout.generate`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import slime_rollout
from .config import RolloutConfig, cache_directory
from .engine.models import resolve_model
from .engine.transformers import Script, TransformersEngine
from .errors import ConfigError
from .merge.traces import spans, trace_json
from .placeholders import fill
from .records import Attempt, SamplingParams, Trace, Trajectory, token_ids
from .service import RolloutService
from .slime_args import SlimeArgs
from .slime_types import SampleLike

TOLERANCE = 1e-4
"""Largest difference, in nats, between a recorded and a recomputed log-probability that counts as exact."""


@dataclass(frozen=True)
class Options:
    """What `polar-plugin quickstart` was asked."""

    model: str = "smollm2"
    out: Path = Path("out")
    recipe: Path | None = None
    """The folder with `agent.py` and `tasks/`; default: the one that comes with the package."""
    attempts: int = 4
    """A task."""
    max_tokens: int = 64
    """A model call."""
    agent_script: Path | None = None
    """Replies that are sampled by force, with the model's own log-probabilities."""
    isolation: str = "bubblewrap"
    show_trace: bool = True


@dataclass
class Prompts:
    """slime's data source, as far as a rollout uses it: one group a task. Mutable: it counts what it gave."""

    rows: Sequence[Mapping[str, Any]]
    attempts: int
    sample: Callable[..., Any] = SampleLike
    """Makes a sample: slime's own class where slime is there."""
    given: int = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups: list[list[Any]] = []
        for _ in range(num_samples):
            row, number = self.rows[self.given % len(self.rows)], self.given
            self.given += 1
            first = number * self.attempts
            group = [
                self.sample(group_index=number, index=first + k, prompt=str(row["instruction"]), metadata={"task": row})
                for k in range(self.attempts)
            ]
            groups.append(group)
        return groups


class Observed(RolloutService):
    """Keeps the trajectories that the trainer's samples were made of."""

    def __init__(self, config: RolloutConfig, engine: TransformersEngine) -> None:
        super().__init__(config, engine=engine)
        self.trajectories: list[Trajectory] = []

    async def run(
        self,
        attempts: Sequence[Attempt],
        *,
        on_done: Callable[[Trajectory], None] | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[Trajectory]:
        trajectories = await super().run(attempts, on_done=on_done, sampling=sampling)
        self.trajectories += trajectories
        return trajectories


@dataclass(frozen=True)
class Exactness:
    """How well the samples say what the model would: the proof that the quickstart prints."""

    difference: float
    """Largest |recorded - recomputed| log-probability over all trained tokens."""
    compared: int
    """Trained tokens."""
    sampled: int
    accounted: float
    """Sampled tokens that are trained or counted under a reason, by those sampled: above 1, some are trained twice."""

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE and self.accounted == 1.0 and self.compared > 0


@dataclass
class Result:
    """What a run of the quickstart gave. Mutable while it is filled."""

    trajectories: Sequence[Trajectory]
    samples: list[list[list[Any]]]
    advantages: Mapping[int, float]
    metrics: Mapping[str, Any]
    exactness: Exactness
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])


def quickstart(options: Options, console: Console) -> Result:
    """Run it and show it. Raises ConfigError for options that cannot be."""
    started = time.monotonic()
    recipe = options.recipe or recipe_directory()
    rows = load_tasks(recipe, options.isolation)
    directory = resolve_model(options.model, cache_directory())
    console.print(f"model: {options.model} ({directory.name}); {len(rows)} tasks x {options.attempts} attempts")
    ready = time.monotonic()
    engine = TransformersEngine(directory, script=script_of(options, rows))
    kept: list[Observed] = []

    def factory(config: RolloutConfig) -> RolloutService:
        kept.append(Observed(config, engine))
        return kept[-1]

    args = slime_arguments(options, directory, rows)
    with slime_rollout.use_service(factory):
        output = slime_rollout.generate(args, 0, Prompts(rows, options.attempts))
        rolled = time.monotonic()
        samples = [sample for group in output.samples for session in group for sample in session]
        _, advantages = slime_rollout.post_process_rewards(args, samples)
        decode = kept[0].policy.renderer.decode
        trajectories = kept[0].trajectories
        exactness = anyio.run(prove, trajectories, engine)
    result = Result(
        trajectories,
        output.samples,
        {sample.rollout_id: share for sample, share in zip(samples, advantages, strict=True)},
        output.metrics or {},
        exactness,
        {"model": ready - started, "rollout": rolled - ready, "proof": time.monotonic() - rolled},
    )
    write(options.out, result)
    show(result, console, decode if options.show_trace else None)
    return result


async def prove(trajectories: Sequence[Trajectory], engine: TransformersEngine) -> Exactness:
    """Recompute every trained token's log-probability over its whole trace, with the same weights and no cache."""
    difference, compared, sampled, accounted = 0.0, 0, 0, 0
    for trajectory in trajectories:
        for trace in trajectory.traces:
            tokens = token_ids(np.concatenate((trace.prompt_ids, trace.response_ids)))
            again = (await engine.score(tokens))[len(trace.prompt_ids) - 1 :]
            gap = np.abs(again - trace.response_logprobs)[trace.loss_mask]
            difference = float(np.maximum(difference, gap.max(initial=0.0)))  # unlike max(), keeps a NaN
            compared += len(gap)
        sampled += trajectory.counts.get("sampled_tokens", 0)
        accounted += _explained(trajectory.counts)
    accounted += compared
    return Exactness(difference, compared, sampled, accounted / sampled if sampled else 1.0)


def _explained(counts: Mapping[str, int]) -> int:
    """Tokens that are not trained for a reason: `untrained_unexplained` is none."""
    reasons = {name: count for name, count in counts.items() if name.startswith("untrained_")}
    return sum(reasons.values()) - reasons.get("untrained_unexplained", 0)


def recipe_directory() -> Path:
    """`recipes/quickstart` of the installed package, or of the checkout it was installed from."""
    here = Path(__file__).parent
    for candidate in (here / "recipes" / "quickstart", here.parent / "recipes" / "quickstart"):
        if (candidate / "tasks").is_dir():
            return candidate
    raise ConfigError("the quickstart's tasks are not installed; give their folder by --recipe")


def load_tasks(recipe: Path, isolation: str = "bubblewrap") -> list[dict[str, Any]]:
    """The task payloads of a recipe, in the order of their folders; `{task_dir}` in them is the folder. ConfigError."""
    rows: list[dict[str, Any]] = []
    for path in sorted((recipe / "tasks").glob("*/task.yaml")):
        row = fill(yaml.safe_load(path.read_text()), {"task_dir": str(path.parent)}, path=str(path))
        runtime = cast("dict[str, Any]", row.get("runtime", {}))
        row["runtime"] = {**runtime, "kwargs": {**runtime.get("kwargs", {}), "isolation": isolation}}
        rows.append(row)
    if not rows:
        raise ConfigError(f"no tasks/*/task.yaml in {recipe}")
    if uneven := [row["task_id"] for row in rows if set(row) != set(rows[0])]:
        raise ConfigError(f"tasks of one run need the same keys; {uneven} have others than {rows[0]['task_id']}")
    return rows


def slime_arguments(options: Options, directory: Path, rows: Sequence[Mapping[str, Any]]) -> SlimeArgs:
    """What slime would have parsed from its command line and the YAML file: each sample brings its task payload."""
    polar = {
        "engine": {"kind": "transformers", "model": str(directory)},
        "stages": {"init": 4, "ready": 2, "run": 8, "postrun": 4},
        "recording": {"directory": str(options.out / "sessions")},
        "verify": "all",
        "task": {name: f"{{sample.metadata.task.{name}}}" for name in rows[0]},
    }
    return SlimeArgs(
        polar=polar,
        hf_checkpoint=str(directory),
        rollout_batch_size=len(rows),
        n_samples_per_prompt=options.attempts,
        global_batch_size=len(rows) * options.attempts,
        rollout_max_response_len=options.max_tokens,
    )


def script_of(options: Options, rows: Sequence[Mapping[str, Any]]) -> Script | None:
    """Scripted replies by task, then by attempt (taken in turn), then by model call; None where there are no more."""
    if options.agent_script is None:
        return None
    scripts = cast("dict[str, list[list[str]]]", yaml.safe_load(options.agent_script.read_text()))
    known = [str(row["task_id"]) for row in rows]
    if missing := [name for name in known if name not in scripts]:
        raise ConfigError(f"{options.agent_script} has no replies for {missing}; it has {sorted(scripts)}")

    def script(session_id: str, turn: int, prompt: str) -> str | None:
        _, group, index, *_ = session_id.split("-")
        variants = scripts[known[int(group[1:]) % len(known)]]
        replies = variants[int(index) % options.attempts % len(variants)]
        return replies[turn] if turn < len(replies) else None

    return script


def write(out: Path, result: Result) -> None:
    """Traces, samples and the summary, beside the recorded sessions."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "traces").mkdir(exist_ok=True)
    for trajectory in result.trajectories:
        told = [trace_json(trace) for trace in trajectory.traces]
        path = out / "traces" / f"{trajectory.attempt.session_id}.json"
        path.write_text(json.dumps(told, ensure_ascii=True))
    with (out / "samples.jsonl").open("w") as file:
        for group in result.samples:
            for sample in (sample for session in group for sample in session):
                file.write(json.dumps(vars(sample), default=lambda value: getattr(value, "value", str(value))) + "\n")
    (out / "summary.json").write_text(json.dumps(summary(result), indent=1))


def summary(result: Result) -> dict[str, Any]:
    """The run in numbers."""
    exactness = {**asdict(result.exactness), "holds": result.exactness.holds, "tolerance": TOLERANCE}
    attempts = [
        {
            "session_id": trajectory.attempt.session_id,
            "task_id": trajectory.attempt.task.task_id,
            "status": trajectory.status.value,
            "reward": trajectory.reward,
            "advantage": result.advantages.get(trajectory.attempt.index),
            "failure": asdict(trajectory.failure) if trajectory.failure else None,
            "timings": trajectory.timings,
            "counts": trajectory.counts,
        }
        for trajectory in result.trajectories
    ]
    return {"exactness": exactness, "seconds": result.seconds, "metrics": result.metrics, "attempts": attempts}


_COLUMNS = (
    "#", "task", "status", "calls", "traces", "prompt", "trained", "context", "reward", "adv.",
    "init", "agent", "grade",
)  # fmt: skip


def show(result: Result, console: Console, decode: Callable[[Any], str] | None) -> None:
    table = Table(title="one row an attempt; tokens as the trainer gets them, seconds by stage", box=box.SIMPLE)
    for column in _COLUMNS:
        table.add_column(
            column,
            justify="left" if column in ("task", "status") else "right",
            overflow="fold",
            no_wrap=column == "status",
        )
    for trajectory in result.trajectories:
        table.add_row(*_row(trajectory, result.advantages.get(trajectory.attempt.index)))
    console.print(table)
    best = max((t for t in result.trajectories if t.traces), key=lambda t: t.counts["trained_tokens"], default=None)
    if best and decode:
        console.print(f"one trace of attempt {best.attempt.index}, trained tokens [black on green]marked[/]:")
        console.print(trace_rich(best.traces[0], decode))
    exactness, seconds = result.exactness, sum(result.seconds.values())
    console.print(
        f"exactness: max |recorded - recomputed| = {exactness.difference:.1e} over {exactness.compared} trained tokens"
        f" (limit {TOLERANCE:.0e}); {exactness.accounted:.4f} of {exactness.sampled} sampled tokens accounted for"
        f" -> {'[green]exact[/]' if exactness.holds else '[red]NOT EXACT[/]'} ({seconds:.0f} s)",
        soft_wrap=True,
    )


def _row(trajectory: Trajectory, advantage: float | None) -> list[str]:
    told, timings = trajectory.counts, trajectory.timings
    grading = timings.get("extract", 0.0) + timings.get("build", 0.0) + timings.get("evaluation", 0.0)
    reward = "-" if trajectory.reward is None else f"{trajectory.reward:g}"
    names = ("completions", "traces", "prompt_tokens", "trained_tokens", "context_tokens")
    return [
        str(trajectory.attempt.index),
        trajectory.attempt.task.task_id,
        trajectory.status.value,
        *(str(told.get(name, 0)) for name in names),
        reward,
        "-" if advantage is None else f"{advantage:+.2f}",
        *(f"{seconds:.1f}" for seconds in (timings.get("init", 0.0), timings.get("agent", 0.0), grading)),
    ]


def trace_rich(trace: Trace, decode: Callable[[Any], str]) -> Text:
    text = Text()
    for trained, ids in spans(trace):
        text.append(decode(ids), style="black on green" if trained else "dim")
    return text
