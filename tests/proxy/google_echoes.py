"""The ways in which Google's clients say a reply back: parts of a reply to the contents of the next request."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

JSON = dict[str, Any]
Echo = Callable[[list[JSON]], list[JSON]]
"""Parts of a reply, one a chunk, to the contents that say it back."""


def contents(parts: list[JSON]) -> list[JSON]:
    return [{"role": "model", "parts": parts}]


def a_content_a_chunk(parts: list[JSON]) -> list[JSON]:
    """The vendor's SDKs, with their own chats."""
    return [{"role": "model", "parts": [part]} for part in parts] or contents([])


def one_content(parts: list[JSON]) -> list[JSON]:
    return contents(parts)


def without_thoughts(parts: list[JSON]) -> list[JSON]:
    """Gemini CLI drops them, and joins the pieces of a text; signatures stay where they were."""
    out: list[JSON] = []
    for part in parts:
        if part.get("thought"):
            continue
        if out and set(out[-1]) == {"text"} and "text" in part:
            out[-1] = {**part, "text": out[-1]["text"] + part["text"]}
        else:
            out.append(dict(part))
    return contents(out)


def without_signatures(parts: list[JSON]) -> list[JSON]:
    return contents([{key: value for key, value in part.items() if key != "thoughtSignature"} for part in parts])


def without_ids(parts: list[JSON]) -> list[JSON]:
    """Gemini CLI's sub-agents: the model's turn has none."""
    return calls_changed(parts, lambda call: call.pop("id", None))


def with_ids_of_its_own(parts: list[JSON]) -> list[JSON]:
    return calls_changed(parts, lambda call: call.update(id=f"{call['name']}_1700000000000_0"))


def signed_within_the_call(parts: list[JSON]) -> list[JSON]:
    out = copy.deepcopy(parts)
    for part in out:
        if "functionCall" in part and "thoughtSignature" in part:
            part["functionCall"]["thoughtSignature"] = part.pop("thoughtSignature")
    return contents(out)


def signed_on_a_thought_before(parts: list[JSON]) -> list[JSON]:
    """A part of its own, before the one that was signed."""
    out: list[JSON] = []
    for part in copy.deepcopy(parts):
        if "thoughtSignature" in part:
            out.append({"text": "", "thought": True, "thoughtSignature": part.pop("thoughtSignature")})
        out.append(part)
    return contents(out)


def every_call_signed(parts: list[JSON]) -> list[JSON]:
    signed = next((part["thoughtSignature"] for part in parts if "thoughtSignature" in part), None)
    more = {} if signed is None else {"thoughtSignature": signed}
    return contents([part | more if "functionCall" in part else part for part in parts])


def in_url_safe_base64(parts: list[JSON]) -> list[JSON]:
    out = copy.deepcopy(parts)
    for part in out:
        if "thoughtSignature" in part:
            part["thoughtSignature"] = part["thoughtSignature"].replace("+", "-").replace("/", "_").rstrip("=")
    return contents(out)


def in_snake_case(parts: list[JSON]) -> list[JSON]:
    names = {"functionCall": "function_call", "thoughtSignature": "thought_signature"}
    return contents([{names.get(key, key): value for key, value in part.items()} for part in parts])


def reserialised(parts: list[JSON]) -> list[JSON]:
    """By a JavaScript client: 1.0 is 1, and keys stand in another order."""
    return calls_changed(parts, lambda call: call.update(args=_turned(call["args"])))


def _turned(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(value)}
    return [_turned(item) for item in value] if isinstance(value, list) else value


def no_args_for_none(parts: list[JSON]) -> list[JSON]:
    return calls_changed(parts, lambda call: None if call["args"] else call.pop("args"))


def calls_changed(parts: list[JSON], change: Callable[[JSON], Any]) -> list[JSON]:
    out = copy.deepcopy(parts)
    for part in out:
        if "functionCall" in part:
            change(part["functionCall"])
    return contents(out)


def text_behind_calls(parts: list[JSON]) -> list[JSON]:
    return contents(sorted(parts, key=lambda part: "text" in part and not part.get("thought")))


def empty_texts_between(parts: list[JSON]) -> list[JSON]:
    return contents([one for part in parts for one in ({"text": ""}, part)])


def with_nulls(parts: list[JSON]) -> list[JSON]:
    unset = ("text", "thought", "functionCall", "functionResponse", "inlineData", "thoughtSignature")
    return contents([dict.fromkeys(unset) | part for part in parts])


ECHOES: list[Echo] = [
    a_content_a_chunk, one_content, without_thoughts, without_signatures, without_ids, with_ids_of_its_own,
    signed_within_the_call, signed_on_a_thought_before, every_call_signed, in_url_safe_base64, in_snake_case,
    reserialised, no_args_for_none, text_behind_calls, empty_texts_between, with_nulls,
]  # fmt: skip
LOSE_REASONING = (without_signatures,)
"""Where nobody asked for thoughts, these say no word of the reasoning."""
CHANGE_IDS = (without_ids, with_ids_of_its_own)


def results(parts: list[JSON], *outputs: str, ids: bool = True) -> JSON:
    """The content that answers the calls among `parts`."""
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    answers = [
        {"name": call["name"], "response": {"output": output}} | ({"id": call["id"]} if ids else {})
        for call, output in zip(calls, outputs, strict=True)
    ]
    return {"role": "user", "parts": [{"functionResponse": json.loads(json.dumps(one))} for one in answers]}
