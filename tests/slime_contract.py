"""What slime does with the samples of a rollout, restated rule by rule, so that our samples meet it without slime.

Each rule names the source it restates, in THUDM/slime at 624b824a; v0.3.1 has the same rules, v0.3.0 the same under the
names `group_id`, `group_ids` and `group_mask_sums`. `tests/slime/real_slime.py` puts the same samples through slime's
own code where SLIME_HOME is set, and the same tests judge both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polar_plugin.slime_types import SampleLike, TrainOutput

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trained:
    """One sample as the trainer's loss sees it."""

    session: int
    tokens: list[int]
    response_length: int
    mask: list[int]
    log_probs: list[float]
    advantages: Array
    """[response_length]"""
    weights: Array
    """[response_length]: what the loss multiplies each token's term with."""
    step: int
    """The optimiser step, of several a rollout."""


class Slime(Protocol):
    """slime's side of the hooks: restated, or real."""

    estimators: tuple[str, ...]
    """Those that normalise over groups."""

    def sample(self, **fields: Any) -> Any:
        """A sample as the data source makes them."""
        ...

    def train(self, args: Any, generate: Callable[..., Any], data_source: Any, post_process: Any) -> list[Trained]:
        """Call the rollout function and take its samples as far as the loss, on two data-parallel ranks."""
        ...

    def default_rewards(self, args: Any, samples: Sequence[Any]) -> list[float]:
        """What slime makes of the rewards where no hook is set."""
        ...


class Restated:
    """The rules, in plain Python."""

    ranks = 2
    estimators = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")

    def sample(self, **fields: Any) -> SampleLike:
        return SampleLike(**fields)

    def train(self, args: Any, generate: Callable[..., Any], data_source: Any, post_process: Any) -> list[Trained]:
        output = generate(args, 0, data_source, evaluation=False)
        assert isinstance(output, TrainOutput)  # slime/rollout/base_types.py:19: other classes count as samples
        annotated(output.samples)
        samples = flattened(output.samples)
        _, rewards = post_process(args, samples)
        data = converted(args, samples, rewards)
        return [
            self._trained(args, data, position, step)
            for step, members in enumerate(steps(data["rollout_ids"], args.global_batch_size, self.ranks))
            for position in members
        ]

    def default_rewards(self, args: Any, samples: Sequence[Any]) -> list[float]:
        return default_rewards(args, samples)

    def _trained(self, args: Any, data: dict[str, Any], position: int, step: int) -> Trained:
        mask, length = data["loss_masks"][position], data["response_lengths"][position]
        return Trained(
            session=data["rollout_ids"][position],
            tokens=data["tokens"][position],
            response_length=length,
            mask=mask,
            log_probs=data["rollout_log_probs"][position],
            # slime/utils/ppo_utils.py:361 get_grpo_returns: the reward, at each response token
            advantages=np.full(length, data["rewards"][position]),
            # slime/backends/megatron_utils/cp_utils.py:47 get_sum_of_sample_mean over loss.py:1353 / global batch size
            weights=np.array(mask) / max(data["rollout_mask_sums"][position], 1) / args.global_batch_size,
            step=step,
        )


def annotated(node: Any, depth: int = 0) -> None:
    """slime/observability/rollout_data_utils.py:92 validate_rollout_id_annotated."""
    if isinstance(node, SampleLike):
        return
    assert isinstance(node, list), type(node)
    if node and isinstance(node[0], SampleLike):
        if depth >= 2 and len(node) > 1:
            ids = {sample.rollout_id for sample in node}
            assert len(ids) == 1, ids
            assert None not in ids
        return
    for item in node:
        annotated(item, depth + 1)


def flattened(data: Any) -> list[Any]:
    """slime/ray/rollout.py:603: by the first element alone, so depth must be uniform."""
    while isinstance(data[0], list):
        data = list(itertools.chain.from_iterable(data))
    return data


def default_rewards(args: Any, samples: Sequence[Any]) -> list[float]:
    """slime/ray/rollout.py:608 _post_process_rewards without a hook: groups by position, or all in one."""
    raw = [sample.get_reward_value(args) for sample in samples]
    if args.advantage_estimator not in Restated.estimators or not args.rewards_normalization:
        return raw
    regular = len(raw) == args.n_samples_per_prompt * args.rollout_batch_size
    rewards = np.array(raw, np.float32).reshape(-1, args.n_samples_per_prompt if regular else len(raw))
    rewards = rewards - rewards.mean(axis=-1, keepdims=True)
    if args.advantage_estimator in ("grpo", "gspo", "cispo") and args.grpo_std_normalization:
        rewards = rewards / (rewards.std(axis=-1, ddof=1, keepdims=True) + 1e-6)
    return rewards.reshape(-1).tolist()


def converted(args: Any, samples: Sequence[Any], rewards: Sequence[float]) -> dict[str, Any]:
    """slime/ray/rollout.py:635 _convert_samples_to_train_data; what its trainer relies on unchecked is asserted too."""
    assert len(rewards) == len(samples)  # :645
    masks: list[list[int]] = []
    for sample in samples:
        assert len(sample.loss_mask) == sample.response_length  # :677
        assert len(sample.rollout_log_probs) == sample.response_length  # cp_utils.py:217
        assert 1 <= sample.response_length < len(sample.tokens)  # megatron_utils/data.py:116 pads by prompt length - 1
        masks.append([0] * sample.response_length if sample.remove_sample else sample.loss_mask)  # :680
    sums: dict[Any, int] = {}
    for sample, mask in zip(samples, masks, strict=True):
        sums[sample.rollout_id] = sums.get(sample.rollout_id, 0) + sum(mask)  # :694
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": list(rewards),
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(sample.status is type(sample).Status.TRUNCATED) for sample in samples],  # :666
        "rollout_ids": [sample.rollout_id for sample in samples],
        "loss_masks": masks,
        "rollout_mask_sums": [sums[sample.rollout_id] for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def steps(rollout_ids: Sequence[Any], global_batch_size: int, ranks: int) -> list[list[int]]:
    """slime/utils/dp_schedule.py:128: whole sessions, `global_batch_size` a step; those left over are dropped."""
    members: dict[Any, list[int]] = {}
    for position, session in enumerate(rollout_ids):
        members.setdefault(session, []).append(position)
    sessions = list(members.values())
    count = len(sessions) // global_batch_size
    assert count >= 1, f"num_rollouts ({len(sessions)}) < global_batch_size ({global_batch_size})"  # :136
    chunks = [sessions[i * global_batch_size : (i + 1) * global_batch_size] for i in range(count)]
    result = [[position for session in chunk for position in session] for chunk in chunks]
    assert all(len(step) >= ranks for step in result)  # :151
    return result
