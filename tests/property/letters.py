"""A small exact chat format: bytes and marks. A byte has two ids, so that a new render is not what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from polar_plugin.engine.base import Parsed
from polar_plugin.records import BreakReason, ChatRequest, Completion, Message, TokenIds, Tool, ToolCall, token_ids

MARKS = ("system", "user", "assistant", "tool", "end", "think", "/think", "call", "/call", "tools")
MARK = {name: 256 + at for at, name in enumerate(MARKS)}
SAMPLED = 300  # what a byte's other id adds to it


class Letters:
    """See `engine.base.Renderer`. It extends whatever brings something new."""

    name = "letters"
    vocab_size = SAMPLED + 256
    stop_ids = (MARK["end"],)
    multimodal = False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        head = [MARK["tools"], *written(" ".join(tool.name for tool in tools)), MARK["end"]] if tools else []
        return token_ids([*head, *told(messages), MARK["assistant"]])

    def extend(
        self, parent: Completion, prompt_and_output: TokenIds, new: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | BreakReason:
        return token_ids(following(parent.generation.output_ids.tolist(), new)) if new else BreakReason.BOUNDARY_UNKNOWN

    def parse(self, output_ids: TokenIds, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        """Half a call is left out and counted."""
        part, parts = "text", {"text": "", "think": ""}
        calls: list[ToolCall] = []
        pending = bytearray()
        for token in [*output_ids.tolist(), MARK["end"]]:
            if token not in MARK.values():
                pending.append(token - SAMPLED if token >= SAMPLED else token)
                continue
            words, pending = pending.decode(errors="replace"), bytearray()
            if part in parts:
                parts[part] += words
            elif token == MARK["/call"]:
                name, _, arguments = words.partition("\n")
                calls.append(ToolCall(name, arguments))
            cut = part == "call" and token == MARK["end"]
            if token == MARK["end"]:
                return Parsed(Message("assistant", parts["text"], parts["think"], tuple(calls)), int(cut))
            part = MARKS[token - 256] if token in (MARK["think"], MARK["call"]) else "text"
        raise AssertionError("it ends")

    def decode(self, ids: TokenIds) -> str:
        return " ".join(map(str, ids.tolist()))


def following(output: list[int], new: Sequence[Message]) -> list[int]:
    """What stands between a sampled turn and the next."""
    return [*([] if output[-1:] == [MARK["end"]] else [MARK["end"]]), *told(new), MARK["assistant"]]


def told(messages: Sequence[Message]) -> list[int]:
    return [token for one in messages for token in (MARK[one.role], *body(one), MARK["end"])]


def body(message: Message) -> list[int]:
    think = [MARK["think"], *written(message.reasoning), MARK["/think"]] if message.reasoning else []
    calls = [(MARK["call"], *written(f"{one.name}\n{one.arguments}"), MARK["/call"]) for one in message.tool_calls]
    return [*think, *written(message.content), *(token for call in calls for token in call)]


def written(text: str) -> list[int]:
    return list(text.encode())


def sampled(message: Message, spelling: Sequence[bool]) -> list[int]:
    """A turn as a model may have spelled it: each byte by one of its ids, as the (repeated) `spelling` says."""
    other = cycle(spelling)
    return [token + SAMPLED if token < 256 and next(other) else token for token in body(message)]
