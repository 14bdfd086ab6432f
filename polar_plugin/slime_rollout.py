"""slime's hooks, by three flags and no patch:

    --rollout-function-path polar_plugin.slime_rollout.generate
    --custom-reward-post-process-path polar_plugin.slime_rollout.post_process_rewards
    --custom-config-path polar.yaml        # RolloutConfig under the key `polar:`

`generate` is synchronous, as slime calls it: it blocks until every session of the rollout has ended, and leaves nothing
in flight, so that weights may change the moment it returns. For slime v0.3.0 and later; without slime the same
functions take and return `SlimeArgs`, `SampleLike`, `TrainOutput` and `EvalOutput`.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from . import slime_service
from .config import RolloutConfig, load_task
from .errors import ConfigError, PolarError
from .records import Attempt, Trajectory
from .rewards import advantages, collapse
from .slime_args import SlimeArgs, preflight, rollout_config
from .slime_evaluation import eval_groups, eval_results
from .slime_metrics import session_metrics
from .slime_samples import Conversion, SessionSamples, convert, validate
from .slime_service import close, use_service
from .slime_types import EvalOutput, SampleLike, TrainOutput, output_class, session_metadata, session_of

__all__ = [
    "EvalOutput",
    "SampleLike",
    "SlimeArgs",
    "TrainOutput",
    "close",
    "generate",
    "leave_one_out_rewards",
    "post_process_rewards",
    "use_service",
]


def generate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One rollout: `--rollout-function-path`, and `--eval-function-path` by default.

    Training: draws `args.rollout_batch_size` groups of samples and returns a RolloutFnTrainOutput of uniform depth,
    prompt x session x trace, with session-level metrics. There is a session for every sample drawn: one that failed is
    a placeholder without trained tokens, out of the baseline. Evaluation: runs the prompts of `args.eval_datasets` and
    returns a RolloutFnEvalOutput, one reward a session, 0 for one that failed, so that the denominator is fixed.

    Raises ConfigError, before anything is run, where a flag would train wrongly (`slime_args.preflight`); PolarError
    where not one session of the rollout can be trained. slime's plugin-contract tests call with `args=None`: there is
    no rollout without arguments, so that is a ConfigError as well.
    """
    told = SlimeArgs.of(args)
    if evaluation:
        return _evaluate(args, told, rollout_id)
    config = rollout_config(told)
    preflight(told, config)
    slots = data_source.get_samples(told.rollout_batch_size)
    _check_drawn(slots, told)
    groups = _run(slots, config, told, {"args": args, "rollout_id": rollout_id, "evaluation": False})
    _check_trainable(groups, rollout_id)
    output = output_class("RolloutFnTrainOutput", slots[0][0])
    totals = {f"rollout/service/{name}": float(count) for name, count in slime_service.totals().items()}
    return output(
        samples=[[session.samples for session in group] for group in groups],
        metrics={**session_metrics(groups, "rollout/session/"), **totals},
    )


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


def _evaluate(args: Any, told: SlimeArgs, rollout_id: int) -> Any:
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    slot: Any = None
    for dataset in eval_groups(told):
        config = rollout_config(told, dataset=dataset.settings)
        values = {"args": args, "rollout_id": rollout_id, "evaluation": True, "dataset": dataset.name}
        groups, slot = _run(dataset.groups, config, told, values), dataset.groups[0][0]
        data[dataset.name] = eval_results(groups)
        metrics |= session_metrics(groups, f"eval/{dataset.name}/session/")
    return output_class("RolloutFnEvalOutput", slot)(data=data, metrics=metrics)


def _run(
    slots: Sequence[Sequence[Any]], config: RolloutConfig, told: SlimeArgs, values: Mapping[str, Any]
) -> list[list[SessionSamples]]:
    """Run a session for each slot and convert it; groups and slots keep their order."""
    drawn = [(number, slot) for number, group in enumerate(slots) for slot in group]
    attempts = [_attempt(slot, group, index, config, values) for index, (group, slot) in enumerate(drawn)]
    label = f"{'eval' if values['evaluation'] else 'rollout'} {values['rollout_id']}"
    with tqdm(total=len(attempts), desc=label, unit="session", disable=None) as bar:
        trajectories = slime_service.run(config, attempts, lambda _: cast("None", bar.update()))
    _check_complete(attempts, trajectories)
    how = Conversion(told.reward_key, on_timeout=config.on_timeout)
    if not values["evaluation"]:
        top_p = "top_p" in config.engine.replay
        how = replace(how, max_tokens=told.max_trace_tokens, experts=told.experts, top_p=top_p)
    ids = _session_numbers([slot for _, slot in drawn])
    sessions = [convert(*each, how) for each in zip(trajectories, (s for _, s in drawn), ids, strict=True)]
    groups: list[list[SessionSamples]] = [[] for _ in slots]
    for (group, _), session in zip(drawn, sessions, strict=True):
        groups[group].append(session)
    validate(groups)
    return groups


def _attempt(slot: Any, group: int, index: int, config: RolloutConfig, values: Mapping[str, Any]) -> Attempt:
    group_index = group if slot.group_index is None else slot.group_index
    rollout_id = values["rollout_id"]
    session_id = f"r{rollout_id}-g{group_index}-{index}-{uuid.uuid4().hex[:12]}"
    known: dict[str, Any] = {
        **values,
        "sample": {**vars(slot), "prompt": _prompt(slot.prompt)},
        "group_index": group_index,
        "index": index,
        "session_id": session_id,
        "policy_version": rollout_id,
    }
    template = config.eval_task if values["evaluation"] and config.eval_task is not None else config.task
    task = load_task({"task_id": "prompt-{group_index}", "instruction": "{sample.prompt}", **template}, known)
    return Attempt(session_id, task, group_index, index, rollout_id, evaluation=values["evaluation"])


def _prompt(prompt: Any) -> Any:
    """The text of a prompt that is one message; any other shape is left for the task's validation to refuse."""
    if isinstance(prompt, str):
        return prompt
    messages = cast("Sequence[Mapping[str, Any]]", prompt)
    return messages[0].get("content") if len(messages) == 1 else messages


def _session_numbers(slots: Sequence[Any]) -> list[int]:
    """slime's session ids: the samples' own indices where each has one of its own, else their positions."""
    indices = [slot.index for slot in slots]
    distinct = None not in indices and len(set(indices)) == len(indices)
    return indices if distinct else list(range(len(indices)))


def _check_drawn(slots: Sequence[Sequence[Any]], told: SlimeArgs) -> None:
    if len(slots) != told.rollout_batch_size or any(len(group) != told.n_samples_per_prompt for group in slots):
        raise ConfigError(
            f"the data source gave groups of {[len(group) for group in slots]} samples, not --rollout-batch-size "
            f"{told.rollout_batch_size} of --n-samples-per-prompt {told.n_samples_per_prompt}"
        )


def _check_complete(attempts: Sequence[Attempt], trajectories: Sequence[Trajectory]) -> None:
    asked = [attempt.session_id for attempt in attempts]
    got = [trajectory.attempt.session_id for trajectory in trajectories]
    if asked != got:
        raise PolarError(f"the service returned {len(got)} trajectories that do not match {len(asked)} attempts")


def _check_trainable(groups: Sequence[Sequence[SessionSamples]], rollout_id: int) -> None:
    """A step without one trained token would pass for training."""
    sessions = [session for group in groups for session in group]
    if any(any(sample.loss_mask) for session in sessions for sample in session.samples):
        return
    reasons = Counter(session.excluded or "nothing to train" for session in sessions)
    failures = [s.trajectory.failure for s in sessions if s.trajectory.failure]
    first = (
        f"; the first failure: [{failures[0].boundary}] {failures[0].kind}: {failures[0].message}" if failures else ""
    )
    raise PolarError(f"rollout {rollout_id}: none of {len(sessions)} sessions can be trained ({dict(reasons)}){first}")
