"""What a session said so far, indexed so that a request finds the completion it continues.

Harnesses echo a turn in other words but the same meaning: arguments re-serialised, text trimmed, reasoning dropped, ids
rewritten. Messages are therefore compared by a digest of what they mean, and found by a chain of digests: one look-up a
message, whatever the length of the session. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from ..records import BreakReason, ChatRequest, Completion, Image, Message, Tool, ToolCall

Digest = bytes


@dataclass(frozen=True, slots=True)
class Match:
    """`completion` is the deepest one whose messages and reply begin the request; `new` is what follows them."""

    completion: Completion
    new: tuple[Message, ...]


class History:
    """The completions of one session. Mutable: it grows by `add`."""

    def __init__(self) -> None:
        self._by_chain: dict[Digest, Completion] = {}
        self._prefixes: set[Digest] = set()
        self._broken: dict[Digest, BreakReason] = {}
        """Prompts that continued nothing, and why: asked again, they do so for the same reason."""
        self._toolless: set[Digest] = set()
        self._systems: set[Digest] = set()
        self._empty = True
        self._latest: tuple[Sequence[Message], list[Digest]] = ((), [])
        """The messages digested last, and their digests: a request is looked up, then added."""

    def find(self, request: ChatRequest) -> Match | BreakReason:
        """The completion that `request` continues, or why it continues none."""
        chain = list(_chain(self._digests(request.messages), _tools_digest(request.tools)))
        for position in range(len(chain), 0, -1):
            if request.messages[position - 1].role == "assistant" and (
                found := self._by_chain.get(chain[position - 1])
            ):
                return Match(found, request.messages[position:])
        return self._why_none(request, chain)

    def add(self, completion: Completion) -> None:
        """Remember a completion. Of two that mean the same, a later request continues the later one."""
        request = completion.request
        self._empty = False
        digests, reply = self._digests(request.messages), message_digest(completion.reply)
        *prefixes, whole = _chain([*digests, reply], _tools_digest(request.tools))
        self._prefixes.update(prefixes)
        if prefixes and completion.break_reason:
            self._broken.setdefault(prefixes[-1], completion.break_reason)
        self._by_chain[whole] = completion
        self._toolless.update(_chain([*digests, reply], b""))
        self._systems.add(_system_digest(request.messages))

    def _digests(self, messages: Sequence[Message]) -> list[Digest]:
        if self._latest[0] is not messages:
            self._latest = (messages, [message_digest(message) for message in messages])
        return self._latest[1]

    def _why_none(self, request: ChatRequest, chain: Sequence[Digest]) -> BreakReason:
        if chain and (reason := self._broken.get(chain[-1])):
            return reason
        if self._empty or (chain and chain[-1] in self._prefixes and not _has_assistant(request.messages)):
            return BreakReason.FIRST_CALL
        if _has_assistant(request.messages):
            return self._why_rewritten(request)
        known = _system_digest(request.messages) in self._systems
        return BreakReason.HISTORY_REWRITTEN if known else BreakReason.NEW_THREAD

    def _why_rewritten(self, request: ChatRequest) -> BreakReason:
        shared = 0
        last_assistant = max(i for i, message in enumerate(request.messages) if message.role == "assistant")
        for position, digest in enumerate(_chain(self._digests(request.messages), b"")):
            if digest not in self._toolless:
                break
            shared = position + 1
        if shared > last_assistant:
            return BreakReason.TOOLS_CHANGED
        differing = request.messages[shared]
        if differing.role == "assistant":
            return BreakReason.ASSISTANT_REWRITTEN
        return BreakReason.SYSTEM_CHANGED if differing.role == "system" else BreakReason.HISTORY_REWRITTEN


def message_digest(message: Message) -> Digest:
    """16 bytes that are equal for messages of equal meaning.

    Left out: wire ids, reasoning (several harnesses drop or trim it), white space around an assistant's text, and how
    the arguments of a call are spelled.
    """
    hasher = hashlib.blake2b(digest_size=16)
    content = message.content.strip() if message.role == "assistant" else message.content
    images = (f"{one.media_type}\0{one.url}\0{one.data}" for one in message.parts if isinstance(one, Image))
    for part in (message.role, content, *(_call_text(call) for call in message.tool_calls), *images):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def canonical_arguments(text: str) -> str:
    """Arguments by meaning: keys sorted, no spaces, 1.0 as 1; text that is no JSON stays as it is."""
    try:
        return json.dumps(_plain(json.loads(text or "{}")), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text.strip()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    return value


def _call_text(call: ToolCall) -> str:
    return f"{call.name}\0{canonical_arguments(call.arguments)}"


def _tools_digest(tools: Sequence[Tool]) -> Digest:
    told = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return hashlib.blake2b(_json(told), digest_size=16).digest()


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(value, sort_keys=True).encode()


def _system_digest(messages: Sequence[Message]) -> Digest:
    first = messages[0] if messages and messages[0].role == "system" else Message("system")
    return message_digest(first)


def _has_assistant(messages: Sequence[Message]) -> bool:
    return any(message.role == "assistant" for message in messages)


def _chain(messages: Sequence[Digest], seed: Digest) -> Iterator[Digest]:
    """After each message, the digest of everything up to it."""
    digest = seed
    for message in messages:
        digest = _link(digest, message)
        yield digest


def _link(before: Digest, message: Digest) -> Digest:
    return hashlib.blake2b(before + message, digest_size=16).digest()
