"""What a recorded HTTP response says, in the words of no provider: for the four model APIs, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

JSON = dict[str, Any]


def reply_of(kind: str, response: JSON) -> JSON | None:
    """{"content", "reasoning", "tool_calls": [{"id", "name", "arguments"}], "finish"}; None where it is no reply.

    A call of a tool in a namespace has a "namespace", too.
    """
    if response.get("status") != 200:
        return None
    whole = list(_events(response["sse"])) if "sse" in response else None
    reply = {"content": "", "reasoning": "", "tool_calls": [], "finish": ""}
    _READERS[kind](reply, whole or [response.get("body")], whole is not None)
    return reply if reply["finish"] else None


def _events(lines: list[str]) -> Iterator[JSON]:
    for block in lines:
        for line in block.splitlines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield json.loads(data)


def _chat(reply: JSON, parts: list[JSON], streamed: bool) -> None:
    for part in parts:
        for choice in part["choices"]:
            told = choice["delta" if streamed else "message"]
            reply["content"] += told.get("content") or ""
            reply["reasoning"] += told.get("reasoning_content") or ""
            for position, call in enumerate(told.get("tool_calls") or ()):
                _chat_call(reply["tool_calls"], call, call.get("index", position))
            reply["finish"] = choice.get("finish_reason") or reply["finish"]


def _chat_call(calls: list[JSON], told: JSON, index: int) -> None:
    while len(calls) <= index:
        calls.append({"id": "", "name": "", "arguments": ""})
    call = calls[index]
    call["id"] = told.get("id") or call["id"]
    call["name"] += told["function"].get("name") or ""
    call["arguments"] += told["function"].get("arguments") or ""


def _anthropic(reply: JSON, parts: list[JSON], streamed: bool) -> None:
    for part in parts:
        if not streamed:
            raise ValueError("no whole reply of this API is among the recordings")
        if part["type"] == "content_block_start" and part["content_block"]["type"] == "tool_use":
            block = part["content_block"]
            reply["tool_calls"].append({"id": block["id"], "name": block["name"], "arguments": ""})
        elif part["type"] == "content_block_delta":
            delta = part["delta"]
            reply["content"] += delta.get("text", "")
            reply["reasoning"] += delta.get("thinking", "")
            if "partial_json" in delta:
                reply["tool_calls"][-1]["arguments"] += delta["partial_json"]
        elif part["type"] == "message_delta":
            reply["finish"] = part["delta"].get("stop_reason") or ""


def _responses(reply: JSON, parts: list[JSON], streamed: bool) -> None:
    ends = [part["response"] for part in parts if part.get("type") in ("response.completed", "response.incomplete")]
    for response in ends if streamed else parts:
        reply["finish"] = response["status"]
        for item in response["output"]:
            if item["type"] == "message":
                reply["content"] += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                reply["reasoning"] += "".join(part["text"] for part in item["summary"])
            else:
                arguments = item["arguments"] if "arguments" in item else json.dumps({"input": item["input"]})
                space = {"namespace": item["namespace"]} if item.get("namespace") else {}
                told = {"id": item["call_id"], "name": item["name"], "arguments": arguments}
                reply["tool_calls"].append(told | space)


def _gemini(reply: JSON, parts: list[JSON], streamed: bool) -> None:
    for part in parts:
        for candidate in part["candidates"]:
            for piece in candidate.get("content", {}).get("parts", ()):
                reply["reasoning" if piece.get("thought") else "content"] += piece.get("text", "")
                if call := piece.get("functionCall"):
                    arguments = json.dumps(call.get("args", {}))
                    reply["tool_calls"].append({"id": call.get("id", ""), "name": call["name"], "arguments": arguments})
            reply["finish"] = candidate.get("finishReason") or reply["finish"]


_READERS = {"chat": _chat, "anthropic": _anthropic, "responses": _responses, "gemini": _gemini}
