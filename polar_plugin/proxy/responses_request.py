"""What an OpenAI Responses request says, as a ChatRequest. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ..errors import BadRequest
from ..records import ChatRequest, Completion, Image, JSONObject, Message, Role, SamplingParams, ToolCall
from . import fields
from .codec import Incoming
from .parts import Part, joined
from .responses_caller import caller
from .responses_items import (
    SUMMARY_ASK,
    Recall,
    as_sampled,
    is_compaction,
    recalled,
    referred,
    restored,
    summed_up,
    unseal,
)
from .responses_tools import Key, Offers, arguments_of, choice, is_understood, offers_of

_READ = frozenset({
    "model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens",
    "temperature", "top_p", "stream",
})  # fmt: skip
_READ_OF = {"reasoning": {"summary", "generate_summary"}, "text": set[str]()}
_UNDERSTOOD = frozenset({"reasoning.encrypted_content", "message.output_text.logprobs"})
_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class UnknownResponse(BadRequest):
    """An earlier response is named that this session does not have."""


def chat_request(incoming: Incoming, api: str) -> ChatRequest:
    """Raises BadRequest with the path of what is wrong."""
    body = incoming.body
    for name in ("conversation", "prompt"):
        if body.get(name):
            raise BadRequest("nothing is stored here under an id; send the text itself as input", path=name)
    offers = offers_of(incoming)
    reader, messages = _read(incoming, offers)
    thread, role = caller(incoming)
    tool_choice = choice(body, offers)
    if is_compaction(incoming):
        messages, role, tool_choice = [*messages, Message("user", SUMMARY_ASK)], Role.COMPACTION, "none"
    return ChatRequest(
        messages=tuple(messages),
        tools=offers.tools,
        tool_choice=tool_choice,
        sampling=_sampling(body),
        stream=fields.flag(body, "stream") and not incoming.path.endswith("/compact"),
        model=fields.text(body, "model"),
        api=api,
        role=role,
        thread=thread,
        retry=incoming.headers.get("x-stainless-retry-count", "") not in ("", "0"),
        ignored=tuple(sorted(_ignored(body) | offers.dropped | reader.ignored)),
    )


@dataclass(slots=True)
class _Turn:
    """The items of one assistant turn. Mutable."""

    reasoning: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def add(self, part: Message) -> None:
        self.reasoning += [part.reasoning] if part.reasoning else []
        self.texts += [part.content] if part.content else []
        self.calls += part.tool_calls

    def message(self) -> Message:
        return Message("assistant", "\n".join(self.texts), "\n".join(self.reasoning), tuple(self.calls))

    def copy(self) -> _Turn:
        return _Turn([*self.reasoning], [*self.texts], [*self.calls])


class _Reader:
    """Reads the input items of one request. Mutable: `messages` grows, items between two others' are one turn."""

    def __init__(self, recall: Recall, offers: Offers, names: Mapping[str, str]) -> None:
        """`names`: the functions of the calls before, by the call's id."""
        self.ignored: set[str] = set()
        self.messages: list[Message] = []
        self._recall = recall
        self._offers = offers
        self._turn: _Turn | None = None
        self._names = dict(names)

    def take(self, item: JSONObject, path: str) -> None:
        kind = fields.text(item, "type", path) or ("message" if "role" in item else "item_reference")
        if kind in _READERS:
            _READERS[kind](self, item, path)
        else:
            self.ignored.add(f"input.*.{kind}")

    def close(self) -> None:
        """The end of a turn, if one is being read."""
        if self._turn is not None:
            self.messages.append(self._turn.message())
        self._turn = None

    def copy(self) -> _Reader:
        other = _Reader(self._recall, self._offers, self._names)
        other.ignored, other.messages = {*self.ignored}, [*self.messages]
        other._turn = self._turn and self._turn.copy()
        return other

    def _open(self) -> _Turn:
        self._turn = self._turn or _Turn()
        return self._turn

    def _say(self, *messages: Message) -> None:
        self.close()
        self.messages += messages

    def message(self, item: JSONObject, path: str) -> None:
        wire_role = fields.text(item, "role", path)
        if wire_role not in _ROLES:
            raise BadRequest(f"unknown role {wire_role!r}; use one of {', '.join(_ROLES)}", path=f"{path}.role")
        role = _ROLES[wire_role]
        content, parts = joined(
            self._pieces(item.get("content"), f"{path}.content"), "" if role == "assistant" else "\n"
        )
        if item.get("phase"):
            self.ignored.add("input.*.phase")
        if role == "assistant":
            self._open().add(Message("assistant", content))
        else:
            self._say(Message(role, content, parts=parts))

    def reasoning(self, item: JSONObject, path: str) -> None:
        """What cannot be read is still part of a turn."""
        turn = self._open()
        blob = fields.text(item, "encrypted_content", path)
        text = unseal("reasoning", blob) if blob else _told(item, path)
        if text is None:
            self.ignored.add("input.*.reasoning.encrypted_content")
        turn.add(Message("assistant", reasoning=text or ""))

    def function_call(self, item: JSONObject, path: str) -> None:
        parsed = item.get("arguments")  # some clients echo the parsed object
        dumped = json.dumps(parsed, ensure_ascii=False) if isinstance(parsed, dict) else ""
        self._call(item, path, ("function", *_names(item, path)), dumped or fields.text(item, "arguments", path))

    def custom_call(self, item: JSONObject, path: str) -> None:
        text = fields.text(item, "input", path)
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        self._call(item, path, ("custom", *_names(item, path)), arguments)

    def shell_call(self, item: JSONObject, path: str) -> None:
        action = fields.mapping(item, "action", path)
        self._call(item, path, ("local_shell", "", "local_shell"), arguments_of(action))

    def _call(self, item: JSONObject, path: str, key: Key, arguments: str) -> None:
        call_id = fields.text(item, "call_id", path) or fields.text(item, "id", path)
        told = ToolCall(self._offers.name(key), arguments or "{}", call_id)
        sampled = None if key[0] == "function" else as_sampled(item, self._recall, self._offers)
        call = ToolCall(sampled.name, sampled.arguments, call_id) if sampled else told
        self._names[call_id] = call.name
        self._open().calls.append(call)

    def output(self, item: JSONObject, path: str) -> None:
        call_id = fields.text(item, "call_id", path) or fields.text(item, "id", path)
        content, parts = joined(self._pieces(item.get("output"), f"{path}.output"), "\n")
        name = self._names.get(call_id) or fields.text(item, "name", path)
        self._say(Message("tool", content, tool_call_id=call_id, name=name, parts=parts))

    def reference(self, item: JSONObject, path: str) -> None:
        part = referred(fields.text(item, "id", path), self._recall)
        if part is None:
            raise BadRequest("this session has no item of that id; send the item itself", path=f"{path}.id")
        self._open().add(part)
        self._names.update((call.id, call.name) for call in part.tool_calls)

    def compaction(self, item: JSONObject, path: str) -> None:
        messages = restored(fields.text(item, "encrypted_content", path))
        if messages is None:
            self.ignored.add("input.*.compaction.encrypted_content")
        self._say(*(messages or ()))

    def nothing(self, item: JSONObject, path: str) -> None:
        """What the request as a whole was asked for by: read elsewhere."""

    def _pieces(self, value: Any, path: str) -> list[Part]:
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise BadRequest("expected a string or a list of parts", path=path)
        return [self._piece(part, f"{path}.{i}") for i, part in enumerate(cast("list[Any]", value))]

    def _piece(self, value: Any, path: str) -> Part:
        if isinstance(value, str):
            return value
        part = fields.as_object(value, path)
        kind = fields.text(part, "type", path)
        if kind in _TEXT_PARTS:
            return fields.text(part, _TEXT_PARTS[kind], path)
        if kind in ("input_image", "image_url") and (url := _url(part, path)):
            return _image(url)
        self.ignored.add(f"input.*.content.*.{kind or 'part'}")
        return f"[{kind.removeprefix('input_') or 'part'} omitted]"


_READERS: Mapping[str, Callable[[_Reader, JSONObject, str], None]] = {
    "message": _Reader.message,
    "reasoning": _Reader.reasoning,
    "function_call": _Reader.function_call,
    "custom_tool_call": _Reader.custom_call,
    "local_shell_call": _Reader.shell_call,
    "function_call_output": _Reader.output,
    "custom_tool_call_output": _Reader.output,
    "local_shell_call_output": _Reader.output,
    "item_reference": _Reader.reference,
    "compaction": _Reader.compaction,
    "compaction_summary": _Reader.compaction,
    "additional_tools": _Reader.nothing,
}


def _read(incoming: Incoming, offers: Offers) -> tuple[_Reader, list[Message]]:
    """The reader of the input, and all messages: of the response that is continued, the instructions, the new ones."""
    body, earlier = incoming.body, _earlier(incoming)
    reader = _Reader(incoming.recall, offers, {call.id: call.name for one in earlier for call in one.tool_calls})
    if isinstance(body.get("input"), str):
        reader.messages.append(Message("user", body["input"]))
    else:
        items = fields.objects(body, "input")
        if items and items[-1].get("type") == "compaction_trigger":  # it asks for something, at the end alone
            items = items[:-1]
        reader = incoming.memory.read(reader, items, "input", (offers, body.get("previous_response_id")))
        reader.close()
    if not reader.messages and not earlier:
        raise BadRequest("expected a string or a list of items", path="input")
    instructions = fields.text(body, "instructions")
    if instructions:
        if earlier and earlier[0].role == "system":  # its own instructions: they are not carried over
            earlier = earlier[1:]
        earlier = [Message("system", instructions), *earlier]
    return reader, earlier + reader.messages


def _earlier(incoming: Incoming) -> list[Message]:
    """The conversation up to and with the response that `previous_response_id` names."""
    name = fields.text(incoming.body, "previous_response_id")
    if not name:
        return []
    completion: Completion | None = recalled(name, incoming.recall)
    if completion is None:
        raise UnknownResponse(f"this session has no response {name!r}", path="previous_response_id")
    return summed_up(completion) or [*completion.request.messages, completion.reply]


def _names(item: JSONObject, path: str) -> tuple[str, str]:
    """Namespace and name."""
    name = fields.text(item, "name", path)
    if not name:
        raise BadRequest("expected the tool's name", path=f"{path}.name")
    return fields.text(item, "namespace", path), name


def _told(item: JSONObject, path: str) -> str:
    """Reasoning in the open: its own text, else its summary."""
    for key in ("content", "summary"):
        texts = [
            fields.text(part, "text", f"{path}.{key}.{i}") for i, part in enumerate(fields.objects(item, key, path))
        ]
        if any(texts):
            return "\n".join(texts)
    return ""


def _url(part: JSONObject, path: str) -> str:
    """As a string, or as the object that OpenAI Chat has."""
    value = part.get("image_url")
    if isinstance(value, dict):
        return fields.text(cast("JSONObject", value), "url", f"{path}.image_url")
    return fields.text(part, "image_url", path)


def _image(url: str) -> Image:
    """By value where the URL is a base64 `data:` one."""
    head, comma, data = url.partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return Image(media_type=head[len("data:") : -len(";base64")], data=data)
    return Image(url=url)


def _sampling(body: JSONObject) -> SamplingParams:
    temperature, top_p = fields.number(body, "temperature"), fields.number(body, "top_p")
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        max_tokens=fields.integer(body, "max_output_tokens", least=1),
    )


def _ignored(body: JSONObject) -> set[str]:
    """Paths of top-level fields that are dropped. Reads a body that was found good."""
    paths = {key for key, value in body.items() if key not in {*_READ, *_READ_OF, "include"} and _says_something(value)}
    for name, read in _READ_OF.items():
        inner = body.get(name)
        told = cast("JSONObject", inner) if isinstance(inner, dict) else {name: inner}
        paths |= {f"{name}.{key}" for key, value in told.items() if key not in read and _says_something(value)}
    include: Sequence[Any] = cast("list[Any]", body["include"]) if isinstance(body.get("include"), list) else []
    paths |= {f"include.{one}" for one in include if str(one) not in _UNDERSTOOD}
    if not is_understood(body.get("tool_choice")):
        paths.add("tool_choice")
    return paths


def _says_something(value: Any) -> bool:
    return value not in (None, "", [], {}, {"type": "text"})
