"""The trainer's part by slime's own code, from a checkout: conversion, split, advantages and loss, on a CPU.

slime's RolloutManager calls `generate`, post-processes rewards by our hook, converts and splits; its Megatron backend's
`compute_advantages_and_returns` and `loss_function` make the loss. Ours are the model (Hugging Face, not Megatron), the
optimiser, and empty stand-ins for libraries that only a GPU needs and that are not installed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from learner import EPS_CLIP, EPS_CLIP_HIGH, Policy, Step
from torch import Tensor

from polar_plugin import slime_rollout

ABSENT = ("sglang", "sglang_router", "ray", "wandb", "megatron", "pylatexenc", "tensordict")
ARGS: dict[str, Any] = {
    # Flags of slime that its code reads here, at slime's own defaults but for `use_rollout_logprobs`: a rollout makes
    # several optimiser steps, and the recorded log-probabilities are exact.
    "use_rollout_logprobs": True, "kl_coef": 0, "custom_advantage_function_path": None, "use_opd": False,
    "normalize_advantages": False, "loss_type": "policy_loss", "calculate_per_token_loss": False,
    "recompute_loss_function": False, "allgather_cp": False, "entropy_coef": 0.0, "use_kl_loss": False,
    "use_opsm": False, "eps_clip": EPS_CLIP, "eps_clip_high": EPS_CLIP_HIGH, "eps_clip_c": None, "use_tis": False,
    "get_mismatch_metrics": False, "log_probs_chunk_size": -1, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
    "micro_batch_size": 1, "balance_data": False, "balance_by_flops": False, "load_debug_rollout_data": None,
    "rollout_data_transport": "object-store", "qkv_format": "thd", "max_tokens_per_gpu": 8192,
}  # fmt: skip


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each absent library."""

    def __init__(self) -> None:
        self._names = {name for name in ABSENT if importlib.util.find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        if spec.name == "ray":
            module.remote = lambda *args, **_: args[0] if args and callable(args[0]) else (lambda cls: cls)
            module.put = module.get = lambda value, **_: value
        if spec.name == "megatron.core":
            for size in ("context_parallel_world_size", "data_parallel_world_size"):
                getattr(module.mpu, f"get_{size}").return_value = 1
            module.mpu.get_context_parallel_rank.return_value = 0
            module.mpu.get_tensor_model_parallel_group.return_value = None
            module.mpu.is_pipeline_last_stage.return_value = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class SlimeLearner:
    """As `learner.Learner`, by the code of the slime checkout at `home`."""

    name = "slime"

    def __init__(self, args: Any, policy: Policy, home: str) -> None:
        if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
            sys.meta_path.append(_StandIns())
            sys.path.insert(0, home)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._rollout = importlib.import_module("slime.ray.rollout")
            self._data = importlib.import_module("slime.utils.data")
            self._loss = importlib.import_module("slime.backends.megatron_utils.loss")
        self.sample = importlib.import_module("slime.utils.types").Sample
        self._args = SimpleNamespace(**{**vars(args), **ARGS})
        self._policy = policy

    def learn(self, rollout_id: int, generate: Callable[..., Any], data_source: Any) -> Step:
        """One rollout, and slime's optimiser steps over it."""
        manager = self._manager(generate, data_source)
        samples, _ = manager._get_rollout_data(rollout_id)
        boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
        data = self._data.process_rollout_data(None, boxes, 0, 1)
        data["tokens"] = [torch.as_tensor(tokens) for tokens in data["tokens"]]
        for key in ("loss_masks", "rollout_log_probs"):
            data[key] = [torch.as_tensor(one, dtype=torch.float32) for one in data[key]]
        self._loss.compute_advantages_and_returns(self._args, data)
        steps = list(_steps(data))
        before, gap = self._measure(data, steps)
        worst = self._worst(data)
        for size, batches in steps:
            self._policy.update(sum(self._term(data, batch, len(batches), size)[0] for batch in batches) / len(batches))
        after, _ = self._measure(data, steps)
        return Step(before, after, gap, worst)

    def _manager(self, generate: Callable[..., Any], data_source: Any) -> Any:
        """The class behind the Ray actor, without the actor and without engines to launch."""
        remote = self._rollout.RolloutManager
        manager = object.__new__(getattr(getattr(remote, "__ray_metadata__", None), "modified_class", remote))
        manager.args, manager.generate_rollout, manager.data_source = self._args, generate, data_source
        manager.custom_reward_post_process_func = slime_rollout.post_process_rewards
        manager.custom_convert_samples_to_train_data_func = None
        parallel = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        manager.train_parallel_config = parallel
        return manager

    def _term(self, data: Any, chosen: Sequence[int], batches: int, size: int) -> tuple[Tensor, dict[str, float]]:
        """slime's loss of one micro-batch, scaled as it is for Megatron, which takes the mean over micro-batches."""
        keys = (
            "advantages",
            "rollout_log_probs",
            "loss_masks",
            "response_lengths",
            "total_lengths",
            "rollout_mask_sums",
        )
        batch = {key: [data[key][i] for i in chosen] for key in keys}
        batch["unconcat_tokens"] = [data["tokens"][i] for i in chosen]
        batch["rollout_mask_sums"] = torch.as_tensor(batch["rollout_mask_sums"], dtype=torch.float32)
        logits = torch.cat(list(self._policy.logits([data["tokens"][i].tolist() for i in chosen])))[None]
        loss, _, log = self._loss.loss_function(self._args, batch, batches, size, logits)
        return loss, dict(zip(log["keys"], log["values"][1:].tolist(), strict=True))

    @torch.no_grad()
    def _measure(self, data: Any, steps: Sequence[tuple[int, list[list[int]]]]) -> tuple[float, float]:
        """Loss and log-probability gap, a mean over sessions of both."""
        told = [(self._term(data, batch, 1, size)[1]) for size, batches in steps for batch in batches]
        sessions = sum(size for size, _ in steps)
        return tuple(sum(one[key] for one in told) / sessions for key in ("loss", "train_rollout_logprob_abs_diff"))

    @torch.no_grad()
    def _worst(self, data: Any) -> float:
        worst = 0.0
        for i, tokens in enumerate(data["tokens"]):
            logits = next(self._policy.logits([tokens.tolist()]))
            said = data["response_lengths"][i]
            log_probs = logits[-said - 1 : -1].log_softmax(-1).gather(1, tokens[-said:, None])[:, 0]
            worst = max(worst, float(((log_probs - data["rollout_log_probs"][i]).abs() * data["loss_masks"][i]).max()))
        return worst


def _steps(data: Any) -> Iterator[tuple[int, list[list[int]]]]:
    """(sessions, micro-batches) of each optimiser step, as slime scheduled them."""
    batches = iter(data["micro_batch_indices"])
    for size, count in zip(data["global_batch_sizes"], data["num_microbatches"], strict=True):
        yield size, [list(next(batches)) for _ in range(count)]
