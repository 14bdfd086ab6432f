"""Chains to traces: one array pass a trace; what became of every sampled token; traces as JSON and as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..records import Completion, CompletionSession, JSONObject, Message, TokenIds, Tool, Trace, VersionSpan
from .chains import Chain, parents_of
from .untrained import Policy, Untrained, untrained


def trace(chain: Chain, left_out: Mapping[str, Untrained]) -> Trace | None:
    """One trace of a chain; None where nothing of it is trained.

    It reaches from the first trained completion to the last: the tokens are the last one's prompt ‖ output, and what
    each completion sampled is trained there unless `left_out`. Costs 9 bytes a response token; the prompt is a view.
    """
    kept = _kept(chain, left_out)
    if not kept:
        return None
    trained = [c for c in kept if c.id not in left_out and len(c.generation.output_ids)]
    first, last = kept[0], kept[-1]
    start, length = len(first.prompt_ids), last.length - len(first.prompt_ids)
    response = np.concatenate((last.prompt_ids[start:], last.generation.output_ids), dtype=np.int32)
    loss_mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
    for completion in trained:
        begin, end = len(completion.prompt_ids) - start, completion.length - start
        loss_mask[begin:end] = True
        logprobs[begin:end] = completion.generation.logprobs
    for array in (response, loss_mask, logprobs):
        array.flags.writeable = False
    versions = version_spans(trained, start, length)
    return Trace(
        prompt_ids=first.prompt_ids,
        response_ids=response,
        loss_mask=loss_mask,
        response_logprobs=logprobs,
        finish_reason=last.generation.finish_reason,
        versions=versions,
        role=first.role,
        completion_ids=tuple([completion.id for completion in trained]),
        prompt_messages=first.request.messages,
        response_messages=_response_messages(kept),
        tools=first.request.tools,
        metadata=_metadata(chain, left_out, versions),
    )


def _kept(chain: Chain, left_out: Mapping[str, Untrained]) -> Chain:
    """The chain from its first trained completion to its last; what is not trained in between stays as context."""
    trained = [at for at, c in enumerate(chain) if c.id not in left_out and len(c.generation.output_ids)]
    return chain[trained[0] : trained[-1] + 1] if trained else ()


def version_spans(trained: Iterable[Completion], start: int, length: int) -> tuple[VersionSpan, ...]:
    """Run-length over the `length` response tokens from token `start` of the trace on.

    "" where nothing was trained or no version was told; empty where none was told at all.
    """
    spans: list[tuple[str, int]] = []
    position, told = start, False
    for completion in trained:
        generation = completion.generation
        _append(spans, "", len(completion.prompt_ids) - position)
        for span in generation.versions:
            _append(spans, span.version, span.count)
        if not generation.versions:
            _append(spans, "", len(generation.output_ids))
        told = told or bool(generation.versions)
        position = completion.length
    _append(spans, "", start + length - position)
    return tuple(VersionSpan(version, count) for version, count in spans) if told else ()


def _append(spans: list[tuple[str, int]], version: str, count: int) -> None:
    if not count:
        return
    if spans and spans[-1][0] == version:
        count += spans.pop()[1]
    spans.append((version, count))


def _response_messages(kept: Sequence[Completion]) -> tuple[Message, ...]:
    """Each reply, and what the harness put between it and the next."""
    messages = [kept[0].reply]
    for before, after in pairwise(kept):
        messages.extend(after.request.messages[len(before.request.messages) + 1 :])
        messages.append(after.reply)
    return tuple(messages)


def _metadata(chain: Chain, left_out: Mapping[str, Untrained], versions: Sequence[VersionSpan]) -> JSONObject:
    """Why the trace starts where it does, what was clipped off its end, and whether several weights sampled it."""
    told: JSONObject = {}
    if reason := chain[0].break_reason:
        told["break_reason"] = reason.value
    if parent := chain[0].parent:
        told["parent"] = parent
    clipped = [c for c in chain if left_out.get(c.id) is Untrained.OVER_LENGTH]
    if clipped:
        told["clipped_tokens"] = sum(len(c.generation.output_ids) for c in clipped)
    if len({span.version for span in versions if span.version}) > 1:
        told["mixed_versions"] = True
    return told


def counts(session: CompletionSession, traces: Sequence[Trace], policy: Policy | None = None) -> dict[str, int]:
    """What became of every sampled token: `sampled_tokens` = `trained_tokens` + the sum of `untrained_<reason>`.

    `untrained_unexplained` counts what no reason covers: it is 0 with the policy of the builder that made the traces.
    `delivered_tokens` are those that the harness got; `completions`, `empty_completions`, `traces`,
    `mixed_version_traces`, `refuted_parents` (told, but the tokens say otherwise), `malformed_calls` and
    `breaks_<reason>` count completions or traces; `prompt_tokens` and `context_tokens` (responses outside the mask) are
    the trainer's. The session's own counts are kept.
    """
    parents = parents_of(session)
    left_out = untrained(session, policy, parents)
    extended = {parent.id for parent in parents.values() if parent}
    trained = {name for trace in traces for name in trace.completion_ids}
    told = Counter(completions=len(session.completions), traces=len(traces))
    told.update(sampled_tokens=0, trained_tokens=0, delivered_tokens=0, empty_completions=0)
    for completion in session.completions:
        tokens = len(completion.generation.output_ids)
        told["sampled_tokens"] += tokens
        if tokens:
            told[f"untrained_{left_out.get(completion.id, 'unexplained')}" if completion.id not in trained
                 else "trained_tokens"] += tokens  # fmt: skip
        else:
            told["empty_completions"] += 1
        if completion.id in extended or session.delivered(completion):
            told["delivered_tokens"] += tokens
        if completion.break_reason:
            told[f"breaks_{completion.break_reason}"] += 1
        told["refuted_parents"] += bool(completion.parent) and parents[completion.id] is None
        told["malformed_calls"] += completion.malformed_calls
    told["prompt_tokens"] = sum(len(trace.prompt_ids) for trace in traces)
    told["context_tokens"] = sum(len(trace.response_ids) - trace.trained for trace in traces)
    told["mixed_version_traces"] = sum("mixed_versions" in trace.metadata for trace in traces)
    return {**session.counts, **told}


def unbuilt(session: CompletionSession | None, reason: str) -> dict[str, int]:
    """The counts of a session of which no trace is made: every sampled token is `untrained_REASON`."""
    completions = session.completions if session else ()
    delivered = [len(c.generation.output_ids) for c in completions if session and session.delivered(c)]
    sampled = sum(len(completion.generation.output_ids) for completion in completions)
    told = {"completions": len(completions), "sampled_tokens": sampled, "delivered_tokens": sum(delivered)}
    return {**(session.counts if session else {}), **told, f"untrained_{reason}": sampled}


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
