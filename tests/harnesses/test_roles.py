"""A call's role is told by a header where its program sends one, else by its words, else by where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from polar_plugin.harnesses.roles import MARKS, Mark, Where, told
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.records import BreakReason, ChatRequest, Message, Role, SamplingParams, Tool

from .programs import Program, Wire, said, user

Start = Callable[[str], Program]
SYSTEM, TASK, BASH = Message("system", "You work in a shell."), Message("user", "Fix it."), Tool("bash")
every_mark = pytest.mark.parametrize("mark", MARKS, ids=lambda mark: f"{mark.harness}: {mark.words}")


def marked(mark: Mark, words: str) -> ChatRequest:
    """A call with these words where the mark has its own."""
    sampling = SamplingParams(max_tokens=mark.max_tokens)
    tools = (BASH,) if mark.tools else ()
    asked = Message("user", words)
    places = {
        Where.SYSTEM: (SYSTEM, Message("system", words), TASK),
        Where.FIRST: (SYSTEM, asked, Message("assistant", "ok"), TASK),
        Where.LAST: (SYSTEM, TASK, Message("assistant", "ok"), asked),
    }
    return ChatRequest(places[mark.where], tools, sampling=sampling)


@every_mark
def test_a_call_with_a_programs_own_words_for_it_has_its_role(mark: Mark) -> None:
    assert mark.version
    assert told(marked(mark, f"{mark.words} and so on")) is mark.role
    assert told(marked(mark, f"\n{mark.words}")) is mark.role


@every_mark
def test_control_the_words_elsewhere_or_in_part_tell_nothing(mark: Mark) -> None:
    assert told(marked(mark, mark.words[:-1])) is None
    request = marked(mark, "Some words.")
    answer = Message("assistant", mark.words)
    assert told(replace(request, messages=(*request.messages[:1], TASK, answer, TASK))) is None
    if mark.begins:
        assert told(marked(mark, f"It said: {mark.words}")) is None
    if not mark.tools:
        assert told(replace(marked(mark, mark.words), tools=(BASH,))) is None
    if mark.max_tokens is not None:
        assert told(replace(marked(mark, mark.words), sampling=SamplingParams(max_tokens=32_000))) is None


HEADERS: dict[str, tuple[str, Wire]] = {
    "Claude Code": ("anthropic", {"x-claude-code-agent-id": "a1"}),
    "Codex": ("responses", {"thread-id": "t2", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "collab_spawn"}),
    "opencode": ("chat", {"x-session-id": "s2", "x-parent-session-id": "s1"}),
}


@pytest.mark.parametrize(("api", "headers"), HEADERS.values(), ids=HEADERS.keys())
def test_a_header_tells_a_sub_agent_whatever_its_prompt_is(start: Start, api: str, headers: Wire) -> None:
    program, task = start(api), [user("hi")]
    main, sub = program.ask(task), program.ask(task, headers=headers)
    assert (main.role, sub.role) == (Role.MAIN, Role.SUB_AGENT)
    assert sub.request.thread


def test_without_a_header_a_conversation_of_another_system_prompt_is_a_sub_agents(start: Start) -> None:
    program = start("google")
    hi: Wire = {"role": "user", "parts": [{"text": "hi"}]}
    ok: Wire = {"role": "model", "parts": [{"text": "ok"}]}
    other = {"parts": [{"text": "You only search."}]}
    main = program.ask([hi])
    sub = program.ask([hi], systemInstruction=other)
    more = program.ask([hi, ok, hi], systemInstruction=other)
    after = program.ask([hi, ok, hi])
    assert [one.role for one in (main, sub, more, after)] == [Role.MAIN, Role.SUB_AGENT, Role.SUB_AGENT, Role.MAIN]
    assert (more.parent, after.parent) == (sub.id, main.id)


def test_case_112_a_title_call_is_a_side_call_is_not_trained_and_splits_no_chain(start: Start) -> None:
    program = start("chat")
    system = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
    title = program.ask([system, user("Generate a title for this conversation:\n"), user("hi")], tools=[])
    first = program.ask([user("hi")], said("Look."))
    again = program.ask([system, user("Generate a title for this conversation:\n"), user("hi")], tools=[])
    second = program.ask([user("hi"), {"role": "assistant", "content": "Look."}, user("more")])
    assert [one.role for one in (title, first, again, second)] == [Role.SIDE, Role.MAIN, Role.SIDE, Role.MAIN]
    assert second.parent == first.id
    ledger = program.world.session.seal()
    traces = PrefixMerging().build(ledger)
    check(traces, ledger)
    assert [trace.completion_ids for trace in traces] == [(first.id, second.id)]


@pytest.mark.parametrize(("api", "headers"), HEADERS.values(), ids=HEADERS.keys())
def test_a_sub_agents_compaction_is_one_and_what_goes_on_from_its_summary_is_the_sub_agents(
    start: Start, api: str, headers: Wire
) -> None:
    program = start(api)
    ok: Wire = {"role": "assistant", "content": "ok"}
    main = program.ask([user("hi")])
    summary = program.ask([user("hi"), ok, user("CRITICAL: Respond with TEXT ONLY: sum it up.")], headers=headers)
    after = program.ask([user("What was done so far: all.")], headers=headers)
    assert (main.role, summary.role, after.role) == (Role.MAIN, Role.COMPACTION, Role.SUB_AGENT)
    assert (summary.parent, after.break_reason) == (main.id, BreakReason.COMPACTION)


@pytest.mark.parametrize(("api", "headers"), HEADERS.values(), ids=HEADERS.keys())
def test_a_sub_agents_side_call_is_not_trained_with_what_it_works_on(start: Start, api: str, headers: Wire) -> None:
    program = start(api)
    program.ask([user("hi")])
    assert program.ask([user("[SUGGESTION MODE: what next?")], headers=headers).role is Role.SIDE
