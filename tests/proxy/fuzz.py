"""Mutated requests over the real HTTP server: each is answered in valid form, or refused with a path.

Nothing else may happen: no 5xx that was not scripted, nothing in the log, no change of another session. A case is made
from the seed, the dialect and its number alone, so that any of them can be made again:

    python -m tests.proxy.fuzz --count 100000            all dialects
    python -m tests.proxy.fuzz --dialect openai_chat --seed 1 --first 4711 --count 1
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import anyio
import numpy as np

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.errors import EngineBusy
from polar_plugin.proxy.codec import Dialect
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.proxy.session import Session
from polar_plugin.records import Completion, Delivery, FinishReason, SamplingParams

from .fuzz_answers import check_answer, check_refusal
from .fuzz_seeds import DIALECTS, Seed, seeds
from .mutations import Bank, children, damaged, spoiled, written

CONTEXT = 1_000_000
ROUND = 40
"""Cases that share a session."""
TRIES = 150
"""To make a body smaller."""
CHUNK = 2000
"""Cases that a process takes at a time."""
SECRET = "bystander-secret-5f1c"
_CONFIG = ProxyConfig(header_grace_seconds=60, keepalive_seconds=60)
_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls é", "n": 1.0}}\n</tool_call>'
REPLIES = (
    Reply("Hello."),
    Reply("<think>\nhm\n</think>\n\nLook:\n" + _CALL),
    Reply(f"{_CALL}\n{_CALL}"),
    Reply("<think>\nthought\n</think>\n\n" + _CALL.replace("bash", "apply_patch").replace("command", "input")),
    Reply(_CALL.replace("bash", "local_shell").replace('"ls é"', '["ls"]')),
    Reply("<tool_call>\nnot json\n</tool_call>"),
    Reply("once upon", finish_reason=FinishReason.LENGTH),
    Reply(_CALL[:40], finish_reason=FinishReason.LENGTH),
    Reply(""),
    Reply("<think>\nonly"),
    Reply("é😀\u2028\x00 " * 30),
    Reply(ids=tuple(range(3, 90))),
    Reply(raises=EngineBusy("full", retry_after=3)),
)


class Fault(AssertionError):
    """A case that went wrong, in words."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what the model says to it."""

    dialect: str
    number: int
    seed: Seed
    body: Any
    raw: bytes
    coding: str
    """The Content-Encoding that is told; "" for none."""
    headers: dict[str, str]
    reply: Reply

    @property
    def path(self) -> str:
        return self.seed.path

    @property
    def readable(self) -> bool:
        """Whether the bytes are a JSON object that is not nested too deep, and no coding is told."""
        try:
            value = json.loads(self.raw)
        except (ValueError, RecursionError):
            return False
        return not self.coding and isinstance(value, dict) and _depth(value) <= 128

    def __str__(self) -> str:
        coding = f" ({self.coding})" if self.coding else ""
        return f"{self.dialect} case {self.number} ({self.seed.name}) POST {self.path}{coding}: {self.raw[:4000]!r}"


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth < 200:
        level = [one[key] for one in level for key in children(one)]
        depth += 1
    return depth - 1


@functools.cache
def bank(dialect: str) -> Bank:
    """All dialects' words, this one's pieces twice, and ids of the bystander's and of the case's own session."""
    own = [seed.body for seed in seeds(dialect)]
    others = [seed.body for other in DIALECTS if other != dialect for seed in seeds(other)]
    ids = [f"{prefix}{name}" for name in ("b1", "c1", "c2") for prefix in ("resp_", "rs_", "msg_", "fc_", "cmp_", "")]
    ids += [f"{one}_0" for one in ids if one[:3] in ("rs_", "msg", "fc_")]
    return Bank.of([*own, *(other for i, other in enumerate(others) if i % 3 == 0)], ids)


def case(dialect: str, seed: int, number: int) -> Case:
    chance = Random(f"{seed}/{dialect}/{number}")
    good = seeds(dialect)
    of = chance.choice(good[:6] if chance.random() < 0.5 else good)
    body = spoiled(of.body, bank(dialect), chance)
    raw, coding = written(body, chance), ""
    if chance.random() < 0.15:
        raw, coding = damaged(raw, chance)
    headers = {name: value for name, value in of.headers.items() if chance.random() > 0.02}
    if chance.random() < 0.03:
        odd = ("x-stainless-retry-count", "x-codex-turn-metadata", "x-openai-subagent", "x-claude-code-agent-id")
        headers[chance.choice(odd)] = chance.choice(("", "{", '{"request_kind": []}', "é", "-1", "1" * 300, "null"))
    return Case(dialect, number, of, body, raw, coding, headers, chance.choice(REPLIES))


# --- a session that cases are sent to, and one that stands by ---------------------------------------------------------


@dataclass
class Bench:
    """A proxy with two sessions. `send` raises Fault."""

    session: Session
    bystander: Session
    engine: ScriptedEngine
    http: aiohttp.ClientSession
    log: list[str]
    statuses: collections.Counter[int] = field(default_factory=collections.Counter[int])
    _stood: tuple[Any, ...] = ()
    _digest: str = ""

    async def send(self, one: Case) -> None:
        self.engine.reply = one.reply  # type: ignore[attr-defined]
        before, calls = self.session.completions, len(self.engine.calls)
        headers = one.headers | ({"Content-Encoding": one.coding} if one.coding else {})
        headers |= {"Content-Type": "application/json", "x-goog-api-key": self.session.key}
        try:
            with anyio.fail_after(60):
                async with self.http.post(one.path, data=one.raw, headers=headers) as response:
                    status, answer = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Fault(f"no answer: {error!r}; log: {self.log}") from error
        self.statuses[status] += 1
        try:
            self._check(one, status, answer, before, len(self.engine.calls) - calls)
        except (AssertionError, ValueError, KeyError, TypeError, LookupError) as error:
            raise Fault(f"{type(error).__name__}: {error}\nstatus {status}: {answer[:2000]!r}") from error

    def _check(self, one: Case, status: int, answer: bytes, before: tuple[Completion, ...], calls: int) -> None:
        assert not self.log, f"in the log: {self.log}"
        assert SECRET.encode() not in answer, "what another session was told"
        assert self.stands_by() == self._stood, "another session changed"
        after = self.session.completions
        assert after[: len(before)] == before, "the ledger was rewritten"
        grown = after[len(before) :]
        if status != 200:
            assert not grown, "a refused request is on the ledger"
            scripted = calls == 1 and one.reply.raises is not None
            check_refusal(one.dialect, one.path, status, answer, scripted=scripted, with_path=one.readable)
            return
        told = json.loads(answer) if answer[:1] in (b"{", b"[") else answer
        check_answer(one.dialect, one.path, told, grown[0] if grown else None, one.raw, one.coding)
        if grown:
            assert len(grown) == calls == 1
            self._check_record(grown[0], before)
        else:
            assert calls == 0, "a reply that is not on the ledger"

    def _check_record(self, completion: Completion, before: Sequence[Completion]) -> None:
        """A well-formed completion, delivered, that continues what it says it continues, token for token."""
        generation = completion.generation
        assert self.session.delivery[completion.id] is Delivery.DELIVERED
        assert 0 < len(completion.prompt_ids) < CONTEXT
        assert len(generation.output_ids) == len(generation.logprobs)
        assert completion.reply.role == "assistant"
        assert all(call.name and call.id for call in completion.reply.tool_calls)
        if completion.parent is None:
            assert completion.break_reason is not None
            return
        (parent,) = (one for one in before if one.id == completion.parent)
        said = np.concatenate([parent.prompt_ids, parent.generation.output_ids])
        assert np.array_equal(completion.prompt_ids[: len(said)], said), "the prompt does not begin with its parent"

    def stands_by(self) -> tuple[Any, ...]:
        """All that the bystander is; its completions, which nobody can change, by identity."""
        other = self.bystander
        told = (other.key, other.sealed, other.in_flight, other.delivery, dict(other.counts), other.last_error)
        return (*told, *map(id, other.completions))

    async def begin(self) -> None:
        """The bystander has a turn."""
        self.engine.reply = Reply(f"{SECRET} {_CALL}")  # type: ignore[attr-defined]
        body = {"messages": [{"role": "user", "content": SECRET}]}
        async with self.http.post(f"/s/{self.bystander.key}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
        self._stood, self._digest = self.stands_by(), repr(self.bystander.completions)

    async def end(self) -> None:
        """The bystander goes on where it was, and both ledgers are sealed as they stood."""
        assert self.stands_by() == self._stood, "another session changed"
        assert repr(self.bystander.completions) == self._digest, "another session's records changed"
        (first,) = self.bystander.completions
        said = {"role": "assistant", "content": first.reply.content}
        said["tool_calls"] = [  # type: ignore[assignment]
            {"id": one.id, "function": {"name": one.name, "arguments": one.arguments}} for one in first.reply.tool_calls
        ]
        asked = {"role": "user", "content": SECRET}
        body = {"messages": [asked, said, {"role": "tool", "tool_call_id": first.reply.tool_calls[0].id}]}
        self.engine.reply = Reply("bye")  # type: ignore[attr-defined]
        async with self.http.post(f"/s/{self.bystander.key}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
        assert self.bystander.completions[1].parent == first.id
        recorded = self.session.completions
        assert self.session.seal().completions == recorded


@asynccontextmanager
async def listening(dialects: Sequence[Dialect] | None = None) -> AsyncGenerator[tuple[Proxy, aiohttp.ClientSession]]:
    proxy = Proxy(_CONFIG, dialects) if dialects else Proxy(_CONFIG)
    async with proxy.serving(), aiohttp.ClientSession(proxy.url) as http:
        yield proxy, http


@asynccontextmanager
async def bench(renderer: Any, proxy: Proxy, http: aiohttp.ClientSession) -> AsyncGenerator[Bench]:
    """Two new sessions."""
    engine = ScriptedEngine(lambda _: engine.reply, renderer.encode, context_length=CONTEXT)  # type: ignore[attr-defined]
    policy = Policy(engine, renderer, SamplingParams(max_tokens=500), CONTEXT)

    def conversation(letter: str) -> Conversation:
        numbers = itertools.count(1)
        return Conversation(policy, letter, clock=lambda: 1.0, new_id=lambda: f"{letter}{next(numbers)}")

    with _log() as log:
        async with (
            proxy.session("own", conversation("c")) as session,
            proxy.session("other", conversation("b")) as bystander,
        ):
            made = Bench(session, bystander, engine, http, log)
            await made.begin()
            yield made
            await made.end()
    if log:
        raise Fault(f"in the log: {log}")


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(logging.Formatter().format(record)[-3000:])


@contextmanager
def _log() -> Iterator[list[str]]:
    """What any logger says of a warning or worse: ours, asyncio's, aiohttp's."""
    listener = _Listener()
    loggers = [logging.getLogger(name) for name in ("", "asyncio", "aiohttp.server", "aiohttp.web", "polar_plugin")]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield listener.heard
    finally:
        for logger in loggers:
            logger.removeHandler(listener)


# --- running and shrinking --------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What became of a run."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter[int])
    faults: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} of {status}" for status, count in sorted(self.statuses.items()))
        return f"{sum(self.statuses.values())} requests ({statuses}), {len(self.faults)} faults"


async def run(
    dialect: str, seed: int, first: int, count: int, renderer: Any, dialects: Sequence[Dialect] | None = None
) -> Report:
    """`count` cases from `first` on, in sessions of ROUND cases. After a fault the session's other cases are left."""
    report = Report()
    async with listening(dialects) as (proxy, http):
        for start in range(first, first + count, ROUND):
            numbers = range(start, min(start + ROUND, first + count))
            one: Case | None = None
            try:
                async with bench(renderer, proxy, http) as made:
                    made.statuses = report.statuses
                    for number in numbers:
                        one = case(dialect, seed, number)
                        await made.send(one)
            except AssertionError as fault:
                shrunken = await _shrunken(one, renderer, dialects) if one else None
                report.faults.append(f"seed {seed}, {shrunken or one}\n{fault}")
    return report


async def _fails(one: Case, renderer: Any, dialects: Sequence[Dialect] | None) -> bool:
    """Whether a case goes wrong on a server and in a session of its own."""
    try:
        async with listening(dialects) as (proxy, http), bench(renderer, proxy, http) as made:
            await made.send(one)
    except AssertionError:
        return True
    return False


async def _shrunken(one: Case, renderer: Any, dialects: Sequence[Dialect] | None) -> Case | None:
    """The case with less in it that still fails; None where it does not fail alone."""
    if not await _fails(one, renderer, dialects):
        return None
    body = json.loads(one.raw) if one.readable else one.body
    plain = replace(one, headers={}, coding="", body=body, raw=json.dumps(body).encode())
    if not await _fails(plain, renderer, dialects):
        return one
    return await _reduced(plain, renderer, dialects)


async def _reduced(best: Case, renderer: Any, dialects: Sequence[Dialect] | None) -> Case:
    """One thing taken away after the other, large things first, as long as it still fails."""
    tried: set[str] = set()
    while len(tried) < TRIES:
        bodies = (_without(best.body, place) for place in sorted(_places(best.body), key=len))
        smaller = next((body for body in bodies if json.dumps(body) not in tried), None)
        if smaller is None:
            break
        told = json.dumps(smaller)
        tried.add(told)
        candidate = replace(best, body=smaller, raw=told.encode())
        if await _fails(candidate, renderer, dialects):
            best = candidate
    return best


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    return [one for key in children(value) for one in ((*path, key), *_places(value[key], (*path, key)))]


def _without(value: Any, place: tuple[Any, ...]) -> Any:
    key, *rest = place
    if isinstance(value, dict):
        inner = {key: _without(value[key], tuple(rest))} if rest else {}
        return {name: inner.get(name, one) for name, one in value.items() if name != key or rest}
    inner_list = [_without(value[key], tuple(rest))] if rest else []
    return [*value[:key], *inner_list, *value[key + 1 :]]


# --- the command ------------------------------------------------------------------------------------------------------


@functools.cache
def _renderer(directory: Path) -> Any:
    return load_renderer(directory)


def run_chunk(directory: Path, dialect: str, seed: int, first: int, count: int) -> Report:
    """In a process of its own."""
    return anyio.run(run, dialect, seed, first, count, _renderer(directory))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dialect", choices=DIALECTS, action="append")
    parser.add_argument("--count", type=int, default=100_000, help="cases of each dialect")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    told = parser.parse_args()
    began, reports = time.monotonic(), {dialect: Report() for dialect in told.dialect or DIALECTS}
    last = told.first + told.count
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(told.jobs) as pool:
        directory = resolve_model("tiny", Path(scratch))
        jobs = {
            pool.submit(run_chunk, directory, dialect, told.seed, start, min(CHUNK, last - start)): dialect
            for start in range(told.first, last, CHUNK)
            for dialect in reports
        }
        for job in as_completed(jobs):
            done, report = job.result(), reports[jobs[job]]
            report.statuses.update(done.statuses)
            report.faults += done.faults
            _print(*done.faults, f"{jobs[job]}: {report} after {time.monotonic() - began:.0f} s")
    _print("", *(f"{dialect}: {report}" for dialect, report in reports.items()))
    return any(report.faults for report in reports.values())


def _print(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
