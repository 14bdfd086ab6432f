"""Conversations and parents for the renderer tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from polar_plugin.records import (
    ChatRequest,
    Completion,
    FinishReason,
    Generation,
    Message,
    TokenIds,
    Tool,
    ToolCall,
    log_probs,
    token_ids,
)

WEATHER = Tool(
    "get_weather",
    "Current weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
TOOLS = (WEATHER, BASH)


def user(text: str) -> Message:
    return Message("user", text)


def system(text: str) -> Message:
    return Message("system", text)


def assistant(text: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", text, reasoning, calls)


def result(text: str, call_id: str = "") -> Message:
    return Message("tool", text, tool_call_id=call_id)


def weather(city: str, call_id: str = "c0") -> ToolCall:
    return ToolCall("get_weather", f'{{"city": "{city}"}}', call_id)


def parent(
    messages: Sequence[Message],
    reply: Message,
    prompt_ids: TokenIds,
    output_ids: ArrayLike,
    tools: Sequence[Tool] = (),
) -> Completion:
    """A completion that sampled `output_ids`."""
    output = token_ids(output_ids)
    request = ChatRequest(tuple(messages), tuple(tools))
    generation = Generation(output, log_probs(np.zeros(len(output))), FinishReason.STOP)
    return Completion("c", request, prompt_ids, generation, reply, request.sampling, 0.0, 0.0)


def whole(completion: Completion) -> TokenIds:
    """Prompt and output of a completion."""
    return token_ids(np.concatenate([completion.prompt_ids, completion.generation.output_ids]))
