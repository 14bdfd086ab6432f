"""verl's configuration: what we read of it, what it makes of our config, and what we refuse to start with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from .config import RolloutConfig, load_config
from .errors import ConfigError
from .records import SamplingParams

logger = logging.getLogger(__name__)

MODES = {"polar_sync": "sync", "polar_colocate_async": "colocate_async", "polar_separate_async": "separate_async"}
"""Our trainer modes (`verl_trainer`) and the modes of verl that they add to."""
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Of `algorithm.adv_estimator`, those that our trainers take over sessions."""
LOSS_MODES = ("vanilla", "gspo", "cispo", "sapo", "gpg", "dppo_tv", "dppo_kl", "bypass_mode")
"""Of `actor.policy_loss.loss_mode`, those that scale with the advantage, so that a session can be weighed by it."""
RESERVED = ("extra_fields", "metrics", "num_turns", "prompts", "responses", "response_mask", "rm_scores")
"""Names of a row that a dataset column of that name would overwrite (`AgentLoopWorkerTQ._agent_loop_postprocess`)."""


@dataclass(frozen=True)
class VerlArgs:
    """The settings of verl that are read; the comment at each says where verl has it."""

    use_v1: bool = True  # trainer.use_v1
    trainer_mode: str = "polar_sync"  # trainer.v1.trainer_mode
    adv_estimator: str = "grpo"  # algorithm.adv_estimator
    norm_adv_by_std: bool = True  # algorithm.norm_adv_by_std_in_grpo
    use_kl_in_reward: bool = False  # algorithm.use_kl_in_reward
    loss_agg_mode: str = "token-mean"  # actor_rollout_ref.actor.loss_agg_mode
    loss_scale_factor: int | None = None  # actor_rollout_ref.actor.loss_scale_factor
    loss_mode: str = "vanilla"  # actor_rollout_ref.actor.policy_loss.loss_mode
    shuffle: bool = False  # actor_rollout_ref.actor.shuffle
    entropy_coeff: float = 0.0  # actor_rollout_ref.actor.entropy_coeff
    use_kl_loss: bool = False  # actor_rollout_ref.actor.use_kl_loss
    use_dynamic_bsz: bool = False  # actor_rollout_ref.actor.use_dynamic_bsz
    max_token_len: int | None = None  # actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    sequence_parallel: int = 1  # actor_rollout_ref.actor.ulysses_sequence_parallel_size
    n: int = 1  # actor_rollout_ref.rollout.n
    mini_batch: int = 1  # actor_rollout_ref.actor.ppo_mini_batch_size
    train_batch_size: int = 1  # data.train_batch_size
    engine: str = "vllm"  # actor_rollout_ref.rollout.name
    max_model_len: int | None = None  # actor_rollout_ref.rollout.max_model_len
    response_length: int | None = None  # actor_rollout_ref.rollout.response_length
    routing_replay: bool = False  # actor_rollout_ref.rollout.enable_rollout_routing_replay
    distillation: bool = False  # distillation.enabled

    @classmethod
    def of(cls, config: Any) -> VerlArgs:
        """What verl's configuration (a DictConfig, or nested mappings) says, our default where it says nothing."""
        told = {name: _at(config, path) for name, path in _PATHS.items()}
        return cls(**{name: value for name, value in told.items() if value is not None})

    @property
    def ours(self) -> bool:
        """Whether one of our trainers runs."""
        return self.trainer_mode in MODES

    @property
    def asynchronous(self) -> bool:
        return MODES.get(self.trainer_mode, self.trainer_mode) != "sync"

    @property
    def max_row_tokens(self) -> int | None:
        """The longest row that fits a micro-batch; verl aborts the whole step over a longer one."""
        if not self.use_dynamic_bsz or self.max_token_len is None:
            return None
        return self.max_token_len * self.sequence_parallel


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_PATHS: Mapping[str, str] = {
    "use_v1": "trainer.use_v1",
    "trainer_mode": "trainer.v1.trainer_mode",
    "adv_estimator": "algorithm.adv_estimator",
    "norm_adv_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "use_kl_in_reward": "algorithm.use_kl_in_reward",
    "loss_agg_mode": f"{_ACTOR}.loss_agg_mode",
    "loss_scale_factor": f"{_ACTOR}.loss_scale_factor",
    "loss_mode": f"{_ACTOR}.policy_loss.loss_mode",
    "shuffle": f"{_ACTOR}.shuffle",
    "entropy_coeff": f"{_ACTOR}.entropy_coeff",
    "use_kl_loss": f"{_ACTOR}.use_kl_loss",
    "use_dynamic_bsz": f"{_ACTOR}.use_dynamic_bsz",
    "max_token_len": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "sequence_parallel": f"{_ACTOR}.ulysses_sequence_parallel_size",
    "n": f"{_ROLLOUT}.n",
    "mini_batch": f"{_ACTOR}.ppo_mini_batch_size",
    "train_batch_size": "data.train_batch_size",
    "engine": f"{_ROLLOUT}.name",
    "max_model_len": f"{_ROLLOUT}.max_model_len",
    "response_length": f"{_ROLLOUT}.response_length",
    "routing_replay": f"{_ROLLOUT}.enable_rollout_routing_replay",
    "distillation": "distillation.enabled",
}
assert set(_PATHS) == {field.name for field in fields(VerlArgs)}


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if config is not None else None
    return config


def rollout_config(source: str | Mapping[str, Any], args: VerlArgs, tokenizer: str) -> RolloutConfig:
    """The RolloutConfig of an agent loop's `polar:` (a YAML file or a mapping), completed by verl's configuration.

    verl samples, so an engine or a temperature in it is a ConfigError.
    """
    config = load_config(source)
    given = config.model_dump(exclude_unset=True)
    if "engine" in given and set(given["engine"]) - {"context_length"}:
        raise ConfigError("polar.engine: leave it out, verl's own servers sample (context_length alone may be set)")
    if wrong := {"temperature", "top_p", "top_k"} & set(given.get("sampling", {})):
        raise ConfigError(
            f"polar.sampling.{min(wrong)}: leave it out, set actor_rollout_ref.rollout.{min(wrong)}; verl computes its"
            " log-probabilities at its own"
        )
    if config.eval_task is not None:
        raise ConfigError("polar.eval_task: verl does not tell an agent loop that it validates; use dataset columns")
    renderer = {"tokenizer": tokenizer, **given.get("renderer", {})}
    sampling = {"max_tokens": args.response_length, **given.get("sampling", {})}
    engine = {"kind": "verl", **given.get("engine", {})}
    return load_config({**given, "engine": engine, "renderer": renderer, "sampling": _known(sampling)})


def _known(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def sampling_of(config: RolloutConfig, params: Mapping[str, Any]) -> SamplingParams:
    """verl's sampling of one session: its temperature and truncation, our limit of a turn and stop strings."""
    own = config.sampling
    top_k = int(cast("int | None", params.get("top_k", -1)) or -1)
    return SamplingParams(
        float(params.get("temperature", 1.0)), float(params.get("top_p", 1.0)), top_k, own.max_tokens, tuple(own.stop)
    )


def preflight(args: VerlArgs) -> None:
    """Raise ConfigError that lists all that would train wrongly or crash, each with the setting to change.

    Logs a warning of what is a choice, but gives sessions of more tokens or traces more weight.
    """
    wrong = [*_crashes(args), *(_biases(args) if args.ours else _stock_biases(args))]
    if wrong:
        raise ConfigError("verl's configuration does not fit sessions of many traces:\n- " + "\n- ".join(wrong))
    for choice in _choices(args):
        logger.warning(choice)


def _crashes(args: VerlArgs) -> Iterator[str]:
    if not args.use_v1:
        yield "set trainer.use_v1=True: the older trainer takes one sequence a session"
    if args.routing_replay:
        yield "set actor_rollout_ref.rollout.enable_rollout_routing_replay=False: rows here carry no experts"
    if args.distillation:
        yield "set distillation.enabled=False: verl asks the teacher about the last row of a session alone"
    if not args.asynchronous and args.train_batch_size % args.mini_batch:
        yield (
            f"set actor_rollout_ref.actor.ppo_mini_batch_size={args.mini_batch} so that it divides "
            f"data.train_batch_size={args.train_batch_size}"
        )


def _biases(args: VerlArgs) -> Iterator[str]:
    """What would run under our trainers, and train on something else than it says."""
    if args.adv_estimator not in ESTIMATORS:
        yield f"set algorithm.adv_estimator to one of {', '.join(ESTIMATORS)}: {args.adv_estimator} is not of sessions"
    if args.loss_mode not in LOSS_MODES:
        yield (
            f"set actor_rollout_ref.actor.policy_loss.loss_mode to one of {', '.join(LOSS_MODES)}: {args.loss_mode} "
            "does not scale with the advantage, so sessions cannot be weighed by it"
        )
    if args.use_kl_in_reward:
        yield "set algorithm.use_kl_in_reward=False (use_kl_loss instead): the last row's KL would be the session's"
    if args.shuffle:
        yield "set actor_rollout_ref.actor.shuffle=False: it tears sessions apart between optimiser steps"
    if args.loss_agg_mode == "seq-mean-token-sum-norm" and args.loss_scale_factor is None:
        yield "set actor_rollout_ref.actor.loss_scale_factor: by default the longest row of a micro-batch is the scale"


def _stock_biases(args: VerlArgs) -> Iterator[str]:
    """What verl's own trainers would take over rows instead of sessions."""
    ours = next((name for name, base in MODES.items() if base == args.trainer_mode), "polar_sync")
    if args.adv_estimator != "grpo":
        yield (
            f"set trainer.v1.trainer_mode={ours}, or algorithm.adv_estimator=grpo: verl's own trainers take "
            f"{args.adv_estimator}'s baseline over rows, so a session of three traces would vote three times"
        )
    if args.loss_agg_mode == "seq-mean-token-mean" or args.loss_mode == "sapo":
        yield (
            f"set trainer.v1.trainer_mode={ours}, or actor_rollout_ref.actor.loss_agg_mode=token-mean: a session of "
            "three traces would weigh three times"
        )
    if args.use_kl_in_reward:
        yield "set algorithm.use_kl_in_reward=False: the KL of a session's last row would be that of the session"


def _choices(args: VerlArgs) -> Iterator[str]:
    if not args.ours:
        yield (
            f"trainer.v1.trainer_mode={args.trainer_mode}: sessions weigh by their tokens, the number of optimiser "
            "steps follows the number of traces, and a single survivor of a group is trained on its bare reward; "
            f"{', '.join(MODES)} weigh sessions equally"
        )
    extra = [name for name, on in (("entropy_coeff", args.entropy_coeff), ("use_kl_loss", args.use_kl_loss)) if on]
    if extra:
        yield (
            f"actor_rollout_ref.actor.{' and '.join(extra)}: these terms are verl's own, taken by loss_agg_mode "
            f"{args.loss_agg_mode} over rows, not over sessions"
        )
