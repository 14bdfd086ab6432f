"""What is remembered of a session's requests changes nothing in what the next one is read as."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any, cast

import pytest

from polar_plugin.errors import BadRequest
from polar_plugin.proxy import body
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.codec import Dialect, Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.memory import Memory
from polar_plugin.proxy.openai_chat import OpenAIChat
from polar_plugin.proxy.openai_responses import OpenAIResponses
from polar_plugin.proxy.resent import Resent
from polar_plugin.records import ChatRequest
from tests.speakers import SPEAKERS

from .fuzz import bank
from .fuzz_seeds import seeds
from .mutations import damaged, spoiled, written

Body = dict[str, Any]
READ: dict[str, tuple[Dialect, str]] = {
    "openai_chat": (OpenAIChat(), "messages"),
    "anthropic_messages": (AnthropicMessages(), "messages"),
    "openai_responses": (OpenAIResponses(), "input"),
    "google_generate": (GoogleGenerate(), "contents"),
}


def read(dialect: Dialect, path: str, body: Any, memory: Memory) -> str:
    """All that a body says, ids and spelling included, or what is wrong with it."""
    try:
        return repr(dialect.decode(Incoming(path, {}, {}, json.loads(json.dumps(body)), memory=memory)))
    except BadRequest as error:
        return f"{error.path}: {error}"


def mutated(body: Body, api: str, chance: Random) -> Body:
    """As it was where no object is left of it."""
    changed = spoiled(body, bank(api), chance)
    return cast("Body", changed) if isinstance(changed, dict) else body


@pytest.mark.parametrize("api", READ)
@pytest.mark.parametrize("seed", range(4))
def test_a_conversation_is_read_the_same_whatever_was_told_before(api: str, seed: int) -> None:
    chance, memory, (dialect, key) = Random(f"{seed}/{api}"), Memory(), READ[api]
    told = [one for one in seeds(api) if isinstance(one.body.get(key), list)]
    for of in chance.choices(told, k=10):
        body, items = of.body, list[Any](of.body[key])
        for _ in range(8):
            if chance.random() < 0.5:
                items = [*items, *chance.choice(told).body[key]]
            if chance.random() < 0.3:
                items = mutated({key: items}, api, chance).get(key)
                items = cast("list[Any]", items) if isinstance(items, list) else list[Any](of.body[key])
            if chance.random() < 0.1:
                body = mutated(of.body, api, chance)
            asked = body | {key: items[: chance.randint(len(items) // 2, len(items))]}
            assert read(dialect, of.path, asked, memory) == read(dialect, of.path, asked, Memory())


@pytest.mark.parametrize("api", READ)
def test_what_is_told_again_is_the_same_object(api: str) -> None:
    (dialect, _), memory, speaker = READ[api], Memory(), SPEAKERS[api]
    history = [speaker.system("s"), *(speaker.user(f"part {i}") for i in range(9))]

    def decoded() -> ChatRequest:
        return dialect.decode(Incoming(speaker.path, {}, {}, json.loads(json.dumps(speaker.body(history, 9)))))

    def remembered() -> ChatRequest:
        body = json.loads(json.dumps(speaker.body(history, 9)))
        return dialect.decode(Incoming(speaker.path, {}, {}, body, memory=memory))

    first = remembered().messages
    history.append(speaker.user("the next part"))
    assert remembered() == decoded()
    same = sum(any(one is other for other in first) for one in remembered().messages)
    assert same >= len(first) - 2  # the system prompt may be told apart, and a turn that still goes on is made again


@pytest.mark.parametrize("arguments", ['{"n": 1}', '{"n": 1.0}', '{"n": true}', '{"n": 1, "m": 2}', '{"m": 2, "n": 1}'])
def test_arguments_that_only_equal_those_told_before_are_read_as_they_are_told(arguments: str) -> None:
    memory = Memory()

    def told(values: str) -> list[str]:
        turns: Sequence[Any] = [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": json.loads(values)}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]},
        ]
        decoded = AnthropicMessages().decode(Incoming("", {}, {}, {"messages": turns}, memory=memory))
        return [call.arguments for message in decoded.messages for call in message.tool_calls]

    for before in ('{"n": 1.0}', '{"n": 1, "m": 2}'):
        told(before)
        assert told(arguments) == [arguments]


def test_what_cannot_be_compared_in_bytes_is_read_again() -> None:
    memory, talk = Memory(), [{"role": "user", "content": text} for text in ("\ud800", "b")]
    for _ in range(2):
        decoded = OpenAIChat().decode(Incoming("", {}, {}, {"messages": list(talk)}, memory=memory))
        assert [message.content for message in decoded.messages] == ["\ud800", "b"]


def parsed(raw: bytes, resent: Resent | None = None) -> str:
    try:
        return repr(resent.parse(raw) if resent else body.parse(raw))
    except BadRequest as error:
        return str(error)


@pytest.mark.parametrize("api", READ)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_the_same_json_whatever_came_before(api: str, seed: int) -> None:
    chance, resent, (_, key) = Random(f"{seed}/{api}"), Resent(), READ[api]
    told = [one for one in seeds(api) if isinstance(one.body.get(key), list)]
    for of in chance.choices(told, k=20):
        items = list[Any]()
        for _ in range(8):
            items = [*items, *chance.choice(told).body[key]]
            whole = {"a": {key: [1]}} | of.body | {key: items}
            raw = written(mutated(whole, api, chance) if chance.random() < 0.2 else whole, chance)
            raw = damaged(raw, chance)[0] if chance.random() < 0.2 else raw
            assert parsed(raw, resent) == parsed(raw)


TAILS = (
    "]}",
    ",2]}",
    ", 2 ] }",
    " , ]}",
    ",]}",
    ",2",
    "}",
    "",
    "]]}",
    '],"b":2}',
    '],"input":[3]}',
    '],"messages":[]}',
)
TAILS += ('],"m\\u0065ssages":7}', ',{"é":"é"}]}', ",NaN]}", ',"\\ud800"]}', "," + "[" * 127 + "]" * 127 + "]}")
TAILS += (',1],"b":[2]}', '],"b":[2]}', ',1],"messages":[2]}', '],"x":{"input":[]}')
TAILS += ("," + "[" * 126 + "]" * 126 + "]}", ",1.0]}", ',"]}', ",1e999]}", "," + "9" * 5000 + "]}")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "head", ['{"messages":[', '{ "x": "é[", "messages" : [ ', '{"input":[],"messages":[', "\ufeff" + '{"input":[']
)
def test_what_stands_behind_known_bytes_is_read_as_in_a_whole_body(head: str, tail: str) -> None:
    resent = Resent()
    for first in ("]}", ',"one"]}'):
        parsed(f'{head}{{"n": 1, "é": "\\u00e9]"}}{first}'.encode(), resent)
    for middle in ("", ',"one"', ' ,"one"', ',"two"'):
        raw = f'{head}{{"n": 1, "é": "\\u00e9]"}}{middle}{tail}'.encode()
        assert parsed(raw, resent) == parsed(raw)
        assert parsed(raw, resent) == parsed(raw)


def test_of_a_body_that_goes_on_only_what_is_new_is_parsed() -> None:
    resent = Resent()
    talk = [{"role": "user", "content": f"part {i}"} for i in range(9)]
    first = resent.parse(json.dumps({"messages": talk, "model": "m"}).encode())
    talk[-1:] = [{"role": "user", "content": "told otherwise"}, {"role": "user", "content": "new"}]
    told = resent.parse(json.dumps({"messages": talk, "model": "n"}).encode())
    assert told == {"messages": talk, "model": "n"}
    assert all(one is other for one, other in zip(first["messages"][:-1], told["messages"][:8], strict=True))


@pytest.mark.parametrize("first", ["tools", "messages"])
def test_tools_that_are_told_again_are_the_same_object(first: str) -> None:
    resent, talk, tools = Resent(), [{"role": "user", "content": "go"}], [{"name": "f", "n": [1, {}]}]

    def told() -> Body:
        whole: Body = {"messages": talk, "tools": tools}
        return resent.parse(json.dumps({first: whole[first]} | whole).encode())

    before = told()
    talk.append({"role": "user", "content": "on"})
    again = told()
    assert again == {"messages": talk, "tools": tools}
    assert again["tools"] is before["tools"]
    tools.append({"name": "g"})
    assert told() == {"messages": talk, "tools": tools}
    assert before == {"messages": talk[:1], "tools": tools[:1]}


@pytest.mark.parametrize("api", READ)
def test_the_tools_of_a_request_are_read_once(api: str) -> None:
    (dialect, _), memory, speaker = READ[api], Memory(), SPEAKERS[api]
    body = json.loads(json.dumps(speaker.body([speaker.system("s"), speaker.user("go")], 9)))
    first, again = (dialect.decode(Incoming(speaker.path, {}, {}, body, memory=memory)) for _ in range(2))
    assert first == again
    assert first.tools
    assert all(one is other for one, other in zip(first.tools, again.tools, strict=True))
    body = body | {"tools": []}
    assert not dialect.decode(Incoming(speaker.path, {}, {}, body, memory=memory)).tools
