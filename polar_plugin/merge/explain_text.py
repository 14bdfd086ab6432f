"""An explanation as text for a terminal. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from .explain import Break, Call, Difference, Explanation

TORN = "cut short by a crash: what its last line began to say is not here"
_INDENT = "│ "


def text(explanation: Explanation, told_by: str) -> str:
    """`told_by` says what decoded the tokens, or why nothing did."""
    return "\n".join(_lines(explanation, told_by)) + "\n"


def headline(explanation: Explanation) -> str:
    """The session in one line of figures."""
    told = explanation.counts
    return (
        f"{told['completions']} calls, {explanation.traces} traces, {len(explanation.breaks)} breaks; "
        f"{told['sampled_tokens']:,} tokens sampled, {explanation.delivered_fraction:.1%} delivered, "
        f"{explanation.trained_fraction:.1%} trained"
    )


def left_out(explanation: Explanation) -> str:
    """Tokens that are not trained, by reason; "" where all are."""
    reasons = (
        f"{name.removeprefix('untrained_')} {count:,}"
        for name, count in sorted(explanation.counts.items())
        if name.startswith("untrained_") and count
    )
    return ", ".join(reasons)


def call_words(call: Call) -> str:
    """What a call was, and what became of it, in one line without its number."""
    thread = f" [{call.thread}]" if call.thread else ""
    part = f", its first {call.trained_tokens:,} tokens" if call.trained_tokens < call.output_tokens else ""
    became = f"trained in trace {call.trace}{part}" if call.trace is not None else f"not trained: {call.untrained}"
    return (
        f"{call.role}{thread}: prompt {call.prompt_tokens:,} (+{call.new_tokens:,}), sampled {call.output_tokens:,}, "
        f"{call.finish_reason}, {call.delivery}, {became}"
    )


def facts(start: Break, numbers: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(title, words) of what is known of a break, differing tokens aside."""
    if start.near:
        yield "cause", start.cause
        yield "nearly extends", f"#{numbers[start.near]}: {start.common:,} tokens in common, read once more as context"
    if start.change:
        yield "changed by", f"the {start.change.by}: {start.change.what}"
    if start.left_behind:
        yield "goes on without", f"{start.left_behind:,} sampled tokens, of which {start.lost:,} are trained nowhere"
    if start.remedy:
        yield "to avoid it", start.remedy


def sides(difference: Difference) -> Iterator[tuple[str, str]]:
    """(title, words): what both have, then what each has at the first differing token."""
    yield "both", _shown(difference.before, difference.before_text)
    yield "before", _shown(difference.old, difference.old_text)
    yield "now", _shown(difference.new, difference.new_text)


def _lines(explanation: Explanation, told_by: str) -> Iterator[str]:
    task = f" (task {explanation.task_id})" if explanation.task_id else ""
    yield f"session {explanation.session_id}{task}: {headline(explanation)}"
    if explanation.torn:
        yield TORN
    if untrained := left_out(explanation):
        yield f"not trained: {untrained}"
    yield told_by
    numbers = {call.id: call.number for call in explanation.calls}
    for call in explanation.calls:
        indent = _INDENT * call.depth
        if call.start:
            yield ""
            yield f"{indent}┌ {call.start.reason}"
            yield from (f"{indent}│   {line}" for line in _break(call.start, numbers))
        yield f"{indent}{'└' if call.start else ' '} #{call.number} {call_words(call)}  {call.id}"


def _break(start: Break, numbers: Mapping[str, int]) -> Iterator[str]:
    for title, words in facts(start, numbers):
        yield f"{title + ':':<16} {words}"
    if start.difference:
        yield f"first differing token, at {start.difference.position:,}:"
        for title, words in sides(start.difference):
            yield f"  {title:<6} {words}"


def _shown(ids: tuple[int, ...], decoded: str | None) -> str:
    """Text in quotes, the first token's id in front; without a tokenizer the ids. "the end" of a sequence."""
    if not ids:
        return "the end"
    return " ".join(map(str, ids)) if decoded is None else f"{json.dumps(decoded, ensure_ascii=False)}  (id {ids[0]})"
