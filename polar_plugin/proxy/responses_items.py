"""The items of a Responses conversation: a reply as output items, and what of them comes back. Pure.

Every item's id has the completion's in it, so an item that is only referred to, or that cannot say all that was
sampled, is found again on the session's ledger.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

from ..records import Completion, FinishReason, Image, JSONObject, Message, ToolCall
from .codec import Incoming
from .responses_tools import Offers, action_of, input_of

Recall = Callable[[str], Completion | None]

SUMMARY_ASK = (
    "Sum up this conversation so that the work can go on from your summary alone: what was asked for, what was done and"
    " found out, how things stand, and what is left to do. Answer with nothing but the summary."
)
_SUMMARY_HEAD = "Summary of the conversation so far:\n\n"
_ID = re.compile(r"(rs|msg|fc|ctc|lsh)_(.+)_([0-9]{1,6})")
_PREFIXES = {"function_call": "fc", "custom_tool_call": "ctc", "local_shell_call": "lsh"}


def response_id(completion: Completion) -> str:
    return f"resp_{completion.id}"


def recalled(response: str, recall: Recall) -> Completion | None:
    """The completion that a response's id names."""
    return recall(response.removeprefix("resp_"))


def output_items(completion: Completion, incoming: Incoming, offers: Offers) -> list[JSONObject]:
    """The reply: reasoning, text, calls. Never an empty list, so that an echo of it is a turn."""
    reply = completion.reply
    items: list[JSONObject] = [_reasoning(completion, wants_summary(incoming.body))] if reply.reasoning else []
    if reply.content or not (reply.reasoning or reply.tool_calls):
        items.append(_message(completion, wants_logprobs(incoming.body)))
    if completion.generation.finish_reason is FinishReason.LENGTH and not reply.tool_calls:
        items[-1]["status"] = "incomplete"
    calls = enumerate(reply.tool_calls)
    return items + [call_item(call, f"{completion.id}_{number}", offers) for number, call in calls]


def call_item(call: ToolCall, number: str, offers: Offers) -> JSONObject:
    """A call in the words of the tool it was offered as; a shell call that says no action is told as a function's."""
    kind, namespace, name = offers.key(call.name)
    call_id = call.id or f"call_{number}"
    within: JSONObject = {"namespace": namespace} if namespace else {}
    if kind == "custom":
        said = {"call_id": call_id, "name": name, "input": input_of(call.arguments)}
        return {"type": "custom_tool_call", "id": f"ctc_{number}", **said} | within
    action = action_of(call.arguments) if kind == "local_shell" else None
    if action is not None:
        said = {"call_id": call_id, "action": action, "status": "completed"}
        return {"type": "local_shell_call", "id": f"lsh_{number}", **said}
    said = {"call_id": call_id, "name": name, "arguments": call.arguments or "{}", "status": "completed"}
    return {"type": "function_call", "id": f"fc_{number}", **said} | within


def referred(item_id: str, recall: Recall) -> Message | None:
    """The part of an earlier reply that an item's id names, as a message that holds nothing else."""
    found = _ID.fullmatch(item_id)
    completion = recall(found[2]) if found else None
    if found is None or completion is None:
        return None
    reply, number = completion.reply, int(found[3])
    if found[1] == "rs":
        return Message("assistant", reasoning=reply.reasoning)
    if found[1] == "msg":
        return Message("assistant", reply.content)
    return Message("assistant", tool_calls=(reply.tool_calls[number],)) if number < len(reply.tool_calls) else None


def as_sampled(item: JSONObject, recall: Recall, offers: Offers) -> ToolCall | None:
    """The recorded call, where an echoed item has our id and says what we said: some items cannot say all of it."""
    item_id, kind = item.get("id"), str(item.get("type"))
    said = referred(item_id, recall) if isinstance(item_id, str) and kind in _PREFIXES else None
    if said is None or not said.tool_calls:
        return None
    ours = call_item(said.tool_calls[0], item_id.partition("_")[2] if isinstance(item_id, str) else "", offers)
    return said.tool_calls[0] if _payload(ours) == _payload(item) else None


def wants_summary(body: JSONObject) -> bool:
    told = cast("JSONObject", body["reasoning"]) if isinstance(body.get("reasoning"), dict) else {}
    return (told.get("summary") or told.get("generate_summary")) in ("auto", "concise", "detailed")


def wants_logprobs(body: JSONObject) -> bool:
    return isinstance(body.get("include"), list) and "message.output_text.logprobs" in body["include"]


# --- opaque content ---------------------------------------------------------------------------------------------------


def seal(kind: Literal["reasoning", "compaction"], text: str) -> str:
    """`text` as an opaque, versioned, checked blob. Not secret: it says to its reader what the reader said."""
    data = text.encode("utf-8", "surrogatepass")
    return f"polar.{kind}.1.{_check(kind, data)}.{base64.urlsafe_b64encode(data).decode()}"


def unseal(kind: Literal["reasoning", "compaction"], blob: str) -> str | None:
    """What `seal` was given; None for a blob that is not ours, of another kind or version, or damaged."""
    head, _, coded = blob.rpartition(".")
    try:
        data = base64.b64decode(coded.encode("ascii"), altchars=b"-_", validate=True)
        return data.decode("utf-8", "surrogatepass") if head == f"polar.{kind}.1.{_check(kind, data)}" else None
    except (binascii.Error, UnicodeError):
        return None


def _check(kind: str, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8, person=kind.encode()).hexdigest()


# --- compaction -------------------------------------------------------------------------------------------------------


def is_compaction(incoming: Incoming) -> bool:
    """Whether the answer is one item in which the conversation so far is summed up."""
    if incoming.path.rstrip("/").endswith("/responses/compact"):
        return True
    items: Any = incoming.body.get("input")
    last: Any = cast("list[Any]", items)[-1] if isinstance(items, list) and items else None
    return isinstance(last, dict) and cast("JSONObject", last).get("type") == "compaction_trigger"


def compaction_item(completion: Completion) -> JSONObject:
    """What the user said, word for word, and the summary that was sampled."""
    users = [message for message in completion.request.messages[:-1] if _is_users(message)]
    kept = {"users": [_kept(message) for message in users], "summary": completion.reply.content}
    return {
        "type": "compaction",
        "id": f"cmp_{completion.id}",
        "encrypted_content": seal("compaction", json.dumps(kept)),
    }


def restored(blob: str) -> list[Message] | None:
    """The messages that a compaction item stands for; None where it is not ours."""
    text = unseal("compaction", blob)
    if text is None:
        return None
    try:
        kept = json.loads(text)
        return [*map(_user, kept["users"]), Message("user", f"{_SUMMARY_HEAD}{kept['summary']}")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None  # a blob that somebody made up


def summed_up(completion: Completion) -> list[Message] | None:
    """What goes on after a completion that was a summary; None for any other."""
    last = completion.request.messages[-1]
    if last != Message("user", SUMMARY_ASK):
        return None
    return restored(compaction_item(completion)["encrypted_content"])


def _is_users(message: Message) -> bool:
    return message.role == "user" and not message.content.startswith(_SUMMARY_HEAD)


def _kept(message: Message) -> JSONObject:
    parts = [p if isinstance(p, str) else [p.media_type, p.data, p.url] for p in message.parts]
    return {"content": message.content, "parts": parts}


def _user(kept: JSONObject) -> Message:
    parts = cast("Sequence[str | list[str]]", kept["parts"])
    return Message("user", str(kept["content"]), parts=tuple(map(_part, parts)))


def _part(kept: str | list[str]) -> str | Image:
    return kept if isinstance(kept, str) else Image(*map(str, kept))


# --- items of a reply -------------------------------------------------------------------------------------------------


def _reasoning(completion: Completion, summary: bool) -> JSONObject:
    """With its opaque text always: the API tells it unasked, and without it a later turn cannot be told in full."""
    text = completion.reply.reasoning
    return {
        "type": "reasoning",
        "id": f"rs_{completion.id}_0",
        "summary": [{"type": "summary_text", "text": text}] if summary else [],
        "encrypted_content": seal("reasoning", text),
        "status": "completed",
    }


def _message(completion: Completion, logprobs: bool) -> JSONObject:
    return {
        "type": "message",
        "id": f"msg_{completion.id}_0",
        "role": "assistant",
        "status": "completed",
        "content": list(_text(completion, logprobs)),
    }


def _text(completion: Completion, logprobs: bool) -> Iterator[JSONObject]:
    """No part for no text."""
    if completion.reply.content:
        told = token_logprobs(completion) if logprobs else []
        yield {"type": "output_text", "text": completion.reply.content, "annotations": [], "logprobs": told}


def token_logprobs(completion: Completion) -> list[JSONObject]:
    """Every sampled token by its id, reasoning and calls included: which of them made the text is not known here."""
    generation = completion.generation
    pairs = zip(generation.output_ids.tolist(), generation.logprobs.tolist(), strict=True)
    return [
        {"token": f"token_id:{token}", "bytes": [], "logprob": max(value, -9999.0), "top_logprobs": []}
        for token, value in pairs
    ]


def _payload(item: JSONObject) -> Any:
    """What a call's item says, without ids and what clients leave out."""
    action = item.get("action")
    if isinstance(action, dict):
        return {key: value for key, value in cast("JSONObject", action).items() if value is not None}
    return item.get("type"), item.get("name"), item.get("namespace"), item.get("input", item.get("arguments"))
