"""RolloutConfig and its parts, the task payload, and the one loader. Frozen; unknown keys are refused by path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from .errors import ConfigError
from .placeholders import fill
from .records import SamplingParams, TaskSpec

T = TypeVar("T")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineConfig(_Part):
    """Which inference engine samples."""

    kind: str = "sglang"
    """`sglang`, `vllm`, `transformers` (embedded, CPU), `scripted`, or "pkg.mod:Class"."""
    url: str | None = None
    """Of an SGLang or vLLM server, or of SGLang's router. Under slime it comes from slime's own arguments."""
    model: str | None = None
    """For `transformers`: a Hugging Face directory, `smollm2` or `tiny`. For `vllm`: the served model's name."""
    context_length: int | None = Field(default=None, gt=1)
    """Prompt and output tokens together; default: what the engine says of itself."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Passed to the engine's constructor."""
    replay: tuple[Literal["routed_experts", "top_p"], ...] = ()
    """What the engine tells beside the tokens, for a trainer that replays it.

    The experts that a mixture-of-experts model sent each token to, and the ids that `top_p` left to draw from. `sglang`
    alone has them; an engine that does not tell them fails at start. Under slime it comes from slime's own arguments.
    """


class RendererConfig(_Part):
    """How messages become tokens and tokens become messages."""

    kind: str = "auto"
    """`auto`, `template` (the tokenizer's own chat template), or a family of the `renderers` package, as in `qwen3`."""
    tokenizer: str | None = None
    """A Hugging Face directory or name; default: the engine's model, under slime `--hf-checkpoint`."""
    history: Literal["sampled", "template"] = "sampled"
    """`sampled` extends what was sampled even where the template would drop old reasoning; `template` forks there."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template_kwargs: Mapping[str, Any] = Field(default_factory=dict)
    images: Literal["placeholder", "reject"] = "placeholder"
    """What a model that sees no images is told of one: a short text in its place, counted, or the request is refused.

    The renderers that come with this library see none, as engines are sent token ids alone.
    """


class SamplingConfig(_Part):
    """The trainer's sampling. It replaces whatever a harness asks for; of `max_tokens` the smaller one counts."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    max_tokens: int = Field(default=4096, gt=0)
    stop: tuple[str, ...] = ()

    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens, self.stop)


class ProxySettings(_Part):
    """Where harnesses reach the model."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    keepalive_seconds: float = Field(default=5.0, gt=0, le=10)
    max_body_bytes: int = Field(default=64 << 20, gt=0)


class StagesConfig(_Part):
    """How many attempts each stage holds at once."""

    init: int = Field(default=4, gt=0)
    ready: int = Field(default=2, ge=0)
    """Initialised sandboxes waiting beyond the running ones."""
    run: int = Field(default=8, gt=0)
    postrun: int = Field(default=4, gt=0)


class BudgetConfig(_Part):
    """Seconds each stage may take; none spends another's."""

    init: float = Field(default=600.0, gt=0)
    build: float = Field(default=120.0, gt=0)
    evaluation: float = Field(default=1800.0, gt=0)
    cleanup: float = Field(default=30.0, gt=0)
    first_call: float | None = Field(default=120.0, gt=0)
    """No model call within this time after the start: the harness did not start, an infrastructure error.

    null: wait for as long as the task's own time. The slowest agent program known calls after some 15 s.
    """
    linger: float | None = Field(default=20.0, gt=0)
    """A program that has printed its result (`Launch.finished`) and makes no model call for this long is ended.

    The attempt counts as completed. null: it is waited for.
    """
    idle: float | None = Field(default=300.0, gt=0)
    """A program that neither prints nor calls for this long after a model call failed is ended: it hangs.

    Longer than any program waits before it tries again. null: it is waited for.
    """


class TrainIf(_Part):
    """How much of an incomplete group is enough."""

    train_if: int = Field(gt=0)
    """How many of its attempts must be usable: graded, with something to train."""


class GroupsConfig(_Part):
    """What becomes of a group (the attempts at one prompt) from which the infrastructure took attempts."""

    refills: int = Field(default=1, ge=0)
    """How often one sample is run once more, after its `retries`, so that its group stays whole."""
    refill_pause: float = Field(default=30.0, ge=0)
    """Seconds before the first refill, doubled with each: what broke the attempt may be over by then."""
    incomplete_group: Literal["drop"] | TrainIf = TrainIf(train_if=2)
    """Of a group that stays incomplete: `drop`, or `{train_if: k}`: what is left is trained if that is k or more."""
    min_usable: int | None = Field(default=None, gt=0)
    """Once this many attempts of a group are usable, the others are ended. null: all are waited for.

    It prefers attempts that take little time; use it where a few stragglers hold up whole steps.
    """

    @model_validator(mode="after")
    def _stragglers_leave_groups_that_train(self) -> Self:
        if self.min_usable is None:
            return self
        if self.incomplete_group == "drop":
            raise ValueError("min_usable makes groups incomplete: write `incomplete_group: {train_if: k}`, not drop")
        if self.min_usable < self.incomplete_group.train_if:
            raise ValueError("min_usable must not be less than incomplete_group.train_if: no such group would train")
        return self


class AsyncConfig(_Part):
    """Rollouts that run on while the trainer trains (`slime_rollout.generate_async`)."""

    max_staleness: int = Field(default=1, ge=0)
    """How many weight updates older than the newest weights a trained token may be.

    As many rollouts' groups are kept under way ahead. Counted by the engine's versions, by rollouts where it has none.
    """
    policy: Literal["drop", "mask", "keep"] = "drop"
    """What is older: `drop` runs its group again, `mask` does not train those completions, `keep` trains them."""
    evaluate_first: bool = False
    """Evaluate before the first rollout of the process, as `train_async.py` does not."""
    store: Path | None = None
    """Where groups that have ended are kept until they are trained, so that a restart need not run them again."""


class RecordingConfig(_Part):
    """Whether sessions are written to files."""

    directory: Path | None = None
    suffix: Literal[".jsonl", ".jsonl.gz", ".jsonl.zst"] = ".jsonl"


class RolloutConfig(_Part):
    """Everything a rollout needs besides the prompts; under slime the key `polar:` of `--custom-config-path`."""

    engine: EngineConfig = EngineConfig()
    renderer: RendererConfig = RendererConfig()
    sampling: SamplingConfig = SamplingConfig()
    proxy: ProxySettings = ProxySettings()
    stages: StagesConfig = StagesConfig()
    budgets: BudgetConfig = BudgetConfig()
    groups: GroupsConfig = GroupsConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    recording: RecordingConfig = RecordingConfig()
    task: Mapping[str, Any] = Field(default_factory=dict)
    """The task payload, with placeholders such as `{sample.metadata.instruction}` (`placeholders`)."""
    eval_task: Mapping[str, Any] | None = None
    """The payload of evaluation rollouts; default: `task`."""
    retries: int = Field(default=1, ge=0)
    """How often an attempt is run again in a new sandbox after an infrastructure error."""
    verify: Literal["all", "sample", "off"] = "sample"
    """Of how many trajectories the merge invariants are checked: each, one in eight, or none."""
    on_timeout: Literal["train", "exclude"] = "train"
    """Whether an attempt that ran out of time is trained with its graded reward or leaves the group."""


def load_config(source: str | Path | Mapping[str, Any]) -> RolloutConfig:
    """Read a YAML file or a mapping, bare or under the key `polar`.

    Raises ConfigError with the path of each wrong key and, for unknown ones, those there are.
    """
    data, where = _read(source)
    if isinstance(data, Mapping) and "polar" in data:
        data, where = cast("Mapping[str, Any]", data)["polar"], f"{where}: polar"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(data).__name__}")
    return validated(TypeAdapter(RolloutConfig), cast("Mapping[str, Any]", data), where)


def load_task(payload: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> TaskSpec:
    """A TaskSpec from a task payload; `values` fill its placeholders where given.

    Raises ConfigError with the path of what is wrong.
    """
    filled: Any = payload if values is None else fill(payload, values)
    task = validated(TypeAdapter(TaskSpec), filled, "task")
    if bool(task.agent.harness) == bool(task.agent.import_path):
        raise ConfigError("task.agent: set exactly one of `harness` and `import_path`")
    if task.num_samples < 1:
        raise ConfigError(f"task.num_samples must be at least 1, got {task.num_samples}")
    if not task.timeout_seconds > 0:  # nor NaN, which is no deadline
        raise ConfigError(f"task.timeout_seconds must be positive, got {task.timeout_seconds}")
    return task


def cache_directory() -> Path:
    """Where downloaded models are kept: $POLAR_PLUGIN_CACHE, else `polar_plugin` under $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("POLAR_PLUGIN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polar_plugin"


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Any, str]:
    if isinstance(source, Mapping):
        return source, "config"
    try:
        return yaml.safe_load(Path(source).read_text()) or {}, str(source)
    except OSError as error:
        raise ConfigError(f"cannot read config {source}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def validated(adapter: TypeAdapter[T], data: Any, where: str) -> T:
    """`data` as what `adapter` describes; raises ConfigError with `where` and the path of each wrong key."""
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        lines = [
            f"{where}: {_told(detail)}" for detail in cast("list[dict[str, Any]]", error.errors(include_url=False))
        ]
        raise ConfigError("\n".join(lines)) from error


def _told(detail: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key `{path}`"
    return f"`{path}`: {detail['msg']}"
