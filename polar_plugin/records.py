"""Every immutable record, in the order it comes into being.

Arrays are one-dimensional and read-only: token ids int32, log-probabilities float32 (natural logarithm), masks bool.
Times are Unix seconds, durations seconds. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

TokenIds = NDArray[np.int32]
LogProbs = NDArray[np.float32]
Mask = NDArray[np.bool_]
Experts = NDArray[np.int16]
JSONObject = dict[str, Any]

_FORBID: Mapping[str, Any] = {"extra": "forbid"}  # read by pydantic when a task payload is loaded (config.load_task)


def token_ids(values: ArrayLike) -> TokenIds:
    """A read-only int32 array of token ids; raises ValueError on a negative id or a value that is no integer."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, got dtype {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError(f"token ids must lie in [0, 2**31), got [{array.min()}, {array.max()}]")
    return _frozen(array.astype(np.int32))


def log_probs(values: ArrayLike) -> LogProbs:
    """A read-only float32 array of natural-log probabilities."""
    return _frozen(np.array(values, np.float32))


def mask(values: ArrayLike) -> Mask:
    """A read-only bool array; True marks a token that is trained."""
    return _frozen(np.array(values, np.bool_))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array = array.reshape(-1)
    array.flags.writeable = False
    return array


# --- the task, as submitted ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareAction:
    """One step that makes a sandbox ready: run `command`, or copy `source` (host) to `target` (sandbox)."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    type: Literal["exec", "upload_file", "upload_dir"]
    source: str | None = None
    target: str | None = None
    command: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    max_attempts: int = 1
    retry_backoff_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """Where an agent runs. `backend` is a registered name or "pkg.mod:Class"; `import_path`, if given, replaces it."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    backend: str = "local"
    import_path: str | None = None
    image: str | None = None
    network: str = "proxy_only"
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cpus: float | None = None
    memory_mb: int | None = None
    gpus: int = 0
    harness_root: str | None = None
    """A directory of the machine that sandboxes run on, as `polar-plugin harness install` makes it: seen inside at the
    same path, read-only. A preset starts its program from there, unless its `settings.root` says otherwise."""
    prepare: tuple[PrepareAction, ...] = ()
    eval_prepare: tuple[PrepareAction, ...] | None = None
    """None: the evaluator's fresh runtime replays `prepare`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The backend's own options."""

    @property
    def plugin(self) -> str:
        """The name or import path that selects the backend."""
        return self.import_path or self.backend


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Which agent program runs: a registered `harness` name or an `import_path` "pkg.mod:Class" (exactly one)."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    harness: str | None = None
    import_path: str | None = None
    model_name: str = "policy"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mcp_servers: tuple[Mapping[str, Any], ...] = ()
    skills_path: str | None = None
    command: str | tuple[str, ...] | None = None
    """For `harness: shell`: a shell script (str) or an argument vector."""

    @property
    def plugin(self) -> str:
        """The name or import path that selects the harness."""
        return self.harness or self.import_path or ""


@dataclass(frozen=True, slots=True)
class BuilderSpec:
    """How completions become traces: a registered name or "pkg.mod:Class", built with `**config`."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    strategy: str = "prefix_merging"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    """How an attempt is graded: a registered name or "pkg.mod:Class", built with `**config`."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    strategy: str = "session_completed"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    refresh_runtime: bool = True
    """Grade in a fresh runtime into which the agent's patch is applied, not in the agent's own."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One task as submitted. The task payload of arXiv 2605.24220, A.3, loads into it (`config.load_task`)."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    task_id: str
    instruction: str
    agent: AgentSpec
    num_samples: int = 1
    timeout_seconds: float = 600.0
    """The agent's budget; the other stages have budgets of their own (`config.Budgets`)."""
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    builder: BuilderSpec = field(default_factory=BuilderSpec)
    evaluator: EvaluatorSpec = field(default_factory=EvaluatorSpec)
    callback_url: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a task: a slot of a GRPO group."""

    session_id: str
    task: TaskSpec
    group_index: int
    """Which prompt (group) this attempt belongs to."""
    index: int
    """Position within the batch of samples; unique in one rollout."""
    rollout_id: int = 0
    """The trainer's rollout step that asked for it."""
    evaluation: bool = False
    """It measures the policy and is not trained: it overtakes training attempts that wait, and is never cut short."""


IMAGE = "[image omitted]"
"""What a renderer that sees no images reads in the place of one."""


# --- the conversation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of an assistant turn."""

    name: str
    arguments: str
    """JSON text as the model wrote it, or as the harness echoed it; `engine.turn` compares calls by meaning."""
    id: str = field(default="", compare=False)
    """Wire-only: harnesses rewrite it, so it never takes part in equality."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of a message: by value or by reference."""

    media_type: str = ""
    """As in "image/png"; "" where the dialect does not tell."""
    data: str = ""
    """Base64; "" where it is told by `url`."""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One canonical chat message, in no provider's dialect."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = field(default="", compare=False)
    name: str = ""
    """For role "tool": the function that was called, where the dialect tells."""
    parts: tuple[str | Image, ...] = ()
    """Only where images are among them: the content piece by piece, for renderers that see images.

    `content` says the same with the text `IMAGE` in the place of each.
    """


@dataclass(frozen=True, slots=True)
class Tool:
    """One function the model may call; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: JSONObject = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens are drawn. `top_k` -1 and `top_p` 1.0 switch truncation off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


class Role(enum.StrEnum):
    """What a model call was for."""

    MAIN = "main"
    SUB_AGENT = "sub_agent"
    SIDE = "side"
    COMPACTION = "compaction"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a harness asked for. `sampling` is what it *asked*; what was *used* is on the completion."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    """`auto`, "none", "required", or the name of the one tool to call."""
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    model: str = ""
    api: str = ""
    """The dialect it came in: "openai_chat", "openai_responses", "anthropic_messages", "google_generate"."""
    role: Role = Role.MAIN
    thread: str = ""
    """The harness's own name for the conversation this belongs to, where a header tells; "" for its main one."""
    retry: bool = False
    """The client says that this repeats an earlier request."""
    ignored: tuple[str, ...] = ()
    """Paths of request fields that have no meaning here and were dropped; counted on the session."""


class FinishReason(enum.StrEnum):
    """Why sampling ended. A reply with tool calls ends in STOP; the dialects derive their own word for it."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`count` consecutive tokens sampled under weight version `version`; "" for tokens that were not sampled."""

    version: str
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of a mixture-of-experts model that each token went through, for trainers that replay the router."""

    experts: Experts
    """int16 [rows, layers * experts a token]: row i is of token `start` + i of prompt ‖ output."""
    start: int = 0
    """The rows before are the parent's. The last row is of the last token but one: nothing came after the last."""

    @property
    def end(self) -> int:
        return self.start + len(self.experts)


@dataclass(frozen=True, slots=True, eq=False)
class Nucleus:
    """The ids that top-p (or top-k) left to draw each token from: of token i `ids[offsets[i] : offsets[i + 1]]`."""

    ids: TokenIds
    """int32"""
    offsets: TokenIds
    """int32 [n + 1]; equal neighbours where no choice is known."""

    def __post_init__(self) -> None:
        if not len(self.offsets) or self.offsets[0] or self.offsets[-1] != len(self.ids):
            raise ValueError(f"offsets must begin with 0 and end with the number of ids, {len(self.ids)}")
        if (self.offsets[1:] < self.offsets[:-1]).any():
            raise ValueError("offsets must not fall: they tell where the choices of each token end")

    def first(self, tokens: int) -> Nucleus:
        """Of the first `tokens` alone."""
        return Nucleus(self.ids[: self.offsets[tokens]], self.offsets[: tokens + 1])


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What the engine sampled: ids out and the log-probability each had in the distribution it was drawn from."""

    output_ids: TokenIds
    """int32 [n]; includes the stop token where the model sampled one."""
    logprobs: LogProbs
    """float32 [n], at the sampling temperature, over the full vocabulary."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = ()
    """Run-length weight versions; counts add up to n where the engine tells versions, else empty."""
    stop: str | None = None
    """The stop string that ended it, if one did."""
    routing: Routing | None = None
    """Where the engine was asked for it."""
    nucleus: Nucleus | None = None
    """Where the engine was asked for it; then `logprobs` are over what it holds, not over the whole vocabulary."""

    def __post_init__(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.output_ids)} output ids but {len(self.logprobs)} log-probabilities")
        told = sum(span.count for span in self.versions)
        if self.versions and told != len(self.output_ids):
            raise ValueError(f"weight-version spans cover {told} tokens of {len(self.output_ids)}")
        if any(span.count < 0 for span in self.versions):
            raise ValueError(f"a weight-version span cannot cover less than no token: {self.versions}")
        if self.nucleus and len(self.nucleus.offsets) != len(self.output_ids) + 1:
            raise ValueError(f"{len(self.output_ids)} output ids but {len(self.nucleus.offsets)} offsets of choices")


class BreakReason(enum.StrEnum):
    """Why a completion extends no earlier one."""

    FIRST_CALL = "first_call"
    NEW_THREAD = "new_thread"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    HISTORY_REWRITTEN = "history_rewritten"
    ASSISTANT_REWRITTEN = "assistant_rewritten"
    TEMPLATE_REWRITE = "template_rewrite"
    COMPACTION = "compaction"
    TRUNCATED_PARENT = "truncated_parent"
    UNDELIVERED_PARENT = "undelivered_parent"
    BOUNDARY_UNKNOWN = "boundary_unknown"


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One model call: the unit that a session records and a builder consumes."""

    id: str
    request: ChatRequest
    prompt_ids: TokenIds
    """int32 [p]: the very ids that were sent. Views of one growing buffer along a chain: treat as read-only."""
    generation: Generation
    reply: Message
    sampling: SamplingParams
    """What the engine was told, after the trainer's settings replaced the harness's."""
    started: float
    ended: float
    parent: str | None = None
    """Id of the completion whose prompt ‖ output begins `prompt_ids`; None: see `break_reason`."""
    break_reason: BreakReason | None = None
    malformed_calls: int = 0
    """Tool calls the model wrote that could not be parsed; they stay in `reply.content` as text."""
    images_omitted: int = 0
    """Images that came with this call and that the model did not see: the text `IMAGE` stands in their place."""

    @property
    def role(self) -> Role:
        return self.request.role

    @property
    def length(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_ids) + len(self.generation.output_ids)


class Delivery(enum.StrEnum):
    """Whether the harness got the whole answer."""

    PENDING = "pending"
    DELIVERED = "delivered"
    UNDELIVERED = "undelivered"


@dataclass(frozen=True, slots=True, eq=False)
class CompletionSession:
    """A sealed ledger: what builders take."""

    session_id: str
    completions: tuple[Completion, ...]
    """In the order they were recorded, so a parent stands before its children."""
    delivery: Mapping[str, Delivery] = field(default_factory=dict[str, Delivery])
    """By completion id; a missing id counts as DELIVERED (recordings of other systems)."""
    task_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    counts: Mapping[str, int] = field(default_factory=dict[str, int])

    def delivered(self, completion: Completion) -> bool:
        return self.delivery.get(completion.id, Delivery.DELIVERED) is Delivery.DELIVERED


# --- the outcome -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One trainable token sequence. The four response arrays share one length r.

    Invariant: recomputing log-probabilities over `prompt_ids ‖ response_ids` with the weights that sampled them gives
    `response_logprobs` wherever `loss_mask` is True.
    """

    prompt_ids: TokenIds
    """int32 [p], p >= 1; never trained."""
    response_ids: TokenIds
    """int32 [r]"""
    loss_mask: Mask
    """bool [r]; True where this trace trains a sampled token."""
    response_logprobs: LogProbs
    """float32 [r]; 0.0 where the mask is False."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = ()
    """Run-length over the response; "" for tokens that were not sampled here."""
    role: Role = Role.MAIN
    reward: float | None = None
    completion_ids: tuple[str, ...] = ()
    """The completions whose output this trace trains, in order."""
    prompt_messages: tuple[Message, ...] = ()
    response_messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    routing: Experts | None = None
    """int16 [p + r - 1, layers * experts a token]: `Routing` of the whole trace; None where a row of it is unknown."""
    nucleus: Nucleus | None = None
    """Of the response: nothing to choose from where the mask is False. None where one of the trained is unknown."""

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.loss_mask), len(self.response_logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"response_ids, loss_mask and response_logprobs differ in length: {sorted(lengths)}")
        if not len(self.prompt_ids):
            raise ValueError("a trace needs at least one prompt token")

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an attempt was worth."""

    outcome_reward: float
    trace_rewards: tuple[float, ...] | None = None
    """One a trace where the evaluator grades the process too."""
    report: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Status(enum.StrEnum):
    """How an attempt ended. Infrastructure failure is a class of its own: it is never reward 0."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    TIMED_OUT = "timed_out"
    FAILED = "failed"
    INFRA_ERROR = "infra_error"
    ABORTED = "aborted"

    @property
    def gradable(self) -> bool:
        """Whether the attempt is the policy's own doing, so that it takes part in baselines."""
        return self not in (Status.INFRA_ERROR, Status.ABORTED)


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, and where."""

    boundary: str
    """One of "init", "agent", "build", "evaluation", "engine", ..."""
    kind: str
    """The exception's class name."""
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The output: exactly one for each admitted attempt."""

    attempt: Attempt
    status: Status
    traces: tuple[Trace, ...] = ()
    evaluation: Evaluation | None = None
    failure: Failure | None = None
    exit_code: int | None = None
    """The agent program's own; independent of the reward."""
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage: "init", "ready", "agent", "build", "evaluation", "total"."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Completions, tokens trained and untrained by reason, breaks by reason, dropped fields, ..."""
    session: CompletionSession | None = None

    @property
    def reward(self) -> float | None:
        """The session's outcome reward; None where it was not graded."""
        return None if self.evaluation is None else self.evaluation.outcome_reward

    @property
    def delivered_fraction(self) -> float | None:
        """Of all sampled tokens, those of answers that the harness got whole or went on from; None: none was sampled.

        `counts["delivered_tokens"] / counts["sampled_tokens"]`.
        """
        return self._fraction("delivered_tokens")

    @property
    def trained_fraction(self) -> float | None:
        """Of all sampled tokens, those that `traces` train; None: none was sampled.

        `counts["trained_tokens"] / counts["sampled_tokens"]`; the rest is under `counts["untrained_<reason>"]`.
        """
        return self._fraction("trained_tokens")

    def _fraction(self, name: str) -> float | None:
        sampled = self.counts.get("sampled_tokens", 0)
        return self.counts.get(name, 0) / sampled if sampled else None
