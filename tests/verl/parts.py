"""verl's real configuration and worker code over a scripted server, and sessions that need no program."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import verl
import yaml
from hydra import compose, initialize_config_dir
from verl.workers.rollout.replica import TokenOutput

from polar_plugin.engine.scripted import made_up_logprobs
from polar_plugin.quickstart import recipe_directory
from polar_plugin.records import token_ids

WRITE = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo mended > result"}}\n</tool_call>'
AGENT = {
    "harness": "shell",
    "command": 'exec python3 "$HOME/agent.py"',
    "settings": {"agent_files": str(recipe_directory() / "agent.py")},
}
TASK = {
    "agent": AGENT,
    "timeout_seconds": 60,
    "evaluator": {"strategy": "test_on_output", "config": {"test_command": "grep -q mended result"}},
}


def configuration(model: Path, agent: Mapping[str, Any] | None, **settings: Any) -> Any:
    """verl's own configuration with two sessions a prompt; `settings` by dotted name, `__` for `.`."""
    told = {
        "actor_rollout_ref.model.path": model,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.prompt_length": 2048,
        "actor_rollout_ref.rollout.response_length": 1000,
        "actor_rollout_ref.rollout.max_model_len": 8192,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "data.train_batch_size": 2,
        "data.return_raw_chat": True,
        "algorithm.adv_estimator": "grpo",
        "trainer.v1.trainer_mode": "polar_sync",
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    if agent is not None:
        path = model / "agent.yaml"
        path.write_text(
            yaml.safe_dump([{"name": "polar", "_target_": "polar_plugin.verl_rollout.PolarAgentLoop", **agent}])
        )
        told["actor_rollout_ref.rollout.agent.agent_loop_config_path"] = path
        told["actor_rollout_ref.rollout.agent.default_agent_loop"] = "polar"
    directory = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=directory, version_base=None):
        return compose("ppo_trainer", overrides=[f"{name}={value}" for name, value in told.items()])


class Server:
    """What verl's server actors do: `generate`, with replies of a script by session and turn."""

    def __init__(self, tokenizer: Any, replies: Sequence[str] | Callable[[str, int], str], version: int = 3) -> None:
        self._tokenizer = tokenizer
        self._replies = replies
        self._turns: dict[str, int] = {}
        self.version = version
        self.calls: list[dict[str, Any]] = []
        self.sessions: set[str] = set()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        self.calls.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params, **more})
        if prompt_ids == [0]:  # the probe
            return self._output(prompt_ids, [1])
        # verl's client gives each call an id of its own, so behind it only the prompt tells the session
        told = re.search(r"\[\[(.+?)\]\]", self._tokenizer.decode(prompt_ids))
        session = told[1] if told else request_id
        self.sessions.add(session)
        turn = self._turns[session] = self._turns.get(session, -1) + 1
        text = self._replies(session, turn) if callable(self._replies) else self._replies[turn]
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), *sampling_params["stop_token_ids"][:1]]
        return self._output(prompt_ids, ids[: sampling_params["max_tokens"]])

    async def seen(self) -> set[str]:
        return self.sessions

    def _output(self, prompt: list[int], ids: list[int]) -> TokenOutput:
        logprobs = made_up_logprobs(token_ids(prompt), token_ids(ids)).tolist()
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self.version}
        )


class LocalClient:
    """verl's client without Ray: one server, in this process."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        output = await self.server.generate(request_id, prompt_ids, dict(sampling_params), **more)
        for end in ("min", "max"):
            output.extra_fields.setdefault(f"{end}_global_steps", output.extra_fields["global_steps"])
        return output


def copy_of(model: Path, directory: Path) -> Path:
    """A model directory that a test may write to."""
    return Path(shutil.copytree(model, directory / "model"))
