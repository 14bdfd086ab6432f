"""What messages mean, as digests that are equal where an agent program only tells a message otherwise. Pure.

A conversation is a row of units: the system prompt, then each message. Results of parallel calls are one unit, since
their order says nothing, and so are assistant messages of which at most one has text, since programs split and merge
them; an assistant message that says nothing is a unit without a digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import orjson

from ..harnesses import noise
from ..records import Image, Message, Tool, ToolCall

Digest = bytes
_EXACT = 2**53  # a JavaScript client knows integers up to here


@dataclass(frozen=True, slots=True)
class Unit:
    """What `messages[start:stop]` of a request mean together."""

    digest: Digest
    """16 bytes; b"" for assistant messages that say nothing."""
    start: int
    stop: int
    assistant: bool = False


class Meaning:
    """Digests of one session's messages. Mutable: it learns the ids of the calls that were sampled."""

    def __init__(self) -> None:
        self._calls: dict[str, list[ToolCall]] = {}

    def learn(self, reply: Message) -> None:
        for call in reply.tool_calls:
            if call.id:
                self._calls.setdefault(call.id, []).append(call)

    def units(self, messages: Sequence[Message], start: int = 0) -> Iterator[Unit]:
        """The units of `messages[start:]`; `start` is 0, or the `stop` of one of them. The first is the system prompt.

        Costs what it digests.
        """
        if not start:
            start = _run(messages, 0, "system")
            yield Unit(system_digest(messages[:start]), 0, start)
        while start < len(messages):
            unit = self._unit(messages, start)
            yield unit
            start = unit.stop

    def _unit(self, messages: Sequence[Message], start: int) -> Unit:
        first = messages[start]
        if first.role == "tool":
            stop = _run(messages, start, "tool")
            return Unit(_results_digest(messages, start, stop), start, stop)
        if first.role != "assistant":
            return Unit(message_digest(first), start, start + 1)
        stop = _one_turn(messages, start)
        turn = merged(messages[start:stop])
        return Unit(self.turn(turn) if said(turn) else b"", start, stop, assistant=True)

    def turn(self, message: Message) -> Digest:
        """Of an assistant turn, its calls told as they were sampled."""
        calls = tuple(self._sampled(call) for call in message.tool_calls)
        return message_digest(replace(message, tool_calls=calls) if calls != message.tool_calls else message)

    def _sampled(self, echoed: ToolCall) -> ToolCall:
        known = self._calls.get(echoed.id, ())
        return next((call for call in reversed(known) if noise.stands_for(echoed, call)), echoed)


def said(message: Message) -> bool:
    """Whether an assistant message says anything: reasoning alone is dropped by some programs, and so are blanks."""
    return bool(message.tool_calls or message.content.strip())


def merged(messages: Sequence[Message], between: str = "") -> Message:
    """Assistant messages as one turn."""
    if len(messages) == 1:
        return messages[0]
    texts = (message.content.strip() for message in messages)
    calls = tuple(call for message in messages for call in message.tool_calls)
    return Message("assistant", between.join(text for text in texts if text), tool_calls=calls)


def canonical_arguments(text: str) -> str:
    """Arguments by meaning: keys sorted, no spaces, numbers as JavaScript has them; what is no JSON stays text."""
    try:
        return json.dumps(_plain(json.loads(text or "{}")), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text.strip()


def tools_digest(tools: Sequence[Tool]) -> Digest:
    """Of what the model is told of its tools, in their order."""
    told = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return hashlib.blake2b(_json(told), digest_size=16).digest()


def system_digest(messages: Sequence[Message]) -> Digest:
    """Of the system messages that a conversation begins with, in one piece or several."""
    texts = (noise.meaningful("system", message.content) for message in messages)
    return _digest(["\n".join(text for text in texts if text.strip())])


def alike(one: Message, other: Message) -> bool:
    """Whether two messages are told in the same words, wire ids included."""
    return (
        one.content == other.content
        and one.role == other.role
        and one.tool_call_id == other.tool_call_id
        and one.reasoning == other.reasoning
        and one.name == other.name
        and one.parts == other.parts
        and one.tool_calls == other.tool_calls
        and (not one.tool_calls or [call.id for call in one.tool_calls] == [call.id for call in other.tool_calls])
    )


def _run(messages: Sequence[Message], start: int, role: str) -> int:
    while start < len(messages) and messages[start].role == role:
        start += 1
    return start


def _one_turn(messages: Sequence[Message], start: int) -> int:
    """Where the turn that begins at `start` ends: before a second text."""
    texts = 0
    for position in range(start, _run(messages, start, "assistant")):
        texts += bool(messages[position].content.strip())
        if texts > 1:
            return position
        start = position + 1
    return start


def message_digest(message: Message) -> Digest:
    """Left out: wire ids, reasoning, blanks around an assistant's text, the spelling of arguments."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = (f"{call.name}\0{canonical_arguments(call.arguments)}" for call in message.tool_calls)
    return _digest((message.role, noise.meaningful(message.role, content), *calls, *_images(message)))


def _results_digest(messages: Sequence[Message], start: int, stop: int) -> Digest:
    """Of the results of one turn's calls: which call each belongs to counts, not the order they stand in."""
    slots = _slots(messages, start)
    told: list[tuple[int, Digest]] = []
    for position in range(start, stop):
        message = messages[position]
        slot = slots.get(message.tool_call_id, position - start)
        told.append((slot, _digest((str(slot), message.content, *_images(message)))))
    return _digest((digest.hex() for _, digest in sorted(told)), b"tool")


def _slots(messages: Sequence[Message], start: int) -> dict[str, int]:
    """The position of each call of the turn before `start`, by its id; nothing where ids do not tell calls apart."""
    stop = next((at for at in range(start, 0, -1) if messages[at - 1].tool_calls), 0)
    begin = next((at for at in range(stop, 0, -1) if messages[at - 1].role != "assistant"), 0)
    calls = [call for message in messages[begin:stop] for call in message.tool_calls]
    slots = {call.id: position for position, call in enumerate(calls) if call.id}
    return slots if len(slots) == len(calls) else {}


def _images(message: Message) -> Iterator[str]:
    for part in message.parts:
        if isinstance(part, Image):
            yield f"\0image\0{part.media_type}\0{part.url}\0{part.data}"


def _digest(parts: Iterable[str], kind: bytes = b"") -> Digest:
    hasher = hashlib.blake2b(digest_size=16, person=kind)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def _plain(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return _as_double(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value


def _as_double(value: int) -> int:
    try:
        return int(float(value))
    except OverflowError:
        return value


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(value, sort_keys=True).encode()
