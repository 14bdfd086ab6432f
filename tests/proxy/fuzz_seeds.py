"""What is mutated: recorded requests of real agent programs, cut to their structure, and one rich request a dialect."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.recorded.replay import load, recordings

from . import fuzz_deep
from .responses_wire import TOOLS

JSON = dict[str, Any]
DIALECTS = ("anthropic_messages", "openai_chat", "openai_responses", "google_generate")
_SHORT, _FEW, _LAST = 40, 3, 6
_OPAQUE = frozenset({"signature", "encrypted_content", "thoughtSignature", "data", "arguments"})
_PREFIXES = {
    "/v1/messages": "anthropic_messages",
    "/v1/chat/": "openai_chat",
    "/v1/responses": "openai_responses",
    "/v1beta/": "google_generate",
}
_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "x-goog-api-key", "accept-encoding", "content-type"})
PNG = "iVBORw0KGgo="


@dataclass(frozen=True, slots=True)
class Seed:
    """A request that is good."""

    name: str
    path: str
    """With its query."""
    body: JSON
    headers: dict[str, str] = field(default_factory=dict[str, str])


@functools.cache
def seeds(dialect: str) -> tuple[Seed, ...]:
    """Hand-written ones first; of the recorded ones each structure once."""
    found = {_shape(seed.body): seed for seed in _recorded(dialect)}
    return (*_written(dialect), *found.values())


def _recorded(dialect: str) -> Iterator[Seed]:
    for name in recordings():
        for number, one in enumerate(load(name)):
            spoken = next((of for prefix, of in _PREFIXES.items() if one.path.startswith(prefix)), None)
            if one.method == "POST" and spoken == dialect:
                headers = {key: value for key, value in one.headers if key.lower() not in _SECRET_HEADERS}
                yield Seed(f"{name}/{number}", one.path, _cut(one.body), headers)


def _cut(value: Any, key: str = "") -> Any:
    """The structure: short texts, few tools and properties, the beginning and the end of a conversation."""
    if isinstance(value, str):
        return value if len(value) <= _SHORT or key in _OPAQUE else f"{value[: _SHORT - 10]}{value[-10:]}"
    if isinstance(value, list):
        few = value if len(value) <= _LAST else [*value[:2], *value[2 - _LAST :]]
        return [_cut(one) for one in (value[:_FEW] if key in ("tools", "functionDeclarations", "required") else few)]
    if isinstance(value, dict):
        kept = list(value.items())[: _FEW if key == "properties" else None]
        return {name: _cut(one, name) for name, one in kept}
    return value


def _shape(value: Any) -> str:
    """Equal for bodies that differ in texts only."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shape(one)}" for key, one in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dict.fromkeys(map(_shape, value))) + "]"
    return type(value).__name__


def _written(dialect: str) -> Iterator[Seed]:
    if dialect == "google_generate":
        for method in ("generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"):
            yield Seed(f"written/{method}", f"/v1beta/models/policy:{method}", GOOGLE)
        yield Seed("written/deep", "/v1beta/models/policy:generateContent", fuzz_deep.GOOGLE)
        yield Seed("written/snake", "/v1/models/policy:generateContent", _snake(GOOGLE))
        yield Seed("written/count", "/v1beta/models/policy:countTokens", {"generateContentRequest": GOOGLE})
        return
    body, deep, paths = {
        "anthropic_messages": (ANTHROPIC, fuzz_deep.ANTHROPIC, ("/v1/messages", "/v1/messages/count_tokens")),
        "openai_chat": (CHAT, fuzz_deep.CHAT, ("/v1/chat/completions",)),
        "openai_responses": (
            RESPONSES,
            fuzz_deep.RESPONSES,
            ("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
        ),
    }[dialect]
    for path in paths:
        yield Seed(f"written{path}", path, body | {"stream": False})
    yield Seed("written/streamed", paths[0], body | {"stream": True})
    yield Seed("written/deep", paths[0], deep | {"stream": True})


def _snake(value: Any) -> Any:
    """The other spelling that Google's API takes."""
    if isinstance(value, list):
        return [_snake(one) for one in value]
    if not isinstance(value, dict):
        return value
    told = json.dumps(list(value))
    names = json.loads("".join(f"_{c.lower()}" if c.isupper() else c for c in told))
    return {name: _snake(one) for name, one in zip(names, value.values(), strict=True)}


SCHEMA: JSON = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What to run."}, "timeout": {"type": "number"}},
    "required": ["command"],
}
ARGUMENTS: JSON = {"command": "ls é", "timeout": 1.5}
ANTHROPIC: JSON = {
    "model": "claude-x", "max_tokens": 99, "temperature": 1, "top_p": 0.9, "top_k": 5, "stop_sequences": ["END"],
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;\nBe brief.", "cache_control": {}}],
    "thinking": {"type": "enabled", "budget_tokens": 10}, "metadata": {"user_id": "u"},
    "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
    "tools": [
        {"name": "bash", "description": "Run it.", "input_schema": SCHEMA},
        {"name": "later", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {"type": "document", "source": {"type": "text", "data": "x"}}, {"type": "text", "text": "see"}]},
        {"role": "system", "content": "More."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": "pp1-aG0="},
            {"type": "redacted_thinking", "data": "pp1-aG0="}, {"type": "text", "text": "look"},
            {"type": "tool_use", "id": "t1", "name": "bash", "input": ARGUMENTS},
            {"type": "tool_use", "id": "t2", "name": "bash", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [
                {"type": "text", "text": "no"}, {"type": "image", "source": {"type": "url", "url": "http://x/y"}},
                {"type": "tool_reference", "tool_name": "later"}]},
            {"type": "tool_result", "tool_use_id": "t1", "content": "a\nb"}, {"type": "text", "text": "go on"}]},
    ],
}  # fmt: skip
CHAT: JSON = {
    "model": "policy", "temperature": 0.5, "top_p": 1, "top_k": 3, "max_tokens": 50, "max_completion_tokens": 40,
    "n": 1, "stop": ["END", ""], "seed": 7, "logprobs": True, "top_logprobs": 2, "user": "u", "store": False,
    "stream_options": {"include_usage": True}, "response_format": {"type": "json_object"},
    "tool_choice": {"type": "function", "function": {"name": "bash"}}, "parallel_tool_calls": True,
    "tools": [
        {"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": SCHEMA}},
        {"type": "custom", "custom": {"name": "free"}},
    ],
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm ", "refusal": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": json.dumps(ARGUMENTS)}},
            {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a", "name": "bash"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}], "reasoning": "so"},
        {"role": "user", "content": "go on", "name": "bob"},
    ],
}  # fmt: skip
RESPONSES: JSON = {
    "model": "policy", "instructions": "Be brief.", "store": False, "temperature": 1, "top_p": 0.5,
    "max_output_tokens": 99, "parallel_tool_calls": True, "truncation": "auto", "prompt_cache_key": "k",
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "metadata": {"a": "b"},
    "reasoning": {"effort": "high", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]},
    "tools": [*TOOLS, {"type": "web_search"}],
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}]},
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, "x"]},
        {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "hm"}],
         "encrypted_content": "polar.reasoning.1.x.eA=="},
        {"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "look", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_0", "call_id": "c1", "name": "bash", "arguments": json.dumps(ARGUMENTS)},
        {"type": "custom_tool_call", "id": "ctc_0", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call", "id": "fc_1", "call_id": "c3", "name": "spawn", "namespace": "agents",
         "arguments": "{}"},
        {"type": "local_shell_call", "id": "lsh_0", "call_id": "c4", "status": "completed",
         "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 10}},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "local_shell_call_output", "id": "c4", "output": "ok"},
        {"type": "compaction", "encrypted_content": "polar.compaction.1.x.eA=="},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ],
}  # fmt: skip
GOOGLE: JSON = {
    "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
    "generationConfig": {
        "temperature": 1, "topP": 0.9, "topK": 5, "maxOutputTokens": 50, "stopSequences": ["END"], "seed": 1,
        "candidateCount": 1, "responseMimeType": "text/plain", "thinkingConfig": {"includeThoughts": True},
    },
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash"]}},
    "safetySettings": [],
    "tools": [
        {"functionDeclarations": [
            {"name": "bash", "description": "Run it.", "parametersJsonSchema": SCHEMA},
            {"name": "look", "parameters": {"type": "OBJECT", "nullable": True, "properties": {
                "n": {"type": "INTEGER", "enum": [1], "minItems": "1"}}, "propertyOrdering": ["n"]}}]},
        {"googleSearch": {}},
    ],
    "contents": [
        {"role": "user", "parts": [
            {"text": "see"}, {"inlineData": {"mimeType": "image/png", "data": PNG}},
            {"fileData": {"mimeType": "text/plain", "fileUri": "gs://x"}}]},
        {"role": "model", "parts": [
            {"text": "hm", "thought": True}, {"text": "look", "thoughtSignature": "c2ln"},
            {"functionCall": {"id": "c1", "name": "bash", "args": ARGUMENTS}, "thoughtSignature": "c2ln"},
            {"functionCall": {"name": "look", "args": {}}}]},
        {"role": "user", "parts": [
            {"functionResponse": {"name": "look", "response": {"output": "b"}}},
            {"functionResponse": {"id": "c1", "name": "bash", "response": {"result": ["a", {"b": 1}]}, "parts": [
                {"inlineData": {"mimeType": "image/png", "data": PNG}}]}}]},
        {"role": "user", "parts": [{"text": "go on"}]},
    ],
}  # fmt: skip
