"""Reports from the field on drift, merging and half calls, replayed over several families of chat templates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polar_plugin.engine.scripted import Reply
from polar_plugin.merge.traces import counts
from polar_plugin.records import BreakReason, FinishReason
from tests.speakers import Wire

from .agent import Agent, opening, results, user, whole

pytestmark = pytest.mark.anyio
TASK = "Find the bug."


async def test_case_1_six_turns_of_thoughts_and_calls_are_one_trace(agent: Agent) -> None:
    history = opening()
    new: Sequence[Wire] = [user(TASK)]
    for turn in range(5):
        answer = await agent.turn(history, *new, says=agent.calls(f"sed -n {turn}p a.py"))
        new = results(answer, f"line {turn}")
    await agent.turn(history, *new, says=agent.thinking("I have it.", "Fixed."))
    (trace,) = agent.traces()
    assert trace.trained == sum(len(c.generation.output_ids) for c in agent.session.completions)
    assert len(trace.completion_ids) == 6


async def test_case_2_ids_that_no_tokenizer_would_write_stay_as_sampled(agent: Agent) -> None:
    spelled = [token for letter in " Pantomime is spelled out" for token in agent.encode(letter)]
    ids = (*agent.written(""), *spelled, agent.end)
    history = opening()
    await agent.turn(history, user(TASK), says=Reply(ids=ids))
    await agent.turn(history, user("go on"), says="Done.")
    (trace,) = agent.traces()
    assert trace.response_ids[: len(ids)].tolist() == list(ids)
    assert trace.loss_mask[: len(ids)].all()


async def test_case_5_a_chain_of_four_turns_is_its_last_prompt_and_output(agent: Agent) -> None:
    history = opening()
    for turn in range(4):
        await agent.turn(history, user(f"step {turn}"), says=f"Did {turn}.")
    (trace,) = agent.traces()
    last = agent.session.completions[-1]
    assert whole(trace) == [*last.prompt_ids.tolist(), *last.generation.output_ids.tolist()]


async def test_case_6_threads_that_take_turns_are_one_trace_each(agent: Agent) -> None:
    main, other = opening(), opening("You only search.")
    for turn in range(3):
        await agent.turn(main, user(f"main {turn}"), says=f"A{turn}")
        await agent.turn(other, user(f"search {turn}"), says=f"B{turn}")
    traces = agent.traces()
    assert [len(trace.completion_ids) for trace in traces] == [3, 3]


async def test_case_9_two_results_are_told_as_the_template_tells_them(agent: Agent) -> None:
    history = opening()
    answer = await agent.turn(history, user(TASK), says=agent.calls("ls", "pwd"))
    await agent.turn(history, *results(answer, "a.py", "/w"), says="Both.")
    first, second = agent.session.completions
    anew = agent.renderer.render(second.request.messages, second.request.tools)
    agent.traces()
    tail = second.prompt_ids[first.length :]
    assert len(tail)
    assert anew[-len(tail) :].tolist() == tail.tolist()


async def test_case_14_an_end_of_turn_that_was_not_sampled_is_context_and_stands_there_once(agent: Agent) -> None:
    with_end, without = opening(), opening()
    await agent.turn(with_end, user(TASK), says="Done.")
    await agent.turn(with_end, user("go on"), says="More.")
    await agent.turn(without, user("Again."), says=Reply(ids=tuple(agent.written("Done."))))
    await agent.turn(without, user("go on"), says="More.")
    sampled, told = agent.traces()
    position, closed = len(agent.written("Done.")), agent.unsampled_end
    assert sampled.response_ids[: position + 1].tolist() == [*agent.written("Done."), agent.end]
    assert told.response_ids[: position + len(closed)].tolist() == [*agent.written("Done."), *closed]
    after_one, after_other = sampled.response_ids[position + 1 :], told.response_ids[position + len(closed) :]
    assert after_one.tolist() == after_other.tolist()
    assert (sampled.loss_mask[position], told.loss_mask[position]) == (True, False)


async def test_a_stop_string_is_sampled_and_trained_but_neither_told_nor_missed_in_the_echo(agent: Agent) -> None:
    history = opening()
    ids = agent.written("I look it up.\nObservation:")
    answer = await agent.turn(history, user(TASK), says=Reply(ids=tuple(ids), stop="Observation:"))
    await agent.turn(history, user("Nothing is there."), says="Done.")
    (trace,) = agent.traces()
    first = agent.session.completions[0]
    assert answer.text.strip() == "I look it up."
    assert first.generation.output_ids.tolist() == ids
    assert len(trace.completion_ids) == 2


async def test_tools_that_were_changed_and_changed_back_go_on_from_where_they_were(agent: Agent) -> None:
    history = opening()
    await agent.turn(history, user(TASK), says="One.")
    await agent.turn(history, user("Two?"), says="Two.", tools=False)
    await agent.turn(history, user("Three?"), says="Three.")
    one, two, three = agent.session.completions
    traces = agent.traces()
    told = counts(agent.session.seal(), traces)
    assert two.break_reason is BreakReason.TOOLS_CHANGED
    if agent.family.extends_over_turns:
        assert [trace.completion_ids for trace in traces] == [(one.id, three.id), (two.id,)]
        assert (three.parent, three.break_reason) == (one.id, None)
    else:
        assert [trace.completion_ids for trace in traces] == [(one.id,), (two.id,), (three.id,)]
        assert (three.parent, three.break_reason) == (None, BreakReason.BOUNDARY_UNKNOWN)
    assert sum(count for name, count in told.items() if name.startswith("breaks_")) == len(traces)


async def test_case_21_an_empty_completion_is_no_row_and_the_chain_goes_on(agent: Agent) -> None:
    history = opening()
    await agent.turn(history, user(TASK), says="One.")
    await agent.turn(history, user("go on"), says=Reply(ids=()))
    await agent.turn(history, user("and on"), says="Three.")
    (trace,) = agent.traces()
    assert len(trace.completion_ids) == 2
    assert trace.trained == len(agent.written("One.")) + len(agent.written("Three.")) + 2


async def test_case_24_a_parent_a_sub_agent_and_the_thread_after_compaction_are_all_trained(agent: Agent) -> None:
    main, sub = opening(), opening("You are a helper.")
    await agent.turn(main, user(TASK), says="First.")
    await agent.turn(sub, user("look"), says="Seen.")
    await agent.turn(sub, user("look again"), says="Seen again.")
    await agent.turn(main, user("go on"), says="Second.")
    after = [*opening(), user(f"{TASK}\nSo far: First. Second.")]
    await agent.turn(after, says="Third.")
    traces = agent.traces()
    assert [len(trace.completion_ids) for trace in traces] == [2, 2, 1]


async def test_case_114_half_a_call_is_neither_a_call_nor_markup_wherever_it_is_cut(agent: Agent) -> None:
    said = agent.family.before_call.format(text="I look.")
    ids = agent.encode(said + agent.family.calls("ls -la /w"))
    for size in range(len(agent.encode(said)) + 1, len(ids)):
        history = opening()
        half = Reply(ids=tuple(ids[:size]), finish_reason=FinishReason.LENGTH)
        answer = await agent.turn(history, user(f"cut at {size}"), says=half)
        assert not answer.calls
        assert answer.text.strip() in ("I look.", "I look.\n<", "I look.\n<t", "I look.\n<to", "I look.\n<too")
        await agent.turn(history, user("go on"), says="Done.")
    traces = agent.traces()
    assert {len(trace.completion_ids) for trace in traces} == {2}
