"""Trainers for verl in which a session is one vote, by `trainer.v1.trainer_mode`: the names are in `verl_args.MODES`.

They add three things to verl's own trainers, whatever the number of traces: baselines over sessions, a number of
optimiser steps that follows the number of sessions, and equal weight of all sessions in the loss (`verl_weights`).
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import open_dict
from tensordict import TensorDict
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.utils.padding import response_to_nested

from .verl_args import MODES, VerlArgs, preflight
from .verl_weights import factors, plan, session_advantages


class SessionTrainer:
    """Mixed into a trainer of verl; `base` is its mode, by which verl's code asks for it."""

    base: str

    def __init__(self, config: Any) -> None:
        """Raises ConfigError where verl's configuration would train sessions wrongly."""
        preflight(VerlArgs.of(config))
        config = config.copy()
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base
        super().__init__(config)  # pyright: ignore[reportCallIssue]

    @property
    def _steps(self) -> int:
        """Optimiser steps an epoch: those of verl, were there one trace a session."""
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        return max(1, prompts // self.config.actor_rollout_ref.actor.ppo_mini_batch_size)

    @property
    def _sessions(self) -> int:
        """Sessions an optimiser step."""
        return self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n

    def _ranks(self) -> int:
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> Any:
        """Rows in an order in which each rank's equal parts are the optimiser steps; the rest is padding, as verl's."""
        ranks = self._ranks()
        lengths = [tag["seq_len"] for tag in batch.tags]
        planned = plan(batch.keys, lengths, steps=self._steps, ranks=ranks)
        batch = upsample_batch_to_divisible_size(batch, len(planned.order), self.tokenizer.eos_token_id)
        batch.reorder(planned.order)
        lengths = [tag["seq_len"] for tag in batch.tags]
        parts = np.arange(len(lengths)).reshape(ranks, -1).tolist()
        metrics.update(log_seqlen_unbalance(seqlen_list=lengths, partitions=parts, prefix=logging_prefix))
        metrics.update(session_metrics(batch))
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's own, for what it does besides (rollout correction), and then advantages over sessions."""
        batch = super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores", "loss_mask"]
        )
        real = [at for at, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        rewards = data["rm_scores"].to_padded_tensor(0.0).sum(-1).double().numpy()
        shares = np.zeros(len(batch))
        shares[real] = session_advantages(
            rewards[real],
            [batch.keys[at] for at in real],
            estimator=self.config.algorithm.adv_estimator,
            standardise=self.config.algorithm.get("norm_adv_by_std_in_grpo", True),
        )
        self._put(batch, shares, data["loss_mask"], ("advantages", "returns"))
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's own, with each session weighed equally while it lasts."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages", "loss_mask"]
        )
        mask = data["loss_mask"]
        shares = np.array([float(_constant(row)) for row in data["advantages"].unbind()])
        weights = factors(
            self.config.actor_rollout_ref.actor.loss_agg_mode,
            batch.keys,
            [int(row.sum()) for row in mask.unbind()],
            self._step_of_rows(len(batch)),
            sessions=self._sessions,
            scale=float(self.config.actor_rollout_ref.actor.loss_scale_factor or 1.0),
        )
        self._put(batch, shares * weights, mask, ("advantages",))
        with self._counted_steps():
            batch = super()._update_actor(batch, metrics)
        self._put(batch, shares, mask, ("advantages",))  # what verl's metrics tell
        return batch

    def _step_of_rows(self, rows: int) -> list[int]:
        ranks, steps = self._ranks(), self._steps
        return np.tile(np.repeat(np.arange(steps), rows // (ranks * steps)), ranks).tolist()

    @contextmanager
    def _counted_steps(self) -> Generator[None]:
        """Within it the actor is told the number of steps instead of the rows of one."""
        group = self.actor_rollout_wg
        self.actor_rollout_wg = _StepsOf(group, self._steps)
        try:
            yield
        finally:
            self.actor_rollout_wg = group

    @staticmethod
    def _put(batch: Any, shares: Any, mask: torch.Tensor, names: tuple[str, ...]) -> None:
        """Write one value a row, on its trained tokens."""
        dense = mask.to_padded_tensor(0)
        values = torch.as_tensor(shares, dtype=torch.float32).unsqueeze(-1) * dense
        fields = TensorDict({name: response_to_nested(values, mask) for name in names}, batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


class _StepsOf:
    """The actor's workers, told how many optimiser steps an epoch has."""

    def __init__(self, group: Any, steps: int) -> None:
        self._group = group
        self._steps = steps

    def update_actor(self, batch: Any) -> Any:
        batch.extra_info.pop("mini_batch_size", None)
        batch.extra_info["num_mini_batch"] = self._steps
        return self._group.update_actor(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def session_metrics(batch: Any) -> dict[str, float]:
    """What verl's metrics, taken over rows, do not tell."""
    rows = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    sessions: dict[str, int] = {}
    for key, tag in rows:
        session = key.rsplit("_", 1)[0]
        sessions[session] = sessions.get(session, 0) + tag["seq_len"]
    prompts = {session.rsplit("_", 1)[0] for session in sessions}
    return {
        "polar/prompts": float(len(prompts)),
        "polar/sessions": float(len(sessions)),
        "polar/traces_per_session": len(rows) / max(1, len(sessions)),
        "polar/tokens_per_session": sum(sessions.values()) / max(1, len(sessions)),
        "polar/padding_rows": float(len(batch.keys) - len(rows)),
    }


def _constant(row: torch.Tensor) -> torch.Tensor:
    """The value that a row's trained tokens share, 0 elsewhere: the one furthest from 0."""
    return row[row.abs().argmax()]


class PolarSync(SessionTrainer, PPOTrainerSync):
    """`polar_sync`"""

    base = "sync"


class PolarColocateAsync(SessionTrainer, PPOTrainerColocateAsync):
    """`polar_colocate_async`"""

    base = "colocate_async"


class PolarSeparateAsync(SessionTrainer, PPOTrainerSeparateAsync):
    """`polar_separate_async`"""

    base = "separate_async"


def register_all() -> None:
    """Make them known to verl; a second call changes nothing."""
    for trainer in (PolarSync, PolarColocateAsync, PolarSeparateAsync):
        register_trainer(next(name for name, base in MODES.items() if base == trainer.base))(trainer)
