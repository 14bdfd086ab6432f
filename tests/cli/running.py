"""One CLI through one scenario, on the whole real stack: service, stages, sandbox, proxy, renderer, merge, grading.

The sandbox has a loopback of its own and no other network: a CLI that waits for anything but the proxy does not end.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from transformers import AutoTokenizer

from polar_plugin.config import load_config, load_task
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import ScriptedEngine
from polar_plugin.records import Attempt, Completion, Role, Trajectory
from polar_plugin.service import RolloutService

from .. import tokenizers
from . import install
from .clis import CLI
from .elsewhere import NOTE, reached
from .model import Model
from .scenarios import Scenario
from .words import ended

TOKENIZER = "qwen3"
SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run came to."""

    trajectory: Trajectory
    model: Model
    engine: ScriptedEngine

    @property
    def outcome(self) -> dict[str, Any]:
        """What the tables of `clis` foresee and docs/conformance.md shows; no times, nothing random."""
        trajectory, counts = self.trajectory, self.trajectory.counts
        return {
            "status": trajectory.status.value,
            "exit_code": trajectory.exit_code,
            "reward": trajectory.reward,
            "calls": len(self.engine.calls),
            "traces": len(trajectory.traces),
            "summaries": self.model.asked["summary"],
            "delivered": counts["delivered_tokens"] == counts["sampled_tokens"],
            "untrained": {name.removeprefix("untrained_") for name in counts if name.startswith("untrained_")},
            "roles": dict(sorted(Counter(completion.role.value for completion in self._completions).items())),
            "elsewhere": self.elsewhere,
            "breaks": {
                name.removeprefix("breaks_"): count for name, count in counts.items() if name.startswith("breaks_")
            },
        }

    @property
    def _completions(self) -> Sequence[Completion]:
        assert self.trajectory.session is not None
        return self.trajectory.session.completions

    @property
    def misjudged(self) -> list[tuple[Role, Role]]:
        """(what the ledger says a call was for, what the model knows) where these differ."""
        told = [(completion.role, self.model.roles[completion.id]) for completion in self._completions]
        return [pair for pair in told if pair[0] is not pair[1]]

    @property
    def elsewhere(self) -> int | None:
        """How often the program reached for another host; None where it was killed and so left no note."""
        evaluation = self.trajectory.evaluation
        note = str(evaluation.report.get("output", "")) if evaluation else ""
        return reached(note) if "Ip:" in note else None

    @property
    def ignored(self) -> set[str]:
        """Fields of requests that had no meaning to us."""
        prefix = "ignored."
        return {name.removeprefix(prefix) for name in self.trajectory.counts if name.startswith(prefix)}


async def run(cli: CLI, scenario: Scenario, directory: Path) -> Ran:
    """Run `scenario` to its end. `directory` is an empty one."""
    renderer = renderer_of(TOKENIZER)
    main, sub = ended(scenario.main(cli.words), cli.words.done), ended(scenario.sub(cli.words), cli.words.reports)
    model = Model(main, sub, renderer.decode, is_summary=cli.is_summary, directory=directory)
    engine = ScriptedEngine(
        model,
        tokenizer_of(TOKENIZER),
        context_length=cli.tight_context if scenario.tight else cli.context,
        delay=model.delay,
    )
    config = load_config({"verify": "all", "retries": 0, "sampling": {"max_tokens": 4000}})
    attempt = Attempt(scenario.name, load_task(payload(cli, scenario, directory)), 0, 0)
    with anyio.fail_after(SECONDS + 60):
        async with RolloutService(config, engine=engine, renderer=renderer) as service:
            (trajectory,) = await service.run([attempt])
    assert not engine.active
    return Ran(trajectory, model, engine)


def payload(cli: CLI, scenario: Scenario, directory: Path) -> dict[str, Any]:
    """The task, as a user would write it."""
    root = install.root_of(cli.package)
    return {
        "task_id": scenario.name,
        "instruction": scenario.instruction,
        "timeout_seconds": SECONDS,
        "agent": {
            "harness": "tests.cli.elsewhere:Watched",
            "model_name": "rl-model",
            "settings": {
                "preset": cli.harness,
                "root": str(root),
                **cli.settings,
                **cli.expects[scenario.name].settings,
            },
            **scenario.agent,
        },
        "runtime": {
            "image": str(scenario.image) if scenario.image else None,
            "kwargs": {"ro_binds": [str(root)], "root": str(directory)},
        },
        "evaluator": {"strategy": "test_on_output", "config": {"test_command": f"cat {NOTE} || true; {scenario.test}"}},
    }


@functools.cache
def renderer_of(name: str) -> Any:
    return load_renderer(tokenizers.load(name))


@functools.cache
def tokenizer_of(name: str) -> Any:
    return AutoTokenizer.from_pretrained(tokenizers.load(name))
