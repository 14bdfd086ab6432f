"""What of verl's configuration is refused, with the setting to change, and what becomes of ours. Needs no verl."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.errors import ConfigError
from polar_plugin.verl_args import VerlArgs, preflight, rollout_config, sampling_of

TASK = {"agent": {"harness": "shell", "command": "true"}}
GOOD = VerlArgs(n=8, mini_batch=4, train_batch_size=8)
STOCK = replace(GOOD, trainer_mode="sync")


def test_good_settings_pass_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        preflight(GOOD)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (replace(GOOD, use_v1=False), "set trainer.use_v1=True"),
        (replace(GOOD, routing_replay=True), "enable_rollout_routing_replay=False"),
        (replace(GOOD, distillation=True), "distillation.enabled=False"),
        (replace(GOOD, mini_batch=3), "ppo_mini_batch_size=3 so that it divides data.train_batch_size=8"),
        (replace(GOOD, adv_estimator="gae"), "algorithm.adv_estimator to one of grpo, rloo"),
        (replace(GOOD, loss_mode="clip_cov"), "loss_mode to one of vanilla"),
        (replace(GOOD, use_kl_in_reward=True), "algorithm.use_kl_in_reward=False"),
        (replace(GOOD, shuffle=True), "actor.shuffle=False"),
        (replace(GOOD, loss_agg_mode="seq-mean-token-sum-norm"), "set actor_rollout_ref.actor.loss_scale_factor"),
        (replace(STOCK, adv_estimator="rloo"), "trainer_mode=polar_sync, or algorithm.adv_estimator=grpo"),
        (replace(STOCK, loss_agg_mode="seq-mean-token-mean"), "loss_agg_mode=token-mean"),
        (replace(STOCK, loss_mode="sapo"), "loss_agg_mode=token-mean"),
        (replace(STOCK, use_kl_in_reward=True), "algorithm.use_kl_in_reward=False"),
    ],
)
def test_what_would_train_wrongly_is_refused_with_what_to_set(args: VerlArgs, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(args)
    assert message in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(replace(GOOD, shuffle=True, adv_estimator="gae", use_kl_in_reward=True))
    assert str(caught.value).count("\n- ") == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (STOCK, "a single survivor of a group is trained on its bare reward"),
        (replace(GOOD, entropy_coeff=0.01, use_kl_loss=True), "entropy_coeff and use_kl_loss"),
    ],
)
def test_what_gives_sessions_unequal_weight_by_choice_is_warned_of(
    args: VerlArgs, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        preflight(args)
    assert words in caplog.text


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean", "token-sum", "token-mean"])
def test_our_trainers_take_any_way_to_aggregate(mode: str) -> None:
    preflight(replace(GOOD, loss_agg_mode=mode))


def test_settings_are_read_where_verl_has_them() -> None:
    told: dict[str, Any] = {
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "polar_separate_async"}},
        "algorithm": {"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False},
        "actor_rollout_ref": {
            "actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 100, "ulysses_sequence_parallel_size": 2},
            "rollout": {"name": "sglang", "n": 4},
        },
        "data": {"train_batch_size": 16},
    }
    args = VerlArgs.of(told)
    assert (args.trainer_mode, args.ours, args.asynchronous) == ("polar_separate_async", True, True)
    assert (args.adv_estimator, args.norm_adv_by_std, args.engine, args.n) == ("rloo", False, "sglang", 4)
    assert (args.train_batch_size, args.max_row_tokens, args.loss_agg_mode) == (16, 200, "token-mean")


def test_without_dynamic_batches_rows_have_no_limit() -> None:
    assert replace(GOOD, max_token_len=100).max_row_tokens is None


def test_the_tokenizer_and_the_limit_of_a_turn_come_from_verl(tmp_path: Path) -> None:
    config = rollout_config({"task": TASK}, replace(GOOD, response_length=300), "/models/qwen")
    assert (config.renderer.tokenizer, config.sampling.max_tokens) == ("/models/qwen", 300)
    path = tmp_path / "polar.yaml"
    path.write_text("polar:\n  sampling: {max_tokens: 50, stop: [END]}\n  renderer: {kind: template}\n")
    config = rollout_config(str(path), replace(GOOD, response_length=300), "/models/qwen")
    assert (config.renderer.kind, config.renderer.tokenizer) == ("template", "/models/qwen")
    told = sampling_of(config, {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0})
    assert (told.temperature, told.top_p, told.top_k, told.max_tokens, told.stop) == (0.7, 0.9, -1, 50, ("END",))


@pytest.mark.parametrize(
    ("polar", "message"),
    [
        ({"engine": {"kind": "sglang", "url": "http://x"}}, "polar.engine: leave it out"),
        ({"sampling": {"temperature": 0.5}}, "set actor_rollout_ref.rollout.temperature"),
        ({"eval_task": TASK}, "polar.eval_task"),
        ({"stages": {"runn": 1}}, "unknown key `stages.runn`"),
    ],
)
def test_what_verl_decides_is_no_key_of_ours(polar: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rollout_config({"task": TASK, **polar}, GOOD, "/models/qwen")
    assert message in str(caught.value)
