"""Rollouts that run on between calls: warm, boundedly stale, and exact after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError
from polar_plugin.records import Attempt, Trajectory, VersionSpan
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import SampleLike, TrainOutput

from .sessions import POLAR, Outcome, Prompts, ReadyService, trace, trajectory
from .test_filters import Buffered, groups_of


@dataclass
class Updating(ReadyService):
    """Its engine's weight version is told; sessions are sampled by whatever `sampled_by` says."""

    weight_version: str = "1"


def call(rollout_id: int, source: Any, **told: Any) -> TrainOutput:
    how = told.pop("asynchronous", {})
    settings = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "polar": {**POLAR, "asynchronous": how}, **told}
    return slime_rollout.generate_async(SlimeArgs(**settings), rollout_id, source)


def sampled(version: str, tokens: int = 4) -> Outcome:
    return lambda attempt: trajectory(attempt, 1.0, [trace(tokens, versions=(VersionSpan(version, tokens),))])


def told(output: TrainOutput, name: str) -> float:
    assert output.metrics is not None
    return output.metrics.get(name, 0.0)


def test_the_next_rollouts_groups_are_under_way_when_a_call_returns() -> None:
    source, service = Buffered(SampleLike, 2), ReadyService(trajectory)
    with slime_rollout.use_service(service):
        assert groups_of(call(0, source, asynchronous={"max_staleness": 2})) == [0, 1]
        assert source.drawn == 6
        assert groups_of(call(1, source, asynchronous={"max_staleness": 2})) == [2, 3]
        assert (source.drawn, service.opened) == (8, 1)


def test_without_staleness_nothing_is_drawn_ahead() -> None:
    source = Buffered(SampleLike, 2)
    with slime_rollout.use_service(ReadyService(trajectory)):
        call(0, source, asynchronous={"max_staleness": 0})
    assert source.drawn == 2


@dataclass
class Gated(ReadyService):
    """Sessions of the first two groups end at once, the others when the gate opens."""

    opened_gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    cleaned: list[int] = field(default_factory=list[int])

    async def run(
        self, attempts: Sequence[Attempt], *, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        try:
            if attempts[0].group_index > 1:
                self.waiting.set()
                await anyio.to_thread.run_sync(self.opened_gate.wait, abandon_on_cancel=True)
        except BaseException:
            self.cleaned.append(attempts[0].group_index)
            raise
        return await super().run(attempts, on_done=on_done)


def test_sessions_live_on_between_calls_and_end_with_the_service() -> None:
    source, service = Buffered(SampleLike, 2), Gated(trajectory)
    with slime_rollout.use_service(service):
        call(0, source)
        assert service.waiting.wait(10)
        assert service.cleaned == []
        service.opened_gate.set()
        assert groups_of(call(1, source)) == [2, 3]
    service = Gated(trajectory)
    with slime_rollout.use_service(service):
        call(0, Buffered(SampleLike, 2))
        assert service.waiting.wait(10)
    assert sorted(service.cleaned) == [2, 3]


def test_what_is_too_old_is_run_again_and_takes_its_turn_then() -> None:
    source, service = Buffered(SampleLike, 2), Updating(sampled("1"))
    with slime_rollout.use_service(service):
        call(0, source)
        service.weight_version, service.outcome = "9", sampled("9")
        output = call(1, source)
    assert groups_of(output) == [2, 3]
    assert (told(output, "rollout/groups/stale"), told(output, "rollout/groups/returned")) == (2, 2)
    assert {sample.weight_versions[0] for group in output.samples for (sample,) in group} == {"9"}


def test_a_session_that_is_always_too_old_leaves_its_group_in_the_end() -> None:
    service = Updating(lambda a: sampled("1" if a.index % 2 else "9")(a), weight_version="9")
    with slime_rollout.use_service(service):
        output = call(0, Buffered(SampleLike, 2))
    assert told(output, "rollout/groups/stale_sessions") == 2
    assert [bool(sum(sample.loss_mask)) for group in output.samples for (sample,) in group] == [True, False] * 2


def test_completions_that_are_too_old_are_masked_and_the_rest_of_their_session_trains() -> None:
    mixed = trace(6, versions=(VersionSpan("1", 2), VersionSpan("8", 4)))
    service = Updating(lambda a: trajectory(a, 1.0, [mixed]), weight_version="9")
    with slime_rollout.use_service(service):
        output = call(0, Buffered(SampleLike, 2), asynchronous={"policy": "mask"})
    (sample,) = output.samples[0][0]
    assert sample.loss_mask == [0, 0, 1, 1, 1, 1]
    assert sample.rollout_log_probs == [0.0, 0.0, -0.5, -0.5, -0.5, -0.5]
    assert told(output, "rollout/groups/masked_tokens") == 8


def test_what_is_too_old_can_be_kept_and_is_counted() -> None:
    with slime_rollout.use_service(Updating(sampled("1"), weight_version="9")):
        output = call(0, Buffered(SampleLike, 2), asynchronous={"policy": "keep"})
    assert told(output, "rollout/groups/stale_tokens") == 16
    assert sum(output.samples[0][0][0].loss_mask) == 4


def test_an_engine_without_versions_is_judged_by_rollouts() -> None:
    source = Buffered(SampleLike, 2)
    with slime_rollout.use_service(ReadyService(sampled(""))):
        call(0, source)
        assert told(call(1, source), "rollout/groups/stale") == 0
        assert told(call(5, source), "rollout/groups/stale") == 2


def test_it_evaluates_first_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(slime_rollout, "_evaluated", set())
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"text": "bug"}\n')
    dataset = SimpleNamespace(name="held_out", path=str(path), input_key="text", n_samples_per_eval_prompt=2)
    source, how = Prompts(SampleLike, 2), {"evaluate_first": True}
    with slime_rollout.use_service(ReadyService(trajectory)):
        first = call(0, source, asynchronous=how, eval_datasets=[dataset])
        second = call(1, source, asynchronous=how, eval_datasets=[dataset])
    assert told(first, "eval/held_out/session/reward") == 1.0
    assert second.metrics is not None
    assert "eval/held_out/session/reward" not in second.metrics


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"colocate": True}, "leave out --colocate"), ({"asynchronous": {"evaluate_first": True}}, "--eval-prompt-data")],
)
def test_what_agents_that_run_on_cannot_live_with_is_refused(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        call(0, Prompts(SampleLike, 2), **settings)


TRAINER = """
import json, sys
from types import SimpleNamespace
from polar_plugin import slime_rollout
from tests.slime.sessions import POLAR, ReadyService, trajectory

folder, first, rollouts = sys.argv[1], int(sys.argv[2]), 10
args = SimpleNamespace(
    prompt_data=f"{folder}/prompts.jsonl", save=folder, load=folder, n_samples_per_prompt=2, rollout_batch_size=2,
    rollout_shuffle=True, polar={**POLAR, "asynchronous": {"max_staleness": 2, "store": f"{folder}/store"}},
    use_dynamic_batch_size=True,
    custom_reward_post_process_path="polar_plugin.slime_rollout.post_process_rewards",
)
source = slime_rollout.PolarDataSource(args)
source.load(first - 1)

def generate(rollout_id):
    output = slime_rollout.generate_async(args, rollout_id, source)
    return [[group[0][0].prompt for group in output.samples], output.metrics.get("rollout/groups/restored", 0)]

with slime_rollout.use_service(ReadyService(trajectory)):
    following = generate(first)
    for rollout_id in range(first, rollouts):
        current, following = following, generate(rollout_id + 1)  # as train_async.py: one rollout ahead, then save
        source.save(rollout_id)
        print(json.dumps([rollout_id, *current]), flush=True)
"""


def test_after_kill_9_no_prompt_is_skipped_or_doubled(tmp_path: Path) -> None:
    """Ten rollouts of two prompts over twenty, killed twice; the log of what was trained is the data set, once."""
    rows = [f"p{i}" for i in range(20)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    trained: list[str] = []
    restored = 0.0
    for start, stop in ((0, 3), (3, 4), (4, 10)):
        command = [sys.executable, "-c", TRAINER, str(tmp_path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout
            watchdog = threading.Timer(60, process.kill)
            watchdog.start()
            for rollout_id in range(start, stop):
                told_id, prompts, taken = json.loads(process.stdout.readline())
                assert told_id == rollout_id
                print(rollout_id, prompts)
                trained += prompts
                restored += taken
            if stop < 10:
                os.kill(process.pid, signal.SIGKILL)
            watchdog.cancel()
        assert process.returncode == (-signal.SIGKILL if stop < 10 else 0)
    assert sorted(trained) == sorted(rows)
    assert restored > 0
