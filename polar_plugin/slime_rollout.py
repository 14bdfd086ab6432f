"""slime's hooks, by three flags and no patch:

    --rollout-function-path polar_plugin.slime_rollout.generate
    --custom-reward-post-process-path polar_plugin.slime_rollout.post_process_rewards
    --custom-config-path polar.yaml        # RolloutConfig under the key `polar:`

`generate` is synchronous, as slime calls it: it blocks until every session of the rollout has ended, and leaves nothing
in flight, so that weights may change the moment it returns. For slime v0.3.0 and later; without slime the same
functions take and return `SlimeArgs`, `SampleLike`, `TrainOutput` and `EvalOutput`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from . import slime_service
from .rewards import advantages, collapse
from .slime_args import SlimeArgs, preflight, rollout_config
from .slime_async import collect_ahead
from .slime_collect import Group, collect, trained
from .slime_data import PolarDataSource
from .slime_evaluation import eval_groups, eval_results
from .slime_hooks import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
from .slime_metrics import session_metrics
from .slime_samples import SessionSamples, validate
from .slime_service import close, use_service
from .slime_sessions import Call, check_complete, numbered
from .slime_types import EvalOutput, SampleLike, TrainOutput, output_class, session_metadata, session_of

__all__ = [
    "EvalOutput",
    "PolarDataSource",
    "SampleLike",
    "SlimeArgs",
    "TrainOutput",
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
    "close",
    "generate",
    "generate_async",
    "leave_one_out_rewards",
    "post_process_rewards",
    "use_service",
]


def generate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One rollout: `--rollout-function-path`, and `--eval-function-path` by default.

    Training: returns a RolloutFnTrainOutput of `args.rollout_batch_size` groups, of uniform depth, prompt x session x
    trace, with session-level metrics. A session that failed is a placeholder without trained tokens, out of the
    baseline. Groups that `polar.groups` or slime's dynamic-sampling filter drop are replaced by others; what is not
    needed in the end goes back to the data source's buffer. Evaluation: runs the prompts of `args.eval_datasets` and
    returns a RolloutFnEvalOutput, one reward a session, 0 for one that failed, so that the denominator is fixed.

    Raises ConfigError, before anything is run, where a flag would train wrongly (`slime_args.preflight`); PolarError
    where not one session of the rollout can be trained. slime's plugin-contract tests call with `args=None`: there is
    no rollout without arguments, so that is a ConfigError as well.
    """
    told = SlimeArgs.of(args)
    if evaluation:
        return _evaluate(args, told, rollout_id)
    call = Call(args, told, rollout_config(told), rollout_id)
    preflight(told, call.config)
    with slime_service.Flights[Group](call.config) as flights:
        collected = collect(call, flights, data_source)
    return trained(collected, data_source)


def generate_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The same for `train_async.py`: `--rollout-function-path polar_plugin.slime_rollout.generate_async`.

    Groups stay under way between calls, at most `polar.asynchronous.max_staleness` rollouts ahead; what is too old when
    its turn comes is run again, masked or kept, as `policy` says. Returns and raises as `generate`.
    """
    told = SlimeArgs.of(args)
    if evaluation:
        return _evaluate(args, told, rollout_id)
    call = Call(args, told, rollout_config(told), rollout_id)
    preflight(told, call.config, asynchronous=True)
    first = _evaluate(args, told, rollout_id).metrics if _evaluates_first(call) else {}
    output = trained(collect_ahead(call, data_source), data_source)
    output.metrics.update(first)
    return output


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: raw rewards and advantages, one a sample, in input order.

    Does what slime does for `args.advantage_estimator`, `rewards_normalization` and `grpo_std_normalization`, but over
    sessions: inside a `group_index` each session (`rollout_id`) has one vote, excluded sessions have none and get 0.
    Process rewards, where an evaluator gives them, are added to their trace's share.
    """
    return _post_process(args, samples, SlimeArgs.of(args).estimator)


def leave_one_out_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """The same with the mean of the *other* sessions of the group as baseline (RLOO), whatever the estimator."""
    return _post_process(args, samples, "rloo")


def _post_process(args: Any, samples: Sequence[Any], estimator: str) -> tuple[list[float], list[float]]:
    key = SlimeArgs.of(args).reward_key
    raw = [float(sample.reward[key] if key else sample.reward) for sample in samples]
    sessions = [(sample.group_index, _session(sample, position)) for position, sample in enumerate(samples)]
    rewards, of = collapse(raw, sessions)
    excluded, _ = collapse([_excluded(sample) for sample in samples], sessions)
    groups = [group for group, _ in dict.fromkeys(sessions)]
    shares = advantages(rewards, groups, excluded=excluded.astype(bool), estimator=estimator)[of]
    shares = shares + np.array([_process_reward(sample) for sample in samples])
    return raw, cast("list[float]", shares.tolist())


def _session(sample: Any, position: int) -> Any:
    """Its session id; a sample without one is a session by itself, as slime takes it."""
    session = session_of(sample)
    return ("unnamed", position) if session is None else session


def _excluded(sample: Any) -> bool:
    """By our own word where a sample has it; of other samples, those removed or aborted."""
    told = session_metadata(sample)
    if told:
        return bool(told["excluded"])
    return bool(sample.remove_sample) or sample.status.value == "aborted"


def _process_reward(sample: Any) -> float:
    return float(session_metadata(sample).get("process_reward", 0.0))


_evaluated: set[int] = set()
"""Processes that have evaluated first: this one, once it has."""


def _evaluates_first(call: Call) -> bool:
    if not call.config.asynchronous.evaluate_first or os.getpid() in _evaluated:
        return False
    _evaluated.add(os.getpid())
    return True


def _evaluate(args: Any, told: SlimeArgs, rollout_id: int) -> Any:
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    slot: Any = None
    for dataset in eval_groups(told):
        call = Call(args, told, rollout_config(told, dataset=dataset.settings), rollout_id, dataset.name)
        groups, slot = _run(call, dataset.groups), dataset.groups[0][0]
        data[dataset.name] = eval_results(groups)
        metrics |= session_metrics(groups, f"eval/{dataset.name}/session/")
    return output_class("RolloutFnEvalOutput", slot)(data=data, metrics=metrics)


def _run(call: Call, slots: Sequence[list[Any]]) -> list[list[SessionSamples]]:
    """Run a session for each slot and convert it; groups and slots keep their order."""
    size = len(slots[0])
    attempts = [call.attempts(group, number, number * size) for number, group in enumerate(slots)]
    flat = [attempt for group in attempts for attempt in group]
    with tqdm(total=len(flat), desc=f"eval {call.rollout_id}", unit="session", disable=None) as bar:
        ended = slime_service.run(call.config, flat, lambda _: cast("None", bar.update()))
    check_complete(flat, ended)
    groups = [call.converted(group, ended[n * size : (n + 1) * size]) for n, group in enumerate(slots)]
    numbered(groups)
    validate(groups)
    return groups
