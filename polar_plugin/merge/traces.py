"""Chains to traces: one array pass a trace; what became of every sampled token; traces as JSON and as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import dropwhile, pairwise

import numpy as np

from ..records import (
    Completion,
    CompletionSession,
    FinishReason,
    JSONObject,
    Mask,
    Message,
    TokenIds,
    Tool,
    Trace,
    VersionSpan,
)
from .chains import Chain
from .plan import Plan
from .replay import nucleus, routing
from .untrained import Policy, Untrained


def trace(chain: Chain, plan: Plan) -> Trace | None:
    """One trace of a chain; None where nothing of it is trained.

    It reaches from the first trained completion to the last: the tokens are the last one's prompt ‖ output, and what
    each completion sampled is trained there unless it is left out; what is not trained in between stays as context.
    Costs 9 bytes a response token, and as many as there are of replay data; the prompt is a view.
    """
    trained = plan.trained(chain)
    if not trained:
        return None
    first, last = trained[0], trained[-1]
    sampled = plan.policy.trained_output(last)
    start, turn = first.prompt_ids.size, last.prompt_ids.size
    length = turn + sampled - start
    response = np.empty(length, np.int32)
    response[: turn - start], response[turn - start :] = last.prompt_ids[start:], last.generation.output_ids[:sampled]
    runs = output_runs(trained, start, length)
    loss_mask, logprobs = mask_of(runs), np.zeros(length, np.float32)
    end = 0
    for completion, (gap, tokens) in zip(trained, runs, strict=True):
        recorded, end = completion.generation.logprobs, end + gap + tokens
        logprobs[end - tokens : end] = recorded if completion is not last else recorded[:tokens]
    for array in (response, loss_mask, logprobs):
        array.flags.writeable = False
    versions = version_spans(trained, runs)
    kept = chain[chain.index(first) : chain.index(last) + 1]
    return Trace(
        prompt_ids=first.prompt_ids,
        response_ids=response,
        loss_mask=loss_mask,
        response_logprobs=logprobs,
        finish_reason=finish_reason(last, plan.policy),
        versions=versions,
        role=first.role,
        completion_ids=tuple([completion.id for completion in trained]),
        prompt_messages=first.request.messages,
        response_messages=_response_messages(kept),
        tools=first.request.tools,
        metadata=_metadata(chain, plan, versions),
        routing=routing(last, plan.parents, start + length - 1),
        nucleus=nucleus(trained, start, length),
    )


def finish_reason(last: Completion, policy: Policy) -> FinishReason:
    """A completion that is split was cut by length."""
    whole = policy.trained_output(last) == len(last.generation.output_ids)
    return last.generation.finish_reason if whole else FinishReason.LENGTH


def output_runs(trained: Sequence[Completion], start: int, length: int) -> list[tuple[int, int]]:
    """The loss mask as run lengths: for each completion the tokens before its output, not trained, and those of it.

    They add up to `length`: the response is as many tokens, from token `start` of the trace on.
    """
    runs: list[tuple[int, int]] = []
    position = start
    for completion in trained:
        begin, sampled = completion.prompt_ids.size, completion.generation.output_ids.size
        runs.append((begin - position, sampled))
        position = begin + sampled
    if position != start + length:  # the last one is split
        gap, sampled = runs.pop()
        runs.append((gap, sampled - position + start + length))
    return runs


def mask_of(runs: Sequence[tuple[int, int]]) -> Mask:
    """The loss mask of `output_runs`."""
    return np.repeat(np.arange(2 * len(runs)) % 2 == 1, [count for run in runs for count in run])


def version_spans(trained: Sequence[Completion], runs: Sequence[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Run-length over the response of which `runs` (of `output_runs`) is the mask.

    "" where nothing was trained or no version was told; empty where none was told at all.
    """
    if not any(completion.generation.versions for completion in trained):
        return ()
    spans: list[VersionSpan] = []
    for completion, (gap, sampled) in zip(trained, runs, strict=True):
        told = completion.generation.versions or (VersionSpan("", sampled),)
        for span in (VersionSpan("", gap), *told) if gap else told:
            if not span.count:
                continue
            if spans and spans[-1].version == span.version:
                span = VersionSpan(span.version, spans.pop().count + span.count)
            spans.append(span)
    split = runs[-1][1] != trained[-1].generation.output_ids.size
    return first_spans(spans, sum(map(sum, runs))) if split else tuple(spans)


def first_spans(spans: Sequence[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """Of the first `tokens` alone."""
    kept: list[VersionSpan] = []
    for span in spans:
        if tokens > 0:
            kept.append(span if span.count <= tokens else VersionSpan(span.version, tokens))
        tokens -= span.count
    return tuple(kept)


def _response_messages(kept: Sequence[Completion]) -> tuple[Message, ...]:
    """Each reply, and what the harness put between it and the next."""
    messages = [kept[0].reply]
    for before, after in pairwise(kept):
        told = after.request.messages[len(before.request.messages) :]
        messages.extend(dropwhile(_is_reply, told))  # told in one message, in several, or left out
        messages.append(after.reply)
    return tuple(messages)


def _is_reply(message: Message) -> bool:
    return message.role == "assistant"


def _metadata(chain: Chain, plan: Plan, versions: Sequence[VersionSpan]) -> JSONObject:
    """Why the trace starts where it does, what was cut off its end, and whether several weights sampled it."""
    told: JSONObject = {}
    head = chain[0]
    if reason := plan.breaks.get(head.id):
        told["break_reason"] = reason.value
    if parent := plan.parents[head.id]:
        told["parent"] = parent.id
    elif head.parent:
        told["parent"] = head.parent
    if clipped := sum(_beyond(completion, plan) for completion in chain):
        told["clipped_tokens"] = clipped
    if _mixed(versions):
        told["mixed_versions"] = True
    return told


def _mixed(versions: Sequence[VersionSpan]) -> bool:
    """Whether several weights sampled it."""
    return len({span.version for span in versions if span.version}) > 1


def _beyond(completion: Completion, plan: Plan) -> int:
    """How many of its sampled tokens are untrained for lying beyond the longest trace."""
    limit = plan.policy.max_trace_tokens
    if limit is None or completion.length <= limit:
        return 0
    reason = plan.left_out.get(completion.id)
    if reason is None:
        return len(completion.generation.output_ids) - plan.policy.trained_output(completion)
    return len(completion.generation.output_ids) if reason is Untrained.OVER_LENGTH else 0


def counts(session: CompletionSession, traces: Sequence[Trace], policy: Policy | None = None) -> dict[str, int]:
    """What became of every sampled token: `sampled_tokens` = `trained_tokens` + the sum of `untrained_<reason>`.

    `untrained_unexplained` counts what no reason covers: it is 0 with the policy of the builder that made the traces.
    `delivered_tokens` are those of answers that the harness got or went on from; `completions`, `empty_completions`,
    `traces`, `mixed_version_traces`, `refuted_parents` (told, but the tokens say otherwise), `malformed_calls` and
    `breaks_<reason>` count completions or traces; `unroutable_traces` lack experts although the engine told some;
    `prompt_tokens` and `context_tokens` (responses outside the mask) are the trainer's. The session's own counts are
    kept.
    """
    plan = Plan.of(session, policy)
    extended = {parent.id for parent in plan.parents.values() if parent}
    trained = {name for trace in traces for name in trace.completion_ids}
    told = Counter(completions=len(session.completions), traces=len(traces))
    told.update(sampled_tokens=0, delivered_tokens=0, empty_completions=0)
    for completion in session.completions:
        tokens = len(completion.generation.output_ids)
        told["sampled_tokens"] += tokens
        if not tokens:
            told["empty_completions"] += 1
        elif completion.id not in trained:
            told[f"untrained_{plan.left_out.get(completion.id, 'unexplained')}"] += tokens
        elif beyond := _beyond(completion, plan):
            told[f"untrained_{Untrained.OVER_LENGTH}"] += beyond
        if completion.id in extended or session.delivered(completion):
            told["delivered_tokens"] += tokens
        if reason := plan.breaks.get(completion.id):
            told[f"breaks_{reason}"] += 1
        told["refuted_parents"] += bool(completion.parent) and plan.parents[completion.id] is None
        told["malformed_calls"] += completion.malformed_calls
    told["trained_tokens"] = sum(trace.trained for trace in traces)
    told["prompt_tokens"] = sum(len(trace.prompt_ids) for trace in traces)
    told["context_tokens"] = sum(len(trace.response_ids) - trace.trained for trace in traces)
    told["mixed_version_traces"] = sum(_mixed(trace.versions) for trace in traces)
    explained = sum(count for name, count in told.items() if name.startswith("untrained_"))
    if (left := told["sampled_tokens"] - told["trained_tokens"] - explained) > 0:
        told["untrained_unexplained"] += left
    if any(completion.generation.routing for completion in session.completions):
        told["unroutable_traces"] = sum(trace.routing is None for trace in traces)
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
        "finish_reason": "tool_calls" if _ends_in_call(trace) else trace.finish_reason.value,
        "response_logprobs": trace.response_logprobs.tolist(),
        "reward": trace.reward,
        "metadata": {
            **trace.metadata,
            "role": trace.role.value,
            "completion_ids": list(trace.completion_ids),
            "weight_versions": [[span.version, span.count] for span in trace.versions],
        },
    }


def _ends_in_call(trace: Trace) -> bool:
    whole = trace.finish_reason is not FinishReason.LENGTH
    return whole and bool(trace.response_messages) and bool(trace.response_messages[-1].tool_calls)


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
