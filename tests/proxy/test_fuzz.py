"""A bounded part of the fuzz; all of it by `make fuzz`. Its controls are codecs that are broken on purpose."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.errors import BadRequest, PolarError
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.codec import Event, Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.records import ChatRequest, Completion, JSONObject

from .fuzz import SECRET, run
from .fuzz_seeds import DIALECTS, seeds
from .test_memory import READ

pytestmark = pytest.mark.anyio
CASES = 1500


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_renderer(resolve_model("tiny", tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_mutated_requests_are_answered_or_refused_with_a_path_and_change_nothing_else(
    tiny: Any, dialect: str
) -> None:
    report = await run(dialect, 0, 0, CASES, tiny)
    assert not report.faults, "\n\n".join(report.faults)
    assert sum(report.statuses.values()) == CASES
    assert report.statuses[200] > CASES // 4
    assert report.statuses[400] > CASES // 4
    assert report.statuses[503] > 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_control_the_seeds_are_many_and_of_recordings_too(dialect: str) -> None:
    recorded = [seed for seed in seeds(dialect) if not seed.name.startswith("written")]
    assert len(recorded) > 2
    assert len(seeds(dialect)) > 5


@pytest.mark.parametrize("dialect", DIALECTS)
def test_control_each_seed_is_good_as_it_stands(dialect: str) -> None:
    reads = READ[dialect][0]
    for seed in seeds(dialect):
        path, _, query = seed.path.partition("?")
        asked = dict(pair.split("=") for pair in query.split("&") if pair)
        assert reads.decode(Incoming(path, {}, asked, json.loads(json.dumps(seed.body)))).messages, seed.name


class Crashing(OpenAIChat):
    """Reads what it did not check."""

    def decode(self, incoming: Incoming) -> ChatRequest:
        incoming.body.get("model", "").lower()
        return super().decode(incoming)


class Pathless(AnthropicMessages):
    def decode(self, incoming: Incoming) -> ChatRequest:
        try:
            return super().decode(incoming)
        except BadRequest:
            raise BadRequest("something is wrong") from None


class Shapeless(GoogleGenerate):
    def error(self, error: PolarError) -> JSONObject:
        return super().error(error) | {"detail": "more"}


class Incomplete(OpenAIResponses):
    """Forgets a field that only the SDK misses."""

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        return {key: value for key, value in super().encode(completion, incoming).items() if key != "output"}


class Endless(AnthropicMessages):
    def events(self, completion: Completion, incoming: Incoming) -> Iterator[Event]:
        return iter(list(super().events(completion, incoming))[:-1])


class Remembering(OpenAIResponses):
    """Says to one session what it said to another."""

    said: list[str]

    def __init__(self) -> None:
        self.said = []

    def encode(self, completion: Completion, incoming: Incoming) -> JSONObject:
        self.said.append(completion.reply.content)
        told = replace(completion, reply=replace(completion.reply, content=SECRET))
        return super().encode(told, incoming)


class Loud(GoogleGenerate):
    def decode(self, incoming: Incoming) -> ChatRequest:
        logging.getLogger("asyncio").error("Task exception was never retrieved")
        return super().decode(incoming)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (Crashing(), "AttributeError"),
        (Pathless(), "no path"),
        (Shapeless(), "AssertionError"),
        (Incomplete(), "output"),
        (Endless(), "AssertionError"),
        (Remembering(), "what another session was told"),
        (Loud(), "never retrieved"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
async def test_control_a_broken_codec_is_found_and_shown_with_its_seed_and_body(
    tiny: Any, broken: Any, fault: str
) -> None:
    good = (AnthropicMessages(), OpenAIResponses(), GoogleGenerate(), OpenAIChat())
    dialects = [broken if one.name == broken.name else one for one in good]
    report = await run(broken.name, 0, 0, 80, tiny, dialects)
    assert report.faults
    assert fault in report.faults[0]
    assert report.faults[0].startswith("seed 0, ")
    assert len(report.faults[0].splitlines()[0]) < 1000, "not shrunken"
