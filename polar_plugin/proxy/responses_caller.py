"""Who makes a Responses call: its thread, and what it is for, as headers tell. Pure."""

from __future__ import annotations

import json
from typing import cast

from ..records import JSONObject, Role
from .codec import Incoming

_SIDE_AGENTS = frozenset({"memory_consolidation"})
_AGENTS = {"x-codex-parent-thread-id": "thread-id", "x-parent-session-id": "x-session-id"}
"""Headers that only a sub-agent's calls have, and the header that names its own thread."""


def caller(incoming: Incoming) -> tuple[str, Role]:
    """The thread, "" for the main one, and what the call is for. Nothing that a header says can fail a request."""
    headers, turn = incoming.headers, _turn_metadata(incoming)
    agent = headers.get("x-openai-subagent", "")
    thread = next(
        (headers.get(own, "") or parent for mark, own in _AGENTS.items() if (parent := headers.get(mark))), ""
    )
    if agent not in ("", "compact") and not thread:
        thread = headers.get("thread-id", "") or agent
    kind = turn.get("request_kind")
    if kind == "compaction" or agent == "compact":
        return thread, Role.COMPACTION
    if kind == "prewarm" or agent in _SIDE_AGENTS:
        return thread, Role.SIDE
    return thread, Role.SUB_AGENT if thread else Role.MAIN


def _turn_metadata(incoming: Incoming) -> JSONObject:
    """Codex's own; {} where there is none that can be read."""
    try:
        value = json.loads(incoming.headers.get("x-codex-turn-metadata", ""))
    except (ValueError, RecursionError):
        return {}
    return cast("JSONObject", value) if isinstance(value, dict) else {}
