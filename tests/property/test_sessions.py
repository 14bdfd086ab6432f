"""Random sessions of agent programs, each call and the traces compared with an oracle.

A session is any sequence of the rules below: conversations that take turns, parallel calls and results, retries,
hang-ups, lost answers, branches, rewrites, compactions, and the same history in ever other words.
`--sessions N` says how many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from polar_plugin.engine.scripted import Reply
from polar_plugin.errors import EngineError
from polar_plugin.merge.builders import PerRequest, PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.records import ChatRequest, Completion, CompletionSession, Message, Role, Tool, ToolCall

from .draws import AT, CUT, HABIT, SAYS, SHELL, SYSTEMS, TOOLS, Sampled
from .letters import following
from .oracle import Asked, Oracle, Place, Record, Truth
from .telling import Entry, Habits, tell, user
from .world import World

REMINDER = "\n[System: You previously returned an empty response. Go on.]"
TITLE = "You are a title generator.\nFive words."
PARTS = 4  # so that several processes can share the work: -k "says[0]"


@dataclass
class Thread:
    """One conversation of the program."""

    system: str
    tools: tuple[Tool, ...]
    name: str = ""
    entries: list[Entry] = field(default_factory=list[Entry])
    restarts: str = ""
    """The compaction call that it begins anew from, until something is said."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that wait for results."""
        return self.entries[-1].message.tool_calls if self.entries and self.entries[-1].role == "assistant" else ()

    def branch(self, count: int, name: str) -> Thread:
        return Thread(self.system, self.tools, name, self.entries[:count])


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world, self.oracle = World(), Oracle()
        self.threads: list[Thread] = []
        self.numbers = 0
        self.wrong = False

    # --- conversations ------------------------------------------------------------------------------------------------

    @initialize(says=SAYS, habit=HABIT, joins=st.sampled_from([None, "", "\n", "\n\n", " "]), tells=st.booleans())
    def begin(self, says: Sampled, habit: tuple[Habits, int], joins: str | None, tells: bool) -> None:
        """`tells`: a header says that a call of a named conversation is a sub-agent's, whatever the call is for."""
        self.joins, self.tells = joins, tells
        self.threads.append(Thread(SYSTEMS[0], SHELL))
        self.say(0, says, habit)

    @precondition(lambda self: len(self.threads) < 5)
    @rule(system=st.sampled_from(SYSTEMS), tools=st.sampled_from(TOOLS), named=st.booleans())
    def another(self, system: str, tools: tuple[Tool, ...], named: bool) -> None:
        """A sub-agent, or a conversation begun anew."""
        self.threads.append(Thread(system, tools, self.name() if named else ""))

    @precondition(lambda self: len(self.threads) < 5)
    @rule(at=AT, count=AT, named=st.booleans())
    def branch(self, at: int, count: int, named: bool) -> None:
        thread = self.thread(at)
        self.threads.append(thread.branch(count, self.name() if named else thread.name))

    @rule(at=AT, says=SAYS, habit=HABIT)
    def say(self, at: int, says: Sampled, habit: tuple[Habits, int]) -> None:
        thread = self.thread(at)
        self.add(thread)
        self.keep(thread, self.ask(thread, says, habit))

    @rule(at=AT, says=SAYS, habit=HABIT)
    def say_again(self, at: int, says: Sampled, habit: tuple[Habits, int]) -> None:
        """The same prompt, after an answer that came or did not."""
        thread = self.thread(at)
        if thread.entries and thread.entries[-1].source:
            thread.entries.pop()
        if not thread.entries:
            self.add(thread)
        self.keep(thread, self.ask(thread, says, habit))

    @precondition(lambda self: len(self.threads) < 6)
    @rule(at=AT, says=SAYS, habit=HABIT, named=st.booleans(), thinks=st.booleans())
    def say_the_same_twice(self, at: int, says: Sampled, habit: tuple[Habits, int], named: bool, thinks: bool) -> None:
        """Two answers of the same words, in other tokens or behind other thoughts, and both are gone on from, in one
        conversation or two."""
        thread = self.thread(at)
        self.add(thread)
        other = thread.branch(len(thread.entries), self.name() if named else thread.name)
        self.threads.append(other)
        pair = says, replace(says, spelling=(not says.spelling[0], True))
        if thinks:
            pair = self.thinking(says), self.thinking(says)
        for one, turn in zip((thread, other), pair, strict=True):
            self.keep(one, self.ask(one, turn, habit))

    @rule(at=AT, says=SAYS, habit=HABIT)
    def say_after_a_reminder(self, at: int, says: Sampled, habit: tuple[Habits, int]) -> None:
        """It stands in one request and is gone from the next."""
        thread = self.thread(at)
        self.add(thread)
        last = thread.entries[-1]
        if last.role == "user":
            thread.entries[-1] = replace(last, reminder=REMINDER)
        completion = self.ask(thread, says, habit)
        thread.entries[-1] = last
        self.keep(thread, completion)

    @rule(at=AT, text=st.sampled_from(["Got it.", "[The previous response was interrupted.]", ""]))
    def write_for_the_model(self, at: int, text: str) -> None:
        thread = self.thread(at)
        if thread.entries and not thread.calls:
            thread.entries.append(Entry(Message("assistant", text)))

    @rule(at=AT, text=st.sampled_from(["Got it.", "So:"]), says=SAYS, habit=HABIT)
    def go_on_from_its_own_words(self, at: int, text: str, says: Sampled, habit: tuple[Habits, int]) -> None:
        """The program begins the model's turn, and tells both as one message later on, or as two."""
        thread = self.thread(at)
        self.add(thread)
        thread.entries.append(Entry(Message("assistant", text)))
        self.keep(thread, self.ask(thread, says, habit))
        self.say(at, says, habit)

    @rule(at=AT, says=SAYS, habit=HABIT)
    def ask_before_all_results_are_there(self, at: int, says: Sampled, habit: tuple[Habits, int]) -> None:
        thread = self.thread(at)
        if len(thread.calls) > 1:
            early = Entry(Message("tool", f"result {self.number()}", tool_call_id=thread.calls[0].id))
            self.ask(replace(thread, entries=[*thread.entries, early]), says, habit)
            later = [Entry(Message("tool", f"result {self.number()}", tool_call_id=one.id)) for one in thread.calls[1:]]
            thread.entries += [early, *later]
            self.keep(thread, self.ask(thread, says, habit))

    @rule(at=AT)
    def remark(self, at: int) -> None:
        """A system message in mid-conversation."""
        thread = self.thread(at)
        if thread.entries and not thread.calls:
            thread.entries.append(Entry(Message("system", f"note {self.number()}")))

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    @rule(at=AT, says=SAYS, habit=HABIT, kept=st.sampled_from(["nothing", "nothing", "text", "calls", "all"]))
    def lose(self, at: int, says: Sampled, habit: tuple[Habits, int], kept: str) -> None:
        """An answer that does not arrive, or of which some items do."""
        thread = self.thread(at)
        self.add(thread)
        completion = self.ask(thread, says, habit, delivered=False)
        reply = completion.reply
        if kept == "text" and reply.content:
            thread.entries.append(Entry(Message("assistant", reply.content)))
        elif kept == "calls" and reply.tool_calls:
            thread.entries.append(Entry(Message("assistant", tool_calls=reply.tool_calls[:1])))
        elif kept == "all":
            self.keep(thread, completion)

    @rule(at=AT, system=st.sampled_from(SYSTEMS), says=CUT, habit=HABIT, kept=st.sampled_from(["none", "part", "more"]))
    def begin_with_half_an_answer(
        self, at: int, system: str, says: Sampled, habit: tuple[Habits, int], kept: str
    ) -> None:
        """A conversation begun anew, the first answer of which is cut by length, and not told as it was."""
        thread = self.threads[at % len(self.threads)] = Thread(system, SHELL)
        self.add(thread)
        text = self.ask(thread, says, habit).reply.content.strip()
        if kept != "none" and text:
            told = text[: len(text) // 2 + 1] if kept == "part" else f"{text} and {self.number()}"
            thread.entries.append(Entry(Message("assistant", told)))
        self.say(at, says, habit)

    @rule(at=AT, says=SAYS, habit=HABIT)
    def hang_up(self, at: int, says: Sampled, habit: tuple[Habits, int]) -> None:
        thread = self.thread(at)
        self.add(thread)
        call = self.world.begin(self.request(self.asked(thread, habit)), says.reply())
        self.world.hang_up(call.task)
        self.world.idle()
        assert len(self.world.session.completions) == len(self.oracle.records)

    @rule(at=AT, habit=HABIT)
    def fail(self, at: int, habit: tuple[Habits, int]) -> None:
        thread = self.thread(at)
        self.add(thread)
        with pytest.raises(EngineError):
            self.world.answer(self.request(self.asked(thread, habit)), Reply(raises=EngineError("no")))

    @rule(at=AT, says=SAYS, habit=HABIT, leaves=st.booleans(), header=st.booleans())
    def retry_under_way(self, at: int, says: Sampled, habit: tuple[Habits, int], leaves: bool, header: bool) -> None:
        """Sent again before the answer is there; the first one may be given up."""
        thread = self.thread(at)
        self.add(thread)
        asked = self.asked(thread, habit)
        call = self.world.begin(self.request(asked), says.reply())
        second = self.world.join(replace(self.request(asked), retry=header))
        if leaves:
            self.world.hang_up(call.task)
            call.release.set()
            completion = self.world.result(second)
        else:
            completion = self.world.end(call)
            assert self.world.result(second) is completion
        self.world.mark(completion, True)
        self.seen(asked, completion)
        self.keep(thread, completion)

    @precondition(lambda self: len(self.threads) > 1)
    @rule(at=AT, other=AT, says=st.tuples(SAYS, SAYS), habit=HABIT, turned=st.booleans())
    def two_at_once(
        self, at: int, other: int, says: tuple[Sampled, Sampled], habit: tuple[Habits, int], turned: bool
    ) -> None:
        """Two conversations ask; the answers come in either order."""
        pair = [self.thread(at), self.thread(other)]
        if pair[0] is pair[1]:
            return
        for thread in pair:
            self.add(thread)
        told = [self.asked(thread, habit) for thread in pair]
        if told[0].messages == told[1].messages:
            return
        places = [self.oracle.place(asked, self.truth(asked)) for asked in told]
        calls = [self.world.begin(self.request(a), s.reply()) for a, s in zip(told, says, strict=True)]
        for index in (1, 0) if turned else (0, 1):
            completion = self.world.end(calls[index])
            self.world.mark(completion, True)
            self.seen(told[index], completion, places[index])
            self.keep(pair[index], completion)

    # --- what the program changes -------------------------------------------------------------------------------------

    @rule(at=AT, where=AT, how=st.sampled_from(["other words", "left out", "more words"]))
    def rewrite(self, at: int, where: int, how: str) -> None:
        entries = self.thread(at).entries
        if not entries:
            return
        position = where % len(entries)
        old = entries[position]
        if how == "left out":
            del entries[position]
            return
        text = f"{old.text} and {self.number()}" if how == "more words" else f"other words {self.number()}"
        entries[position] = Entry(replace(old.message, content=text))

    @rule(at=AT, count=AT)
    def truncate(self, at: int, count: int) -> None:
        del self.thread(at).entries[:count]

    @rule(at=AT, tools=st.sampled_from(TOOLS))
    def change_tools(self, at: int, tools: tuple[Tool, ...]) -> None:
        self.thread(at).tools = tools

    @rule(at=AT)
    def change_the_system_prompt(self, at: int) -> None:
        self.thread(at).system = f"You work.\nToday is day {self.number()}."

    @rule(at=AT, says=SAYS, habit=HABIT, style=st.sampled_from(["quoted", "wrapped"]))
    def compact(self, at: int, says: Sampled, habit: tuple[Habits, int], style: str) -> None:
        thread = self.thread(at)
        entries = [*thread.entries, user("CRITICAL: Respond with TEXT ONLY. Sum it up.")]
        completion = self.ask(replace(thread, entries=entries), says, habit, role=Role.COMPACTION)
        text = completion.reply.content if style == "quoted" else "what we did"
        thread.entries = [user(f"So far {self.number()}: {text}")]
        thread.restarts = completion.id

    @rule(at=AT, says=SAYS, habit=HABIT)
    def ask_for_a_title(self, at: int, says: Sampled, habit: tuple[Habits, int]) -> None:
        entries = [user(f"Title this {self.number()}.")]
        plain = (habit[0] - {"billed"}, habit[1])  # no program has both
        self.ask(Thread(TITLE, (), self.thread(at).name, entries), says, plain, role=Role.SIDE)

    @rule()
    def update_the_weights(self) -> None:
        self.world.engine.version = str(int(self.world.engine.version) + 1)

    # --- asking -------------------------------------------------------------------------------------------------------

    def thread(self, at: int) -> Thread:
        return self.threads[at % len(self.threads)]

    def thinking(self, says: Sampled) -> Sampled:
        return replace(says, message=replace(says.message, reasoning=f"thought {self.number()}"))

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def name(self) -> str:
        return f"thread {self.number()}"

    def add(self, thread: Thread) -> None:
        """What the program says next: results of the calls that wait for them, or a word of its user's."""
        if not thread.calls:
            thread.entries.append(user(f"task {self.number()}"))
        for call in thread.calls:
            thread.entries.append(Entry(Message("tool", f"result {self.number()}", tool_call_id=call.id)))

    def keep(self, thread: Thread, completion: Completion) -> None:
        reply, last = completion.reply, thread.entries[-1]
        if reply.content.strip() or reply.tool_calls:
            own = last.role == "assistant" and not last.source and not last.message.tool_calls and reply.content.strip()
            thread.entries.append(Entry(reply, completion.id, after=last.text if own else ""))

    def asked(self, thread: Thread, habit: tuple[Habits, int], role: Role | None = None) -> Asked:
        lines = tell(thread.system, thread.entries, habit[0], habit[1], self.number(), self.joins)
        entries = tuple(thread.entries)
        return Asked(thread.system, thread.tools, entries, tuple(lines), thread.name, role, thread.restarts)

    def ask(
        self, thread: Thread, says: Sampled, habit: tuple[Habits, int], *, delivered: bool = True,
        role: Role | None = None,
    ) -> Completion:  # fmt: skip
        asked = self.asked(thread, habit, role)
        completion = self.world.answer(self.request(asked), says.reply(), delivered=delivered)
        self.seen(asked, completion, delivered=delivered)
        return completion

    def request(self, asked: Asked) -> ChatRequest:
        role = Role.SUB_AGENT if asked.thread and self.tells else Role.MAIN
        return ChatRequest(asked.messages, asked.tools, role=role, thread=asked.thread)

    def truth(self, asked: Asked) -> Truth:
        """The last sampled turn of the request; its words show it by ids, or by reasoning that is no other's."""
        last = next((one for one in reversed(asked.entries) if one.source), None)
        if last is None:
            return Truth()
        calls, thought = last.message.tool_calls, last.message.reasoning.strip()
        ids = {call.id for message in asked.messages for call in message.tool_calls}
        others = [one for one in self.oracle.records if one.completion.id != last.source]
        thinks = any(message.reasoning.strip() == thought for message in asked.messages)
        alone = all(one.completion.reply.reasoning.strip() != thought for one in others)
        by_ids = bool(calls) and all(call.id in ids for call in calls)
        return Truth(last.source, by_ids or (bool(thought) and thinks and alone))

    def seen(self, asked: Asked, completion: Completion, place: Place | None = None, *, delivered: bool = True) -> None:
        """Compare a completion with the oracle, then tell the oracle of it."""
        self.wrong = True
        place = place or self.oracle.place(asked, self.truth(asked))
        parent = next((one for one in self.oracle.records if one.completion.id == completion.parent), None)
        assert (parent is None) == (completion.break_reason is not None)
        if parent is None:
            assert completion.break_reason in place.reasons, f"{completion.break_reason}, not {place.reasons}"
        else:
            stop = next((stop for one, stop in place.parents if one is parent), None)
            assert stop is not None, "the longest beginning that was said"
            again = [one for one in place.again if one.completion.parent == completion.parent]
            prompt = [*parent.tokens, *following(parent.output, asked.new(stop))]
            assert completion.prompt_ids.tolist() == (again[0].completion.prompt_ids.tolist() if again else prompt)
        if asked.role or asked.thread:
            assert completion.role is (asked.role or Role.SUB_AGENT)
        version = self.world.engine.version
        self.oracle.records.append(Record(asked, completion, version, delivered))
        self.wrong = False

    def teardown(self) -> None:
        try:
            if not self.wrong:
                self.check_ledger(self.world.seal())
        finally:
            self.world.close()

    def check_ledger(self, ledger: CompletionSession) -> None:
        assert [one.id for one in ledger.completions] == [one.completion.id for one in self.oracle.records]
        traces = PrefixMerging().build(ledger)
        check(traces, ledger)
        self.oracle.check_traces(ledger, traces)
        self.oracle.check_counts(ledger, counts(ledger, traces))
        each = PerRequest().build(ledger)
        check(each, ledger)
        self.oracle.check_traces(ledger, each)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_any_session_is_what_the_oracle_says(pytestconfig: pytest.Config, part: int) -> None:
    sessions = cast("int", pytestconfig.getoption("sessions"))
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        seed(f"part {part} of {sessions}")(Sessions),  # the same sessions in each run of the same test modules
        settings=settings(
            max_examples=sessions // PARTS,
            stateful_step_count=16,
            deadline=None,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
        ),
    )
