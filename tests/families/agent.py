"""A small agent program that talks to a session over HTTP, and a model that says what each turn tells it to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio

from polar_plugin.config import load_config
from polar_plugin.engine.base import Renderer
from polar_plugin.engine.scripted import Reply, ScriptedEngine
from polar_plugin.engine.turn import Conversation
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.proxy.session import Session
from polar_plugin.records import CompletionSession, Trace
from polar_plugin.service import RolloutService
from tests.speakers import Answer, Chat, Wire

from .chat_formats import Family, loaded


@dataclass
class Agent:
    """A client of OpenAI Chat that keeps its history as agents do."""

    http: aiohttp.ClientSession
    url: str
    engine: ScriptedEngine
    session: Session
    renderer: Renderer
    script: list[Reply]
    family: Family
    encode: Callable[[str], Sequence[int]]

    async def turn(self, history: list[Wire], *new: Wire, says: str | Reply, tools: bool = True) -> Answer:
        """`says`: a text, or a reply that `text`, `thinking`, `calls` or a test made."""
        self.script.append(self.text(says) if isinstance(says, str) else says)
        history += new
        body = Chat().body(history, 400)
        if not tools:
            del body["tools"]
        async with self.http.post(self.url, json=body) as response:
            assert response.status == 200, await response.text()
            answer = Chat().read(await response.json())
        history += answer.echo
        return answer

    # --- what the model says ------------------------------------------------------------------------------------------

    def text(self, text: str) -> Reply:
        return Reply(ids=(*self.written(text), self.end))

    def thinking(self, thoughts: str, text: str) -> Reply:
        return Reply(ids=(*self.encode(self.family.thoughts.format(thoughts=thoughts, text=text)), self.end))

    def calls(self, *commands: str) -> Reply:
        return Reply(
            ids=(*self.encode(self.family.begin_call + self.family.calls(*commands)), self._id(self.family.end_of_call))
        )

    def written(self, text: str) -> list[int]:
        """The ids of a text, without what ends the turn."""
        return list(self.encode(self.family.text.format(text=text)))

    @property
    def end(self) -> int:
        """The id that ends a turn that calls nothing."""
        return self._id(self.family.end)

    @property
    def unsampled_end(self) -> list[int]:
        """What closes a text of which the end was not sampled."""
        return list(self.encode(self.family.unsampled_end)) or [self.end]

    def _id(self, mark: str) -> int:
        return self.encode(mark)[0] if mark else self.renderer.stop_ids[0]

    # --- what the trainer gets ----------------------------------------------------------------------------------------

    def traces(self) -> tuple[Trace, ...]:
        """Checked, and with every sampled token accounted for."""
        session = self.session.seal()
        traces = merged(session)
        told = counts(session, traces)
        assert told["sampled_tokens"] == told["delivered_tokens"] == told["trained_tokens"]
        return traces


@asynccontextmanager
async def started(family: Family, models: Path) -> AsyncGenerator[Agent]:
    renderer, encode = loaded(family, models)
    script: list[Reply] = []
    engine = ScriptedEngine(lambda call: script[-1], encode, context_length=32_768)
    with anyio.fail_after(120):
        async with (
            RolloutService(load_config({"sampling": {"max_tokens": 400}}), engine=engine, renderer=renderer) as service,
            aiohttp.ClientSession() as http,
            service.proxy.session("s", Conversation(service.policy, "s")) as session,
        ):
            url = f"{service.proxy.url}/s/{session.key}{Chat.path}"
            yield Agent(http, url, engine, session, renderer, script, family, encode)


def merged(session: CompletionSession) -> tuple[Trace, ...]:
    traces = PrefixMerging().build(session)
    check(traces, session)
    return traces


def opening(text: str = "You work in a shell.") -> list[Wire]:
    return [Chat().system(text)]


def user(text: str) -> Wire:
    return Chat().user(text)


def results(answer: Answer, *texts: str) -> list[Wire]:
    assert len(answer.calls) == len(texts), "the scripted calls were not read"
    return Chat().results(answer, *texts)


def whole(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
