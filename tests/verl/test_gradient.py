"""The gradient of verl's own loss on our rows is that of an ideal loss over sessions, for each estimator and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import numpy as np
import torch
from numpy.testing import assert_allclose
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, OptimizerConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from polar_plugin.config import load_task
from polar_plugin.records import Attempt
from polar_plugin.rewards import advantages
from polar_plugin.verl_samples import convert
from polar_plugin.verl_weights import factors, plan, session_advantages
from tests.slime.sessions import trace, trajectory

pytestmark = pytest.mark.verl

REWARDS = [1.0, 0.0, 0.25, 1.0]
TRACES = [(3, 7, 2), (5,), (4, 1), (6, 2, 2, 2)]
"""Trained tokens of each trace of each session: two prompts of two sessions."""
SCALE = 50
RANKS = 2
VERL = {"dr_grpo": ("grpo", False)}
"""Our name -> verl's estimator, and whether it standardises."""


@dataclass
class Row:
    key: str
    ids: dict[str, list[int]]
    mask: torch.Tensor
    reward: float
    noise: torch.Tensor
    """How far the policy has gone from the one that sampled: log-probability now minus then."""


@cache
def rows() -> tuple[Row, ...]:
    made: list[Row] = []
    task = load_task({"task_id": "t", "instruction": "x", "agent": {"harness": "shell", "command": "true"}})
    generator = torch.Generator().manual_seed(1)
    for number, (reward, lengths) in enumerate(zip(REWARDS, TRACES, strict=True)):
        traces = [trace(n, prompt=2 + at, context=at) for at, n in enumerate(lengths)]
        session = convert(trajectory(Attempt(f"s{number}", task, 0, number), reward, traces), step=1, max_tokens=None)
        for at, row in enumerate(session.rows):
            mask = torch.tensor(row["response_mask"])
            noise = 0.3 * torch.randn(len(mask), generator=generator, dtype=torch.float64)
            ids = {"prompts": row["prompt_ids"], "responses": row["response_ids"]}
            made.append(Row(f"p{number // 2}_{number % 2}_{at}", ids, mask, row["reward_score"], noise))
    return tuple(made)


def padding() -> Row:
    one = torch.zeros(1, dtype=torch.int64)
    return Row("pad_0_0", {"prompts": [1, 1], "responses": [1]}, one, 0.0, one.double())


def actor(loss_mode: str, agg_mode: str) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=agg_mode, rollout_n=2,
        optim=OptimizerConfig(lr=0.1),
        loss_scale_factor=SCALE if agg_mode == "seq-mean-token-sum-norm" else None,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
    )  # fmt: skip


def nested(parts: Sequence[Any], dtype: Any) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(part, dtype=dtype) for part in parts], layout=torch.jagged)


def of_rank(
    members: Sequence[Row], weighted: Sequence[float], now: dict[str, torch.Tensor], config: Any, told: Any
) -> Any:
    """verl's loss on the rows that one rank has of one step."""
    old = [torch.where(one.mask == 1, -1.0, 0.0).double() for one in members]
    data = TensorDict(
        {
            "prompts": nested([one.ids["prompts"] for one in members], torch.int64),
            "responses": nested([one.ids["responses"] for one in members], torch.int64),
            "response_mask": nested([one.mask for one in members], torch.int64),
            "old_log_probs": nested(old, torch.float64),
            "advantages": nested([w * one.mask for w, one in zip(weighted, members, strict=True)], torch.float64),
        },
        batch_size=len(members),
    )
    tu.assign_non_tensor(data, **told)
    # a model tells the log-probability of each next token: those of the response begin at the prompt's last
    whole = [
        torch.cat([torch.zeros(len(one.ids["prompts"]) - 1).double(), now[one.key], torch.zeros(1).double()])
        for one in members
    ]
    loss, _ = ppo_loss(config, {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}, data)
    return loss


def gradient(estimator: str, loss_mode: str, agg_mode: str, steps: int) -> dict[str, np.ndarray]:
    """By row, what verl's actor would add up over the optimiser steps and ranks of one epoch."""
    name, standardise = VERL.get(estimator, (estimator, True))
    real = list(rows())
    shares = session_advantages(
        [r.reward for r in real], [r.key for r in real], estimator=name, standardise=standardise
    )
    planned = plan([one.key for one in real], [len(one.mask) for one in real], steps=steps, ranks=RANKS)
    placed = [real[at] if at < len(real) else padding() for at in planned.order]
    tokens = [int(one.mask.sum()) for one in placed]
    sessions = 4 // steps
    weights = factors(
        agg_mode, [one.key for one in placed], tokens, planned.steps, sessions=sessions, scale=float(SCALE)
    )
    weighted = [w * shares[at] if at < len(real) else 0.0 for w, at in zip(weights, planned.order, strict=True)]
    now = {one.key: (one.noise - 1.0 * one.mask).requires_grad_() for one in placed}
    size = len(placed) // (RANKS * steps)
    for rank in range(RANKS):
        for step in range(steps):
            part = range((rank * steps + step) * size, (rank * steps + step + 1) * size)
            assert {planned.steps[at] for at in part} == {step}
            told = {
                "dp_size": RANKS, "global_batch_size": sessions,
                "batch_num_tokens": sum(n for n, at in zip(tokens, planned.steps, strict=True) if at == step),
            }  # fmt: skip
            members = [placed[at] for at in part]
            loss = of_rank(members, [weighted[at] for at in part], now, actor(loss_mode, agg_mode), told)
            (loss / RANKS).backward()  # ranks' gradients are averaged
    return {one.key: now[one.key].grad.numpy() for one in real}


def ideal(estimator: str, loss_mode: str, steps: int) -> dict[str, np.ndarray]:
    """Each session: its advantage, the mean of its trained tokens' terms, over the sessions of a step."""
    shares = advantages(REWARDS, [0, 0, 1, 1], estimator=estimator)
    if estimator == "reinforce_plus_plus_baseline":
        shares = shares / shares.std(ddof=1)
    config, found = actor(loss_mode, "token-mean"), {}
    for one in rows():
        number = 2 * int(one.key[1]) + int(one.key.split("_")[1])
        now = (one.noise - 1.0 * one.mask).unsqueeze(0).requires_grad_()
        mask = one.mask.bool().unsqueeze(0)
        old = torch.where(mask, -1.0, 0.0).double()
        config.global_batch_info.clear()
        loss, _ = get_policy_loss_fn(loss_mode)(
            old_log_prob=old, log_prob=now, advantages=shares[number] * mask.double(), response_mask=mask,
            loss_agg_mode="token-mean", config=config,
        )  # fmt: skip
        (loss * float(one.mask.sum()) / sum(TRACES[number]) / (4 // steps)).backward()
        found[one.key] = now.grad.squeeze(0).numpy()
    return found


def check(estimator: str, loss_mode: str, agg_mode: str, steps: int) -> None:
    expected, found = ideal(estimator, loss_mode, steps), gradient(estimator, loss_mode, agg_mode, steps)
    assert max(float(np.abs(one).max()) for one in expected.values()) > 1e-3
    for key, one in expected.items():
        assert_allclose(found[key], one, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl"])
def test_the_gradient_is_that_of_an_ideal_loss_over_sessions(estimator: str, loss_mode: str) -> None:
    """Case 49: sessions of one to four traces weigh alike, on two ranks, with padding rows."""
    check(estimator, loss_mode, "seq-mean-token-mean" if loss_mode == "sapo" else "token-mean", 1)


@pytest.mark.parametrize(
    "agg_mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
@pytest.mark.parametrize("steps", [1, 2])
def test_it_is_so_for_each_way_to_aggregate_and_several_steps(agg_mode: str, steps: int) -> None:
    check("grpo", "vanilla", agg_mode, steps)


def test_verls_own_trainer_weighs_a_session_by_its_tokens() -> None:
    """Why the mixin is there. Turns red once verl weighs outputs itself."""
    config = actor("vanilla", "token-mean")
    real = list(rows())
    shares = session_advantages([r.reward for r in real], [r.key for r in real], estimator="grpo")
    now = {one.key: (one.noise - 1.0 * one.mask).requires_grad_() for one in real}
    tokens = sum(int(one.mask.sum()) for one in real)
    told = {"dp_size": 1, "global_batch_size": 4, "batch_num_tokens": tokens}
    of_rank(real, list(shares), now, config, told).backward()
    expected = ideal("grpo", "vanilla", 1)
    ratios = {one.key: now[one.key].grad.abs().max().item() / np.abs(expected[one.key]).max() for one in real}
    assert max(ratios.values()) / min(ratios.values()) == pytest.approx(12 / 5)
