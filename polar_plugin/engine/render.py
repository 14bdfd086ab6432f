"""Which renderer a model gets, and what a renderer is shown to do.

`renderers` has hand-written chat formats that extend and parse by token id. It is taken where it says what the
model's own chat template says (compared token for token over probe conversations); every other model gets a
`TemplateRenderer`.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from ..errors import BadRequest, ConfigError
from ..records import BreakReason, ChatRequest, Completion, Message, TokenIds, Tool, token_ids
from . import probes
from .chat import TEMPLATE_ERRORS, Shape
from .library import REFUSALS, LibraryRenderer, create_family, library_json
from .probes import Kind
from .template import History, TemplateRenderer
from .tokenizer import Tokenizer, load_tokenizer
from .toolcalls import tool_json


def load_renderer(
    tokenizer: str | Path | Any,
    *,
    kind: str = "auto",
    history: History = "sampled",
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    vocab_size: int | None = None,
    stop_ids: Sequence[int] = (),
) -> LibraryRenderer | TemplateRenderer:
    """The renderer of a tokenizer, given as a directory or as a `transformers` object.

    `kind`: "auto", "template", or a family of `renderers` ("qwen3", "glm45", "gpt-oss", ...). "auto" takes the family
    of `model_name` where `renderers` knows it, else any family that says what the chat template says; a family that
    differs from the template is never taken. A named parser asks for the template.
    `history`: "sampled" keeps the reasoning of earlier turns where the template would drop it, so that a chain goes on;
    "template" follows the template and breaks the chain.
    `vocab_size` and `stop_ids` are the model's, where the files beside the tokenizer do not tell them.
    Raises ConfigError that says what to write.
    """
    if history not in ("sampled", "template"):
        raise ConfigError(f"renderer.history: {history!r} is neither sampled nor template")
    if isinstance(tokenizer, str | Path):
        loaded = load_tokenizer(tokenizer, vocab_size=vocab_size, stop_ids=stop_ids)
    else:
        loaded = Tokenizer(tokenizer, vocab_size=vocab_size, stop_ids=stop_ids)
    own_parser = tool_parser not in (None, "auto") or reasoning_parser not in (None, "auto")
    if kind == "auto" and not own_parser:
        name = model_name or str(getattr(loaded.hf, "name_or_path", ""))
        found = _detect(loaded, name, history, chat_template_kwargs)
        if found is not None:
            return found
    if kind in ("auto", "template"):
        return TemplateRenderer(
            loaded,
            history=history,
            tool_parser_name=tool_parser,
            reasoning_parser=reasoning_parser,
            options=chat_template_kwargs,
        )
    if own_parser:
        raise ConfigError(f"renderer.tool_parser: {kind!r} brings its own parsers; leave them out, or kind: template")
    return LibraryRenderer(loaded, _family(kind), history=history, options=chat_template_kwargs)


class Check(NamedTuple):
    """One line of a report."""

    name: str
    ok: bool
    detail: str


def extension_report(renderer: LibraryRenderer | TemplateRenderer) -> list[Check]:
    """What the renderer can extend, shown against its own full renders, and whether its tool calls parse back."""
    report = [_extends(renderer, name, kind) for name, kind in probes.REPORTED.items()]
    return [*report, _describes_tools(renderer), *(_parses_back(renderer, count) for count in (1, 2))]


# --- choosing ---------------------------------------------------------------------------------------------------------


def _families() -> list[str]:
    from renderers import base

    base._populate_registry()  # pyright: ignore[reportPrivateUsage]
    return [name for name in base.RENDERER_REGISTRY if name != "default"]


def _family(kind: str) -> str:
    """A family by its name, written with or without its dashes and dots."""

    def plain(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    for family in _families():
        if plain(family) == plain(kind):
            return family
    raise ConfigError(f"renderer.kind: unknown {kind!r}; use auto, template, or one of {', '.join(_families())}")


def _detect(
    tokenizer: Tokenizer, model_name: str, history: History, options: Mapping[str, Any] | None
) -> LibraryRenderer | None:
    from renderers.base import MODEL_RENDERER_MAP

    known = MODEL_RENDERER_MAP.get(model_name)
    for family in [known] if known else [name for name in _families() if name != "gpt-oss"]:  # it loads files
        try:
            library = create_family(tokenizer, family, history, options)
        except REFUSALS:
            continue
        if _agrees(library, tokenizer, options or {}) if tokenizer.chat_template else known:
            return LibraryRenderer(tokenizer, family, history=history, options=options)
    return None


def _agrees(library: Any, tokenizer: Tokenizer, options: Mapping[str, Any]) -> bool:
    """Whether the family's ids are the chat template's over the probe conversations.

    What neither can say does not count; what only one of them can say is a difference.
    """
    seen = 0
    for messages, tools in _conversations():
        said = library_json(messages, Shape())
        definitions = tool_json(tools)
        theirs = _ids(tokenizer.prompt, said, definitions, options)
        ours = _ids(library.render_ids, said, tools=definitions or None, add_generation_prompt=True)
        if ours != theirs:
            return False
        seen += ours is not None
    return seen > len(probes.PLAIN)


def _ids(render: Callable[..., list[int]], *args: Any, **kwargs: Any) -> list[int] | None:
    try:
        return render(*args, **kwargs)
    except (*TEMPLATE_ERRORS, *REFUSALS):
        return None


def _conversations() -> Iterator[tuple[Sequence[Message], Sequence[Tool]]]:
    for history in probes.PLAIN:
        yield history, ()
        yield history, probes.TOOLS
    for history in probes.CALLING:
        yield history, probes.TOOLS


# --- the doctor's report ----------------------------------------------------------------------------------------------


def _extends(renderer: LibraryRenderer | TemplateRenderer, name: str, kind: Kind) -> Check:
    reply = Message("assistant", "Words.", "", probes.calls(kind.calls))
    endings = (None, *renderer.stop_ids)
    reasons = [renderer.why_not(reply, probes.new(kind, reply), kind.tools, ending) for ending in endings]
    shown = "the delta is the end of the full render"
    return Check(name, None in reasons, shown if None in reasons else f"not extended: {reasons[0]}")


def _describes_tools(renderer: LibraryRenderer | TemplateRenderer) -> Check:
    name = "the prompt describes the tools"
    text = renderer.decode(renderer.render([Message("user", "Look.")], probes.TOOLS))
    ok = all(tool.name in text and tool.description in text for tool in probes.TOOLS)
    return Check(name, ok, "found" if ok else "the model is never told of its tools; use renderer.kind: template")


def _parses_back(renderer: LibraryRenderer | TemplateRenderer, count: int) -> Check:
    name = "a tool call parses back" if count == 1 else "several tool calls parse back"
    history = [Message("user", "Look.")]
    reply = Message("assistant", tool_calls=probes.calls(count))
    new = probes.new(Kind(count, ("tool",) * count, True), reply)
    try:
        prompt = renderer.render(history, probes.TOOLS)
        full = renderer.render([*history, reply, *new], probes.TOOLS)
    except BadRequest as error:
        return Check(name, False, str(error))
    kept = _kept(renderer, probes.parent(history, reply, prompt, prompt[:1], probes.TOOLS), full, new)
    if kept is None:
        return Check(name, False, "its turn cannot be told from what follows")
    size = min(len(prompt), len(full))
    differing = np.flatnonzero(prompt[:size] != full[:size])
    begin = int(differing[0]) if len(differing) else size  # a template may write the end of its prompt otherwise later
    said = full[begin:kept]
    parsed = renderer.parse(said, ChatRequest((*history,), probes.TOOLS), prompt[:begin])
    wanted = [(call.name, orjson.loads(call.arguments)) for call in reply.tool_calls]
    got = [(call.name, orjson.loads(call.arguments)) for call in parsed.reply.tool_calls]
    return Check(name, got == wanted, "as written" if got == wanted else f"{renderer.decode(said)!r} reads as {got}")


def _kept(
    renderer: LibraryRenderer | TemplateRenderer, cut: Completion, full: TokenIds, new: Sequence[Message]
) -> int | None:
    """Where the turn of `cut` ends in a full render that `new` follows."""
    for ending in (None, *renderer.stop_ids):
        output = cut.generation.output_ids.tolist() + ([] if ending is None else [ending])
        parent = probes.parent(cut.request.messages, cut.reply, cut.prompt_ids, token_ids(output), probes.TOOLS)
        delta = renderer.extend(parent, cut.prompt_ids, new, probes.TOOLS)
        if not isinstance(delta, BreakReason):
            size = probes.closing(full, delta, renderer.stop_ids, renderer.encode("</think>"))
            return None if size is None else len(full) - len(delta) + size
    return None
