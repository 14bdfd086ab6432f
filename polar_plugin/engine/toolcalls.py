"""Tool calls and reasoning, read out of a sampled turn.

A call is either whole (a name, and arguments that are a JSON object) or it stays text and is counted as malformed:
half a call never reaches a harness. Parsers read *text*, so that a tag which the model spelled in several tokens
counts as the engines' own parsers count it.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..errors import ConfigError
from ..records import JSONObject, Tool, ToolCall
from .tokenizer import Tokenizer

UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError)
"""What a parser may raise over sampled nonsense."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a turn says, its reasoning aside."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: int = 0


ToolParser = Callable[[str, Sequence[Tool]], Found]


def tool_json(tools: Sequence[Tool]) -> list[JSONObject]:
    """Tool definitions as chat templates expect them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in tools
    ]


def tool_parser(name: str, tokenizer: Tokenizer) -> ToolParser:
    """The parser of one call format. Raises ConfigError that lists the names."""
    name = _ALIASES.get(name, name)
    if name in _TEXT:
        return _TEXT[name]
    if name not in _LIBRARY:
        names = sorted({*_TEXT, *_LIBRARY, *_ALIASES})
        raise ConfigError(f"renderer.tool_parser: unknown {name!r}; use one of {', '.join(names)}")
    marker = _LIBRARY[name]
    if tokenizer.token(marker) is None:
        raise ConfigError(f"renderer.tool_parser: {name!r} needs a token {marker!r}, which this tokenizer lacks")
    return lambda text, tools: _by_library(name, tokenizer, text, tools)


def guess_tool_parser(template: str) -> str:
    """The call format that a chat template's text shows; "none" where it shows none we can read."""
    marks = (
        ("<function=", "qwen3.5"),
        ("<arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3"),
        ("<tool_call>", "hermes"),
        ('"parameters"', "llama-3"),
    )
    return next((name for mark, name in marks if mark in template), "none")


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str, bool]:
    """(reasoning, the rest, whether the reasoning is still open) of a turn with one leading <think> block.

    `opened`: the prompt opened the block already. A tool call ends a block that nothing else ends.
    """
    start = len(text) - len(text.lstrip())
    if text.startswith("<think>", start):
        start += len("<think>")
    elif not opened:
        return "", text, False
    for mark, skip in (("</think>", len("</think>")), ("<tool_call>", 0)):
        end = text.find(mark, start)
        if end >= 0:
            return text[start:end].strip(), text[end + skip :], False
    return text[start:].strip(), "", True


def call_of(name: Any, arguments: Any, raw: str, identity: str = "") -> ToolCall | None:
    """A whole call, its arguments as the model wrote them in `raw`; None where it is no call a harness could run."""
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):  # a JSON object in a JSON string: some models write it twice encoded
        raw, arguments = arguments, _object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    text = _slice(raw, cast("JSONObject", arguments))
    return None if text is None else ToolCall(name, text, identity)


def gather(tokenizer: Tokenizer, ids: Sequence[int], content: str, attempts: Sequence[Any]) -> Found:
    """What `renderers` parsed out of `ids` (stop tokens stripped), with nothing lost: malformed calls stay text.

    `attempts` are its ParsedToolCall records in order.
    """
    calls: list[ToolCall] = []
    rest: list[str] = [content]
    malformed, end = 0, len(ids)
    for attempt in attempts:
        call = _attempted(attempt)
        if call is not None:
            calls.append(call)
        else:
            malformed += 1
            span = attempt.token_span
            rest.append(tokenizer.decode(ids[span[0] : span[1]]) if span else attempt.raw)
        end = attempt.token_span[1] if attempt.token_span else len(ids)
    trailing = tokenizer.decode(ids[end:]).strip() if tokenizer.token(_OPEN) is not None else ""
    if trailing not in content:  # said after the last call: some formats drop it
        rest.append(trailing)
    return Found("\n".join(part for part in rest if part), tuple(calls), malformed)


def without_half_call(content: str) -> str:
    """The text of a turn that was cut by length or a stop string, without the call in which it was cut.

    Its markup would be shown as an answer, echoed, and read by the model as its own way to write.
    """
    starts = (content.rfind(mark) for mark in _OPENINGS)
    if still_open := [at for at in starts if at >= 0 and not any(mark in content[at:] for mark in _CLOSINGS)]:
        return content[: min(still_open)].rstrip()
    said = content.lstrip()
    if said.startswith(("{", _PYTHON_TAG)) and _begins_llama_call(said.removeprefix(_PYTHON_TAG).strip()):
        return ""
    cut = (size for mark in _OPENINGS for size in range(len(mark) - 1, 4, -1) if content.endswith(mark[:size]))
    return content[: len(content) - next(cut, 0)].rstrip()


# --- formats read from text -------------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_OPENINGS = (
    _OPEN, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|tool_calls_section_begin|>", "<function=",
    "<|start|>assistant",
)  # fmt: skip
_CLOSINGS = (_CLOSE, "<｜tool▁call▁end｜>", "<|tool_call_end|>", "<|call|>")
_SPACE = re.compile(r"\s*")
_FIRST_KEY = re.compile(r'\{\s*"?(\w*)')
_BETWEEN = re.compile(r"[\s;]*")
_END = re.compile(r"\s*" + _CLOSE)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _hermes(text: str, tools: Sequence[Tool]) -> Found:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text, any number of times."""
    rest: list[str] = []
    calls: list[ToolCall] = []
    malformed = at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        rest.append(text[at:start].strip())
        call, at = _hermes_call(text, start)
        if call is None:
            malformed += 1
            rest.append(text[start:at])
        else:
            calls.append(call)
    rest.append(text[at:].strip())
    malformed += any(rest[-1].endswith(_OPEN[:size]) for size in range(5, len(_OPEN)))  # cut inside the opening tag
    return Found("\n".join(part for part in rest if part), tuple(calls), malformed)


def _hermes_call(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose tag opens at `start`, and where it ends; (None, end) where it is malformed."""
    body = _SPACE.match(text, start + len(_OPEN))
    begin = body.end() if body else start
    try:
        value, stop = _JSON.raw_decode(text, begin)
        close = _END.match(text, stop)
        call = _from_object(value, text[begin:stop])
        if close and call:
            return call, close.end()
    except UNREADABLE:
        pass
    ends = (text.find(_OPEN, begin), text.find(_CLOSE, begin))
    following, closing = (len(text) if end < 0 else end for end in ends)
    return None, following if following < closing else min(closing + len(_CLOSE), len(text))


def _llama(text: str, tools: Sequence[Tool]) -> Found:
    """The whole turn is `{"name": ..., "parameters": {...}}`, or several of them with ";" between."""
    said = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not said.startswith("{"):
        return Found(text.strip())
    calls: list[ToolCall] = []
    at = 0
    try:
        while at < len(said):
            value, stop = _JSON.raw_decode(said, at)
            call = _from_object(value, said[at:stop])
            if call is None:
                raise ValueError("no call")
            calls.append(call)
            gap = _BETWEEN.match(said, stop)
            at = gap.end() if gap else stop
    except UNREADABLE:
        return Found(text.strip(), malformed=int(_begins_llama_call(said)))
    return Found("", tuple(calls))


def _begins_llama_call(said: str) -> bool:
    """Whether an object's first key is one of a call's, or was cut before it could be told."""
    begin = _FIRST_KEY.match(said)
    keys = ("name", "type", "function")
    cut = begin is not None and begin.end() == len(said)
    return begin is not None and any(key == begin[1] or (cut and key.startswith(begin[1])) for key in keys)


def _none(text: str, tools: Sequence[Tool]) -> Found:
    return Found(text.strip())


def _from_object(value: Any, raw: str) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    said = cast("JSONObject", value)
    return call_of(said.get("name"), said.get("arguments", said.get("parameters", {})), raw)


# --- formats that `renderers` reads -----------------------------------------------------------------------------------


def _by_library(name: str, tokenizer: Tokenizer, text: str, tools: Sequence[Tool]) -> Found:
    ids = tokenizer.encode(text)
    try:
        parsed = _library_parse(name, tokenizer, ids, tool_json(tools))
    except UNREADABLE:
        return Found(text.strip(), malformed=1)
    return gather(tokenizer, ids, parsed.content, parsed.tool_calls)


def _library_parse(name: str, tokenizer: Tokenizer, ids: list[int], tools: list[Any]) -> Any:
    from renderers import parsing

    def token(text: str) -> int:
        index = tokenizer.token(text)
        return -1 if index is None else index

    parse: Any = getattr(parsing, f"parse_{name.replace('-', '_').replace('.', '')}")
    if name == "deepseek-v3":
        marks = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
        keys = {f"tool_{mark.replace('▁', '_')}_id": token(f"<｜tool▁{mark}｜>") for mark in marks}
        return parse(tokenizer.hf, ids, stop_ids=set[int](), **keys)
    keys = {"think_id": token("<think>"), "think_end_id": token("</think>")}
    keys |= {"tool_call_id": token(_OPEN), "tool_call_end_id": token(_CLOSE)}
    if name == "glm":
        keys |= {f"arg_{part}_id": token(f"<arg_{part}>") for part in ("key", "value")}
        keys |= {f"arg_{part}_end_id": token(f"</arg_{part}>") for part in ("key", "value")}
    return parse(tokenizer.hf, ids, stop_ids=set[int](), tools=tools, **keys)


def _attempted(attempt: Any) -> ToolCall | None:
    """The call of one ParsedToolCall. A name that is not among the tools is the harness's to refuse."""
    lost = "<parameter=" in attempt.raw and attempt.raw.count("<parameter=") != attempt.raw.count("</parameter>")
    typed = attempt.status == "invalid_json" and isinstance(attempt.arguments, dict)  # a value against its schema
    if lost or not (typed or attempt.status in ("ok", "unknown_tool")):
        return None
    return call_of(attempt.name, attempt.arguments, attempt.raw, attempt.id or "")


_TEXT: Mapping[str, ToolParser] = {"hermes": _hermes, "llama-3": _llama, "none": _none}
_LIBRARY: Mapping[str, str] = {"qwen3.5": _OPEN, "glm": "<arg_key>", "deepseek-v3": "<｜tool▁calls▁begin｜>"}
_ALIASES: Mapping[str, str] = {
    "qwen3": "hermes",
    "qwen25": "hermes",
    "qwen3_coder": "qwen3.5",
    "glm45": "glm",
    "glm47": "glm",
    "deepseekv3": "deepseek-v3",
    "llama3": "llama-3",
}


# --- raw argument text ------------------------------------------------------------------------------------------------


def _slice(raw: str, arguments: JSONObject) -> str | None:
    """The text in `raw` that reads as `arguments`; their JSON where the format did not write them as JSON.

    None where they have no JSON (NaN).
    """
    at = raw.find("{")
    for _ in range(3):  # the arguments are the outermost object, or a member of it
        if at < 0:
            break
        try:
            value, stop = _JSON.raw_decode(raw, at)
        except UNREADABLE:
            break
        if value == arguments:
            return raw[at:stop]
        at = raw.find("{", at + 1)
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except UNREADABLE:
        return None


def _object(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except UNREADABLE:
        return None
