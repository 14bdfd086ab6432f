"""What the traces of recorded sessions are expected to be, as a file that a project keeps under version control. Pure.

    version: 1
    builder: prefix_merging
    config: {}
    sessions:
      NAME:                          # the recording's file name without .jsonl, .jsonl.gz or .jsonl.zst
        traces: 2
        trained_tokens: 311
        min_delivered_fraction: 1.0
        min_trained_fraction: 0.97
        breaks: {first_call: 1, new_thread: 1}
        untrained: {side: 9}
        masks: 0f3c...

Every key of a session may be left out: what is not said is not checked. `breaks` are completions by recorded break
reason, `untrained` tokens by reason; a reason that is not named is expected not to occur. `masks` is a digest of which
tokens of each trace are trained, and of the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import yaml
from pydantic import Field, TypeAdapter

from ..config import validated
from ..errors import ConfigError
from ..records import CompletionSession, Trace
from .traces import counts
from .untrained import Policy

_FORBID: Mapping[str, Any] = {"extra": "forbid"}
_SLACK = 1e-9  # a minimum that was written with fewer digits than were found still holds
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of one session; None: not checked."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    traces: int | None = None
    trained_tokens: int | None = None
    min_delivered_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    min_trained_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    breaks: Mapping[str, int] | None = None
    untrained: Mapping[str, int] | None = None
    masks: str | None = None


@dataclass(frozen=True, slots=True)
class Expectations:
    """Of the sessions of a project, by recording name, and the builder that they were written with."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _FORBID
    sessions: Mapping[str, Expectation]
    version: Literal[1] = 1
    builder: str = "prefix_merging"
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])


def found(session: CompletionSession, traces: Sequence[Trace], policy: Policy | None = None) -> Expectation:
    """What holds now, with every key said."""
    told = counts(session, traces, policy)
    sampled = told["sampled_tokens"]
    return Expectation(
        traces=len(traces),
        trained_tokens=told["trained_tokens"],
        min_delivered_fraction=told["delivered_tokens"] / sampled if sampled else 1.0,
        min_trained_fraction=told["trained_tokens"] / sampled if sampled else 1.0,
        breaks=_named(told, "breaks_"),
        untrained=_named(told, "untrained_"),
        masks=masks_digest(traces),
    )


def disagreements(expected: Expectation, now: Expectation) -> Iterator[str]:
    """Each key in which `now` (of `found`) is not as expected, in words."""
    for name, value in asdict(now).items():
        wanted = getattr(expected, name)
        if wanted is None:
            continue
        if name.startswith("min_"):
            if value < wanted - _SLACK:
                yield f"{name.removeprefix('min_')} is {value:.{_DIGITS}g}, expected at least {wanted:g}"
        elif isinstance(value, dict):
            yield from _counted(name, wanted, cast("dict[str, int]", value))
        elif value != wanted:
            yield f"{name} is {value}, expected {wanted}"


def _counted(name: str, wanted: Mapping[str, int], value: Mapping[str, int]) -> Iterator[str]:
    for reason in sorted({*wanted, *value}):
        if wanted.get(reason, 0) != value.get(reason, 0):
            yield f"{name}.{reason} is {value.get(reason, 0)}, expected {wanted.get(reason, 0)}"


def masks_digest(traces: Sequence[Trace]) -> str:
    """Of each trace's tokens and loss mask, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for trace in traces:
        digest.update(np.array([len(trace.prompt_ids), len(trace.response_ids)], "<i8").tobytes())
        for ids in (trace.prompt_ids, trace.response_ids):
            digest.update(np.ascontiguousarray(ids, "<i4").tobytes())
        digest.update(np.packbits(trace.loss_mask).tobytes())
    return digest.hexdigest()


def loads(text: str, where: str) -> Expectations:
    """From YAML or JSON; `where` names the file. Raises ConfigError with the path of what is wrong."""
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is neither YAML nor JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where} is no expectation file: write one with `polar-plugin replay --write-expect {where}`"
        )
    return validated(TypeAdapter(Expectations), data, where)


def dumps(expectations: Expectations) -> str:
    """As YAML that `loads` reads back; fractions are rounded down."""
    told = asdict(expectations)
    for session in told["sessions"].values():
        for name in ("min_delivered_fraction", "min_trained_fraction"):
            session[name] = int(session[name] * 10**_DIGITS) / 10**_DIGITS
    ordered = {name: told[name] for name in ("version", "builder", "config", "sessions")}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)


def _named(told: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): count for name, count in told.items() if name.startswith(prefix) and count}
