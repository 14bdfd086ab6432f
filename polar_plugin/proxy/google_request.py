"""What a Google generateContent request says, as a ChatRequest. Pure.

Source: the API's REST reference and the models of the `google-genai` package. Every field is read in camelCase and in
snake_case, and every list also where one item stands without it, as the API itself does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from ..errors import BadRequest
from ..records import ChatRequest, Image, JSONObject, Message, SamplingParams, Tool, ToolCall
from . import fields
from .codec import Incoming
from .google_schema import camel, functions, listed, unread
from .google_signature import signed_reasoning
from .memory import Memory
from .parts import Part, joined

STREAM, COUNT = ":streamGenerateContent", ":countTokens"
UNPARSED = "unparsed_arguments"
"""The one argument of a call whose arguments are no JSON object: their text. The API can say nothing else."""
_ROLES = ("user", "model", "function", "tool")
_READ = frozenset({"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model"})
_READ_OF_CONFIG = frozenset({
    "temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "candidateCount", "thinkingConfig",
})  # fmt: skip
_READ_OF_CALLING = frozenset({"mode", "allowedFunctionNames"})
_READ_OF_CONTENT = frozenset({"role", "parts"})
_DATA = ("text", "inlineData", "fileData", "functionCall", "functionResponse")
_READ_OF_PART = frozenset({"text", "functionCall", "functionResponse", "thought", "thoughtSignature"})
_BESIDE_DATA = frozenset({"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"})
_READ_OF_CALL = frozenset({"id", "name", "args", "thoughtSignature"})
_READ_OF_RESULT = frozenset({"id", "name", "response", "parts"})
_SOLE = ("output", "result", "error")
"""Keys under which a function's response is told whole: the API's two, and the one of the Python SDK."""
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto"}


def asked(incoming: Incoming) -> tuple[JSONObject, str]:
    """The request and its path within the body: a count may hold the whole request that it counts."""
    body = camel(incoming.body)
    if incoming.path.endswith(COUNT) and body.get("generateContentRequest") is not None:
        return camel(fields.mapping(body, "generateContentRequest")), "generateContentRequest"
    return body, ""


def config_of(body: JSONObject, path: str) -> JSONObject:
    return camel(fields.mapping(body, "generationConfig", path))


def wants_thoughts(incoming: Incoming) -> bool:
    """Whether the client asked to see the reasoning."""
    body, path = asked(incoming)
    return _includes_thoughts(config_of(body, path), fields.at(path, "generationConfig"))


def chat_request(incoming: Incoming, api: str) -> ChatRequest:
    """Raises BadRequest with the path of what is wrong."""
    body, path = asked(incoming)
    ignored = unread(body, _READ, "")
    tools, dropped = incoming.memory.once((path, "tools"), body.get("tools"), lambda: _functions(body, path))
    ignored |= dropped
    return ChatRequest(
        messages=(*_system(body, path, ignored), *_messages(body, path, ignored, incoming.memory)),
        tools=tools,
        tool_choice=_tool_choice(body, path, tools, ignored),
        sampling=_sampling(body, path, ignored),
        stream=incoming.path.endswith(STREAM),
        model=incoming.variables.get("model", ""),
        api=api,
        ignored=tuple(sorted(ignored)),
    )


def _functions(body: JSONObject, path: str) -> tuple[tuple[Tool, ...], set[str]]:
    ignored = set[str]()
    return functions(body, path, ignored), ignored


def _system(body: JSONObject, path: str, ignored: set[str]) -> tuple[Message, ...]:
    """A string, a content, or the parts alone."""
    value, path = body.get("systemInstruction"), fields.at(path, "systemInstruction")
    if value is None:
        return ()
    content = camel(cast("JSONObject", value)) if isinstance(value, dict) else {"parts": value}
    if isinstance(value, dict) and "parts" not in content:
        content = {"parts": [content]}
    pieces = list(_all_pieces(_parts(content, path, ignored, "systemInstruction.")))
    text, parts = joined(pieces, "\n")
    return (Message("system", text, parts=parts),) if pieces else ()


def _messages(body: JSONObject, path: str, ignored: set[str], memory: Memory) -> list[Message]:
    where, contents = fields.at(path, "contents"), listed(body.get("contents"))
    if not contents:
        raise BadRequest("expected at least one content", path=where)
    reader = memory.read(_Contents(), contents, where)
    reader.close()
    ignored |= reader.ignored
    return reader.messages


_Parts = list[tuple[JSONObject, str]]


def _content(value: Any, path: str, ignored: set[str]) -> tuple[str, _Parts]:
    """Whose it is, and its parts with their paths."""
    raw = {"parts": [value]} if isinstance(value, str) else camel(fields.as_object(value, path))
    parts = _parts(raw, path, ignored)
    role = fields.text(raw, "role", path)
    if role and role not in _ROLES:
        raise BadRequest(f"unknown role {role!r}; use user or model", path=f"{path}.role")
    if not role:
        role = "model" if any(part.get("functionCall") is not None for part, _ in parts) else "user"
    foreign = "functionResponse" if role == "model" else "functionCall"
    for part, at in parts:
        if part.get(foreign) is not None:
            raise BadRequest(f"a {foreign} has no place in a content of role {role!r}", path=f"{at}.{foreign}")
    return role, parts


def _parts(content: JSONObject, path: str, ignored: set[str], where: str = "contents.*.") -> _Parts:
    """The parts with their paths; `where` stands before what is put to `ignored`."""
    ignored |= unread(content, _READ_OF_CONTENT, where)
    parts = _Parts()
    for i, value in enumerate(listed(content.get("parts"))):
        at = f"{path}.parts.{i}"
        part = {"text": value} if isinstance(value, str) else camel(fields.as_object(value, at))
        ignored |= unread(part, _READ_OF_PART, f"{where}parts.*.")
        parts.append((part, at))
    return parts


def _pieces(part: JSONObject, path: str) -> list[Part]:
    """What a part shows: one piece or none."""
    if part.get("text") is not None:
        return [fields.text(part, "text", path)]
    if part.get("inlineData") is not None:
        return [_inline(camel(fields.mapping(part, "inlineData", path)), f"{path}.inlineData")]
    if part.get("fileData") is not None:
        return [_file(camel(fields.mapping(part, "fileData", path)), f"{path}.fileData")]
    others = (key for key, value in part.items() if key not in _BESIDE_DATA and value is not None)
    return [f"[{_words(key)} omitted]" for key in itertools.islice(others, 1)]


def _inline(blob: JSONObject, path: str) -> Part:
    kind, data = fields.text(blob, "mimeType", path), fields.text(blob, "data", path)
    if kind.startswith("image/"):
        return Image(media_type=kind, data=data.replace("-", "+").replace("_", "/"))
    return f"[{kind.partition('/')[0] or 'data'} omitted]"


def _file(file: JSONObject, path: str) -> Part:
    kind, uri = fields.text(file, "mimeType", path), fields.text(file, "fileUri", path)
    if kind.startswith("image/"):
        return Image(media_type=kind, url=uri)
    return f"[{kind.partition('/')[0] or 'file'} omitted]"


def _words(key: str) -> str:
    """ "executableCode" as "executable code"."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in key).strip()


@dataclass(slots=True)
class _Contents:
    """The messages so far. Mutable: it knows which calls of the latest turn still wait for their results."""

    ignored: set[str] = field(default_factory=set[str])
    messages: list[Message] = field(default_factory=list[Message])
    _turn: _Parts | None = None
    """The parts of the model's turn that is being read; None between two turns."""
    _waiting: list[ToolCall] = field(default_factory=list[ToolCall])
    _calls: int = 0

    def take(self, item: Any, path: str) -> None:
        """The next content. Those of the model that follow one another are one turn, cut up as it was streamed."""
        role, parts = _content(item, path, self.ignored)
        if role == "model":
            self._turn = [*(self._turn or ()), *parts]
        else:
            self.close()
            self._rest(parts)

    def close(self) -> None:
        """The end of a turn, if one is being read."""
        if self._turn is not None:
            self._said(self._turn)
        self._turn = None

    def copy(self) -> Self:
        lists = {"ignored": {*self.ignored}, "messages": [*self.messages], "_waiting": [*self._waiting]}
        return replace(self, **lists)

    def _said(self, parts: _Parts) -> None:
        """One turn of the model."""
        pieces, thoughts, calls = list[Part](), list[str](), list[ToolCall]()
        signed = dict[str, None]()  # several calls may carry one signature
        for part, path in parts:
            signed.update(dict.fromkeys(self._signed(part, path)))
            if part.get("functionCall") is not None:
                calls.append(self._call(part, path))
            elif fields.flag(part, "thought", path):
                thoughts.append(fields.text(part, "text", path))
            else:
                pieces += _pieces(part, path)
        content, _ = joined(pieces, "")
        self.messages.append(Message("assistant", content, "".join(signed) or "".join(thoughts), tuple(calls)))
        self._waiting = calls

    def _rest(self, parts: _Parts) -> None:
        """A content of anybody else: each response is a message of its own, and so is what stands between them."""
        for is_response, group in itertools.groupby(parts, lambda item: item[0].get("functionResponse") is not None):
            if is_response:
                self.messages += (self._result(part, path) for part, path in group)
            else:
                self._user(list(_all_pieces(group)))
        if not parts:
            self._user([])

    def _user(self, pieces: Sequence[Part]) -> None:
        content, parts = joined(pieces, "\n")
        self.messages.append(Message("user", content, parts=parts))

    def _signed(self, part: JSONObject, path: str) -> Iterator[str]:
        """The reasoning in the part's signature: it stands beside the call, or, with some clients, within it."""
        call = part.get("functionCall")
        holders = [(part, path)]
        if isinstance(call, dict):
            holders.append((camel(cast("JSONObject", call)), f"{path}.functionCall"))
        for holder, at in holders:
            text = fields.text(holder, "thoughtSignature", at)
            reasoning = signed_reasoning(text) if text else ""
            if reasoning is None:
                self.ignored.add("contents.*.parts.*.thoughtSignature")
            elif reasoning:
                yield reasoning

    def _call(self, part: JSONObject, path: str) -> ToolCall:
        path = f"{path}.functionCall"
        raw = camel(fields.as_object(part["functionCall"], path))
        self.ignored |= unread(raw, _READ_OF_CALL, "contents.*.parts.*.functionCall.")
        name = fields.text(raw, "name", path)
        if not name:
            raise BadRequest("expected the function's name", path=f"{path}.name")
        self._calls += 1
        call_id = fields.text(raw, "id", path) or f"call_{self._calls}"
        return ToolCall(name, self._arguments(raw, path), id=call_id)

    def _arguments(self, raw: JSONObject, path: str) -> str:
        if isinstance(raw.get("args"), str):
            return raw["args"] or "{}"
        args = fields.mapping(raw, "args", path)
        if set(args) == {UNPARSED} and isinstance(args[UNPARSED], str):
            self.ignored.add(f"contents.*.parts.*.functionCall.args.{UNPARSED}")
            return args[UNPARSED]
        return _json(args)

    def _result(self, part: JSONObject, path: str) -> Message:
        path = f"{path}.functionResponse"
        raw = camel(fields.as_object(part["functionResponse"], path))
        self.ignored |= unread(raw, _READ_OF_RESULT, "contents.*.parts.*.functionResponse.")
        call_id, name = fields.text(raw, "id", path), fields.text(raw, "name", path)
        if call := self._answered(call_id, name):
            call_id, name = call.id, call.name
        pieces = [piece for piece in (_response_text(raw.get("response")),) if piece]
        inner = _parts({"parts": raw.get("parts")}, path, self.ignored, "contents.*.parts.*.functionResponse.")
        content, parts = joined([*pieces, *_all_pieces(inner)], "\n")
        return Message("tool", content, tool_call_id=call_id, name=name, parts=parts)

    def _answered(self, call_id: str, name: str) -> ToolCall | None:
        """The call that a response answers, by its id, else the first one of its name, else, unnamed, the first."""
        by_id = (i for i, call in enumerate(self._waiting) if call_id and call.id == call_id)
        by_name = (i for i, call in enumerate(self._waiting) if not name or call.name == name)
        position = next(itertools.chain(by_id, by_name), None)
        return None if position is None else self._waiting.pop(position)


def _all_pieces(parts: Iterable[tuple[JSONObject, str]]) -> Iterator[Part]:
    return (piece for part, path in parts for piece in _pieces(part, path))


def _response_text(response: Any) -> str:
    """A response under one of the known keys is its value; any other is JSON."""
    if isinstance(response, dict) and len(cast("JSONObject", response)) == 1:
        ((key, value),) = cast("JSONObject", response).items()
        response = value if key in _SOLE else cast("Any", response)
    if response is None:
        return ""
    return response if isinstance(response, str) else _json(response)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tool_choice(body: JSONObject, path: str, tools: Sequence[Tool], ignored: set[str]) -> str:
    config = camel(fields.mapping(body, "toolConfig", path))
    ignored |= unread(config, frozenset({"functionCallingConfig"}), "toolConfig.")
    where = fields.at(path, "toolConfig")
    calling = camel(fields.mapping(config, "functionCallingConfig", where))
    where += ".functionCallingConfig"
    ignored |= unread(calling, _READ_OF_CALLING, "toolConfig.functionCallingConfig.")
    mode = fields.text(calling, "mode", where).upper() or "AUTO"
    if mode not in _MODES:
        raise BadRequest(f"unknown mode {mode!r}; use AUTO, ANY, NONE or VALIDATED", path=f"{where}.mode")
    names = _strings(calling, "allowedFunctionNames", where)
    for i, name in enumerate(names):
        if name not in {tool.name for tool in tools}:
            raise BadRequest(f"no function is called {name!r}", path=f"{where}.allowedFunctionNames.{i}")
    if mode == "ANY" and len(names) == 1:
        return names[0]
    if names:  # a choice among several cannot be enforced
        ignored.add("toolConfig.functionCallingConfig.allowedFunctionNames")
    return _MODES[mode]


def _sampling(body: JSONObject, path: str, ignored: set[str]) -> SamplingParams:
    config, where = config_of(body, path), fields.at(path, "generationConfig")
    ignored |= unread(config, _READ_OF_CONFIG, "generationConfig.")
    if (fields.integer(config, "candidateCount", where) or 1) != 1:
        raise BadRequest("only one candidate a request is sampled; ask several times", path=f"{where}.candidateCount")
    _includes_thoughts(config, where)
    thinking = camel(fields.mapping(config, "thinkingConfig", where))
    ignored |= unread(thinking, frozenset({"includeThoughts"}), "generationConfig.thinkingConfig.")
    temperature, top_p = fields.number(config, "temperature", where), fields.number(config, "topP", where)
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=fields.integer(config, "topK", where) or -1,
        max_tokens=fields.integer(config, "maxOutputTokens", where, least=1),
        stop=tuple(stop for stop in _strings(config, "stopSequences", where) if stop),
        seed=fields.integer(config, "seed", where),
    )


def _includes_thoughts(config: JSONObject, path: str) -> bool:
    thinking = camel(fields.mapping(config, "thinkingConfig", path))
    return fields.flag(thinking, "includeThoughts", f"{path}.thinkingConfig")


def _strings(holder: JSONObject, key: str, path: str) -> list[str]:
    values = listed(holder.get(key))
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise BadRequest("expected a string", path=f"{path}.{key}.{i}")
    return values
