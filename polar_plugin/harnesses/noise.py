"""What agent programs change from call to call without meaning it: one row a fact, with the version it was seen in.

The table serves *matching* only: a request finds the completion it continues although its history is told otherwise.
What reaches the model is decided at the session's first sight of a text, and its tokens stay. A change that the model
would read is no noise: its row says so, and it breaks the chain for a reason. Pure.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from ..records import ToolCall


class Kind(enum.Enum):
    """What is done about a fact."""

    MEANINGLESS = enum.auto()
    """`pattern` is left out of messages of `role` wherever they are compared."""
    TRANSIENT = enum.auto()
    """`pattern` is told in one request and gone from the next: left out of what a request repeats, not of what is new.
    """
    CALL = enum.auto()
    """`same_call` tells that an echoed call of one of our ids stands for the sampled one."""
    FORM = enum.auto()
    """Another form of one message, the same once decoded or digested (`engine.meaning`, the dialects)."""
    CONTEXT = enum.auto()
    """An assistant text that the program wrote: context that is never trained."""
    REWRITE = enum.auto()
    """The model would read it: no noise. The completion goes on from what stands before it, or breaks with a reason."""


SameCall = Callable[[ToolCall, ToolCall], bool]
"""(echoed, sampled), of one id."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that one program does."""

    harness: str
    version: str
    what: str
    kind: Kind
    role: Literal["system", "user", "assistant", "tool", ""] = ""
    pattern: re.Pattern[str] | None = None
    same_call: SameCall | None = None


def _renamed_invalid(echoed: ToolCall, sampled: ToolCall) -> bool:
    return echoed.name == "invalid" and _arguments(echoed).get("tool") == sampled.name


def _unparsed(echoed: ToolCall, sampled: ToolCall) -> bool:
    told = _arguments(echoed).get("__unparsedToolInput")
    raw = cast("dict[str, Any]", told).get("raw") if isinstance(told, dict) else None
    return echoed.name == sampled.name and isinstance(raw, str) and bool(raw) and sampled.arguments.startswith(raw)


def _emptied(echoed: ToolCall, sampled: ToolCall) -> bool:
    return echoed.name == sampled.name and echoed.arguments.strip() in ("", "{}") and not _parses(sampled)


def _filled_in(echoed: ToolCall, sampled: ToolCall) -> bool:
    if echoed.name != sampled.name or not _parses(sampled):
        return False
    try:
        return _has_all(_arguments(echoed), _arguments(sampled))
    except RecursionError:  # nested as only a model that repeats itself would
        return False


def _has_all(echoed: Any, sampled: Any) -> bool:
    """Whether a value is another one, or that with more keys."""
    if isinstance(sampled, dict) and isinstance(echoed, dict):
        told, said = cast("dict[str, Any]", echoed), cast("dict[str, Any]", sampled)
        return all(key in told and _has_all(told[key], value) for key, value in said.items())
    if isinstance(sampled, list) and isinstance(echoed, list):
        told_items, said_items = cast("list[Any]", echoed), cast("list[Any]", sampled)
        return len(told_items) == len(said_items) and all(map(_has_all, told_items, said_items))
    return bool(echoed == sampled)


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _parses(call: ToolCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


CLAUDE, CODEX, GEMINI = ("Claude Code", "2.1.332"), ("Codex", "0.171.0"), ("Gemini CLI", "0.61.0")
QWEN, OPENCODE, PI = ("Qwen Code", "0.24.4"), ("opencode", "1.18.33"), ("Pi", "1.6.0")
OPENHANDS, MINI = ("OpenHands CLI", "1.16.0"), ("mini-swe-agent", "2.4.6")

FACTS: tuple[Fact, ...] = (
    Fact(
        *CLAUDE,
        "a billing line in the system prompt, other after a compaction and in each sub-agent",
        Kind.MEANINGLESS,
        "system",
        re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE),
    ),
    Fact(
        *GEMINI,
        "after an empty reply a part behind the last user message, gone from the request after",
        Kind.TRANSIENT,
        "user",
        re.compile(r"\s*\[System: You previously returned an empty response[^\]]*\]\s*\Z"),
    ),
    Fact(*OPENCODE, "a call that it cannot run is renamed `invalid`", Kind.CALL, "assistant", None, _renamed_invalid),
    Fact(*CLAUDE, "arguments that are no JSON become __unparsedToolInput", Kind.CALL, "assistant", None, _unparsed),
    Fact(*CLAUDE, "arguments that a tool has defaults for are filled in", Kind.CALL, "assistant", None, _filled_in),
    Fact(*PI, "arguments that are no JSON become {}", Kind.CALL, "assistant", None, _emptied),
    Fact(*CLAUDE, "cache_control moves; a message is a string here, a list of blocks there", Kind.FORM),
    Fact(*CLAUDE, "keys of arguments in the schema's order; text between calls goes before them", Kind.FORM),
    Fact(*CLAUDE, "a white-space-only text block is dropped", Kind.FORM, "assistant"),
    Fact(*CLAUDE, "results of parallel calls in the order in which they ended", Kind.FORM, "tool"),
    Fact(*GEMINI, "arguments are written anew; thoughts are dropped; ids are invented", Kind.FORM, "assistant"),
    Fact(*QWEN, "arguments are written anew; reasoning is trimmed; content null or \"\"", Kind.FORM, "assistant"),
    Fact(*OPENCODE, "arguments are written anew", Kind.FORM, "assistant"),
    Fact(*OPENCODE, "an empty assistant message in the place of a reply that broke off", Kind.FORM, "assistant"),
    Fact(*PI, "arguments are written anew; item ids are invented", Kind.FORM, "assistant"),
    Fact(*OPENHANDS, "reasoning and white-space-only text are dropped", Kind.FORM, "assistant"),
    Fact(*CODEX, "ids of items are invented; client_metadata in random order", Kind.FORM),
    Fact(*MINI, "`content` is left out where it is null", Kind.FORM, "assistant"),
    Fact(*QWEN, "behind a summary an acknowledgement of its own, in one message with a call", Kind.CONTEXT),
    Fact(*GEMINI, "a notice of its own in the place of a turn that repeats the same call", Kind.CONTEXT),
    Fact(*CLAUDE, "after an empty reply a reminder within the first user message, which stays", Kind.REWRITE, "user"),
    Fact(*QWEN, "the summary's message gets a reminder before it, one request later", Kind.REWRITE, "user"),
    Fact(*GEMINI, "old tool outputs are masked where they stand", Kind.REWRITE, "tool"),
    Fact(*CODEX, "the complete items of a reply that broke off stay, and their tools run", Kind.REWRITE, "assistant"),
)  # fmt: skip

_REMOVED = {
    kind: {
        role: tuple(fact.pattern for fact in FACTS if fact.kind is kind and fact.role == role and fact.pattern)
        for role in ("system", "user", "assistant", "tool")
    }
    for kind in (Kind.MEANINGLESS, Kind.TRANSIENT)
}
_SAME_CALL = tuple(fact.same_call for fact in FACTS if fact.same_call)


def meaningful(role: str, text: str) -> str:
    """`text` without what means nothing in messages of `role`."""
    return _without(Kind.MEANINGLESS, role, text)


def lasting(role: str, text: str) -> str:
    """`text` without what its program will not repeat; the same object where it repeats all of it."""
    return _without(Kind.TRANSIENT, role, text)


def stands_for(echoed: ToolCall, sampled: ToolCall) -> bool:
    """Whether an echoed call of one of our ids tells of `sampled` in a program's own way, run or not."""
    return any(same(echoed, sampled) for same in _SAME_CALL)


def _without(kind: Kind, role: str, text: str) -> str:
    for pattern in _REMOVED[kind][role]:
        text = pattern.sub("", text)
    return text
