"""slime's arguments: what they make of the config, and what is refused before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError
from polar_plugin.slime_args import SlimeArgs, preflight, rollout_config
from polar_plugin.slime_types import SampleLike

from .sessions import POLAR, Prompts, ReadyService, trajectory

SGLANG = {"task": POLAR["task"]}


def arguments(**told: Any) -> SlimeArgs:
    router = {"sglang_router_ip": "10.0.0.1", "sglang_router_port": 3456, "hf_checkpoint": "/models/m"}
    return SlimeArgs.of(SimpleNamespace(**{"polar": SGLANG, **router, **told}))


def test_engine_context_and_tokenizer_come_from_slime() -> None:
    config = rollout_config(arguments(rollout_max_context_len=32768))
    assert (config.engine.url, config.engine.context_length) == ("http://10.0.0.1:3456", 32768)
    assert config.renderer.tokenizer == "/models/m"


def test_what_the_config_says_of_the_engine_stands() -> None:
    polar = {**SGLANG, "engine": {"url": "http://other:1", "context_length": 100}, "renderer": {"tokenizer": "mine"}}
    config = rollout_config(arguments(polar=polar, rollout_max_context_len=32768))
    assert (config.engine.url, config.engine.context_length, config.renderer.tokenizer) == (
        "http://other:1",
        100,
        "mine",
    )


def test_sampling_is_pinned_to_the_trainers() -> None:
    """Cases 63 and 64, the trainer's half: what the proxy then imposes on every request."""
    config = rollout_config(
        arguments(
            rollout_temperature=0.7,
            rollout_top_p=1.0,
            rollout_top_k=-1,
            rollout_max_response_len=512,
            rollout_stop="END",
        )
    )
    told = config.sampling.params()
    assert (told.temperature, told.top_p, told.top_k, told.max_tokens, told.stop) == (0.7, 1.0, -1, 512, ("END",))


def test_sampling_that_contradicts_the_trainers_is_refused() -> None:
    polar = {**SGLANG, "sampling": {"temperature": 0.3}}
    with pytest.raises(ConfigError, match=r"polar\.sampling\.temperature is 0\.3 but --rollout-temperature is 0\.7"):
        rollout_config(arguments(polar=polar, rollout_temperature=0.7))
    assert rollout_config(arguments(polar=polar, rollout_temperature=0.3)).sampling.temperature == 0.3


def test_a_missing_router_or_config_is_said_plainly() -> None:
    with pytest.raises(ConfigError, match=r"polar\.engine\.url is not set and slime has no router"):
        rollout_config(SlimeArgs(polar=SGLANG))
    assert rollout_config(SlimeArgs(polar={**SGLANG, "engine": {"url": "http://e:1"}})).engine.url == "http://e:1"
    for missing in (None, {}):
        with pytest.raises(ConfigError, match="give --custom-config-path a YAML file with the key `polar:`"):
            rollout_config(arguments(polar=missing))


GOOD = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 8,
    "global_batch_size": 32,
    "use_dynamic_batch_size": True,
    "custom_reward_post_process_path": "polar_plugin.slime_rollout.post_process_rewards",
}


def refused(**told: Any) -> str:
    args = arguments(**{**GOOD, **told})
    with pytest.raises(ConfigError) as caught:
        preflight(args, rollout_config(args))
    return str(caught.value)


def test_right_arguments_pass() -> None:
    for more in (
        {},
        {"global_batch_size": 16},
        {"advantage_estimator": "ppo", "custom_reward_post_process_path": None},
    ):
        args = arguments(**{**GOOD, **more})
        preflight(args, rollout_config(args))


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        (
            {"custom_reward_post_process_path": None},
            "set --custom-reward-post-process-path polar_plugin.slime_rollout.",
        ),
        ({"use_dynamic_batch_size": False}, "set --use-dynamic-batch-size"),
        ({"log_passrate": True}, "leave out --log-passrate"),
        ({"group_rm": True}, "leave out --group-rm"),
        ({"rollout_top_p": 0.9, "polar": POLAR}, "set --rollout-top-p 1: the trainer replays"),
        ({"global_batch_size": 24}, "--global-batch-size 24 must divide"),
        ({"global_batch_size": 64}, "--global-batch-size 64 must divide"),
        ({"use_rollout_routing_replay": True}, "set --num-layers and --moe-router-topk"),
        (
            {"use_rollout_routing_replay": True, "polar": POLAR},
            "leave out --use-rollout-routing-replay: the engine",
        ),
        ({"over_sampling_batch_size": 2}, "--over-sampling-batch-size must not be less"),
        (
            {"dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check_x"},
            "set --dynamic-sampling-filter-path polar_plugin.slime_rollout.check_x",
        ),
        ({"partial_rollout": True}, "leave out --partial-rollout"),
        ({"custom_rm_path": "a.b"}, "leave out --custom-rm-path"),
        ({"rm_type": "math"}, "leave out --rm-type"),
        ({"log_reward_category": "kind"}, "leave out --log-reward-category"),
        ({"apply_chat_template": True}, "leave out --apply-chat-template"),
    ],
)
def test_a_flag_that_would_crash_or_train_wrongly_is_named(told: dict[str, Any], flag: str) -> None:
    assert flag in refused(**told)


def test_what_the_trainer_replays_is_asked_of_sglang() -> None:
    mixture = {"use_rollout_routing_replay": True, "num_layers": 4, "moe_router_topk": 2}
    args = arguments(**{**GOOD, **mixture, "rollout_top_p": 0.9})
    config = rollout_config(args)
    assert config.engine.replay == ("routed_experts", "top_p")
    preflight(args, config)
    assert rollout_config(arguments(**GOOD, rollout_top_p=1.0)).engine.replay == ()


@pytest.mark.parametrize(
    ("told", "warning"),
    [
        ({"calculate_per_token_loss": True}, "sessions weigh by their tokens"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, "it can only weigh traces"),
        ({"custom_reward_post_process_path": "a.b"}, "must count a session once"),
    ],
)
def test_a_choice_that_weighs_sessions_unequally_is_warned_of(
    told: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(**{**GOOD, **told})
    preflight(args, rollout_config(args))
    assert warning in caplog.text


def test_a_config_of_the_wrong_shape_is_refused_by_path() -> None:
    with pytest.raises(ConfigError, match="`engine`"):
        rollout_config(arguments(polar={"engine": "sglang"}))


def test_all_faults_are_told_at_once() -> None:
    message = refused(log_passrate=True, group_rm=True, rollout_top_p=0.5, polar=POLAR)
    assert message.count("\n- ") == 3


def test_nothing_runs_and_no_prompt_is_drawn_where_a_flag_is_wrong() -> None:
    service, prompts = ReadyService(trajectory), Prompts(SampleLike, 1)
    with slime_rollout.use_service(service), pytest.raises(ConfigError, match="leave out --group-rm"):
        slime_rollout.generate(SlimeArgs(polar=POLAR, group_rm=True), 0, prompts)
    assert (service.opened, prompts.drawn) == (0, 0)
