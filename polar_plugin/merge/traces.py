"""Chains to traces: one array pass a trace, and the reasons why sampled tokens are not trained. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..records import (
    Completion,
    CompletionSession,
    JSONObject,
    Message,
    TokenIds,
    Tool,
    Trace,
    VersionSpan,
)
from .chains import Chain, parents_of


class Untrained(enum.StrEnum):
    """Why a sampled token is in no trace's loss."""

    UNDELIVERED = "undelivered"
    """The harness never got the answer and nothing extends it."""
    SUPERSEDED = "superseded"
    """An answer to the same prompt went on instead of it, and the harness never got this one."""
    OVER_LENGTH = "over_length"
    """Cut by `max_trace_tokens`."""


def untrained(session: CompletionSession) -> Mapping[str, Untrained]:
    """By completion id, the completions whose output is not trained, and why.

    An undelivered leaf that nobody extended is not trained on; where its prompt was answered again it is superseded.
    """
    extended = set(parents_of(session.completions).values())
    answered = Counter(_prompt_key(completion) for completion in session.completions)
    return {
        completion.id: Untrained.SUPERSEDED if answered[_prompt_key(completion)] > 1 else Untrained.UNDELIVERED
        for completion in session.completions
        if not session.delivered(completion) and completion.id not in extended
    }


def _prompt_key(completion: Completion) -> tuple[int, bytes]:
    return len(completion.prompt_ids), completion.prompt_ids[-64:].tobytes()


def trace(chain: Chain, left_out: Mapping[str, Untrained], max_tokens: int | None = None) -> Trace | None:
    """One trace of a chain; None where nothing of it is trained.

    The tokens are the last kept completion's prompt ‖ output; what each completion sampled is trained there unless
    `left_out`. Completions that end beyond `max_tokens` are cut: a causal prefix at a completion boundary remains.
    """
    kept = [completion for completion in chain if max_tokens is None or completion.length <= max_tokens]
    while kept and (kept[-1].id in left_out or not len(kept[-1].generation.output_ids)):
        kept.pop()
    if not kept:
        return None
    first, last = kept[0], kept[-1]
    start = len(first.prompt_ids)
    response = np.empty(last.length - start, np.int32)
    response[: len(last.prompt_ids) - start] = last.prompt_ids[start:]
    response[len(last.prompt_ids) - start :] = last.generation.output_ids
    loss_mask, logprobs = np.zeros(len(response), np.bool_), np.zeros(len(response), np.float32)
    trained = [completion for completion in kept if completion.id not in left_out]
    for completion in trained:
        begin = len(completion.prompt_ids) - start
        end = begin + len(completion.generation.output_ids)
        loss_mask[begin:end] = True
        logprobs[begin:end] = completion.generation.logprobs
    for array in (response, loss_mask, logprobs):
        array.flags.writeable = False
    return Trace(
        prompt_ids=first.prompt_ids,
        response_ids=response,
        loss_mask=loss_mask,
        response_logprobs=logprobs,
        finish_reason=last.generation.finish_reason,
        versions=_versions(trained, start, len(response)),
        role=first.role,
        completion_ids=tuple(c.id for c in trained if len(c.generation.output_ids)),
        prompt_messages=first.request.messages,
        response_messages=_response_messages(kept),
        tools=first.request.tools,
        metadata={"break_reason": first.break_reason.value} if first.break_reason else {},
    )


def _versions(trained: Sequence[Completion], start: int, length: int) -> tuple[VersionSpan, ...]:
    """Run-length over the response; empty where no engine told a version."""
    if not any(completion.generation.versions for completion in trained):
        return ()
    spans: list[VersionSpan] = []
    position = 0
    for completion in trained:
        begin = len(completion.prompt_ids) - start
        _append(spans, VersionSpan("", begin - position))
        told = completion.generation.versions or (VersionSpan("", len(completion.generation.output_ids)),)
        for span in told:
            _append(spans, span)
        position = begin + len(completion.generation.output_ids)
    _append(spans, VersionSpan("", length - position))
    return tuple(spans)


def _append(spans: list[VersionSpan], span: VersionSpan) -> None:
    if not span.count:
        return
    if spans and spans[-1].version == span.version:
        span = VersionSpan(span.version, spans.pop().count + span.count)
    spans.append(span)


def _response_messages(kept: Sequence[Completion]) -> tuple[Message, ...]:
    """Each reply, and what the harness put between it and the next."""
    messages = [kept[0].reply]
    for before, after in pairwise(kept):
        messages.extend(after.request.messages[len(before.request.messages) + 1 :])
        messages.append(after.reply)
    return tuple(messages)


def counts(session: CompletionSession, traces: Sequence[Trace]) -> dict[str, int]:
    """What became of every sampled token: `sampled_tokens` = `trained_tokens` + the sum of `untrained_*`.

    Also `completions`, `traces`, `context_tokens` (of the traces, not trained), `prompt_tokens`, `malformed_calls`, and
    `breaks_<reason>` for each completion that extends none.
    """
    left_out = untrained(session)
    trained = {name for trace in traces for name in trace.completion_ids}
    told: Counter[str] = Counter(session.counts)
    told.update(completions=len(session.completions), traces=len(traces), sampled_tokens=0, trained_tokens=0)
    for completion in session.completions:
        tokens = len(completion.generation.output_ids)
        told["sampled_tokens"] += tokens
        if completion.id in trained:
            told["trained_tokens"] += tokens
        elif tokens:
            told[f"untrained_{left_out.get(completion.id, Untrained.OVER_LENGTH)}"] += tokens
        if completion.break_reason:
            told[f"breaks_{completion.break_reason}"] += 1
        told["malformed_calls"] += completion.malformed_calls
    told["prompt_tokens"] = sum(len(trace.prompt_ids) for trace in traces)
    told["context_tokens"] = sum(len(trace.response_ids) - trace.trained for trace in traces)
    return dict(told)


def trace_json(trace: Trace) -> JSONObject:
    """A trace in the JSON shape of arXiv 2605.24220, A.4; messages and tools as OpenAI Chat writes them."""
    return {
        "prompt_ids": trace.prompt_ids.tolist(),
        "response_ids": trace.response_ids.tolist(),
        "loss_mask": trace.loss_mask.astype(np.int8).tolist(),
        "prompt_messages": [message_json(message) for message in trace.prompt_messages],
        "response_messages": [message_json(message) for message in trace.response_messages],
        "tools": [tool_json(tool) for tool in trace.tools],
        "finish_reason": "tool_calls"
        if trace.response_messages and trace.response_messages[-1].tool_calls
        else trace.finish_reason.value,
        "response_logprobs": trace.response_logprobs.tolist(),
        "reward": trace.reward,
        "metadata": {
            **trace.metadata,
            "role": trace.role.value,
            "completion_ids": list(trace.completion_ids),
            "weight_versions": [[span.version, span.count] for span in trace.versions],
        },
    }


def message_json(message: Message) -> JSONObject:
    """A message in OpenAI Chat form, with `reasoning_content`."""
    told: JSONObject = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.name:
        told["name"] = message.name
    return told


def tool_json(tool: Tool) -> JSONObject:
    """A tool in OpenAI Chat form."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def spans(trace: Trace) -> list[tuple[bool, TokenIds]]:
    """The trace cut where the loss mask changes: (trained, ids), the prompt first as untrained."""
    edges = np.flatnonzero(np.diff(trace.loss_mask.astype(np.int8))) + 1
    pieces = np.split(trace.response_ids, edges)
    marks = [bool(trace.loss_mask[position]) for position in (0, *edges.tolist())] if len(trace.response_ids) else []
    return [(False, trace.prompt_ids), *zip(marks, pieces, strict=False)]


def trace_text(trace: Trace, decode: Callable[[TokenIds], str], mark: tuple[str, str] = ("⟦", "⟧")) -> str:
    """The trace as text, trained spans between `mark`s."""
    opening, closing = mark
    return "".join(f"{opening}{decode(ids)}{closing}" if on else decode(ids) for on, ids in spans(trace))
