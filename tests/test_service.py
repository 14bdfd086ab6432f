"""The whole from the highest seam: an agent program in a sandbox, a model behind the proxy, a graded trajectory out."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import openai
import pytest
from rich.console import Console
from transformers import AutoTokenizer
from typer.testing import CliRunner

from polar_plugin import doctor
from polar_plugin.cli import app
from polar_plugin.config import load_config, load_task
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Call, Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation
from polar_plugin.errors import ConfigError, EngineError
from polar_plugin.proxy.session import Session, SessionTable
from polar_plugin.quickstart import Exactness, Options, load_tasks, prove, quickstart, recipe_directory
from polar_plugin.recording import load
from polar_plugin.records import (
    Attempt,
    BreakReason,
    FinishReason,
    LogProbs,
    Message,
    Status,
    TokenIds,
    Trace,
    Trajectory,
    log_probs,
    mask,
    token_ids,
)
from polar_plugin.service import RolloutService

from .runtimes.plugin import Noted

pytestmark = pytest.mark.anyio

WRITE = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo mended > result"}}\n</tool_call>'


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@functools.cache
def renderer_of(directory: Path) -> Any:
    return load_renderer(directory)


@asynccontextmanager
async def service_over(
    tiny: Path, replies: Any, config: dict[str, Any] | None = None
) -> AsyncGenerator[tuple[RolloutService, ScriptedEngine]]:
    """A service whose model says `replies`."""
    engine = ScriptedEngine(replies, AutoTokenizer.from_pretrained(str(tiny)), context_length=8192)
    told = load_config({"verify": "all", "sampling": {"max_tokens": 1000}, **(config or {})})
    with anyio.fail_after(120):
        async with RolloutService(told, engine=engine, renderer=renderer_of(tiny)) as service:
            yield service, engine


def attempt(agent: dict[str, Any], name: str = "s0", **task: Any) -> Attempt:
    payload = {"task_id": "t", "instruction": "Fix it.", "timeout_seconds": 60, "agent": agent, **task}
    return Attempt(name, load_task(payload), 0, 0)


def agent_py(**settings: Any) -> dict[str, Any]:
    return {
        "harness": "shell",
        "command": 'exec python3 "$HOME/agent.py"',
        "settings": {"agent_files": str(recipe_directory() / "agent.py"), **settings},
    }


async def test_an_agent_program_gives_one_graded_trace(tiny: Path, tmp_path: Path) -> None:
    evaluator = {"strategy": "test_on_output", "config": {"test_command": "grep -q mended result"}}
    config = {"recording": {"directory": str(tmp_path)}}
    async with service_over(tiny, [WRITE, "Done."], config) as (service, _):
        (trajectory,) = await service.run([attempt(agent_py(), evaluator=evaluator)])
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), trajectory.failure
    (trace,) = trajectory.traces
    assert trace.reward == 1.0
    assert trajectory.counts["sampled_tokens"] == trajectory.counts["trained_tokens"] == trace.trained
    recording = load(tmp_path / "s0.jsonl")
    assert [c.id for c in recording.session.completions] == list(trace.completion_ids)
    assert trajectory.session is not None
    for kept, completion in zip(recording.session.completions, trajectory.session.completions, strict=True):
        assert kept.prompt_ids.tolist() == completion.prompt_ids.tolist()


async def test_case_63_and_64_sampling_is_the_trainers_and_of_max_tokens_the_smaller_counts(tiny: Path) -> None:
    async with service_over(tiny, ["a", "b"], {"sampling": {"temperature": 0.7, "max_tokens": 50}}) as (
        service,
        engine,
    ):
        conversation = Conversation(service.policy, "s")
        async with service.proxy.session("s", conversation) as session, client(service, session.key) as api:
            for asked in (32_000, 5):
                await api.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}], temperature=0.3, top_p=0.9, seed=1,
                    max_tokens=asked,
                )  # fmt: skip
    assert [call.sampling.max_tokens for call in engine.calls] == [50, 5]
    assert {(call.sampling.temperature, call.sampling.top_p, call.sampling.seed) for call in engine.calls} == {
        (0.7, 1.0, None)
    }
    asked_of_second = session.completions[1].request.sampling
    assert (asked_of_second.temperature, asked_of_second.max_tokens) == (0.3, 5)


@asynccontextmanager
async def client(service: RolloutService, key: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{service.proxy.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    ) as api:
        yield api


async def test_case_117_a_prompt_near_the_end_of_the_context_is_clamped_and_one_beyond_overflows(tiny: Path) -> None:
    async with (
        service_over(tiny, lambda _: "yes") as (service, engine),
        service.proxy.session("s", Conversation(service.policy, "s")) as session,
        client(service, session.key) as api,
    ):
        fill = 8192 - 2 - len(service.policy.renderer.render((Message("user", ""),), ()))
        await ask(api, "x" * fill)
        with pytest.raises(openai.BadRequestError) as told:
            await ask(api, "x" * (fill + 2))
    assert len(engine.calls[0].prompt_ids) == 8190
    assert engine.calls[0].sampling.max_tokens == 2
    assert told.value.code == "context_length_exceeded"
    assert len(session.completions) == 1


async def ask(api: openai.AsyncOpenAI, text: str) -> Any:
    return await api.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], max_tokens=4096)


async def test_case_20_a_turns_prompt_is_extended_not_rendered_again(tiny: Path) -> None:
    """200 turns: every prompt begins with the one before, and only the first was rendered in full."""
    async with (
        service_over(tiny, lambda _: "ok") as (service, engine),
        service.proxy.session("s", Conversation(service.policy, "s")) as session,
        client(service, session.key) as api,
    ):
        messages: list[Any] = [{"role": "user", "content": "start"}]
        for turn in range(200):
            reply = await api.chat.completions.create(model="m", messages=messages)
            messages += [
                reply.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": str(turn)},
            ]
    reasons = [completion.break_reason for completion in session.completions]
    assert reasons == [BreakReason.FIRST_CALL, *[None] * 199]
    for before, after in itertools.pairwise(engine.calls):
        assert after.prompt_ids[: len(before.prompt_ids)].tolist() == before.prompt_ids.tolist()
    last = service.policy.renderer.render(session.completions[-1].request.messages, ())
    assert engine.calls[-1].prompt_ids.tolist() == last.tolist()


async def test_an_engine_that_fails_is_infrastructure_and_the_attempt_is_run_again(tiny: Path) -> None:
    async with service_over(tiny, [Reply(raises=EngineError("the GPU fell off")), "Done."]) as (service, _):
        (trajectory,) = await service.run([attempt(agent_py())])
    assert trajectory.status is Status.COMPLETED, trajectory.failure
    assert trajectory.counts["retries"] == 1


@pytest.mark.parametrize("name", ["backend", "import_path"])
async def test_a_backend_of_somebodys_own_is_named_by_its_import_path(tiny: Path, name: str) -> None:
    Noted.notes.clear()
    runtime = {name: "tests.runtimes.plugin:Noted", "kwargs": {"note": "mine"}}
    evaluator = {"strategy": "test_on_output", "config": {"test_command": "grep -q mended result"}}
    async with service_over(tiny, [WRITE, "Done."]) as (service, _):
        (trajectory,) = await service.run([attempt(agent_py(), runtime=runtime, evaluator=evaluator)])
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), trajectory.failure
    assert [note for note in Noted.notes if note != "exec"] == ["mine: agent", "mine: evaluation"]
    assert "exec" in Noted.notes


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("no.such.module:Class", "cannot import 'no.such.module'"),
        ("tests.runtimes.plugin:Missing", "has no 'Missing'"),
        ("tests.runtimes.plugin:Unlike", "does not take config"),
        ("dockr", "use one of apptainer, docker, local"),
    ],
)
async def test_a_backend_that_cannot_be_is_told(tiny: Path, path: str, told: str) -> None:
    async with service_over(tiny, ["Done."]) as (service, _):
        (trajectory,) = await service.run([attempt(agent_py(), runtime={"backend": path})])
    assert trajectory.status is Status.INFRA_ERROR
    assert trajectory.failure is not None
    assert told in trajectory.failure.message


async def test_a_task_that_names_what_does_not_exist_is_refused_before_anything_starts(tiny: Path) -> None:
    async with service_over(tiny, []) as (service, _):
        with pytest.raises(ConfigError, match=r"unknown harness 'clawd': use one of .*pi, .*shell"):
            await service.run([attempt({"harness": "clawd"})])
        in_place = {"strategy": "test_on_output", "refresh_runtime": False, "config": {"test_command": "true"}}
        with pytest.raises(ConfigError, match="refresh_runtime"):
            await service.run([attempt(agent_py(), evaluator=in_place)])


def test_the_quickstart_gives_rewards_of_1_and_0_and_proves_itself_exact(tiny: Path, tmp_path: Path) -> None:
    recipe = recipe_directory()
    options = Options(str(tiny), tmp_path, attempts=2, max_tokens=2000, agent_script=recipe / "script.json")
    result = quickstart(options, Console(quiet=True))
    assert result.exactness.holds, result.exactness
    assert [trajectory.reward for trajectory in result.trajectories] == [1.0, 0.0, 1.0, 0.0], failures(
        result.trajectories
    )
    assert [round(share, 2) for share in result.advantages.values()] == [0.71, -0.71, 0.71, -0.71]
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["exactness"]["accounted"] == 1.0
    sessions = sorted((tmp_path / "sessions").glob("*.jsonl"))
    assert len(sessions) == 4
    told = CliRunner().invoke(app, ["replay", str(sessions[0]), "--json"])
    assert told.exit_code == 0, told.output
    again = json.loads(told.stdout.splitlines()[-1])
    kept = json.loads((tmp_path / "traces" / f"{sessions[0].stem}.json").read_text())
    assert [trace["response_ids"] for trace in again["traces"]] == [trace["response_ids"] for trace in kept]


def failures(trajectories: Any) -> list[Any]:
    return [(t.status, t.failure) for t in trajectories]


def test_a_proof_that_does_not_hold_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    """The limit is real: with one that nothing can meet, the exit code says so."""
    monkeypatch.setattr("polar_plugin.quickstart.TOLERANCE", -1.0)
    told = CliRunner().invoke(
        app, ["quickstart", "--model", str(tiny), "--out", str(tmp_path), "--attempts", "1", "--max-tokens", "8"]
    )
    assert told.exit_code == 1, told.output
    assert "NOT EXACT" in told.output


async def proof(logprobs: float, trained: int, **counts: int) -> Exactness:
    """Of one attempt whose trace trains `trained` tokens; the model says `logprobs` for each."""

    class Model:
        async def score(self, tokens: TokenIds) -> LogProbs:
            return log_probs(np.full(len(tokens) - 1, logprobs))

    zeros = log_probs(np.zeros(trained))
    trace = Trace(token_ids([1]), token_ids([2] * trained), mask([True] * trained), zeros, FinishReason.STOP)
    one = Trajectory(attempt(agent_py()), Status.COMPLETED, (trace,), counts=counts)
    return await prove([one], cast("Any", Model()))


async def test_the_proof_sees_what_is_no_number_what_is_lost_and_what_is_trained_twice() -> None:
    assert (await proof(0.0, 3, sampled_tokens=5, trained_tokens=3, untrained_side=2)).holds
    assert not (await proof(float("nan"), 3, sampled_tokens=3, trained_tokens=3)).holds
    assert not (await proof(0.0, 3, sampled_tokens=5, trained_tokens=3, untrained_unexplained=2)).holds
    assert not (await proof(0.0, 6, sampled_tokens=3, trained_tokens=3)).holds


async def test_a_tasks_metadata_may_have_any_names(tiny: Path) -> None:
    metadata = {"session_id": "x", "reply": "y", "self": "z", "task_id": "another"}
    async with service_over(tiny, ["Done."]) as (service, _):
        (trajectory,) = await service.run([attempt(agent_py(), metadata=metadata)])
    assert trajectory.status is Status.COMPLETED, trajectory.failure
    assert trajectory.session is not None
    assert trajectory.session.task_id == "t"
    assert {**trajectory.session.metadata, "task_id": "another"}.items() >= metadata.items()


async def test_an_answer_that_comes_after_the_seal_is_not_in_the_recording_either(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    opened = SessionTable.open

    def kept(table: SessionTable, session_id: str, reply: Any, metadata: Any) -> Session:
        sessions.append(opened(table, session_id, reply, metadata))
        return sessions[-1]

    def sealing(call: Call) -> str:
        if call.index == 1:
            sessions[0].seal()
        return WRITE

    async def at_once(engine: ScriptedEngine, call: Call, reply: Reply) -> None:
        """Without a checkpoint: the answer was there when the seal came."""

    monkeypatch.setattr(SessionTable, "open", kept)
    monkeypatch.setattr(ScriptedEngine, "_wait", at_once)
    async with service_over(tiny, sealing, {"recording": {"directory": str(tmp_path)}}) as (service, _):
        (trajectory,) = await service.run([attempt(agent_py())])
    assert trajectory.session is not None
    assert len(trajectory.session.completions) == len(load(tmp_path / "s0.jsonl").session.completions) == 1


@pytest.mark.parametrize(
    ("runtime", "kwargs", "network"),
    [
        ({"kwargs": {"isolation": "none"}, "network": "none"}, {"isolation": "none"}, "none"),
        ({"kwargs": {"isolation": "{sample.metadata.isolation}"}}, {}, "proxy_only"),
        ("{sample.metadata.task.runtime}", {}, "proxy_only"),
    ],
)
def test_the_doctor_looks_at_the_sandbox_of_the_task_as_far_as_it_is_told(
    runtime: Any, kwargs: dict[str, Any], network: str
) -> None:
    spec = doctor.task_runtime(load_config({"task": {"runtime": runtime}}))
    assert (spec.kwargs, spec.network) == (kwargs, network)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--model", "gpt-9"], "smollm2"),
        (["doctor", "--config", "nowhere.yaml"], "cannot read config"),
        (["replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["replay", "[extra]/[/nowhere]"], "[extra]/[/nowhere]"),
    ],
)
def test_a_command_that_cannot_be_says_why_in_one_message(arguments: list[str], message: str) -> None:
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2, told.output
    assert message in told.output


def test_the_doctor_finds_a_working_setup_well_and_a_broken_one_not(tiny: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(f"polar:\n  engine: {{kind: transformers, model: {tiny}}}\n")
    bad.write_text(
        f"polar:\n  engine: {{kind: sglang, url: 'http://127.0.0.1:9'}}\n  renderer: {{tokenizer: {tiny}}}\n"
    )
    told = CliRunner().invoke(app, ["doctor", "--config", str(good)])
    assert told.exit_code == 0, told.output
    assert "fail" not in told.output
    for line in ("engine", "context", "vocabulary", "renderer", "sandbox: proxy", "cannot be reached"):
        assert line in told.output
    told = CliRunner().invoke(app, ["doctor", "--config", str(bad)])
    assert told.exit_code == 1
    assert "fail engine" in told.output


def test_tasks_of_a_recipe_must_have_the_same_keys(tmp_path: Path) -> None:
    for name, text in {"a": "task_id: a", "b": "task_id: b\ninstruction: x"}.items():
        (tmp_path / "tasks" / name).mkdir(parents=True)
        (tmp_path / "tasks" / name / "task.yaml").write_text(text)
    with pytest.raises(ConfigError, match="same keys"):
        load_tasks(tmp_path)
