"""slime's own code on a CPU: its RolloutManager's conversion and split, its trainer's advantages and loss reducer.

Nothing of it is copied: it is imported from the checkout in SLIME_HOME. Libraries that only the GPU side needs are
stood in for where they are not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from tests.slime_contract import Trained

ABSENT = ("sglang", "sglang_router", "ray", "wandb", "megatron", "pylatexenc", "tensordict")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty stand-in for each library that is not installed."""

    def __init__(self) -> None:
        self.names = {name for name in ABSENT if importlib.util.find_spec(name) is None}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        if spec.name == "ray":
            module.remote = lambda *args, **_: args[0] if args and callable(args[0]) else (lambda cls: cls)
            module.put = lambda value, **_: value
            module.get = lambda value, **_: value
        if spec.name == "megatron.core":
            module.mpu.get_context_parallel_world_size.return_value = 1
            module.mpu.get_context_parallel_rank.return_value = 0
            module.mpu.is_pipeline_last_stage.return_value = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@functools.cache
def load(home: str) -> RealSlime:
    """slime from the checkout at `home`; once a process, since modules are process-wide."""
    sys.meta_path.append(_Absent())
    sys.path.insert(0, home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RealSlime(home)


class RealSlime:
    ranks = 2

    def __init__(self, home: str) -> None:
        self.home = home
        self.rollout = importlib.import_module("slime.ray.rollout")
        self.types = importlib.import_module("slime.utils.types")
        self.data = importlib.import_module("slime.utils.data")
        self.cp_utils = importlib.import_module("slime.backends.megatron_utils.cp_utils")
        self.loss = importlib.import_module("slime.backends.megatron_utils.loss")
        assert str(self.rollout.__file__).startswith(home), self.rollout.__file__
        self.estimators = ("grpo", "gspo", "reinforce_plus_plus_baseline", *(() if self.is_v0_3_0 else ("cispo",)))
        self.names = ("group_ids", "group_mask_sums") if self.is_v0_3_0 else ("rollout_ids", "rollout_mask_sums")

    @property
    def is_v0_3_0(self) -> bool:
        """The release in which the session id is called `group_id`."""
        return "group_id" in self.types.Sample.__dataclass_fields__

    def sample(self, **fields: Any) -> Any:
        return self.types.Sample(**fields)

    def manager(self, args: Any, generate: Any = None, data_source: Any = None, post_process: Any = None) -> Any:
        remote = self.rollout.RolloutManager
        manager = object.__new__(getattr(getattr(remote, "__ray_metadata__", None), "modified_class", remote))
        manager.args = SimpleNamespace(**{**TRAINER_ARGS, **vars(args)})
        manager.generate_rollout, manager.data_source = generate, data_source
        manager.custom_reward_post_process_func = post_process
        manager.custom_convert_samples_to_train_data_func = None
        manager.train_parallel_config = {
            "dp_size": self.ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1,
        }  # fmt: skip
        return manager

    def train(self, args: Any, generate: Callable[..., Any], data_source: Any, post_process: Any) -> list[Trained]:
        manager = self.manager(args, generate, data_source, post_process)
        samples, _ = manager._get_rollout_data(0)
        boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
        return [one for rank in range(self.ranks) for one in self._rank(args, boxes, rank)]

    def default_rewards(self, args: Any, samples: Sequence[Any]) -> list[float]:
        return self.manager(args)._post_process_rewards(list(samples))[1]

    def _rank(self, args: Any, boxes: Any, rank: int) -> list[Trained]:
        torch = importlib.import_module("torch")
        data = self.data.process_rollout_data(None, boxes, rank, self.ranks)
        data["loss_masks"] = [torch.as_tensor(mask, dtype=torch.float32) for mask in data["loss_masks"]]
        data["rollout_log_probs"] = [torch.as_tensor(x, dtype=torch.float32) for x in data["rollout_log_probs"]]
        self.loss.compute_advantages_and_returns(
            SimpleNamespace(**LOSS_ARGS, advantage_estimator=args.advantage_estimator), data
        )
        weights = self._weights(data)
        step_of = self._steps(data)
        return [
            Trained(
                session=int(data[self.names[0]][i]),
                tokens=[int(token) for token in data["tokens"][i]],
                response_length=data["response_lengths"][i],
                mask=[int(one) for one in data["loss_masks"][i]],
                log_probs=data["rollout_log_probs"][i].tolist(),
                advantages=data["advantages"][i].numpy().astype(np.float64),
                weights=weights[i],
                step=step_of[i],
            )
            for i in range(len(data["tokens"]))
        ]

    def _weights(self, data: Any) -> list[Any]:
        """The gradient of slime's own loss reducer with respect to each token's term."""
        torch = importlib.import_module("torch")
        lengths = data["response_lengths"]
        terms = torch.zeros(sum(lengths), requires_grad=True)
        denominators = torch.as_tensor(data[self.names[1]], dtype=torch.float32)
        reduce = self.cp_utils.get_sum_of_sample_mean(data["total_lengths"], lengths, data["loss_masks"], denominators)
        reduce(terms).backward()
        weights = terms.grad.numpy().astype(np.float64) / data["global_batch_sizes"][0]
        return np.split(weights, np.cumsum(lengths)[:-1])

    def _steps(self, data: Any) -> list[int]:
        bounds = np.cumsum(data["num_microbatches"])
        step = [0] * len(data["tokens"])
        for number, batch in enumerate(data["micro_batch_indices"]):
            for i in batch:
                step[i] = int(np.searchsorted(bounds, number, side="right"))
        return step


TRAINER_ARGS: dict[str, Any] = {
    "micro_batch_size": 1,
    "balance_data": False,
    "balance_by_flops": False,
    "rollout_data_transport": "object-store",
    "load_debug_rollout_data": None,
}
LOSS_ARGS: dict[str, Any] = {
    "use_rollout_logprobs": False,
    "kl_coef": 0,
    "custom_advantage_function_path": None,
    "use_opd": False,
    "normalize_advantages": False,
}
