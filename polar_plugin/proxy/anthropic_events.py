"""How a reply is written in Anthropic Messages, and how what harnesses echo of it is read back.

Reasoning comes first, then text, then the calls, whichever of them say something: the API has no empty blocks, and
clients that are given one send it back and fail.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ..records import Completion, FinishReason, JSONObject
from .codec import Event

_PIECE = 1024
"""Characters a delta carries at most: some clients read lines into buffers of 64 KiB."""
_SEALED = 24 * 1024
"""Bytes of reasoning that a signature can carry; it is one event, so that a longer one would be too long a line."""
_SEAL, _MARK = "pp1-", "pp0-"
"""What a signature begins with that restores its reasoning, and one that does not."""
_NOT_AN_OBJECT = "__arguments__"
_DEPTH = 100
"""Nesting of arguments that is sent as JSON: what is echoed must stay below the proxy's own limit for a body."""
_EMPTY: Mapping[str, JSONObject] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
"""What a block lacks when it starts; its deltas add it."""


def message(completion: Completion) -> JSONObject:
    """The whole reply."""
    reason, sequence = _stop(completion)
    return _envelope(completion) | {
        "content": list(_blocks(completion)),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(completion),
    }


def events(completion: Completion) -> Iterator[Event]:
    """The reply as a stream: `message_start`, each block from start to stop, `message_delta`, `message_stop`."""
    usage = _usage(completion)
    opened: JSONObject = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage | {"output_tokens": 0},
    }
    yield _event("message_start", {"message": _envelope(completion) | opened})
    for index, block in enumerate(_blocks(completion)):
        start: JSONObject = _EMPTY[block["type"]]
        yield _event("content_block_start", {"index": index, "content_block": block | start})
        for delta in _deltas(block):
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    reason, sequence = _stop(completion)
    yield _event("message_delta", {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage})
    yield _event("message_stop", {})


def seal(reasoning: str) -> str:
    """The signature of a thinking block: ours, the same for the same reasoning, and enough to restore it.

    Reasoning beyond 24 KiB gets a digest, which restores nothing.
    """
    data = reasoning.encode("utf-8", "surrogatepass")
    if len(data) > _SEALED:
        return _MARK + hashlib.blake2b(data, digest_size=24).hexdigest()
    return _SEAL + base64.b64encode(data).decode("ascii")


def unsealed(signature: str) -> str | None:
    """The reasoning that `seal` put into a signature; None where it is none of ours, or carries none."""
    if not signature.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(signature[len(_SEAL) :], validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return None


def tool_input(arguments: str) -> JSONObject:
    """The arguments of a call as an object. What is none, or none that JSON can carry, goes under one key as text."""
    try:
        value = _JSON.decode(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return cast("JSONObject", value) if isinstance(value, dict) and _plain(value) else {_NOT_AN_OBJECT: arguments}


def tool_arguments(value: Mapping[str, Any]) -> str:
    """The arguments that `tool_input` made `value` of; those of an echo, since their spelling is the client's."""
    text = value.get(_NOT_AN_OBJECT)
    if len(value) == 1 and isinstance(text, str):
        return text
    return json.dumps(value, ensure_ascii=False)


def _event(kind: str, data: JSONObject) -> Event:
    return Event({"type": kind} | data, name=kind)


def _envelope(completion: Completion) -> JSONObject:
    return {
        "id": completion.id if completion.id.startswith("msg_") else f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "model": completion.request.model,
    }


def _blocks(completion: Completion) -> Iterator[JSONObject]:
    reply = completion.reply
    if reply.reasoning.strip():
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": seal(reply.reasoning)}
    if reply.content.strip():
        yield {"type": "text", "text": reply.content}
    for index, call in enumerate(reply.tool_calls):
        call_id = call.id or f"toolu_{completion.id}_{index}"
        yield {"type": "tool_use", "id": call_id, "name": call.name, "input": tool_input(call.arguments)}


def _deltas(block: JSONObject) -> Iterator[JSONObject]:
    if block["type"] == "thinking":
        yield from ({"type": "thinking_delta", "thinking": piece} for piece in _pieces(block["thinking"]))
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "text":
        yield from ({"type": "text_delta", "text": piece} for piece in _pieces(block["text"]))
    else:  # "{}" where there are no arguments: nothing at all makes some clients drop the call
        text = json.dumps(block["input"], ensure_ascii=False)
        yield from ({"type": "input_json_delta", "partial_json": piece} for piece in _pieces(text))


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def _stop(completion: Completion) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. A cut turn says so even where it holds whole calls; calls are to be run even
    where a stop string ended the turn; a stop string of the trainer's own is no matter of the client's."""
    generation = completion.generation
    if generation.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if completion.reply.tool_calls:
        return "tool_use", None
    if generation.stop is not None and generation.stop in completion.request.sampling.stop:
        return "stop_sequence", generation.stop
    return "end_turn", None


def _usage(completion: Completion) -> JSONObject:
    """True counts of ids. The API's input is the sum of the first three; nothing here is billed as a cache's."""
    return {
        "input_tokens": len(completion.prompt_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(completion.generation.output_ids),
    }


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _plain(value: Any, depth: int = _DEPTH) -> bool:
    """Whether JSON can carry it: no infinity (1e999 is read as one), not too deep."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        children = list(cast("JSONObject", value).values())
    else:
        children = cast("list[Any]", value) if isinstance(value, list) else []
    return depth > 0 and all(_plain(child, depth - 1) for child in children)
