"""A Responses reply as the API writes it: the response object, and the events that build one up. Pure.

Source: the models of the `openai` package, whose validation is strict about every field here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from ..records import Completion, FinishReason, JSONObject
from .codec import Event, Incoming
from .responses_items import compaction_item, is_compaction, output_items, response_id, token_logprobs, wants_logprobs
from .responses_tools import offers_of

_PIECE = 1024
"""Characters a delta carries at most: some clients read lines into buffers of 64 KiB."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "summary": ("auto", "concise", "detailed"),
    "verbosity": ("low", "medium", "high"),
    "truncation": ("auto", "disabled"),
}
_HIDDEN: Mapping[str, JSONObject] = {
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": ""},
    "local_shell_call": {"status": "in_progress"},
    "reasoning": {"summary": [], "encrypted_content": None, "status": "in_progress"},
    "compaction": {"encrypted_content": ""},
}
"""What an item has when it is added, before its deltas."""


def response(completion: Completion, incoming: Incoming) -> JSONObject:
    """The whole reply."""
    cut = completion.generation.finish_reason is FinishReason.LENGTH
    told: JSONObject = {
        "id": response_id(completion),
        "created_at": int(completion.started),
        "completed_at": None if cut else int(completion.ended),
        "model": completion.request.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output(completion, incoming),
        "usage": usage(completion),
    }
    return blank(incoming) | told


def output(completion: Completion, incoming: Incoming) -> list[JSONObject]:
    if is_compaction(incoming):
        return [compaction_item(completion)]
    return output_items(completion, incoming, offers_of(incoming))


def usage(completion: Completion) -> JSONObject:
    """True counts of ids. The SDK demands the details as well, which nobody here counts."""
    prompt, sampled = len(completion.prompt_ids), len(completion.generation.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }


def blank(incoming: Incoming) -> JSONObject:
    """A response in which nothing has happened: what the request said, told back in valid shapes only."""
    body = incoming.body
    return {
        "id": "resp_",
        "object": "response",
        "created_at": 0,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": _string(body, "instructions"),
        "max_output_tokens": _whole(body, "max_output_tokens"),
        "max_tool_calls": _whole(body, "max_tool_calls"),
        "metadata": {key: text for key, text in _object(body, "metadata").items() if isinstance(text, str)},
        "model": _string(body, "model") or "",
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": _string(body, "previous_response_id"),
        "prompt_cache_key": _string(body, "prompt_cache_key"),
        "reasoning": {"effort": _one_of("effort", _object(body, "reasoning")), "summary": _summary(body)},
        "safety_identifier": _string(body, "safety_identifier"),
        "service_tier": "default",
        "temperature": _number(body, "temperature"),
        "text": {"format": _format(body), "verbosity": _one_of("verbosity", _object(body, "text"))},
        "tool_choice": _tool_choice(body),
        "tools": list(_tools(body.get("tools"))),
        "top_logprobs": _whole(body, "top_logprobs") or 0,
        "top_p": _number(body, "top_p"),
        "truncation": _one_of("truncation", body) or "disabled",
        "usage": None,
        "user": _string(body, "user"),
    }


# --- the stream -------------------------------------------------------------------------------------------------------


def stream(completion: Completion, incoming: Incoming) -> Iterator[Event]:
    """From `response.created` to the terminal event."""
    return numbered(_stream(completion, incoming))


def numbered(events: Iterable[JSONObject]) -> Iterator[Event]:
    for number, data in enumerate(events):
        yield Event(data | {"sequence_number": number}, data["type"])


def failed(incoming: Incoming, failure: JSONObject) -> Iterator[Event]:
    """The stream of a reply that there is none of: `failure` over what the request says."""
    told = blank(incoming) | {key: value for key, value in failure.items() if key in ("id", "status", "error")}
    opened = {"type": "response.created", "response": told | {"status": "in_progress", "error": None}}
    return numbered([opened, {"type": "response.failed", "response": told}])


def _stream(completion: Completion, incoming: Incoming) -> Iterator[JSONObject]:
    whole = response(completion, incoming)
    began: JSONObject = {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    opened = whole | began | {"incomplete_details": None}
    yield {"type": "response.created", "response": opened}
    yield {"type": "response.in_progress", "response": opened}
    logprobs = token_logprobs(completion) if wants_logprobs(incoming.body) else []
    for index, item in enumerate(whole["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": item | _HIDDEN[item["type"]]}
        at = {"item_id": item["id"], "output_index": index}
        yield from (event | at for event in _parts(item, logprobs))
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _parts(item: JSONObject, logprobs: list[JSONObject]) -> Iterator[JSONObject]:
    """An item's own events, without its place."""
    if item["type"] == "message":
        for number, part in enumerate(item["content"]):
            yield from (event | {"content_index": number} for event in _text(part, logprobs))
    elif item["type"] == "reasoning":
        for number, part in enumerate(item["summary"]):
            yield from (event | {"summary_index": number} for event in _summarised(part))
    elif item["type"] == "function_call":
        yield from _deltas("function_call_arguments", item["arguments"])
        yield {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
    elif item["type"] == "custom_tool_call":
        yield from _deltas("custom_tool_call_input", item["input"])
        yield {"type": "response.custom_tool_call_input.done", "input": item["input"]}


def _text(part: JSONObject, logprobs: list[JSONObject]) -> Iterator[JSONObject]:
    told = [{key: value for key, value in token.items() if key != "bytes"} for token in logprobs]
    deltas = list(_deltas("output_text", part["text"]))
    share = -(-len(told) // len(deltas))
    yield {"type": "response.content_part.added", "part": part | {"text": "", "logprobs": []}}
    for number, delta in enumerate(deltas):
        yield delta | {"logprobs": told[number * share : (number + 1) * share]}
    yield {"type": "response.output_text.done", "text": part["text"], "logprobs": told}
    yield {"type": "response.content_part.done", "part": part}


def _summarised(part: JSONObject) -> Iterator[JSONObject]:
    yield {"type": "response.reasoning_summary_part.added", "part": part | {"text": ""}}
    yield from _deltas("reasoning_summary_text", part["text"])
    yield {"type": "response.reasoning_summary_text.done", "text": part["text"]}
    yield {"type": "response.reasoning_summary_part.done", "part": part}


def _deltas(kind: str, text: str) -> Iterator[JSONObject]:
    for start in range(0, len(text), _PIECE):
        yield {"type": f"response.{kind}.delta", "delta": text[start : start + _PIECE]}


# --- the request told back --------------------------------------------------------------------------------------------


def _tools(raw: Any) -> Iterator[JSONObject]:
    """Those that were offered to the model, as they came in; of their fields those that have a meaning here."""
    for tool in cast("list[JSONObject]", raw) if isinstance(raw, list) else []:
        kind = tool.get("type", "function")
        told = _object(tool, "function") or tool
        named: JSONObject = {
            "type": kind, "name": told.get("name"), "description": _string(told, "description"),
        }  # fmt: skip
        if kind == "function":
            strict = told.get("strict")
            parameters = _schema(told, "parameters")
            yield named | {"parameters": parameters, "strict": strict if isinstance(strict, bool) else None}
        elif kind == "custom":
            yield named | {"format": _custom_format(_object(tool, "format"))}
        elif kind == "namespace":
            inner = [one for one in _tools(tool.get("tools")) if one["type"] in ("function", "custom")]
            yield named | {"description": named["description"] or "", "tools": inner}
        elif kind == "local_shell":
            yield {"type": kind}


def _custom_format(told: JSONObject) -> JSONObject:
    if isinstance(told.get("definition"), str) and told.get("syntax") in ("lark", "regex"):
        return {"type": "grammar", "syntax": told["syntax"], "definition": told["definition"]}
    return {"type": "text"}


def _tool_choice(body: JSONObject) -> str | JSONObject:
    told = _object(body, "tool_choice")
    kind = told.get("type")
    if kind in ("function", "custom"):
        return {"type": kind, "name": told["name"]}
    if kind == "allowed_tools":
        tools: list[JSONObject] = _schema({"tools": {"tools": told.get("tools") or []}}, "tools").get("tools", [])
        return {"type": kind, "mode": told.get("mode") or "auto", "tools": tools}
    return _string(body, "tool_choice") or "auto"


def _format(body: JSONObject) -> JSONObject:
    told = _object(_object(body, "text"), "format")
    if told.get("type") == "json_schema" and isinstance(told.get("name"), str):
        return {"type": "json_schema", "name": told["name"], "schema": _schema(told, "schema")}
    return {"type": "json_object"} if told.get("type") == "json_object" else {"type": "text"}


def _summary(body: JSONObject) -> str | None:
    told = _object(body, "reasoning")
    return _one_of("summary", told) or _one_of("summary", {"summary": told.get("generate_summary")})


def _one_of(name: str, holder: JSONObject) -> str | None:
    value = holder.get(name)
    return value if value in _CHOICES[name] else None


def _object(holder: JSONObject, name: str) -> JSONObject:
    value = holder.get(name)
    return cast("JSONObject", value) if isinstance(value, dict) else {}


def _schema(holder: JSONObject, name: str) -> JSONObject:
    """Requests may hold NaN, which no answer can."""
    value = _object(holder, name)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {}
    return value


def _string(holder: JSONObject, name: str) -> str | None:
    value = holder.get(name)
    return value if isinstance(value, str) else None


def _whole(holder: JSONObject, name: str) -> int | None:
    value = holder.get(name)
    return (
        int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1 else None
    )


def _number(holder: JSONObject, name: str) -> float:
    value = holder.get(name)
    return float(value) if isinstance(value, int | float) else 1.0
