"""The contract with slime's classes: named and typed as slime's, for use without it; slime's own where it is there.

`SampleLike` is `Sample` of `slime/utils/types.py` as far as the hooks fill it; `TrainOutput` and `EvalOutput` are
`RolloutFnTrainOutput` and `RolloutFnEvalOutput` of `slime/rollout/base_types.py`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from .errors import ConfigError

METADATA_KEY = "polar"
"""Where a sample's metadata says which session it is of."""


class SampleStatus(enum.Enum):
    """slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SampleLike:
    """slime's `Sample`, as far as we fill it."""

    Status: ClassVar[type[SampleStatus]] = SampleStatus
    group_index: int | None = None
    """The prompt."""
    index: int | None = None
    rollout_id: int | None = None
    """The session: unit of optimiser steps and of the loss's mean."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list[int])
    """Prompt and response."""
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """0 or 1 a response token."""
    weight_versions: list[str] = field(default_factory=list[str])
    rollout_log_probs: list[float] | None = None
    """A response token each; 0.0 where the mask is 0."""
    remove_sample: bool = False
    """Its mask counts as zeros, and it keeps its place in the batch size. Whether it votes, its metadata says."""
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    session_id: str | None = None
    non_generation_time: float = 0.0

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if not args.reward_key else cast("dict[str, Any]", self.reward)[args.reward_key]


@dataclass
class TrainOutput:
    """slime's `RolloutFnTrainOutput`: samples as prompt x session x trace."""

    samples: list[list[list[Any]]]
    metrics: dict[str, Any] | None = None


@dataclass
class EvalOutput:
    """slime's `RolloutFnEvalOutput`: by dataset `rewards`, `truncated` (one a session) and `samples` (one a trace)."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def session_metadata(sample: Any) -> dict[str, Any]:
    """What `convert` told about the sample's session; empty for a sample that is not ours."""
    return cast("dict[str, Any]", (sample.metadata or {}).get(METADATA_KEY) or {})


def session_of(sample: Any) -> Any:
    """The session id under the name this slime has for it."""
    return getattr(sample, session_field(sample))


def session_field(sample: Any) -> str:
    """`rollout_id`, or `group_id` in slime v0.3.0, where the other name raises on reading."""
    names = getattr(type(sample), "__dataclass_fields__", {})
    for name in ("rollout_id", "group_id"):
        if name in names:
            return name
    raise ConfigError(f"{type(sample).__name__} has no session id (`rollout_id`): slime v0.3.0 or later is needed")


def sample_class() -> Any:
    """slime's `Sample`, or SampleLike where slime is absent."""
    try:
        return importlib.import_module("slime.utils.types").Sample
    except ImportError:
        return SampleLike


def output_class(name: Literal["RolloutFnTrainOutput", "RolloutFnEvalOutput"], sample: Any) -> Any:
    """slime's own where `sample` is slime's: any other class it would take for the samples themselves."""
    if any(base.__module__ == "slime.utils.types" for base in type(sample).__mro__):
        return getattr(importlib.import_module("slime.rollout.base_types"), name)
    return TrainOutput if name == "RolloutFnTrainOutput" else EvalOutput
