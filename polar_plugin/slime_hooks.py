"""slime's own hooks into a rollout, called for groups of sessions of traces: filters, and the look at all samples.

slime calls them within its rollout loop (`slime/rollout/sglang_rollout.py`), which ours takes the place of. A group is
handed over as `list[list[Sample]]`, session x trace.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .rewards import uninformative
from .slime_args import SlimeArgs
from .slime_types import session_metadata


@dataclass
class FilterOutput:
    """slime's `DynamicFilterOutput`, for use without slime."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Kept where dropping it would mean to draw more prompts."""


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> Any:
    """`--dynamic-sampling-filter-path`: slime's filter of the same name, for sessions of any number of traces.

    Keeps a group whose sessions differ in reward; a session is one vote, and one that the infrastructure took has none.
    Takes `list[Sample]` and `list[list[Sample]]`.
    """
    return _verdict(args, samples)


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Any], **_: Any) -> Any:
    """The same, but never at the price of drawing more prompts."""
    told = _verdict(args, samples)
    told.keep_when_insufficient = True
    return told


def dynamic_filter(args: SlimeArgs, given: Any, group: Sequence[Sequence[Any]]) -> FilterOutput:
    """The word of `--dynamic-sampling-filter-path`; without one every group is kept."""
    if not args.dynamic_sampling_filter_path:
        return FilterOutput(True)
    told = hook(args.dynamic_sampling_filter_path)(given, group)
    if not hasattr(told, "keep"):
        return FilterOutput(bool(told))
    return FilterOutput(bool(told.keep), told.reason, bool(getattr(told, "keep_when_insufficient", False)))


@functools.cache
def hook(path: str) -> Callable[..., Any]:
    """The object at a dotted path, as slime finds it. Raises ConfigError where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no {path}: {error}") from error


def _verdict(args: Any, samples: Sequence[Any]) -> Any:
    sessions = [each[0] if isinstance(each, list) else each for each in samples]
    rewards = [float(sample.get_reward_value(args)) for sample in sessions]
    excluded = [_excluded(sample) for sample in sessions]
    keep = not uninformative(rewards, [0] * len(rewards), excluded=excluded)
    counted = [reward for reward, out in zip(rewards, excluded, strict=True) if not out]
    reason = None if keep else f"zero_std_{round(counted[0], 1)}" if counted else "no_usable_session"
    return _output_class()(keep=keep, reason=reason)


def _excluded(sample: Any) -> bool:
    return bool(session_metadata(sample).get("excluded")) or sample.status.value == "aborted"


def _output_class() -> Any:
    """slime's own where slime is there: its loop takes anything else for the verdict itself."""
    try:
        return importlib.import_module("slime.rollout.filter_hub.base_types").DynamicFilterOutput
    except ImportError:
        return FilterOutput
