"""What a model call is for, where its request tells: a table of the marks that agent programs leave. Pure.

A mark is a few words that a program puts into calls of one purpose, with the version it was seen in. What no mark tells
follows from where the call stands in its session (`engine.history`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..records import ChatRequest, Message, Role


class Where(enum.Enum):
    """Which text of a request has the words."""

    SYSTEM = enum.auto()
    """One of its first system messages."""
    LAST = enum.auto()
    """Its last message."""
    FIRST = enum.auto()
    """Its first user message."""


@dataclass(frozen=True, slots=True)
class Mark:
    """`words` stand in the text at `where`; with `begins`, at its beginning."""

    harness: str
    version: str
    role: Role
    where: Where
    words: str
    begins: bool = False
    tools: bool = True
    """Whether such a call may have tools; one that may not is no such call where it has."""
    max_tokens: int | None = None
    """The limit that such a call asks for, where it is part of the mark."""


CLAUDE, CODEX, GEMINI = ("Claude Code", "2.1.332"), ("Codex", "0.171.0"), ("Gemini CLI", "0.61.0")
QWEN, OPENCODE, PI = ("Qwen Code", "0.24.4"), ("opencode", "1.18.33"), ("Pi", "1.6.0")
SIDE, COMPACTION = Role.SIDE, Role.COMPACTION

MARKS: tuple[Mark, ...] = (
    Mark(*CLAUDE, COMPACTION, Where.LAST, "CRITICAL: Respond with TEXT ONLY"),
    Mark(*CLAUDE, COMPACTION, Where.LAST, "Your task is to create a detailed summary of the conversation"),
    Mark(*CLAUDE, COMPACTION, Where.SYSTEM, "tasked with summarizing conversations", tools=False),
    Mark(*CODEX, COMPACTION, Where.LAST, "You are performing a CONTEXT CHECKPOINT COMPACTION"),
    Mark(*QWEN, COMPACTION, Where.SYSTEM, "You are the component that summarizes"),
    Mark(*QWEN, COMPACTION, Where.LAST, "You are the component that summarizes"),
    Mark(*GEMINI, COMPACTION, Where.SYSTEM, "responsible for distilling chat history"),
    Mark(*PI, COMPACTION, Where.SYSTEM, "You are a context summarization assistant", begins=True, tools=False),
    Mark(*OPENCODE, COMPACTION, Where.SYSTEM, "You are a context summarization agent", begins=True, tools=False),
    Mark(*OPENCODE, SIDE, Where.SYSTEM, "You are a title generator", begins=True, tools=False),
    Mark("opencode", "0.x", SIDE, Where.FIRST, "Generate a title for this conversation", begins=True, tools=False),
    Mark("Claude Code", "1.x", SIDE, Where.SYSTEM, "new conversation topic", tools=False),
    Mark("Claude Code", "1.x", SIDE, Where.LAST, "5-10 word title", tools=False),
    Mark(*CLAUDE, SIDE, Where.SYSTEM, "sentence-case title", tools=False),
    Mark(*CLAUDE, SIDE, Where.LAST, "[SUGGESTION MODE:", begins=True),
    Mark(*CLAUDE, SIDE, Where.LAST, "quota", begins=True, tools=False, max_tokens=1),
    Mark(*GEMINI, SIDE, Where.SYSTEM, "Task Routing AI", tools=False),
    Mark(*GEMINI, SIDE, Where.LAST, "structure of your immediately preceding response", tools=False),
    Mark(*GEMINI, SIDE, Where.SYSTEM, "debugging and correcting failed search-and-replace", tools=False),
    Mark(*QWEN, SIDE, Where.SYSTEM, "managed memory extraction subagent"),
)
_SYSTEMS = tuple(mark for mark in MARKS if mark.where is Where.SYSTEM)
_LASTS = tuple(mark for mark in MARKS if mark.where is Where.LAST)
_FIRSTS = tuple(mark for mark in MARKS if mark.where is Where.FIRST)


def told(request: ChatRequest) -> Role | None:
    """The role that the request tells by itself; None where only its place in the session does.

    A dialect that reads it from a header (`ChatRequest.role`) is believed. A sub-agent's header says whose call it is,
    not what it is for: a sub-agent's compaction is a compaction.
    """
    if request.role in (Role.SIDE, Role.COMPACTION):
        return request.role
    whose = request.role if request.role is Role.SUB_AGENT else None
    return _for(request) or whose


def _for(request: ChatRequest) -> Role | None:
    """What a call is for, by the marks."""
    for message in _system(request):
        if (role := _marked(_SYSTEMS, message.content, request)) is not None:
            return role
    user = next((message for message in request.messages if message.role == "user"), None)
    if user and (role := _marked(_FIRSTS, user.content, request)) is not None:
        return role
    last = request.messages[-1] if request.messages else None
    return _marked(_LASTS, last.content, request) if last and last.role in ("user", "system") else None


def thread_role(request: ChatRequest) -> Role | None:
    """The role of a conversation that its program names: its main one has no name (`ChatRequest.thread`)."""
    return Role.SUB_AGENT if request.thread else None


def _system(request: ChatRequest) -> list[Message]:
    found: list[Message] = []
    for message in request.messages:
        if message.role != "system":
            break
        found.append(message)
    return found


def _marked(marks: tuple[Mark, ...], text: str, request: ChatRequest) -> Role | None:
    for mark in marks:
        if request.tools and not mark.tools:
            continue
        if mark.max_tokens is not None and request.sampling.max_tokens != mark.max_tokens:
            continue
        if text.lstrip().startswith(mark.words) if mark.begins else mark.words in text:
            return mark.role
    return None
