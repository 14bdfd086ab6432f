"""GRPO over the samples of `polar_plugin.slime_rollout.generate`, in plain PyTorch: what slime does, on one CPU.

A sample is one trace: `tokens`, and for its last `response_length` of them `loss_mask` and `rollout_log_probs`; the
samples of one session share `rollout_id`. The loss of a step is the mean over sessions of the mean over a session's
trained tokens of the clipped policy-gradient term, so a session weighs 1 whatever its number of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polar_plugin import slime_rollout
from polar_plugin.slime_types import SampleLike

EPS_CLIP = 0.2
EPS_CLIP_HIGH = 0.28
GRADIENT_NORM = 0.3


@dataclass(frozen=True)
class Step:
    """What one rollout taught."""

    loss: float
    """Of the samples as they came: what the optimiser lowered."""
    loss_after: float
    """Of the same samples under the weights it made of them."""
    gap: float
    """Mean |recorded - recomputed| log-probability of trained tokens, in nats, before the first optimiser step."""
    gap_max: float


class Policy:
    """The model that is trained, apart from the engine's copy of it, and its optimiser. Mutable."""

    def __init__(self, model: Any, learning_rate: float, steps: int) -> None:
        """The learning rate falls to a tenth over `steps` optimiser steps."""
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.1, steps)

    def logits(self, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """float32 [len(row), vocab] for each row of token ids; rows share one padded batch."""
        size = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[0] * (size - len(row))] for row in rows])  # causal: nothing sees what is behind it
        logits = self.model(input_ids=ids, use_cache=False).logits
        for row, one in zip(rows, logits, strict=True):
            yield one[: len(row)]

    def update(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        self._schedule.step()

    def state(self) -> dict[str, Tensor]:
        """Weights as the engine takes them: a copy."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


class Learner:
    """The trainer of this recipe; `slime_code.SlimeLearner` does the same with slime's own code."""

    name = "recipe"
    sample = SampleLike

    def __init__(self, args: Any, policy: Policy) -> None:
        self._args = args
        self._policy = policy

    def learn(self, rollout_id: int, generate: Callable[..., Any], data_source: Any) -> Step:
        """One rollout, and an optimiser step for each `global_batch_size` sessions of it."""
        output = generate(self._args, rollout_id, data_source)
        samples = [sample for group in output.samples for session in group for sample in session]
        _, advantages = slime_rollout.post_process_rewards(self._args, samples)
        pairs = list(zip(samples, advantages, strict=True))
        gaps = torch.cat([gap for gap, _ in self._terms(pairs)])
        before = self._loss(pairs)
        for batch in by_session(pairs, self._args.global_batch_size):
            self._policy.update(self._loss(batch))
        with torch.no_grad():
            after = self._loss(pairs)
        return Step(float(before.detach()), float(after), float(gaps.mean()), float(gaps.max()))

    def _loss(self, pairs: Sequence[tuple[Any, float]]) -> Tensor:
        """Mean over sessions of the mean over trained tokens; sessions without any count in the mean."""
        sessions = {sample.rollout_id for sample, _ in pairs}
        trained = dict.fromkeys(sessions, 0)
        for sample, _ in pairs:
            trained[sample.rollout_id] += sum(mask_of(sample))
        terms = [
            term.sum() / trained[sample.rollout_id]
            for (_, term), (sample, _) in zip(self._terms(pairs), pairs, strict=True)
            if len(term)
        ]
        return torch.stack(terms).sum() / len(sessions)

    def _terms(self, pairs: Sequence[tuple[Any, float]]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each sample, over its trained tokens: |recorded - recomputed|, and the clipped policy-gradient term."""
        rows = [sample.tokens for sample, _ in pairs]
        for (sample, advantage), logits in zip(pairs, self._policy.logits(rows), strict=True):
            mask = torch.tensor(mask_of(sample), dtype=torch.bool)
            said = torch.tensor(sample.tokens[-sample.response_length :])
            log_probs = logits[-sample.response_length - 1 : -1].log_softmax(-1).gather(1, said[:, None])[:, 0][mask]
            recorded = torch.tensor(sample.rollout_log_probs)[mask]
            ratio = (log_probs - recorded).exp()
            clipped = ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP_HIGH)
            yield (log_probs - recorded).abs().detach(), torch.maximum(-advantage * ratio, -advantage * clipped)


def mask_of(sample: Any) -> list[int]:
    """A sample that was removed trains nothing."""
    return [0] * sample.response_length if sample.remove_sample else sample.loss_mask


def by_session(pairs: Sequence[tuple[Any, float]], size: int) -> Iterator[list[tuple[Any, float]]]:
    """Batches of all samples of `size` sessions, in order."""
    sessions = list(dict.fromkeys(sample.rollout_id for sample, _ in pairs))
    for start in range(0, len(sessions), size):
        chosen = set(sessions[start : start + size])
        yield [pair for pair in pairs if pair[0].rollout_id in chosen]
