"""An explanation as one HTML page: no script, nothing fetched, every text escaped. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from .explain import Break, Call, Explanation
from .explain_text import TORN, call_words, facts, headline, left_out, sides

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; --was: #d33c; --now: #2a7c; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: 0; } p { margin: .2rem 0; }
.call { border-left: 3px solid var(--line); padding: .1rem .7rem; margin: 0; font-variant-numeric: tabular-nums; }
.call.lost { border-left-color: var(--was); } .id { opacity: .5; font: 12px monospace; }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .8rem 0 0; padding: .3rem .7rem; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .1rem .8rem; margin: .4rem 0; }
dt { opacity: .7; } dd { margin: 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .5rem; margin: .2rem 0; }
pre.before { border-left: 4px solid var(--was); } pre.now { border-left: 4px solid var(--now); }
"""


def page(explanations: Mapping[str, Explanation], told_by: str) -> str:
    """The explanations by file name; `told_by` says what decoded the tokens, or why nothing did."""
    body = "\n".join(line for name, one in explanations.items() for line in _session(name, one))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Traces, explained</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{_tag('p', told_by)}\n{body}\n</body></html>\n"
    )


def _session(name: str, explanation: Explanation) -> Iterator[str]:
    yield "<section>"
    yield _tag("h1", f"session {explanation.session_id}")
    yield _tag("p", name)
    yield _tag("p", headline(explanation))
    if explanation.torn:
        yield _tag("p", TORN)
    if untrained := left_out(explanation):
        yield _tag("p", f"not trained: {untrained}")
    numbers = {call.id: call.number for call in explanation.calls}
    for call in explanation.calls:
        yield f'<div style="margin-left: {2 * call.depth}rem">'
        if call.start:
            yield from _break(call.start, numbers)
        yield _call(call)
        yield "</div>"
    yield "</section>"


def _call(call: Call) -> str:
    lost = " lost" if call.trace is None else ""
    identity = f' <span class="id">{escape(call.id)}</span>'
    return f'<p class="call{lost}">#{call.number} {escape(call_words(call))}{identity}</p>'


def _break(start: Break, numbers: Mapping[str, int]) -> Iterator[str]:
    opened = " open" if start.difference else ""
    yield f"<details{opened}>{_tag('summary', start.reason)}<dl>"
    for title, words in facts(start, numbers):
        yield f"{_tag('dt', title)}{_tag('dd', words)}"
    yield "</dl>"
    if start.difference:
        yield _tag("p", f"first differing token, at {start.difference.position:,}:")
        for title, words in sides(start.difference):
            yield f'{_tag("p", title)}<pre class="{title}">{escape(words)}</pre>'
    yield "</details>"


def _tag(name: str, text: str) -> str:
    return f"<{name}>{escape(text)}</{name}>"
