"""LibraryRenderer: the adapter of the `renderers` package, for the model families that it knows."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..errors import BadRequest, ConfigError
from ..records import BreakReason, ChatRequest, Completion, JSONObject, Message, TokenIds, Tool, token_ids
from . import probes
from .base import Parsed
from .chat import Shape, shaped
from .probes import Kind, kind_of
from .template import KINDS_KEPT, History
from .tokenizer import Plain, Tokenizer, scrub
from .toolcalls import UNREADABLE, gather, tool_json, tool_parser

REFUSALS = (AssertionError, ImportError, OSError, RuntimeError, *UNREADABLE)
"""How a family's constructor says that a tokenizer is not of its family."""
_WANT_OFFSETS = ("deepseek-v4", "hy3", "laguna")
"""Families that, told no offsets, find them out by decoding token by token."""
_TOOLS_KEPT = 256
_TAGS = ("<tool_call>", "<think>", "</think>")


class LibraryRenderer:
    """A family of the `renderers` package. See `engine.base.Renderer` for the contract of its methods.

    `notes` says what the format could not say and how it is said instead.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        *,
        history: History = "sampled",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options` are the chat template's (enable_thinking, ...). Raises ConfigError where the two do not fit."""
        self.name = family
        self.tokenizer = tokenizer
        self.history = history
        try:
            self._library = create_family(tokenizer, family, history, options)
        except REFUSALS as error:
            raise ConfigError(
                f"renderer.kind: {family!r} does not fit this tokenizer ({error}); use auto or template"
            ) from error
        ends: list[int] = self._library.get_stop_token_ids()
        stop_ids: list[int] = [*ends, *tokenizer.stop_ids]
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        self.vocab_size = tokenizer.vocab_size
        self.multimodal = False
        self._told: dict[int, tuple[Sequence[Tool], Any]] = {}
        start = tokenizer.special.get("<|start|>")
        self._edges = frozenset([*ends, *([] if start is None else [start])])
        self._foreign_ends = frozenset(tokenizer.stop_ids) - frozenset(ends)
        self._proved: dict[tuple[Kind, int | None], BreakReason | None] = {}
        self.shape = Shape()
        self._needs_whole_prompt = not self._looks_at_the_end_only()
        if not self._says_system_later():
            self.shape = Shape(mid_system=False)
            self._proved.clear()
        self.notes = self.shape.notes

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        try:
            ids = self._library.render_ids(
                library_json(messages, self.shape), tools=self._tools(tools), add_generation_prompt=True
            )
        except UNREADABLE as error:
            raise BadRequest(f"the {self.name} format cannot say this conversation: {error}") from error
        return self.tokenizer.checked(ids)

    def extend(
        self, parent: Completion, prompt_and_output: TokenIds, new: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | BreakReason:
        if not new:
            return BreakReason.BOUNDARY_UNKNOWN
        output = parent.generation.output_ids
        ending = int(output[-1]) if len(output) and int(output[-1]) in self.stop_ids else None
        reason = self.why_not(parent.reply, new, bool(tools), ending)
        return self._extension(parent, new, tools) if reason is None else reason

    def why_not(
        self, reply: Message, new: Sequence[Message], tools: bool, ending: int | None = None
    ) -> BreakReason | None:
        """Why an extension of this kind is not made; None where it was shown to be the end of the full render.

        `ending`: the stop id that the sampled turn ends with, None where it was cut.
        """
        key = (kind_of(reply, new, tools), ending)
        if key not in self._proved:
            if len(self._proved) >= KINDS_KEPT:
                return BreakReason.BOUNDARY_UNKNOWN
            self._proved[key] = self._prove(*key)
        return self._proved[key]

    def _extension(self, parent: Completion, new: Sequence[Message], tools: Sequence[Tool]) -> TokenIds | BreakReason:
        output: list[int] = parent.generation.output_ids.tolist()
        messages = library_json([parent.reply, *new], self.shape)[1:]
        tail = self._bridge(self._end_of(parent.prompt_ids), output, messages, tools)
        if tail is None and output and output[-1] in self.stop_ids:
            # the library refuses a turn that ended inside its reasoning; behind an end token nothing depends on that
            closed = [*self.encode("</think>").tolist(), output[-1]]
            tail = self._bridge(output[-1:], output[-1:], messages, tools)
            tail = self._bridge(output[-1:], closed, messages, tools) if tail is None else tail
        if tail is not None:
            return self.tokenizer.checked(tail)
        rewritten = self.history == "template" and any(message.role == "user" for message in new)
        return BreakReason.TEMPLATE_REWRITE if rewritten else BreakReason.BOUNDARY_UNKNOWN

    def parse(self, output_ids: TokenIds, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        ids = self._turn(output_ids)
        prompt, tools = self._end_of(prompt_ids), self._tools(request.tools)
        try:
            parsed = self._library.parse_response(ids, tools=tools, prompt_ids=prompt)
            said = f"{parsed.content}{parsed.reasoning_content or ''}"
            if not parsed.tool_calls and any(tag in said for tag in _TAGS):  # a tag spelled in several tokens
                ids = self.tokenizer.encode(self.tokenizer.decode(ids))
                parsed = self._library.parse_response(ids, tools=tools, prompt_ids=prompt)
        except UNREADABLE:
            return Parsed(Message("assistant", self.tokenizer.decode(ids)), malformed_calls=1)
        found = gather(self.tokenizer, self._body(ids), parsed.content, parsed.tool_calls)
        if self.name == "llama-3" and not found.calls:  # its calls have no tags, so the library knows no half ones
            found = tool_parser("llama-3", self.tokenizer)(found.content, request.tools)
        reply = Message("assistant", found.content, parsed.reasoning_content or "", found.calls)
        return Parsed(reply, found.malformed)

    def decode(self, ids: TokenIds) -> str:
        return self.tokenizer.decode(ids)

    def encode(self, text: str) -> TokenIds:
        """Ids of plain text: what a model that says `text` would have sampled, without an end token."""
        return self.tokenizer.checked(self.tokenizer.encode(text))

    def _prove(self, kind: Kind, ending: int | None) -> BreakReason | None:
        """Compare the library's extensions of a kind with its own full renders, over several histories."""
        tools = probes.TOOLS if kind.tools else ()
        output = token_ids([*self.encode("Words.").tolist(), *([] if ending is None else [ending])])
        seen = 0
        for history, reply in probes.cases(kind):
            new = probes.new(kind, reply)
            try:
                prompt, full = self.render(history, tools), self.render([*history, reply, *new], tools)
            except BadRequest:
                continue
            delta = self._extension(probes.parent(history, reply, prompt, output, tools), new, tools)
            if isinstance(delta, BreakReason):
                return delta
            said = self.decode(delta)
            if any(message.content.split()[0] not in said for message in new):
                return BreakReason.BOUNDARY_UNKNOWN
            if probes.closing(full, delta, self.stop_ids, self.encode("</think>")) is None:
                return BreakReason.BOUNDARY_UNKNOWN
            seen += 1
        return None if seen > 1 else BreakReason.BOUNDARY_UNKNOWN

    def _says_system_later(self) -> bool:
        kinds = (Kind(0, roles, False) for roles in (("system", "user"), ("system",)))
        reasons = (self._prove(kind, ending) for kind in kinds for ending in (None, *self.stop_ids))
        return any(reason is not BreakReason.BOUNDARY_UNKNOWN for reason in reasons)

    def _tools(self, tools: Sequence[Tool]) -> Any:
        """As the library takes them; those of the latest conversations are kept, since a turn tells them thrice."""
        known = self._told.get(id(tools))
        if known and known[0] is tools:
            return known[1]
        told = [_scrubbed(tool) for tool in tool_json(tools)] or None
        if len(self._told) >= _TOOLS_KEPT:
            self._told = {}
        self._told[id(tools)] = (tools, told)
        return told

    def _turn(self, output_ids: TokenIds) -> list[int]:
        """Sampled ids up to an end token that the library does not know as one."""
        ids: list[int] = output_ids.tolist()
        return ids[: next((at for at, index in enumerate(ids) if index in self._foreign_ends), len(ids))]

    def _body(self, ids: list[int]) -> list[int]:
        """The turn without its end token: what the spans of parsed calls count in."""
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def _bridge(
        self, prompt: list[int], output: list[int], new: list[JSONObject], tools: Sequence[Tool]
    ) -> list[int] | None:
        """The library's extension without what it extends; None where it makes none that begins with just that."""
        try:
            bridged = self._library.bridge_to_next_turn(prompt, output, new, tools=self._tools(tools))
        except UNREADABLE:
            return None
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        size = len(prompt) + len(output)
        same = len(ids) > size and np.array_equal(np.array(ids[:size]), np.array([*prompt, *output]))
        return ids[size:] if same else None

    def _end_of(self, prompt: TokenIds) -> list[int]:
        """The end of a prompt from the last token that ends or opens a turn: all that the library looks at."""
        size = len(prompt) if self._needs_whole_prompt else 1024
        while size < len(prompt):
            ids: list[int] = prompt[-size:].tolist()
            edge = next((at for at in range(size - 1, -1, -1) if ids[at] in self._edges), None)
            if edge is not None:
                return ids[edge:]
            size *= 8
        return prompt.tolist()

    def _looks_at_the_end_only(self) -> bool:
        """Whether extending from a prompt's end gives what extending from the whole prompt gives, over probes."""
        self._needs_whole_prompt = False
        long = Message("user", "<think> " * 700)
        for kind in probes.REPORTED.values():
            history, reply = list(probes.cases(kind))[-1]
            new = library_json([reply, *probes.new(kind, reply)], self.shape)[1:]
            try:
                prompt = self.render([long, *history], probes.TOOLS if kind.tools else ())
            except BadRequest:
                continue
            whole = self._bridge(prompt.tolist(), prompt[:3].tolist(), new, probes.TOOLS)
            if whole != self._bridge(self._end_of(prompt), prompt[:3].tolist(), new, probes.TOOLS):
                return False
        return True


def create_family(tokenizer: Tokenizer, family: str, history: History, options: Mapping[str, Any] | None) -> Any:
    """The library's own renderer; raises one of REFUSALS where the tokenizer is not of the family."""
    from renderers import base, configs

    retention = "all" if history == "sampled" else None
    config = configs._config_class_for(family)(thinking_retention=retention)  # pyright: ignore[reportPrivateUsage]
    merged = base.merge_chat_template_kwargs(cast("Any", config), options)
    return base.create_renderer(tokenizer.hf if family.startswith(_WANT_OFFSETS) else Plain(tokenizer), merged)


# --- messages as the library takes them -------------------------------------------------------------------------------


def library_json(messages: Sequence[Message], shape: Shape) -> list[JSONObject]:
    """Messages as `renderers` takes them: OpenAI's form, arguments as objects, results with their function's name."""
    return [_scrubbed(message) for message in shaped(messages, (), shape)]


def _scrubbed(value: Any) -> Any:
    """The same JSON without lone surrogates."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {_scrubbed(key): _scrubbed(item) for key, item in cast("JSONObject", value).items()}
    return [_scrubbed(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value
