"""verl's own agent-loop worker, in this process: an agent program in a sandbox, verl's client behind the proxy, rows out."""

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
from polar_plugin.errors import ConfigError

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
