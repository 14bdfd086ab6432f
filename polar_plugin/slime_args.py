"""slime's arguments: what we read of them, what they make of our config, and what we refuse to start with."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from .config import RolloutConfig, load_config
from .errors import ConfigError

logger = logging.getLogger(__name__)

POST_PROCESS = "polar_plugin.slime_rollout.post_process_rewards"
LEAVE_ONE_OUT = "polar_plugin.slime_rollout.leave_one_out_rewards"
FILTERS = "polar_plugin.slime_rollout"
"""Where our versions of slime's filters are, under the same names."""
DATA_SOURCE = "polar_plugin.slime_rollout.PolarDataSource"
GROUP_NORMALISING = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""The estimators for which slime subtracts a group's mean itself (`slime/ray/rollout.py`, `_post_process_rewards`)."""

_UNUSED = (
    "custom_generate_function_path",
    "custom_rm_path",
    "rm_type",
    "rollout_sample_hook_path",
    "partial_rollout",
    "rollout_stop_token_ids",
)
"""Flags of slime's own rollout loop that would be ignored here."""


_OWN_LOOP = ("custom_generate_function_path", "custom_rm_path", "rm_type", "rollout_sample_hook_path")
"""Of these, those that slime's own loop honours beside a custom generate function."""


@dataclass(frozen=True)
class SlimeArgs:
    """The arguments of slime that the hooks read; fields are named as slime names them (`slime/utils/arguments.py`).

    The hooks take any object with these attributes, so this class serves where slime is absent. Its defaults are
    settings that train rightly, which slime's own are not always.
    """

    polar: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The key `polar:` of the YAML file given to `--custom-config-path`: a RolloutConfig."""
    hf_checkpoint: str | None = None
    rollout_batch_size: int = 1
    """Prompts a rollout."""
    n_samples_per_prompt: int = 1
    """Sessions a prompt."""
    global_batch_size: int | None = None
    """Sessions an optimiser step."""
    sglang_router_ip: str | None = None
    sglang_router_port: int | None = None
    rollout_temperature: float | None = None
    rollout_top_p: float | None = None
    rollout_top_k: int | None = None
    rollout_max_response_len: int | None = None
    """Tokens one model call may sample."""
    rollout_max_context_len: int | None = None
    rollout_stop: str | Sequence[str] | None = None
    rollout_stop_token_ids: Sequence[int] | None = None
    max_tokens_per_gpu: int | None = None
    context_parallel_size: int = 1
    use_dynamic_batch_size: bool = True
    advantage_estimator: str = "grpo"
    rewards_normalization: bool = True
    grpo_std_normalization: bool = True
    reward_key: str | None = None
    custom_reward_post_process_path: str | None = POST_PROCESS
    calculate_per_token_loss: bool = False
    custom_pg_loss_reducer_function_path: str | None = None
    colocate: bool = False
    log_passrate: bool = False
    log_reward_category: str | None = None
    group_rm: bool = False
    apply_chat_template: bool = False
    partial_rollout: bool = False
    use_rollout_routing_replay: bool = False
    num_layers: int | None = None
    moe_router_topk: int | None = None
    over_sampling_batch_size: int | None = None
    data_source_path: str | None = None
    custom_generate_function_path: str | None = None
    custom_rm_path: str | None = None
    rm_type: str | None = None
    dynamic_sampling_filter_path: str | None = None
    rollout_sample_filter_path: str | None = None
    rollout_all_samples_process_path: str | None = None
    rollout_sample_hook_path: Sequence[str] | None = None
    eval_datasets: Sequence[Any] = ()
    eval_max_context_len: int | None = None

    @classmethod
    def of(cls, args: Any) -> SlimeArgs:
        """What `args` says, and our default where it lacks an attribute."""
        if isinstance(args, SlimeArgs):
            return args
        if args is None:
            raise ConfigError("slime passed no arguments: `generate` runs real agents, it needs args.polar at least")
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})

    @property
    def max_trace_tokens(self) -> int | None:
        """The longest trace that fits one micro-batch; None where slime sets no limit."""
        if self.max_tokens_per_gpu is None or not self.use_dynamic_batch_size:
            return None
        return self.max_tokens_per_gpu * self.context_parallel_size

    @property
    def experts(self) -> tuple[int, int] | None:
        """Layers, and experts a token, where the trainer replays the router."""
        return (self.num_layers or 0, self.moe_router_topk or 0) if self.use_rollout_routing_replay else None

    @property
    def estimator(self) -> str:
        """The name in `rewards.ESTIMATORS` of what slime would do, were its groups sessions."""
        if not self.rewards_normalization or self.advantage_estimator not in GROUP_NORMALISING:
            return "none"
        if self.advantage_estimator == "reinforce_plus_plus_baseline" or self.grpo_std_normalization:
            return self.advantage_estimator
        return "dr_grpo"


def rollout_config(args: SlimeArgs, *, dataset: Any = None) -> RolloutConfig:
    """The RolloutConfig under `args.polar`, completed by slime's arguments (of an evaluation `dataset`, by its own).

    The engine's URL, context length and tokenizer are taken from slime where the config leaves them out. Sampling is
    the trainer's: a config that contradicts it is a ConfigError, since training on it would be off-policy.
    """
    given = args.polar
    if not isinstance(given, Mapping) or not given:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("args.polar is missing: give --custom-config-path a YAML file with the key `polar:`")
    load_config(given)  # what is wrong in it is told by path, before anything is added
    sections = {key: dict(cast("Mapping[str, Any]", given.get(key, {}))) for key in ("engine", "renderer", "sampling")}
    if sections["engine"].get("kind", "sglang") == "sglang" and not sections["engine"].get("url"):
        sections["engine"]["url"] = _router(args)
    context = args.rollout_max_context_len if dataset is None else args.eval_max_context_len
    for section, key, value in (("engine", "context_length", context), ("renderer", "tokenizer", args.hf_checkpoint)):
        if value is not None:
            sections[section].setdefault(key, value)
    _pin(sections["sampling"], _sampling(args) if dataset is None else _eval_sampling(args, dataset))
    if sections["engine"].get("kind", "sglang") == "sglang" and dataset is None:
        sections["engine"].setdefault("replay", _replay(args, sections["sampling"].get("top_p", 1.0)))
    return load_config({**given, **sections})


def preflight_sample(args: SlimeArgs, config: RolloutConfig) -> None:
    """The same for slime's own rollout loop, which may use those of its flags that take sessions of several traces.

    It never tells a data source what was trained, so a resume from `PolarDataSource` would train all of it again.
    """
    if args.data_source_path == DATA_SOURCE:
        raise ConfigError(
            f"slime's own rollout loop does not tell {DATA_SOURCE} what was trained: leave out --data-source-path, "
            "or set --rollout-function-path polar_plugin.slime_rollout.generate, not --custom-generate-function-path"
        )
    preflight(replace(args, **dict.fromkeys(_OWN_LOOP)), config)


def preflight(args: SlimeArgs, config: RolloutConfig, *, asynchronous: bool = False) -> None:
    """Raise ConfigError that lists all that would train wrongly or crash, each with the flag to change.

    Logs a warning of what is a choice, but gives sessions of more tokens or traces more weight.
    """
    wrong = [*_crashes(args), *_biases(args, config), *(_races(args, config) if asynchronous else ())]
    if wrong:
        raise ConfigError("slime's arguments do not fit sessions of many traces:\n- " + "\n- ".join(wrong))
    for choice in _choices(args):
        logger.warning(choice)


def _router(args: SlimeArgs) -> str:
    if not args.sglang_router_ip or not args.sglang_router_port:
        raise ConfigError("polar.engine.url is not set and slime has no router (args.sglang_router_ip and _port)")
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def _sampling(args: SlimeArgs) -> dict[str, tuple[str, Any]]:
    """Sampling key -> the flag that sets it and its value."""
    stop = (args.rollout_stop,) if isinstance(args.rollout_stop, str) else args.rollout_stop
    return {
        "temperature": ("--rollout-temperature", args.rollout_temperature),
        "top_p": ("--rollout-top-p", args.rollout_top_p),
        "top_k": ("--rollout-top-k", args.rollout_top_k),
        "max_tokens": ("--rollout-max-response-len", args.rollout_max_response_len),
        "stop": ("--rollout-stop", list(stop) if stop else None),
    }


def _replay(args: SlimeArgs, top_p: float) -> list[str]:
    """What slime's trainer replays."""
    experts = ["routed_experts"] if args.use_rollout_routing_replay else []
    return experts if top_p == 1.0 else [*experts, "top_p"]


def _eval_sampling(args: SlimeArgs, dataset: Any) -> dict[str, tuple[str, Any]]:
    """The same for an evaluation dataset, whose own settings slime has resolved already."""
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_response_len"}
    own = {key: (f"eval dataset `{name}`", getattr(dataset, name, None)) for key, name in names.items()}
    return {key: own[key] if key in own and own[key][1] is not None else told for key, told in _sampling(args).items()}


def _pin(sampling: dict[str, Any], trainer: Mapping[str, tuple[str, Any]]) -> None:
    for key, (flag, value) in trainer.items():
        if value is not None and sampling.setdefault(key, value) != value:
            raise ConfigError(
                f"polar.sampling.{key} is {sampling[key]!r} but {flag} is {value!r}: leave it out of polar"
            )


def _crashes(args: SlimeArgs) -> Iterator[str]:
    """What slime's own code cannot do with sessions of several traces, and what this rollout function does not do."""
    sessions = args.rollout_batch_size * args.n_samples_per_prompt
    if not args.use_dynamic_batch_size:
        yield "set --use-dynamic-batch-size: the number of traces is not known beforehand"
    if args.global_batch_size and sessions % args.global_batch_size:
        yield (
            f"--global-batch-size {args.global_batch_size} must divide --rollout-batch-size x --n-samples-per-prompt "
            f"= {sessions}: slime drops the sessions left over without a word"
        )
    if (args.rollout_max_response_len or 0) >= (args.rollout_max_context_len or math.inf):
        yield (
            f"--rollout-max-context-len {args.rollout_max_context_len} must be more than --rollout-max-response-len "
            f"{args.rollout_max_response_len}: agents need room for a prompt"
        )
    if args.log_passrate:
        yield "leave out --log-passrate: it counts traces; the metrics rollout/session/pass@k count sessions"
    if args.group_rm:
        yield "leave out --group-rm: the evaluator of the task grades sessions"
    if args.log_reward_category is not None:
        yield "leave out --log-reward-category: rewards here have one key"
    if args.over_sampling_batch_size and args.over_sampling_batch_size < args.rollout_batch_size:
        yield "--over-sampling-batch-size must not be less than --rollout-batch-size"
    if (args.dynamic_sampling_filter_path or "").startswith("slime.rollout.filter_hub."):
        name = str(args.dynamic_sampling_filter_path).rpartition(".")[2]
        yield f"set --dynamic-sampling-filter-path {FILTERS}.{name}: slime's own cannot read sessions of several traces"
    for name in _UNUSED:
        if getattr(args, name):
            yield f"leave out --{name.replace('_', '-')}: this rollout function does not use it"


def _races(args: SlimeArgs, config: RolloutConfig) -> Iterator[str]:
    """What agents that run on between calls cannot live with."""
    if args.colocate:
        yield "leave out --colocate, or use slime_rollout.generate: agents would call an engine that sleeps"
    if config.asynchronous.evaluate_first and not args.eval_datasets:
        yield "set --eval-prompt-data, or leave out polar.asynchronous.evaluate_first: there is nothing to evaluate"


def _biases(args: SlimeArgs, config: RolloutConfig) -> Iterator[str]:
    """What would run, and train on something else than it says."""
    if args.estimator != "none" and not args.custom_reward_post_process_path:
        yield (
            f"set --custom-reward-post-process-path {POST_PROCESS}: without it slime takes the baseline over traces, "
            "and over all prompts at once where their number is uneven"
        )
    if config.sampling.top_p != 1.0 and "top_p" not in config.engine.replay:
        yield (
            "set --rollout-top-p 1: the trainer replays what top-p left to draw from, which the engine "
            f"{config.engine.kind!r} is not asked to tell (polar.engine.replay: [top_p]; sglang can)"
        )
    if args.use_rollout_routing_replay and "routed_experts" not in config.engine.replay:
        yield (
            f"leave out --use-rollout-routing-replay: the engine {config.engine.kind!r} is not asked to tell routed "
            "experts (polar.engine.replay: [routed_experts]; sglang can)"
        )
    if args.experts and not all(args.experts):
        yield "set --num-layers and --moe-router-topk: --use-rollout-routing-replay gives experts their shape by them"
    if args.apply_chat_template and "{sample.prompt}" in repr(config.task.get("instruction", "{sample.prompt}")):
        yield "leave out --apply-chat-template: the agent's messages are rendered; a rendered prompt would be twice"


def _choices(args: SlimeArgs) -> Iterator[str]:
    """What departs from one vote a session on purpose."""
    if args.calculate_per_token_loss:
        yield "--calculate-per-token-loss: sessions weigh by their tokens, not equally"
    if args.custom_pg_loss_reducer_function_path:
        yield "--custom-pg-loss-reducer-function-path: it is not told sessions, so it can only weigh traces"
    if args.custom_reward_post_process_path not in (None, POST_PROCESS, LEAVE_ONE_OUT):
        yield f"--custom-reward-post-process-path {args.custom_reward_post_process_path}: must count a session once"
