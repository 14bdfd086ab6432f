"""What agent programs change without meaning it, one case a row of the table: the chain goes on, the tokens stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from polar_plugin.harnesses.noise import FACTS, Kind
from polar_plugin.records import BreakReason, Completion

from .programs import Program, Wire, said, user

LS, TESTS = '{"command": "ls", "timeout": 1.0}', '{"command": "make test"}'


def model(content: Any = None, *calls: tuple[str, str, Any], **more: Any) -> Wire:
    """An assistant message of OpenAI Chat; a call is (id, name, arguments)."""
    told = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": told} if told else {}), **more}


def result(name: str, text: str = "a.py") -> Wire:
    return {"role": "tool", "tool_call_id": name, "content": text}


def uses(*blocks: tuple[str, Any] | str, name: str = "bash") -> Wire:
    """An assistant turn of Anthropic: texts, and calls as (id, input)."""
    told = [
        {"type": "text", "text": one} if isinstance(one, str)
        else {"type": "tool_use", "id": one[0], "name": name, "input": one[1]}
        for one in blocks
    ]  # fmt: skip
    return {"role": "assistant", "content": told}


def results(*pairs: tuple[str, str]) -> Wire:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in pairs],
    }


def part(role: str, *parts: Wire) -> Wire:
    return {"role": role, "parts": list(parts)}


def item(role: str, text: str, **more: Any) -> Wire:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


# --- one function a row: the completion that is continued, and the one that continues it ------------------------------

Pair = tuple[Completion, Completion]
Start = Callable[[str], Program]


def billing(start: Start) -> Pair:
    program, line = start("anthropic"), "x-anthropic-billing-header: cc_version=2.1.332; cch={};\nYou work."
    first = program.ask([user("hi")], system=line.format("a1b2c"))
    return first, program.ask([user("hi"), uses("ok"), user("more")], system=line.format("00fff"))


def reminder(start: Start) -> Pair:
    program, reminder = start("google"), "[System: You previously returned an empty response. Please go on.]"
    hi = part("user", {"text": "hi"})
    program.ask([hi], said())
    first = program.ask([part("user", {"text": "hi"}, {"text": reminder})])
    return first, program.ask([hi, part("model", {"text": "ok"}), part("user", {"text": "more"})])


def renamed(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")], said("", LS))
    why = json.dumps({"tool": "bash", "error": "Model tried to call unavailable tool"})
    return first, program.ask([user("hi"), model("", ("call_c1", "invalid", why)), result("call_c1")])


def unparsed(start: Start) -> Pair:
    program = start("anthropic")
    first = program.ask([user("hi")], said("", '{"command": "ls'))
    told = {"__unparsedToolInput": {"raw": '{"command": "ls', "len": 15}}
    return first, program.ask([user("hi"), uses(("call_c1", told)), results(("call_c1", "no JSON"))])


def filled_in(start: Start) -> Pair:
    program = start("anthropic")
    first = program.ask([user("hi")], said("", '{"command": "ls", "where": {"path": "/"}}'))
    told = {"command": "ls", "where": {"path": "/", "deep": False}, "timeout": 120_000}
    return first, program.ask([user("hi"), uses(("call_c1", told)), results(("call_c1", "a.py"))])


def emptied(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")], said("", '{"command": "ls'))
    return first, program.ask([user("hi"), model(None, ("call_c1", "bash", "{}")), result("call_c1", "bad")])


def cache_control(start: Start) -> Pair:
    program, mark = start("anthropic"), {"cache_control": {"type": "ephemeral"}}
    first = program.ask([user([{"type": "text", "text": "hi"} | mark])])
    return first, program.ask([user("hi"), uses("ok"), user([{"type": "text", "text": "more"} | mark])])


def keys_and_texts(start: Start) -> Pair:
    program = start("anthropic")
    first = program.ask([user("hi")], said("Look.", LS, TESTS))
    echo = uses(("call_c1", {"timeout": 1, "command": "ls"}), "Look.", ("call_c2", json.loads(TESTS)))
    return first, program.ask([user("hi"), echo, results(("call_c1", "a.py"), ("call_c2", "ok"))])


def blank_text(start: Start) -> Pair:
    program = start("anthropic")
    first = program.ask([user("hi")], said("\n\n", LS))
    return first, program.ask([user("hi"), uses(("call_c1", json.loads(LS))), results(("call_c1", "a.py"))])


def turned_results(start: Start) -> Pair:
    program, echo = start("anthropic"), uses(("call_c1", json.loads(LS)), ("call_c2", json.loads(TESTS)))
    program.ask([user("hi")], said("", LS, TESTS))
    first = program.ask([user("hi"), echo, results(("call_c1", "a.py"), ("call_c2", "passed"))])
    turned = results(("call_c2", "passed"), ("call_c1", "a.py"))
    return first, program.ask([user("hi"), echo, turned, uses("ok"), user("more")])


def google_words(start: Start) -> Pair:
    program, hi = start("google"), part("user", {"text": "hi"})
    first = program.ask([hi], said("", LS, thought="hmm"))
    call = {"functionCall": {"id": "invented", "name": "bash", "args": {"timeout": 1, "command": "ls"}}}
    answer = {"functionResponse": {"id": "invented", "name": "bash", "response": {"output": "a.py"}}}
    return first, program.ask([hi, part("model", call), part("user", answer)])


def qwen_words(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")], said("", LS, thought="\nhmm\n\n"))
    echo = model("", ("call_c1", "bash", '{"command":"ls","timeout":1}'), reasoning_content="hmm")
    return first, program.ask([user("hi"), echo, result("call_c1")])


def opencode_words(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")], said("Look.", '{"command": "\\u00e9"}'))
    return first, program.ask([user("hi"), model("Look.", ("call_c1", "bash", '{"command":"é"}')), result("call_c1")])


def empty_message(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")])
    program.ask([user("hi"), model("ok"), user("more")], arrives=False)
    return first, program.ask([user("hi"), model("ok"), user("more"), model(""), user("go on")])


def pi_words(start: Start) -> Pair:
    program = start("responses")
    first = program.ask([item("user", "hi")], said("Look.", LS))
    call = {"type": "function_call", "id": "fc_invented", "call_id": "call_c1", "name": "bash",
            "arguments": '{"command":"ls","timeout":1}'}  # fmt: skip
    echo = item("assistant", "Look.", id="msg_invented", status="completed")
    output = {"type": "function_call_output", "call_id": "call_c1", "output": "a.py"}
    return first, program.ask([item("user", "hi"), echo, call, output])


def openhands_words(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")], said("\n", LS, thought="hmm"))
    return first, program.ask([user("hi"), model(None, ("call_c1", "bash", LS)), result("call_c1")])


def codex_items(start: Start) -> Pair:
    program = start("responses")
    told = {"session": "s", "turn": "1"}
    first = program.ask([item("user", "hi")], said("ok"), client_metadata=told)
    echo = item("assistant", "ok", id="msg_invented")
    turned = dict(reversed(told.items()))
    return first, program.ask([item("user", "hi"), echo, item("user", "more")], client_metadata=turned)


def left_out_content(start: Start) -> Pair:
    program = start("chat")
    first = program.ask([user("hi")], said("", LS))
    echo = model(None, ("call_c1", "bash", LS))
    del echo["content"]
    return first, program.ask([user("hi"), echo, result("call_c1")])


def acknowledgement(start: Start) -> Pair:
    program, ack = start("chat"), "Got it. Thanks for the additional context!"
    first = program.ask([user("So far: nothing."), model(ack)], said("", LS))
    return first, program.ask([user("So far: nothing."), model(ack, ("call_c1", "bash", LS)), result("call_c1")])


def reminded_summary(start: Start) -> Pair:
    program, ack, tools = start("chat"), "Got it. Thanks for the additional context!", "<system-reminder>skills\n"
    first = program.ask([user("So far: nothing."), model(ack)], said("", LS))
    acknowledged = model(ack, ("call_c1", "bash", LS))
    return first, program.ask([user(f"{tools}So far: nothing."), acknowledged, result("call_c1")])


def notice(start: Start) -> Pair:
    program, texts = start("google"), ("ok", "[The previous response was interrupted before it completed.]")
    hi, more = part("user", {"text": "hi"}), part("user", {"text": "more"})
    first = program.ask([hi])
    program.ask([hi, part("model", {"text": texts[0]}), more], said("again"))
    told = [
        hi,
        part("model", {"text": texts[0]}),
        more,
        part("model", {"text": texts[1]}),
        part("user", {"text": "go"}),
    ]
    return first, program.ask(told)


def first_message_reminded(start: Start) -> Pair:
    program = start("anthropic")
    first = program.ask([user("hi")], said())
    return first, program.ask([user([{"type": "text", "text": "hi\n"}, {"type": "text", "text": "<reminder>"}])])


def masked_output(start: Start) -> Pair:
    program = start("google")
    hi = part("user", {"text": "hi"})

    def call(number: int) -> Wire:
        return part("model", {"functionCall": {"id": f"call_c{number}", "name": "bash", "args": json.loads(LS)}})

    def output(number: int, text: str) -> Wire:
        answer = {"id": f"call_c{number}", "name": "bash", "response": {"output": text}}
        return part("user", {"functionResponse": answer})

    program.ask([hi], said("", LS))
    first = program.ask([hi, call(1), output(1, "long")], said("", LS))
    return first, program.ask([hi, call(1), output(1, "[masked]"), call(3), output(3, "short")])


def complete_items(start: Start) -> Pair:
    program = start("responses")
    first = program.ask([item("user", "hi")], said("Look.", LS, TESTS), arrives=False)
    call = {"type": "function_call", "call_id": "call_c1", "name": "bash", "arguments": LS}
    output = {"type": "function_call_output", "call_id": "call_c1", "output": "a.py"}
    return first, program.ask([item("user", "hi"), item("assistant", "Look."), call, output])


ROWS = {
    ("Claude Code", "a billing line in the system prompt, other after a compaction and in each sub-agent"): billing,
    ("Gemini CLI", "after an empty reply a part behind the last user message, gone from the request after"): reminder,
    ("opencode", "a call that it cannot run is renamed `invalid`"): renamed,
    ("Claude Code", "arguments that are no JSON become __unparsedToolInput"): unparsed,
    ("Claude Code", "arguments that a tool has defaults for are filled in"): filled_in,
    ("Pi", "arguments that are no JSON become {}"): emptied,
    ("Claude Code", "cache_control moves; a message is a string here, a list of blocks there"): cache_control,
    ("Claude Code", "keys of arguments in the schema's order; text between calls goes before them"): keys_and_texts,
    ("Claude Code", "a white-space-only text block is dropped"): blank_text,
    ("Claude Code", "results of parallel calls in the order in which they ended"): turned_results,
    ("Gemini CLI", "arguments are written anew; thoughts are dropped; ids are invented"): google_words,
    ("Qwen Code", 'arguments are written anew; reasoning is trimmed; content null or ""'): qwen_words,
    ("opencode", "arguments are written anew"): opencode_words,
    ("opencode", "an empty assistant message in the place of a reply that broke off"): empty_message,
    ("Pi", "arguments are written anew; item ids are invented"): pi_words,
    ("OpenHands CLI", "reasoning and white-space-only text are dropped"): openhands_words,
    ("Codex", "ids of items are invented; client_metadata in random order"): codex_items,
    ("mini-swe-agent", "`content` is left out where it is null"): left_out_content,
    ("Qwen Code", "behind a summary an acknowledgement of its own, in one message with a call"): acknowledgement,
    ("Gemini CLI", "a notice of its own in the place of a turn that repeats the same call"): notice,
    (
        "Claude Code",
        "after an empty reply a reminder within the first user message, which stays",
    ): first_message_reminded,
    ("Qwen Code", "the summary's message gets a reminder before it, one request later"): reminded_summary,
    ("Gemini CLI", "old tool outputs are masked where they stand"): masked_output,
    ("Codex", "the complete items of a reply that broke off stay, and their tools run"): complete_items,
}
KINDS = {(fact.harness, fact.what): fact.kind for fact in FACTS}


def test_every_fact_of_the_table_has_a_case_and_a_version() -> None:
    assert KINDS.keys() == ROWS.keys()
    assert all(fact.version for fact in FACTS)


@pytest.mark.parametrize("row", [row for row in ROWS if KINDS[row] is not Kind.REWRITE], ids=": ".join)
def test_a_history_told_otherwise_goes_on_from_the_very_tokens(start: Start, row: tuple[str, str]) -> None:
    first, second = ROWS[row](start)
    assert (second.parent, second.break_reason) == (first.id, None)
    kept = [*first.prompt_ids.tolist(), *first.generation.output_ids.tolist()]
    assert second.prompt_ids[: first.length].tolist() == kept


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("Claude Code", "after an empty reply a reminder within the first user message, which stays"),
         BreakReason.HISTORY_REWRITTEN),
        (("Qwen Code", "the summary's message gets a reminder before it, one request later"),
         BreakReason.HISTORY_REWRITTEN),
        (("Gemini CLI", "old tool outputs are masked where they stand"), None),
        (("Codex", "the complete items of a reply that broke off stay, and their tools run"),
         BreakReason.UNDELIVERED_PARENT),
    ],
)  # fmt: skip
def test_a_history_that_the_model_would_read_otherwise_is_not_continued(
    start: Start, row: tuple[str, str], reason: BreakReason | None
) -> None:
    """Masked outputs leave the turns before them: it goes on from those."""
    first, second = ROWS[row](start)
    assert KINDS[row] is Kind.REWRITE
    assert second.parent != first.id
    assert second.break_reason is reason
