"""Replies of all kinds for Anthropic's dialect, and the ways in which its clients say them back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from polar_plugin.records import Message, ToolCall

HELLO: dict[str, Any] = {"model": "policy", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]}

LIST = ToolCall("bash", '{"command": "ls", "timeout": 1.0}', id="call_1")
READ = ToolCall("read", '{"path": "a \\u00e9 \\ud83d\\ude00.py", "lines": [1, 2]}', id="call_2")
NOTHING = ToolCall("look_around", "{}", id="call_3")

REPLIES = {
    "text": Message("assistant", "hello"),
    "reasoning": Message("assistant", "four", "two and two"),
    "one call": Message("assistant", "", "", (LIST,)),
    "text, reasoning and several calls": Message("assistant", "look:", "hmm", (LIST, READ, NOTHING)),
    "empty text with calls": Message("assistant", "", "thought", (LIST, READ)),
    "blank text with calls": Message("assistant", " \n\n", "thought", (LIST,)),
    "a call without arguments": Message("assistant", "", "", (NOTHING,)),
    "nothing at all": Message("assistant"),
    "only reasoning": Message("assistant", "", "thought"),
    "unicode": Message("assistant", "π 😀 \u2028 \u0000 \x85 日本語" * 400, "思考 😀"),
    "a long text": Message("assistant", "word " * 5000, "thought " * 9000),
    "long arguments": Message("assistant", "", "", (ToolCall("w", json.dumps({"t": "é😀\n" * 3000}), id="c9"),)),
}


def texts(*, surrogates: bool) -> st.SearchStrategy[str]:
    characters = st.characters(exclude_categories=() if surrogates else ("Cs",))
    return st.text(characters).flatmap(lambda text: st.sampled_from([1, 1, 1, 900]).map(lambda times: text * times))


def json_values(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    exact = st.integers(-(2**53) + 1, 2**53 - 1)  # beyond it JavaScript has other numbers
    leaves = st.none() | st.booleans() | exact | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=8)


def replies(*, surrogates: bool = False, arguments: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[Message]:
    """Any of reasoning, text and 0 to 8 calls whose arguments are a JSON object, or `arguments`."""
    text = texts(surrogates=surrogates)
    name = st.text(st.characters(exclude_categories=() if surrogates else ("Cs",)), min_size=1)
    objects = st.dictionaries(text, json_values(text), max_size=4).map(json.dumps) | st.just("")
    call = st.builds(ToolCall, name=name, arguments=objects if arguments is None else arguments, id=st.uuids().map(str))
    return st.builds(
        Message,
        role=st.just("assistant"),
        content=text,
        reasoning=text,
        tool_calls=st.lists(call, max_size=8).map(tuple),
    )


Echo = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Blocks of a reply to the messages that say it back."""


def one_message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": content}]


def reserialised(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments parsed and written by another language: other key order, 1.0 as 1."""
    out = copy.deepcopy(blocks)
    for block in out:
        if block["type"] == "tool_use":
            block["input"] = _turned(block["input"])
    return one_message([dict(reversed(block.items())) for block in out])


def _turned(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(value)}
    return [_turned(item) for item in value] if isinstance(value, list) else value


def without_thinking(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([block for block in blocks if block["type"] != "thinking"])


def thinking_omitted(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([block | ({"thinking": ""} if block["type"] == "thinking" else {}) for block in blocks])


def thinking_redacted(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([
        {"type": "redacted_thinking", "data": block["signature"]} if block["type"] == "thinking" else block
        for block in blocks
    ])  # fmt: skip


def text_as_a_string(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said = [block for block in blocks if block["type"] != "thinking"]
    return one_message(said[0]["text"] if [block["type"] for block in said] == ["text"] else blocks)


def text_trimmed(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([b | {"text": b["text"].strip()} if b["type"] == "text" else b for b in blocks])


def blank_text_between(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([one for block in blocks for one in ({"type": "text", "text": "\n"}, block)])


def text_behind_calls(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message(sorted(blocks, key=lambda block: block["type"] == "text"))


def cache_control_at_the_end(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([*blocks[:-1], *({**b, "cache_control": {"type": "ephemeral"}} for b in blocks[-1:])])


def a_message_a_block(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [block]} for block in blocks] or one_message([])


def with_nulls(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return one_message([{**block, "citations": None, "caller": None} for block in blocks])


ECHOES: list[Echo] = [
    one_message, reserialised, without_thinking, thinking_omitted, thinking_redacted, text_as_a_string, text_trimmed,
    blank_text_between, text_behind_calls, cache_control_at_the_end, a_message_a_block, with_nulls,
]  # fmt: skip
