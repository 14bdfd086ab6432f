"""A Responses reply comes back as each client spells it, and still means the reply that was sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_plugin.engine.meaning import message_digest
from polar_plugin.records import Completion, FinishReason, Message, ToolCall

from .responses_wire import (
    BODY,
    CUSTOM,
    DIALECT,
    EXEC,
    FUNCTION,
    NAMESPACE,
    PATCH,
    REPLIES,
    RUN,
    SPAWN,
    TOOLS,
    Wire,
    complete,
    decode,
    incoming_of,
)
from .scripted import say
from .test_responses_stream import ANY_REPLY

Items = list[Wire]
Echo = Callable[[Items], Items]


def each(change: Callable[[Wire], Wire]) -> Echo:
    return lambda items: [change(item) for item in items]


def without(*names: str) -> Echo:
    return each(lambda item: {name: value for name, value in item.items() if name not in names})


def renamed(item: Wire) -> Wire:
    """Another item id, and another call id."""
    return item | {"id": f"x{item['id']}"} | ({"call_id": f"y{item['call_id']}"} if "call_id" in item else {})


def with_arguments(change: Callable[[Any], Any]) -> Echo:
    return each(lambda i: i | {"arguments": change(json.loads(i["arguments"]))} if "arguments" in i else i)


def codex(item: Wire) -> Wire:
    """As Codex 0.171 writes items back: the same, with its own idea of what is optional."""
    if item["type"] == "reasoning":
        return {"type": "reasoning", "id": item["id"], "summary": item["summary"], "content": None} | {
            "encrypted_content": item["encrypted_content"]
        }
    if item["type"] == "message":
        parts = [{"type": "output_text", "text": part["text"], "annotations": []} for part in item["content"]]
        return item | {"content": parts}
    return item


def easy(item: Wire) -> Wire:
    """The short form of a message."""
    text = "".join(part["text"] for part in item.get("content", ()))
    return {"role": "assistant", "content": text} if item["type"] == "message" else item


ECHOES: dict[str, Echo] = {
    "word for word": lambda items: items,
    "as Codex writes it": each(codex),
    "nothing that is null": each(lambda item: {k: v for k, v in item.items() if v is not None}),
    "no status": without("status"),
    "other ids": each(renamed),
    "no item ids": without("id"),
    "messages in short": each(easy),
    "arguments serialised again, without spaces": with_arguments(
        lambda a: json.dumps(a, separators=(",", ":"), ensure_ascii=False)
    ),
    "arguments with their keys in another order": with_arguments(lambda a: json.dumps(a, sort_keys=True)),
    "whole floats as integers": with_arguments(lambda a: json.dumps(a).replace("1.0", "1")),
    "arguments as an object": with_arguments(lambda a: a),
    "fields of the client's own": each(lambda item: item | {"internal": {"x": 1}, "created_by": "me"}),
    "a message in two parts": each(
        lambda i: (
            i | {"content": [{"type": "output_text", "text": t} for p in i["content"] for t in halves(p["text"])]}
            if i["type"] == "message"
            else i
        )
    ),
}
FORGETTING: dict[str, Echo] = {
    "no encrypted content": without("encrypted_content"),
    "no reasoning": lambda items: [item for item in items if item["type"] != "reasoning"],
    "no summary": each(lambda item: item | {"summary": []} if item["type"] == "reasoning" else item),
    "encrypted content that is damaged": each(
        lambda item: item | {"encrypted_content": item["encrypted_content"][:-3]} if "summary" in item else item
    ),
}


SAYING = {name: reply for name, reply in REPLIES.items() if reply.content or reply.tool_calls}


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def output_of(completion: Completion, body: Wire = BODY) -> Items:
    """As the wire has it."""
    return json.loads(json.dumps(DIALECT.encode(completion, incoming_of(body))))["output"]


def echoed(items: Items, body: Wire = BODY, *completions: Completion) -> Message:
    """The one assistant message that the next request has."""
    known = {one.id: one for one in completions}
    messages = [{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "go on"}]
    first, turn, last = decode(body | {"input": messages}, recall=known.get).messages
    assert (first.content, last.content, turn.role) == ("hi", "go on", "assistant")
    return turn


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_a_reply_is_known_again_however_its_client_spells_it(reply: Message, echo: Echo) -> None:
    turn = echoed(echo(output_of(complete(reply))))
    assert message_digest(turn) == message_digest(reply)
    assert turn.reasoning == reply.reasoning


@pytest.mark.parametrize("echo", FORGETTING.values(), ids=FORGETTING.keys())
@pytest.mark.parametrize(
    "reply", [r for r in REPLIES.values() if r.content or r.tool_calls], ids=lambda r: r.content[:9]
)
def test_a_reply_is_known_again_where_its_client_forgets_the_reasoning(reply: Message, echo: Echo) -> None:
    assert message_digest(echoed(echo(output_of(complete(reply))))) == message_digest(reply)


@settings(max_examples=200, deadline=None)
@given(reply=ANY_REPLY, summary=st.booleans(), cut=st.sampled_from(FinishReason))
def test_case_99_any_reply_comes_back_under_its_ids_with_its_reasoning_exact(
    reply: Message, summary: bool, cut: FinishReason
) -> None:
    body = BODY | {"reasoning": {"summary": "auto"} if summary else None}
    completion = complete(reply, body, finish=cut)
    turn = echoed(output_of(completion, body), body, completion)
    assert message_digest(turn) == message_digest(reply)
    assert turn.reasoning == reply.reasoning


MEANT_OTHERWISE = {
    "a free-form call with another argument": ToolCall("apply_patch", '{"patch": "*** Begin"}', "call_1"),
    "a free-form call with one argument more": ToolCall("apply_patch", '{"input": "x", "path": "y"}', "call_1"),
    "a free-form call of a number": ToolCall("apply_patch", '{"input": 7}', "call_1"),
    "a free-form call of a list": ToolCall("apply_patch", "[1]", "call_1"),
    "a free-form call that is no JSON": ToolCall("apply_patch", '{"input": "x', "call_1"),
    "a shell call of a string": ToolCall("local_shell", '{"command": "ls"}', "call_1"),
    "a shell call without a command": ToolCall("local_shell", "{}", "call_1"),
    "a shell call with an invented field": ToolCall("local_shell", '{"command": ["ls"], "shell": "zsh"}', "call_1"),
    "a shell call with no variables, said so": ToolCall("local_shell", '{"command": ["ls"], "env": {}}', "call_1"),
    "a shell call with a null": ToolCall("local_shell", '{"command": ["ls"], "user": null}', "call_1"),
    "a shell call with its type": ToolCall("local_shell", '{"type": "exec", "command": ["ls"]}', "call_1"),
    "a shell call that is no JSON": ToolCall("local_shell", "ls", "call_1"),
}


@pytest.mark.parametrize("echo", [ECHOES["word for word"], ECHOES["nothing that is null"], ECHOES["no status"]])
@pytest.mark.parametrize("call", MEANT_OTHERWISE.values(), ids=MEANT_OTHERWISE.keys())
def test_case_93_a_call_that_its_item_cannot_say_is_still_known_under_its_id(call: ToolCall, echo: Echo) -> None:
    completion = complete(say("", "", call))
    items = output_of(completion)
    items = [item | {"action": {k: v for k, v in item["action"].items() if v is not None}} if "action" in item else item
             for item in echo(items)]  # fmt: skip
    assert message_digest(echoed(items, BODY, completion)) == message_digest(say("", "", call))


def test_control_a_call_under_our_id_that_says_something_else_is_what_it_says() -> None:
    completion = complete(say("", "", PATCH, EXEC))
    patch, run = output_of(completion)
    turn = echoed([patch | {"input": "other"}, run | {"action": {"type": "exec", "command": ["rm"]}}], BODY, completion)
    assert [json.loads(call.arguments) for call in turn.tool_calls] == [{"input": "other"}, {"command": ["rm"]}]


@pytest.mark.parametrize(
    "change",
    [
        lambda items: [item | {"content": [{"type": "output_text", "text": "?"}]} for item in items[:1]] + items[1:],
        lambda items: [*items, {"type": "function_call", "call_id": "z", "name": "f", "arguments": "{}"}],
        lambda items: items[:-1],
        lambda items: [*items[:-1], items[-1] | {"name": "other"}],
        lambda items: [*items[:-1], items[-1] | {"namespace": "other"}],
    ],
    ids=["another text", "one call more", "one call less", "another name", "another namespace"],
)
def test_control_another_meaning_is_another_message(change: Echo) -> None:
    reply = say("look", "", RUN, SPAWN)
    assert message_digest(echoed(change(output_of(complete(reply))))) != message_digest(reply)


@pytest.mark.parametrize("tools", [[], [FUNCTION], [CUSTOM, NAMESPACE], None], ids=["none", "one", "others", "null"])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_calls_of_tools_that_are_offered_no_more_are_still_known(reply: Message, tools: list[Wire] | None) -> None:
    turn = echoed(output_of(complete(reply)), BODY | {"tools": tools})
    assert message_digest(turn) == message_digest(reply)


def test_items_that_are_only_referred_to_are_found_on_the_ledger() -> None:
    reply = REPLIES["all in one turn"]
    completion = complete(reply)
    references = [{"type": "item_reference", "id": item["id"]} for item in output_of(completion)]
    untyped = [{"id": reference["id"]} for reference in references]
    for items in (references, untyped, [*output_of(completion)[:3], *references[3:]]):
        turn = echoed(items, BODY, completion)
        assert (message_digest(turn), turn.reasoning) == (message_digest(reply), reply.reasoning)


def test_results_of_referred_calls_know_their_function() -> None:
    completion = complete(say("", "", SPAWN, PATCH))
    references = [{"type": "item_reference", "id": item["id"]} for item in output_of(completion)]
    outputs = [
        {"type": "function_call_output", "call_id": "call_5", "output": "started"},
        {"type": "custom_tool_call_output", "call_id": "call_4", "output": "patched"},
    ]
    items = [{"role": "user", "content": "hi"}, *references, *outputs]
    request = decode({"input": items, "tools": TOOLS}, recall={completion.id: completion}.get)
    results = [(message.name, message.content) for message in request.messages[2:]]
    assert results == [("agents__spawn", "started"), ("apply_patch", "patched")]


# --- opaque content ---------------------------------------------------------------------------------------------------

BLOB = output_of(complete(say("x", "so it is é \ud83d")))[0]["encrypted_content"]
REFUSED = {
    "another provider's": "gAAAAABnothing_of_ours==",
    "a recorder's": "ENC_Let me look.",
    "cut at its end": BLOB[:-4],
    "cut within": BLOB[:30] + BLOB[34:],
    "one letter changed": BLOB[:-6] + ("A" if BLOB[-6] != "A" else "B") + BLOB[-5:],
    "another version": BLOB.replace(".1.", ".2."),
    "another kind": BLOB.replace("reasoning", "compaction"),
    "with something before it": f"x{BLOB}",
    "with something behind it": f"{BLOB}.x",
    "no letters at all": "....",
    "not ASCII": "polar.reasoning.1.é.ü",
    "a lone surrogate": "\ud83d",
    "NUL": "\x00",
}


@pytest.mark.parametrize("blob", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("kind", ["reasoning", "compaction"])
def test_case_99_content_that_is_not_ours_or_damaged_is_dropped_and_counted(kind: str, blob: str) -> None:
    said = {"role": "assistant", "content": "x"}
    item = {"type": kind, "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": blob}
    request = decode({"input": [{"role": "user", "content": "hi"}, item, said]})
    assert [(m.role, m.content, m.reasoning) for m in request.messages] == [("user", "hi", ""), ("assistant", "x", "")]
    assert request.ignored == (f"input.*.{kind}.encrypted_content",)


@pytest.mark.parametrize("field", ["content", "summary"])
def test_case_99_reasoning_without_opaque_content_is_read_from_its_text(field: str) -> None:
    item = {"type": "reasoning", field: [{"type": "any", "text": "first"}, {"type": "any", "text": "then"}]}
    request = decode({"input": [item, {"role": "assistant", "content": "x"}]})
    assert (request.messages[0].reasoning, request.ignored) == ("first\nthen", ())


@settings(max_examples=200, deadline=None)
@given(blob=st.text(max_size=80) | st.text("abcdefghAB01._-=", max_size=80).map("polar.reasoning.1.".__add__))
def test_case_99_no_blob_fails_a_request(blob: str) -> None:
    items = [{"type": kind, "encrypted_content": blob} for kind in ("reasoning", "compaction", "compaction_summary")]
    assert decode({"input": [*items, {"role": "user", "content": "hi"}]}).messages[-1].content == "hi"
