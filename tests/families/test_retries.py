"""Reports from the field on retries, hang-ups, lost answers and log-probabilities, over several chat formats."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from polar_plugin.engine.scripted import Reply, made_up_logprobs
from polar_plugin.merge.traces import counts
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.records import BreakReason, CompletionSession, Delivery, token_ids
from tests.speakers import Chat, Wire

from .agent import Agent, merged, opening, results, user, whole

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def hang_up(agent: Agent, body: Wire) -> None:
    """Ask, and leave once the engine works on it."""
    agent.script.append(Reply(until=anyio.Event()))
    asked = len(agent.engine.calls)

    async def post() -> None:
        async with agent.http.post(agent.url, json=body):
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        await until(lambda: len(agent.engine.calls) > asked and bool(agent.engine.active))
        group.cancel_scope.cancel()
    await until(lambda: not agent.engine.active)


async def lose(agent: Agent, body: Wire, says: str) -> None:
    """An answer that is made, and does not reach its client."""
    agent.script.append(agent.text(says))
    completion = await agent.session.turn(OpenAIChat().decode(Incoming(Chat.path, {}, {}, body)))
    agent.session.mark(completion.id, Delivery.UNDELIVERED)


async def test_case_15_and_63_each_log_probability_stands_at_its_token_and_before_it_what_was_there(
    agent: Agent,
) -> None:
    history = opening()
    answer = await agent.turn(history, user("go"), says=agent.calls("ls"))
    await agent.turn(history, *results(answer, "a.py"), says="Done.")
    (trace,) = agent.traces()
    tokens = whole(trace)
    for completion in agent.session.completions:
        begin = len(completion.prompt_ids)
        sampled = token_ids(tokens[begin : completion.length])
        at = begin - len(trace.prompt_ids)
        told = trace.response_logprobs[at : at + len(sampled)]
        assert told.tolist() == made_up_logprobs(token_ids(tokens[:begin]), sampled).tolist()


async def test_case_18_ids_of_a_streamed_call_are_those_that_the_next_turn_goes_on_from(agent: Agent) -> None:
    history = [*opening(), user("go")]
    agent.script.append(agent.text("Streamed."))
    async with agent.http.post(agent.url, json=Chat().body(history, 400) | {"stream": True}) as response:
        assert "Streamed" in await response.text()
    history.append({"role": "assistant", "content": "Streamed."})
    await agent.turn(history, user("on"), says="Whole.")
    (trace,) = agent.traces()
    first, second = agent.session.completions
    assert second.parent == first.id
    assert trace.trained == sum(len(c.generation.output_ids) for c in (first, second))
    assert first.generation.output_ids.tolist() == [*agent.written("Streamed."), agent.end]


async def test_case_20_many_turns_share_one_prompt_that_only_grows(agent: Agent) -> None:
    history = opening()
    new: list[Wire] = [user("go")]
    for turn in range(60):
        answer = await agent.turn(history, *new, says=agent.calls(f"sed -n {turn}p a.py"))
        new = results(answer, f"line {turn}")
    (trace,) = agent.traces()
    completions = agent.session.completions
    anew = agent.renderer.render(completions[-1].request.messages, completions[-1].request.tools)
    assert [one.break_reason for one in completions] == [BreakReason.FIRST_CALL, *[None] * 59]
    assert all(np.shares_memory(one.prompt_ids, completions[-1].prompt_ids) for one in completions[-8:])
    tail = completions[-1].prompt_ids[completions[-2].length :]
    assert anew[-len(tail) :].tolist() == tail.tolist()
    assert len(trace.completion_ids) == 60


async def test_case_23_of_answers_to_one_prompt_that_all_arrived_the_last_or_the_one_gone_on_from_is_trained(
    agent: Agent,
) -> None:
    history = [*opening(), user("go")]
    await agent.turn([*history], says="Thrown away.")
    await agent.turn([*history], says="Also thrown away.")
    unresolved = merged(CompletionSession("s", agent.session.completions, agent.session.delivery))
    await agent.turn(history, says="Kept.")
    await agent.turn(history, user("on"), says="End.")
    ledger = agent.session.seal()
    thrown, also, kept, end = ledger.completions
    assert thrown.prompt_ids.tolist() == also.prompt_ids.tolist() == kept.prompt_ids.tolist()
    assert [trace.completion_ids for trace in unresolved] == [(also.id,)]
    traces = merged(ledger)
    assert [trace.completion_ids for trace in traces] == [(kept.id, end.id)]
    told = counts(ledger, traces)
    assert told["untrained_discarded"] == sum(len(one.generation.output_ids) for one in (thrown, also))


async def test_case_26_a_request_given_up_and_sent_again_is_one_turn(agent: Agent) -> None:
    history = [*opening(), user("go")]
    await hang_up(agent, Chat().body(history, 400))
    await agent.turn(history, says="First.")
    await agent.turn(history, user("on"), says="Second.")
    (trace,) = agent.traces()
    assert [one.break_reason for one in agent.session.completions] == [BreakReason.FIRST_CALL, None]
    assert len(trace.completion_ids) == 2


async def test_case_28_an_answer_lost_on_its_way_and_asked_again_is_superseded(agent: Agent) -> None:
    history = opening()
    answer = await agent.turn(history, user("go"), says=agent.calls("ls"))
    history += results(answer, "a.py")
    for _ in range(2):
        await lose(agent, Chat().body(history, 400), "Lost on its way.")
    await agent.turn(history, says="Arrived.")
    await agent.turn(history, user("on"), says="End.")
    ledger = agent.session.seal()
    first, lost, again, arrived, end = ledger.completions
    assert lost.prompt_ids.tolist() == again.prompt_ids.tolist() == arrived.prompt_ids.tolist()
    traces = merged(ledger)
    assert [trace.completion_ids for trace in traces] == [(first.id, arrived.id, end.id)]
    told = counts(ledger, traces)
    lost_tokens = sum(len(one.generation.output_ids) for one in (lost, again))
    assert told["untrained_superseded"] == told["sampled_tokens"] - told["delivered_tokens"] == lost_tokens


async def test_case_32_a_turn_that_its_client_left_is_no_ghost_in_what_goes_on_without_it(agent: Agent) -> None:
    history = opening()
    await agent.turn(history, user("go"), says="First.")
    await hang_up(agent, Chat().body([*history, user("ghost?")], 400))
    await lose(agent, Chat().body([*history, user("ghost!")], 400), "Boo.")
    await agent.turn(history, user("on"), says="Second.")
    ledger = agent.session.seal()
    first, ghost, second = ledger.completions
    assert (ghost.parent, second.parent) == (first.id, first.id)
    (trace,) = merged(ledger)
    assert trace.completion_ids == (first.id, second.id)
    assert "Boo" not in agent.renderer.decode(token_ids(whole(trace)))
    assert len(agent.engine.aborted) == 1


async def test_case_41_a_call_that_is_open_at_the_end_is_in_no_trace(agent: Agent) -> None:
    history = opening()
    await agent.turn(history, user("go"), says="First.")
    never = anyio.Event()
    agent.script.append(Reply(until=never))
    body: Any = Chat().body([*history, user("memory?")], 400)

    async def post() -> None:
        with suppress(OSError):
            async with agent.http.post(agent.url, json=body) as response:
                assert response.status == 409

    async with anyio.create_task_group() as group:
        group.start_soon(post)
        await until(lambda: len(agent.engine.calls) == 2 and bool(agent.engine.active))
        ledger = agent.session.seal()
        never.set()
    assert len(ledger.completions) == 1
    assert len(merged(ledger)) == 1
    assert agent.session.seal() is ledger


async def test_case_64_a_harness_s_own_sampling_is_pinned_and_its_max_tokens_clamped(agent: Agent) -> None:
    history = [*opening(), user("go")]
    agent.script.append(agent.text("Done."))
    body: Any = Chat().body(history, 32_000) | {"temperature": 0.3, "top_p": 0.9}
    async with agent.http.post(agent.url, json=body) as response:
        assert response.status == 200
    (completion,) = agent.session.completions
    used = agent.engine.calls[0].sampling
    assert (used.temperature, used.top_p, used.max_tokens) == (1.0, 1.0, 400)
    assert completion.sampling == used
