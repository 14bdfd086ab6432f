"""verl's own agent-loop worker, in this process: an agent program in a sandbox, verl's client behind the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from transformers import AutoTokenizer
from verl.experimental.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from polar_plugin import verl_service
from polar_plugin.errors import ConfigError, PolarError

from .parts import TASK, WRITE, LocalClient, Server, configuration, copy_of

pytestmark = pytest.mark.verl
T = TypeVar("T")

POLAR = {"verify": "all", "task": TASK}
TRAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class Worker(AgentLoopWorker):
    """verl's, with what it would put into the TransferQueue kept instead."""

    kept: list[tuple[str, list[AgentLoopOutput]]]

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        self.kept.append((kwargs["uid"], output))
        return output


def worker(model: Path, replies: Any, agent: dict[str, Any] | None = None, **settings: Any) -> Worker:
    server = Server(AutoTokenizer.from_pretrained(str(model)), replies)
    made = Worker(configuration(model, agent or {"polar": POLAR}, **settings), LocalClient(server), None, None)
    made.kept = []
    return made


async def session(of: Worker, number: int = 0, uid: str = "u0", sampling: Any = TRAIN, **columns: Any) -> Any:
    trajectory = {"step": 5, "sample_index": 0, "rollout_n": number, "validate": False}
    told = {"raw_prompt": [{"role": "user", "content": "Mend it."}], "index": 0, "global_steps": 5, **columns}
    return await of._run_agent_loop(
        dict(sampling), trajectory, agent_name="polar", trace=False, uid=uid, session_id=number, **told
    )


def run(job: Callable[[], Awaitable[T]]) -> T:
    """Within a loop of its own, whose services end with it."""

    async def whole() -> T:
        try:
            return await asyncio.wait_for(job(), 120)
        finally:
            await verl_service.close()

    return asyncio.run(whole())


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return copy_of(tiny, tmp_path)


def test_an_agent_program_becomes_one_graded_row(model: Path) -> None:
    of = worker(model, [WRITE, "Done."])
    (row,) = run(lambda: session(of))
    assert isinstance(row, AgentLoopOutput)
    assert (row.reward_score, row.num_turns > 2) == (1.0, True)
    assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs)
    calls = [call for call in of.llm_client.server.calls if call["request_id"] != "probe"]
    assert [call["prompt_ids"] for call in calls] == [
        row.prompt_ids, (row.prompt_ids + row.response_ids)[: len(calls[1]["prompt_ids"])],
    ]  # fmt: skip
    assert row.extra_fields["reward_extra_info"] == {"acc": 1.0}
    assert [row.extra_fields[f"{end}_global_steps"] for end in ("min", "max")] == [3, 3]


def test_a_second_conversation_comes_first_and_the_primary_trace_last(model: Path) -> None:
    """verl reads advantage, metrics and validation off the last row; all rows have the same keys and reward."""
    again = WRITE.replace("echo mended > result", "sleep 0; echo mended > result; echo a longer turn")
    command = 'python3 "$HOME/agent.py"; exec python3 "$HOME/agent.py"'
    task = {**TASK, "agent": {**TASK["agent"], "command": command}}
    rows = run(lambda: session(worker(model, [again, "Done.", "Nothing."], {"polar": {"task": task}})))
    assert len(rows) == 2
    assert sum(rows[1].response_mask) > sum(rows[0].response_mask) > 0
    assert {row.reward_score for row in rows} == {1.0}
    first, last = (row.as_dict() for row in rows)
    assert set(first) == set(last)
    assert {"num_turns", "rm_scores", "rollout_log_probs"} <= set(first)
    assert set(first["extra_fields"]) == set(last["extra_fields"])
    assert all(type(row.extra_fields["min_global_steps"]) is int for row in rows)


def test_the_loop_survives_its_second_use_with_what_its_entry_says(model: Path) -> None:
    """A class decorated with verl's `register` would lose the entry's keys after the first session."""

    async def both() -> list[Any]:
        of = worker(model, lambda *_: "Done.")
        return [await session(of, number) for number in (0, 1)]

    assert [rows[0].reward_score for rows in run(both)] == [0.0, 0.0]
    assert "polar" in _agent_loop_registry["polar"]


def test_sessions_that_start_at_once_share_one_proxy_and_wait_for_their_turn(model: Path) -> None:
    config = {"task": TASK, "stages": {"run": 1, "init": 1, "ready": 0}}
    running: list[int] = []

    async def all_at_once() -> None:
        of = worker(model, lambda *_: "Done.", {"polar": config})
        server, plain = of.llm_client.server, of.llm_client.server.generate
        active = 0

        async def counted(*args: Any, **told: Any) -> Any:
            nonlocal active
            active += 1
            running.append(active)
            try:
                await asyncio.sleep(0.05)
                return await plain(*args, **told)
            finally:
                active -= 1

        server.generate = counted
        await asyncio.gather(*(session(of, number, uid=f"u{number}") for number in range(4)))
        assert [len(one.services) for one in verl_service._loops.values()] == [1]
        assert sum(call["request_id"] == "probe" for call in server.calls) == 1

    run(all_at_once)
    assert max(running) == 1


def test_sampling_is_verls_also_where_it_validates_with_another(model: Path) -> None:
    """Cases 63 and 64: a program's temperature does not count, and `max_tokens` is always told."""

    async def both() -> Server:
        of = worker(model, lambda *_: "Done.", actor_rollout_ref__rollout__response_length=300)
        await session(of, 0, sampling={**TRAIN, "temperature": 0.7, "top_k": 5})
        await session(of, 1, sampling={**TRAIN, "temperature": 0.0})
        return of.llm_client.server

    calls = [call for call in run(both).calls if call["request_id"] != "probe"]
    assert [(call["temperature"], call["top_k"], call["max_tokens"]) for call in calls] == [
        (0.7, 5, 300),
        (0.0, -1, 300),
    ]
    assert all(call["logprobs"] is True for call in calls)


def test_a_row_longer_than_a_micro_batch_is_cut(model: Path) -> None:
    (whole,) = run(lambda: session(worker(model, [WRITE, "Done."])))
    length = len(whole.prompt_ids) + 5
    told = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": length}
    of = worker(model, [WRITE, "Done."], **{f"actor_rollout_ref__actor__{name}": one for name, one in told.items()})
    (cut,) = run(lambda: session(of))
    assert (cut.prompt_ids, cut.response_ids) == (whole.prompt_ids, whole.response_ids[:5])
    assert (sum(cut.response_mask), cut.reward_score) == (5, 1.0)


BROKEN = {"task": {**TASK, "runtime": {"image": "/nowhere{index}"}}, "retries": 0}


@pytest.mark.parametrize(("policy", "mode"), [("auto", "polar_sync"), ("empty", "polar_colocate_async")])
def test_infrastructure_that_fails_gives_no_row(model: Path, policy: str, mode: str) -> None:
    of = worker(model, [], {"polar": BROKEN, "on_failure": policy}, trainer__v1__trainer_mode=mode)
    assert run(lambda: session(of)) == []


@pytest.mark.parametrize(("policy", "mode"), [("raise", "polar_sync"), ("auto", "polar_colocate_async")])
def test_a_group_with_fewer_than_two_survivors_fails_where_verl_refills_it(model: Path, policy: str, mode: str) -> None:
    of = worker(model, [], {"polar": BROKEN, "on_failure": policy}, trainer__v1__trainer_mode=mode)
    with pytest.raises(PolarError, match=r"cannot be trained \(infra_error\): \[init\]"):
        run(lambda: session(of))


def test_case_53_one_failure_does_not_cost_an_asynchronous_group_its_other_sessions(model: Path) -> None:
    """Case 53: verl would evict the whole group over a raised error; with two survivors nothing is raised."""
    for number in (0, 1):
        (model / f"work{number}").mkdir()
    config = {"task": {**TASK, "runtime": {"image": str(model / "work") + "{index}"}}, "retries": 0}

    async def group() -> list[Any]:
        of = worker(model, lambda *_: "Done.", {"polar": config}, trainer__v1__trainer_mode="polar_colocate_async")
        return await asyncio.gather(*(session(of, number) for number in range(3)))

    assert [len(rows) for rows in run(group)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"uid": "a_b"}, "has an underscore"),
        ({"num_turns": 3}, "dataset column 'num_turns': rename it"),
    ],
)
def test_a_dataset_that_would_break_verls_rows_is_refused(model: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(lambda: session(worker(model, []), **columns))


def test_a_configuration_that_would_train_wrongly_is_refused_by_the_first_session(model: Path) -> None:
    of = worker(model, [], algorithm__adv_estimator="gae", critic__enable=False)
    with pytest.raises(ConfigError, match=r"set algorithm\.adv_estimator to one of grpo"):
        run(lambda: session(of))
