"""verl's agent loop, by configuration and no patch. In `agent.yaml`:

    - name: polar
      _target_: polar_plugin.verl_rollout.PolarAgentLoop
      polar: polar.yaml        # a RolloutConfig, or the mapping itself

and `actor_rollout_ref.rollout.agent.agent_loop_config_path=agent.yaml`, `...agent.default_agent_loop=polar`,
`trainer.v1.trainer_mode=polar_sync`. For verl 0.9, its V1 trainer. The class is not decorated with verl's `register`:
that would replace the entry above at its first use, and all later sessions would lose `polar`.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from .config import RolloutConfig, load_task
from .errors import ConfigError, PolarError
from .records import Attempt, Trajectory
from .service import RolloutService
from .verl_args import RESERVED, VerlArgs, preflight, rollout_config, sampling_of
from .verl_engine import VerlEngine
from .verl_groups import Groups, Member
from .verl_plugin import check_loaded
from .verl_samples import Rows, convert
from .verl_service import service_of
from .wiring import make_renderer

logger = logging.getLogger(__name__)

OnFailure = Literal["auto", "empty", "raise"]

_groups = Groups()
_checked: set[VerlArgs] = set()


class PolarAgentLoop(AgentLoopBase):
    """One session: an agent program in a sandbox, its model calls sampled by verl's servers, its traces as rows.

    `polar`: a RolloutConfig, as a YAML file or a mapping, without engine and temperature, which are verl's.
    `on_failure`: what a session returns that infrastructure failed, after its retries. "empty": nothing, so that its
    siblings are trained without it; "raise": an error, so that verl counts the group as failed (its asynchronous
    trainers then drop and refill it, siblings included). "auto": nothing, but an error under an asynchronous trainer
    where fewer than two siblings are left, since then the group can teach nothing.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        *args: Any,
        polar: str | Mapping[str, Any],
        on_failure: OnFailure = "auto",
        **kwargs: Any,
    ) -> None:
        # Not verl's own constructor: it makes a renderer of verl's for each session, with a warning for each, unused.
        if on_failure not in ("auto", "empty", "raise"):
            raise ConfigError(f"on_failure must be auto, empty or raise, not {on_failure!r}")
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self._on_failure = on_failure
        self._args = VerlArgs.of(self.config)
        source = polar if isinstance(polar, str) else _plain(polar)
        self._polar = rollout_config(source, self._args, str(tokenizer.name_or_path))

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """The session's rows, the primary trace last; none where it failed by no fault of the policy.

        `kwargs` are the dataset's columns, `raw_prompt`, `uid`, `session_id` and `global_steps`. Raises ConfigError
        where verl's configuration, the dataset or the task cannot be; PolarError by `on_failure`.
        """
        self._check(kwargs)
        with _groups.joined(str(kwargs["uid"])) as member:
            service = await service_of(self._polar, self._service)
            attempt = _attempt(self._polar, kwargs)
            (trajectory,) = await service.run([attempt], sampling=sampling_of(self._polar, sampling_params))
            step = attempt.rollout_id
            rows = convert(
                trajectory, step=step, max_tokens=self._args.max_row_tokens, on_timeout=self._polar.on_timeout
            )
            member.end(counted=bool(rows.rows))
            if not rows.rows:
                await self._fail(trajectory, rows, member)
        return [AgentLoopOutput(**{**row, "metrics": AgentLoopMetrics(**row["metrics"])}) for row in rows.rows]

    async def _fail(self, trajectory: Trajectory, rows: Rows, member: Member) -> None:
        """Return for nothing, or raise for a failed group."""
        failure = trajectory.failure
        told = f": [{failure.boundary}] {failure.kind}: {failure.message}" if failure else ""
        words = f"session {trajectory.attempt.session_id} cannot be trained ({rows.excluded}){told}"
        logger.warning(words)
        refilled = self._on_failure == "auto" and self._args.asynchronous
        if self._on_failure == "raise" or (refilled and await member.survivors() < 2):
            raise PolarError(words)

    def _check(self, columns: Mapping[str, Any]) -> None:
        if self._args not in _checked:
            preflight(self._args)
            check_loaded(self._args.trainer_mode)
            _checked.add(self._args)
        if "_" in str(columns["uid"]):
            raise ConfigError(f"the uid {columns['uid']!r} has an underscore: verl parts its row keys there")
        if wrong := sorted(set(columns) & set(RESERVED)):
            raise ConfigError(f"dataset column {wrong[0]!r}: rename it, it would overwrite what the rollout says")

    def _service(self, config: RolloutConfig) -> RolloutService:
        renderer = make_renderer(config)
        engine = VerlEngine(
            self.server_manager,
            model=str(self.config.actor_rollout_ref.model.path),
            context_length=_context_length(self.config, self._args),
            vocab_size=renderer.vocab_size,
            decode=functools.partial(self.tokenizer.decode, skip_special_tokens=False),
            stop_strings=self._args.engine != "sglang",
        )
        return RolloutService(config, engine=engine, renderer=renderer)


def _attempt(config: RolloutConfig, columns: Mapping[str, Any]) -> Attempt:
    uid, number, step = str(columns["uid"]), int(columns["session_id"]), int(columns["global_steps"])
    session_id = f"{uid}-{number}-{uuid.uuid4().hex[:8]}"
    known: dict[str, Any] = {
        "sample": {**columns, "prompt": _prompt(columns["raw_prompt"]), "metadata": columns.get("extra_info") or {}},
        "uid": uid,
        "index": number,
        "session_id": session_id,
        "policy_version": step,
    }
    task = load_task({"task_id": "{uid}", "instruction": "{sample.prompt}", **config.task}, known)
    return Attempt(session_id, task, 0, number, step)


def _prompt(messages: Sequence[Mapping[str, Any]]) -> Any:
    """The text of a prompt that is one message; any other shape is left for the task's validation to refuse."""
    listed = list(messages)
    return listed[0].get("content") if len(listed) == 1 else listed


def _context_length(config: Any, args: VerlArgs) -> int:
    """What verl's servers take, prompt and output together; SGLang under verl keeps a token back."""
    length = args.max_model_len
    if length is None:
        from transformers import AutoConfig

        model = config.actor_rollout_ref.model
        told: Any = AutoConfig.from_pretrained(model.path, trust_remote_code=bool(model.get("trust_remote_code")))
        length = getattr(told.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ConfigError("set actor_rollout_ref.rollout.max_model_len: the model does not tell its context")
    return int(length) - (args.engine == "sglang")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without hydra's own mappings and lists, whose types a config refuses."""
    from omegaconf import DictConfig, OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    return cast("dict[str, Any]", plain)
