"""TemplateRenderer: any Hugging Face chat template, extended without re-rendering what was sampled.

The ids behind an assistant turn are found by rendering a *stub*: a made-up user message, a made-up assistant turn of
the same shape as the real one, then the real new messages. The text from the turn's closing special token on is the
delta. That it does not depend on the history is proved by rendering, once for each kind of extension; a kind that
cannot be proved is answered with a BreakReason and never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..errors import BadRequest, ConfigError
from ..records import BreakReason, ChatRequest, Completion, JSONObject, Message, TokenIds, Tool, ToolCall
from . import probes
from .base import Parsed
from .chat import TEMPLATE_ERRORS, probe_shape, shaped
from .probes import Kind, kind_of
from .tokenizer import Tokenizer, scrub
from .toolcalls import guess_tool_parser, split_reasoning, tool_json, tool_parser

History = Literal["sampled", "template"]
_STUB_USER = Message("user", "stub")
_MARK = "q7stub{}q"  # what stands for an assistant turn's words; looked for in the rendered text
_STUB_TOOLS = (Tool("stub", "stub", {"type": "object", "properties": {}}),)
KINDS_KEPT = 512


class TemplateRenderer:
    """The `Renderer` of a tokenizer's own chat template. See `engine.base.Renderer` for the contract of its methods.

    `notes` says what the template could not say and how it is said instead.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        history: History = "sampled",
        tool_parser_name: str | None = None,
        reasoning_parser: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`history="template"` breaks where the template drops reasoning of earlier turns, instead of keeping it.

        Parser names: see `toolcalls`; None guesses from the template's text. Raises ConfigError.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "renderer: the tokenizer has no chat template; put chat_template.jinja beside tokenizer.json, or name "
                "the model's family (renderer.kind)"
            )
        self.tokenizer = tokenizer
        self.history = history
        self._options = dict(options or {})
        self.shape = probe_shape(lambda messages, tools: self._apply(messages, tools, prompt=False), self._template)
        self.notes = self.shape.notes
        self._parse_calls = tool_parser(self._parser_name(tool_parser_name), tokenizer)
        self._thinks = _thinks(reasoning_parser, self._template)
        self._closes_itself, closers = self._find_closers()
        self._closer = re.compile("|".join(map(re.escape, closers))) if closers else None
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*(tokenizer.special[closer] for closer in closers), *tokenizer.stop_ids])
        )
        self.vocab_size = tokenizer.vocab_size
        self.multimodal = False
        self._proved: dict[Kind, BreakReason | None] = {}

    # --- Renderer -----------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        try:
            text = self._text(messages, tools, prompt=True)
        except TEMPLATE_ERRORS as error:
            raise BadRequest(f"the model's chat template cannot say this conversation: {error}") from error
        return self.tokenizer.checked(self.tokenizer.encode(text))

    def extend(
        self, parent: Completion, prompt_and_output: TokenIds, new: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | BreakReason:
        if not new:
            return BreakReason.BOUNDARY_UNKNOWN
        reason = self.why_not(parent.reply, new, bool(tools))
        if reason is not None:
            return reason
        try:
            text = self._text([_STUB_USER, _stub(parent.reply), *new], self._stub_tools(bool(tools)), prompt=True)
        except TEMPLATE_ERRORS:
            return BreakReason.BOUNDARY_UNKNOWN
        ids = self.tokenizer.encode(self._cut(text, parent.reply)[1])
        if not ids:
            return BreakReason.BOUNDARY_UNKNOWN
        output = parent.generation.output_ids
        if len(output) and self._ends_turn(int(output[-1]), ids[0]):
            ids = ids[1:]
        elif self._thinks and self._split(output, parent.prompt_ids)[2]:
            ids = [*self.tokenizer.encode("</think>"), *ids]
        return self.tokenizer.checked(ids)

    def parse(self, output_ids: TokenIds, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        reasoning, text, _ = self._split(output_ids, prompt_ids)
        found = self._parse_calls(text, request.tools)
        return Parsed(Message("assistant", found.content, reasoning, found.calls), found.malformed)

    def decode(self, ids: TokenIds) -> str:
        return self.tokenizer.decode(ids)

    def encode(self, text: str) -> TokenIds:
        """Ids of plain text: what a model that says `text` would have sampled, without an end token."""
        return self.tokenizer.checked(self.tokenizer.encode(text))

    def why_not(
        self, reply: Message, new: Sequence[Message], tools: bool, ending: int | None = None
    ) -> BreakReason | None:
        """Why an extension of this kind is not made; None where it is proved, for every `ending`."""
        kind = kind_of(reply, new, tools)
        if kind not in self._proved:
            if len(self._proved) >= KINDS_KEPT:
                return BreakReason.BOUNDARY_UNKNOWN
            self._proved[kind] = self._prove(kind)
        return self._proved[kind]

    # --- text ---------------------------------------------------------------------------------------------------------

    @property
    def _template(self) -> str:
        return self.tokenizer.chat_template

    def _apply(self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, prompt: bool) -> str:
        return scrub(self.tokenizer.apply(messages, tools, prompt, self._options))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        native = tool_json(tools) if self.shape.tools else []
        return self._apply(shaped(messages, tools, self.shape), native, prompt=prompt)

    def _stub_tools(self, tools: bool) -> tuple[Tool, ...]:
        """A stub's tools: the real ones may be long, and a proved delta does not depend on them."""
        return _STUB_TOOLS if tools and self.shape.tools else ()

    def _cut(self, text: str, reply: Message) -> tuple[str, str]:
        """What follows the words of a stub of `reply` in a rendered text: up to its closing token, and from there on.

        The second is "" where nothing closes the turn.
        """
        begin = _words_end(text, len(reply.tool_calls))
        closing = self._closer.search(text, begin) if self._closer and begin is not None else None
        return (text[begin : closing.start()], text[closing.start() :]) if closing else ("", "")

    def _ends_turn(self, last: int, closer: int) -> bool:
        """Whether a sampled turn that ends in `last` needs no `closer`.

        Any stop id ends a turn, as it does for the model; but a closer that opens the next role has to be that role's.
        """
        return last == closer or (self._closes_itself and last in self.stop_ids)

    def _split(self, output_ids: TokenIds, prompt_ids: TokenIds) -> tuple[str, str, bool]:
        """(reasoning, text, whether the reasoning is still open) of a sampled turn."""
        values: list[int] = output_ids.tolist()
        end = next((index for index, value in enumerate(values) if value in self.stop_ids), len(values))
        text = self.tokenizer.decode(values[:end])
        if not self._thinks:
            return "", text, False
        opened = self.tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>")
        return split_reasoning(text, opened=opened)

    def _parser_name(self, name: str | None) -> str:
        if self.shape.tools:
            return name if name and name != "auto" else guess_tool_parser(self._template)
        if name not in (None, "auto", "hermes", "qwen3", "qwen25"):
            raise ConfigError(
                f"renderer.tool_parser: the chat template has no words for tools, so calls are asked for as "
                f"<tool_call> JSON and {name!r} would not find them; leave it out, or use a template with tools"
            )
        return "hermes"

    # --- proofs -------------------------------------------------------------------------------------------------------

    def _find_closers(self) -> tuple[bool, tuple[str, ...]]:
        """Whether an assistant turn has a closing token of its own, and the special tokens that can follow its words.

        Without one, the turn is closed by the token that opens the next role.
        """
        special = re.compile("|".join(map(re.escape, sorted(self.tokenizer.special, key=len, reverse=True))))
        plain, called = Message("assistant", "x"), Message("assistant", tool_calls=(ToolCall("stub", "{}"),))
        at_end = self._behind([_STUB_USER, _stub(plain)], 0, prompt=False)
        own = special.match(at_end.lstrip()) if at_end is not None else None
        if own:
            return True, (own.group(),)
        found: dict[str, None] = {}
        pairs = ((plain, Message("user")), (plain, Message("system")), (called, Message("tool")))
        for reply, follower in pairs:
            calls = len(reply.tool_calls)
            alone = self._behind([_STUB_USER, _stub(reply)], calls, prompt=False)
            followed = self._behind([_STUB_USER, _stub(reply), replace(follower, content="stub")], calls, prompt=True)
            if alone is not None and followed is not None and followed.startswith(alone.rstrip()):
                opener = special.match(followed[len(alone.rstrip()) :].lstrip())
                found |= {opener.group(): None} if opener else {}
        return False, tuple(found)

    def _behind(self, messages: Sequence[Message], calls: int, *, prompt: bool) -> str | None:
        try:
            text = self._text(messages, _STUB_TOOLS if calls else (), prompt=prompt)
        except TEMPLATE_ERRORS:
            return None
        begin = _words_end(text, calls)
        return None if begin is None else text[begin:]

    def _prove(self, kind: Kind) -> BreakReason | None:
        """Render extensions of a kind in full over several histories: every tail must be the stub's.

        Text and ids are compared, and what came before the turn must stand unchanged.
        """
        seen = 0
        for history, reply in probes.cases(kind):
            new = probes.new(kind, reply)
            try:
                reason = self._differs(history, reply, new, kind.tools)
            except TEMPLATE_ERRORS:
                continue  # a history that the template cannot say is never a parent's
            if reason is not None:
                return reason
            seen += 1
        return None if seen > 1 else BreakReason.BOUNDARY_UNKNOWN

    def _differs(
        self, history: Sequence[Message], reply: Message, new: Sequence[Message], with_tools: bool
    ) -> BreakReason | None:
        tools = probes.TOOLS if with_tools else ()
        full = self._text([*history, _stub(reply), *new], tools, prompt=True)
        before, tail = self._cut(full, reply)
        stub = self._text([_STUB_USER, _stub(reply), *new], self._stub_tools(with_tools), prompt=True)
        if not tail or tail != self._cut(stub, reply)[1] or not self._begins_behind(history, reply, before, tools):
            return BreakReason.BOUNDARY_UNKNOWN
        ids, whole = self.tokenizer.encode(tail), self.tokenizer.encode(full)
        if whole[len(whole) - len(ids) :] != ids or ids[0] not in self.stop_ids:
            return BreakReason.BOUNDARY_UNKNOWN
        return None if self._keeps(history, reply, full[: len(full) - len(tail)], tools) else _REWRITE

    def _begins_behind(self, history: Sequence[Message], reply: Message, before: str, tools: Sequence[Tool]) -> bool:
        """Whether what stands between the reply's words and the closing token is the reply's, not the next role's."""
        alone = self._text([*history, _stub(reply)], tools, prompt=False)
        begin = _words_end(alone, len(reply.tool_calls))
        return begin is not None and alone.startswith(before.rstrip(), begin)

    def _keeps(self, history: Sequence[Message], reply: Message, kept: str, tools: Sequence[Tool]) -> bool:
        """Whether the text before the delta is what stood there before: all of it, or all but reasoning.

        `kept` is that text in the longer render.
        """
        if reply.reasoning and self.history == "template":
            return self._text([*history, _stub(reply)], tools, prompt=False).startswith(kept)
        if self.history == "sampled" and any(message.reasoning for message in [*history, reply]):
            return True
        return reply.reasoning != "" or kept.startswith(self._text(history, tools, prompt=False))


_REWRITE = BreakReason.TEMPLATE_REWRITE


def _thinks(name: str | None, template: str) -> bool:
    if name not in (None, "auto", "think", "none"):
        raise ConfigError(f"renderer.reasoning_parser: unknown {name!r}; use think, none, or leave it out")
    return name == "think" or (name != "none" and "think>" in template)


def _stub(reply: Message) -> Message:
    """A turn of the same shape with marks for words."""
    calls = tuple(
        replace(call, arguments=f'{{"x": "{_MARK.format(index + 1)}"}}') for index, call in enumerate(reply.tool_calls)
    )
    content = _MARK.format(0) if reply.content or not calls else ""
    return replace(reply, content=content, reasoning="stub" if reply.reasoning else "", tool_calls=calls)


def _words_end(text: str, calls: int) -> int | None:
    """Where a stub's last mark ends in a rendered text."""
    mark = _MARK.format(calls)
    at = text.find(mark)
    return None if at < 0 else at + len(mark)
