"""A recording of a real agent program, asked again of our own proxy: real codecs, routes, chain matching and tokens.

The harness's side is recorded; the model says what it was recorded to say. What the harness echoes of it, re-spelled or
not, is what the recording has.
"""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from polar_plugin.engine.base import Engine, Parsed, Renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.errors import EngineBusy
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.records import (
    BreakReason,
    ChatRequest,
    Completion,
    CompletionSession,
    FinishReason,
    Message,
    SamplingParams,
    TokenIds,
    Tool,
    ToolCall,
)

DIRECTORY = Path(__file__).parent
CONTEXT = 200_000
PATIENCE = 600.0
"""Seconds within which a failure has an HTTP status of its own: on a busy machine, too, it ends no stream midway."""
_NOT_SAID_AGAIN = frozenset({
    "authorization", "x-api-key", "x-goog-api-key", "accept-encoding", "content-type", "content-length",
    "content-encoding", "transfer-encoding", "connection", "host",
})  # fmt: skip
_CUT = frozenset({"length", "max_tokens", "MAX_TOKENS", "incomplete"})


@dataclass(frozen=True, slots=True)
class Recorded:
    """One exchange; see `redact_http`."""

    method: str
    path: str
    """With its query."""
    headers: list[list[str]]
    body: dict[str, Any]
    response: dict[str, Any]
    thread: str
    """Whose turn it was by the script: "main", "SUBTASK" or "side"."""

    @property
    def reply(self) -> dict[str, Any] | None:
        return self.response.get("reply")

    @property
    def well_formed(self) -> bool:
        """Whether a model could have said it in its chat format: arguments that are no JSON are no call."""
        return all(_is_object(call["arguments"]) for call in (self.reply or {"tool_calls": ()})["tool_calls"])


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def recordings() -> list[str]:
    """Names of all of them, as in "pi-1.6.0/long"."""
    paths = DIRECTORY.glob("*/*.jsonl.xz")
    return sorted(f"{path.parent.name}/{path.name.removesuffix('.jsonl.xz')}" for path in paths)


def load(name: str) -> list[Recorded]:
    lines = lzma.decompress((DIRECTORY / f"{name}.jsonl.xz").read_bytes()).splitlines()
    fields = Recorded.__dataclass_fields__
    return [Recorded(**{key: value for key, value in json.loads(line).items() if key in fields}) for line in lines]


def written(reply: dict[str, Any]) -> str:
    """As a model with Qwen3's chat format writes it."""
    thought = f"<think>\n{reply['reasoning']}\n</think>\n\n" if reply["reasoning"] else ""
    calls = (
        f'<tool_call>\n{{"name": {json.dumps(_name(call))}, "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in reply["tool_calls"]
    )
    return thought + "\n".join([*([reply["content"]] if reply["content"] else []), *calls])


def message_of(reply: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(_name(call), call["arguments"] or "{}", call["id"]) for call in reply["tool_calls"])
    return Message("assistant", reply["content"], reply["reasoning"], calls)


def _name(call: dict[str, Any]) -> str:
    """As the model sees it, and so writes it."""
    return f"{call['namespace']}__{call['name']}" if "namespace" in call else call["name"]


class Remembering:
    """A renderer whose replies have the recorded ids of calls; arguments that are no JSON come as recorded, too."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.recorded: Recorded | None = None

    @property
    def name(self) -> str:
        return self._renderer.name

    @property
    def vocab_size(self) -> int:
        return self._renderer.vocab_size

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._renderer.stop_ids

    @property
    def multimodal(self) -> bool:
        return self._renderer.multimodal

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        return self._renderer.render(messages, tools)

    def extend(
        self, parent: Completion, prompt_and_output: TokenIds, new: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | BreakReason:
        return self._renderer.extend(parent, prompt_and_output, new, tools)

    def parse(self, output_ids: TokenIds, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        assert self.recorded is not None
        assert self.recorded.reply is not None
        told = message_of(self.recorded.reply)
        if not self.recorded.well_formed:
            return Parsed(told)
        parsed = self._renderer.parse(output_ids, request, prompt_ids)
        pairs = zip(parsed.reply.tool_calls, told.tool_calls, strict=True)
        calls = tuple(replace(call, id=recorded.id) for call, recorded in pairs)
        return replace(parsed, reply=replace(parsed.reply, tool_calls=calls))

    def decode(self, ids: TokenIds) -> str:
        return self._renderer.decode(ids)


@dataclass
class Replayed:
    """What became of a recording."""

    session: CompletionSession
    exchanges: list[Recorded] = field(default_factory=list[Recorded])
    """Those that were answered, in the order of the session's completions."""
    statuses: list[int] = field(default_factory=list[int])
    """Of all."""


class Voice(Protocol):
    """Gives an open engine that says what a recording says: `script` has the reply to the exchange under way."""

    def __call__(self, script: Callable[[object], Reply], tokenizer: Any, /) -> Engine: ...


def scripted(script: Callable[[object], Reply], tokenizer: Any) -> Engine:
    return ScriptedEngine(script, tokenizer, context_length=CONTEXT)


async def replay(name: str, renderer: Renderer, tokenizer: Any, voice: Voice = scripted) -> Replayed:
    """One exchange after the other. Exchanges that got no reply get 503 from us: nothing of them is to be kept."""
    exchanges, remembering = load(name), Remembering(renderer)

    def script(call: object) -> Reply:
        assert remembering.recorded is not None
        reply = remembering.recorded.reply
        if reply is None:
            return Reply(raises=EngineBusy("as recorded: no answer", retry_after=1.0))
        return Reply(written(reply), finish_reason=_finish(reply))

    engine = voice(script, tokenizer)
    policy = Policy(engine, remembering, SamplingParams(max_tokens=20_000), CONTEXT)
    numbers = itertools.count(1)
    conversation = Conversation(policy, "s", clock=lambda: 0.0, new_id=lambda: f"{next(numbers):032x}")
    statuses: list[int] = []
    async with (
        Proxy(ProxyConfig(header_grace_seconds=PATIENCE)).serving() as proxy,
        aiohttp.ClientSession() as http,
        proxy.session("s", conversation) as session,
    ):
        for recorded in exchanges:
            remembering.recorded = recorded
            url, headers = f"{proxy.url}/s/{session.key}{recorded.path}", headers_of(recorded)
            async with http.request(recorded.method, url, headers=headers, json=recorded.body) as response:
                await response.read()
                statuses.append(response.status)
        ledger = session.seal()
    return Replayed(ledger, [one for one in exchanges if one.reply is not None], statuses)


def headers_of(recorded: Recorded) -> dict[str, str]:
    """Without keys, and without what the client that asks again says of its own."""
    return {name: value for name, value in recorded.headers if name.lower() not in _NOT_SAID_AGAIN}


def _finish(reply: dict[str, Any]) -> FinishReason:
    return FinishReason.LENGTH if reply["finish"] in _CUT else FinishReason.STOP
