"""The V1 path, whole: Ray workers, verl's load balancer over two servers, TransferQueue, replay buffer, our trainer."""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import numpy as np
import ray
import torch
import transfer_queue as tq
from numpy.testing import assert_allclose
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from .parts import TASK, WRITE, Server, configuration, copy_of

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
AGAIN = WRITE.replace("echo mended > result", "touch again")
TWICE = 'python3 "$HOME/agent.py"; test ! -e again || exec python3 "$HOME/agent.py"'


def replies(session_id: str, turn: int) -> str:
    """Session 0 of a prompt fails in two conversations, session 1 mends in one."""
    number = session_id.split("-")[-2]
    return {"0": [AGAIN, "Done.", "Nothing to do."], "1": [WRITE, "Done."]}[number][turn]


@dataclass
class Workers:
    """Stands for verl's actor workers, which need a GPU library: keeps what they would be given."""

    _dispatch_info: dict[str, list[int]] = field(default_factory=lambda: {"actor": [0, 1]})
    told: dict[str, Any] = field(default_factory=dict)
    advantages: list[torch.Tensor] = field(default_factory=list)

    def update_actor(self, batch: Any) -> Any:
        self.told = dict(batch.extra_info)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
        self.advantages = [row.clone() for row in data["advantages"].unbind()]
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": 0.0}})


@dataclass
class Cluster:
    config: Any
    servers: list[Any]
    balancer: Any
    manager: Any
    tokenizer: Any
    directory: Path
    failed: set[int] = field(default_factory=set)
    uids: list[str] = field(default_factory=list)

    def sample(self, prompts: list[dict[str, Any]]) -> Any:
        """Submit prompts as verl's trainer does, and draw all of them from the replay buffer."""
        uids = [str(uuid.uuid4()) for _ in prompts]
        columns = {"raw_prompt": np.empty(len(prompts), object), "extra_info": np.empty(len(prompts), object)}
        columns["raw_prompt"][:] = [[{"role": "user", "content": "Mend it."}]] * len(prompts)
        columns["extra_info"][:] = prompts
        batch = tu.get_tensordict({**columns, "uid": np.array(uids, object), "index": np.arange(len(prompts))})
        tu.assign_non_tensor_data(batch, "global_steps", 4)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 4} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        self.manager.generate_sequences(batch)
        buffer = ReplayBuffer(
            trainer_mode="sync", trainer_config=OmegaConf.create({}), max_off_policy_threshold=8,
            max_off_policy_strategy="drop", sampler_kwargs=OmegaConf.create({}), poll_interval=0.2,
        )  # fmt: skip
        sampled, _ = buffer.sample(global_steps=4, partition_id="train", batch_size=len(prompts))
        self.failed = {uids.index(uid) for uid in buffer.failure_keys["train"]}
        self.uids = uids
        return sampled

    def trainer(self) -> Any:
        """Ours, without the workers of verl's constructor."""
        made = object.__new__(get_trainer_cls("polar_sync"))
        made.config, made.tokenizer = self.config, self.tokenizer
        made.parameter_sync_step, made.actor_rollout_wg, made.distillation_config = 1, Workers(), None
        return made


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    model = copy_of(tiny, directory)
    for name in ("good0", "good1", "hole1"):
        (directory / name).mkdir()
    task = {
        **TASK,
        "instruction": "{sample.prompt} [[{session_id}]]",
        "agent": {**TASK["agent"], "command": TWICE},
        "runtime": {"image": "{sample.metadata.workspace}{index}"},
    }
    config = configuration(model, {"polar": {"task": task, "retries": 0}}, actor_rollout_ref__rollout__n=2)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        servers = [ray.remote(Server).remote(tokenizer, replies) for _ in range(2)]
        named = {f"127.0.0.1:{port}": server for port, server in enumerate(servers, 1)}
        balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers=named)
        queue = OmegaConf.create(OmegaConf.to_container(config.transfer_queue, resolve=True))
        queue.enable, queue.backend.SimpleStorage.num_data_storage_units = True, 1
        tq.init(queue)
        manager = AgentLoopManagerTQ.create(
            config=config, llm_client=LLMServerClient(config=config, load_balancer_handle=balancer)
        )
        yield Cluster(config, servers, balancer, manager, tokenizer, directory)
        tq.close()
    finally:
        ray.shutdown()


def test_sessions_of_many_traces_are_one_vote_each_from_the_queue_to_the_actor(cluster: Cluster) -> None:
    """Cases 46 and 49: session 0 failed in two traces, session 1 succeeded in one; both prompts alike."""
    good = str(cluster.directory / "good")
    batch = cluster.sample([{"workspace": good}, {"workspace": good}])
    names = sorted(f"{cluster.uids.index(key.split('_')[0])}_{key.split('_', 1)[1]}" for key in batch.keys)
    assert names == ["0_0_0", "0_0_1", "0_1_0", "1_0_0", "1_0_1", "1_1_0"]
    assert {(tag["global_steps"], tag["min_global_steps"], tag["max_global_steps"]) for tag in batch.tags} == {
        (4, 3, 3)
    }

    trainer, metrics = cluster.trainer(), {}
    batch = trainer._balance_batch(batch, metrics)
    assert metrics["polar/sessions"] == 4
    assert metrics["polar/traces_per_session"] == 1.5
    zeros = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
    zeros["old_log_probs"] = zeros.pop("rollout_log_probs")
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=zeros)
    batch = trainer._compute_advantage(batch, metrics)
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id="train", select_fields=["advantages", "loss_mask", "rm_scores"]
    )
    real = [at for at, tag in enumerate(batch.tags) if not tag.get("is_padding")]
    masks, rows = data["loss_mask"].unbind(), data["advantages"].unbind()
    for at in real:
        expected = 0.70710 if batch.keys[at].split("_")[1] == "1" else -0.70710
        assert_allclose(rows[at].numpy(), expected * masks[at].numpy(), atol=1e-4)

    kept = [row.clone() for row in rows]
    trainer._update_actor(batch, metrics)
    told = trainer.actor_rollout_wg.told
    assert (told["num_mini_batch"], told.get("mini_batch_size"), told["global_batch_size"]) == (1, None, 4)
    tokens = sum(int(mask.sum()) for mask in masks)
    weights: dict[str, float] = {}
    for at in real:  # by token-mean: what each session adds to the loss, were each of its tokens' terms 1
        session = batch.keys[at].rsplit("_", 1)[0]
        weights[session] = weights.get(session, 0.0) + float(trainer.actor_rollout_wg.advantages[at].sum()) / tokens
    assert_allclose(np.abs(list(weights.values())), 0.70710 / 4, atol=1e-4)
    after = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])["advantages"].unbind()
    assert all(torch.equal(one, other) for one, other in zip(kept, after, strict=True))
    tq.kv_clear(keys=batch.keys, partition_id="train")


def test_the_balancer_keeps_the_calls_of_a_session_at_one_server(cluster: Cluster) -> None:
    good = str(cluster.directory / "good")
    batch = cluster.sample([{"workspace": good}, {"workspace": good}])
    tq.kv_clear(keys=batch.keys, partition_id="train")
    seen = [ray.get(server.seen.remote()) for server in cluster.servers]
    assert seen[0]
    assert seen[1]
    assert not seen[0] & seen[1]


def test_a_failed_session_leaves_no_row_and_its_sibling_no_bare_reward(cluster: Cluster) -> None:
    """Verl's own trainer gives the single survivor its reward as advantage; ours gives it 0."""
    hole, good = str(cluster.directory / "hole"), str(cluster.directory / "good")
    batch = cluster.sample([{"workspace": hole}, {"workspace": good}])
    assert cluster.failed == set()
    of_hole = [key for key in batch.keys if key.startswith(cluster.uids[0])]
    assert of_hole == [f"{cluster.uids[0]}_1_0"]
    trainer, metrics = cluster.trainer(), {}
    batch = trainer._balance_batch(batch, metrics)
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
    data["old_log_probs"] = data.pop("rollout_log_probs")
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=data)
    batch = trainer._compute_advantage(batch, metrics)
    rows = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])["advantages"].unbind()
    survivor = rows[batch.keys.index(of_hole[0])]
    assert float(survivor.abs().max()) == 0.0
    tq.kv_clear(keys=batch.keys, partition_id="train")
