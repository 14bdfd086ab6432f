"""What a Responses request says: items, tools of every kind, callers; and what of it is dropped and counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from polar_plugin.errors import BadRequest, EngineError
from polar_plugin.proxy.responses_items import seal
from polar_plugin.records import IMAGE, ChatRequest, Completion, Image, Message, Role, SamplingParams, ToolCall

from .responses_stream import check
from .responses_wire import (
    BODY,
    CUSTOM,
    DIALECT,
    FUNCTION,
    GRAMMAR,
    NAMESPACE,
    PATH,
    SHELL,
    Wire,
    complete,
    decode,
    incoming_of,
    whole,
)
from .scripted import Scripted, say, serving
from .test_responses_stream import events_of

pytestmark = pytest.mark.anyio
USER: Wire = {"role": "user", "content": "hi"}
PIXEL = "data:image/png;base64,iVBORw0="


def messages(*items: Wire, **more: Any) -> tuple[Message, ...]:
    return decode({"input": list(items)} | more).messages


def called(reply: Message, body: Wire) -> list[Wire]:
    """The calls of a reply as items."""
    return [item for item in whole(reply, body)["output"] if item["type"].endswith("_call")]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_string_is_the_users_word_and_instructions_stand_before_it() -> None:
    assert decode({"input": "hi", "instructions": "Be brief."}).messages == (
        Message("system", "Be brief."),
        Message("user", "hi"),
    )


ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


@pytest.mark.parametrize(("wire", "role"), ROLES.items())
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("kind", ["input_text", "output_text", "text"])
def test_every_role_is_read_with_text_and_with_parts(wire: str, role: str, typed: bool, kind: str) -> None:
    item: Wire = {"role": wire} | ({"type": "message"} if typed else {})
    parts = [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]
    (plain,) = messages(item | {"content": "ab"})
    (parted,) = messages(item | {"content": parts})
    assert (plain.role, plain.content) == (role, "ab")
    assert (parted.role, parted.content) == (role, "ab" if role == "assistant" else "a\nb")


def test_a_refusal_is_what_the_assistant_said() -> None:
    (said,) = messages({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})
    assert said == say("No.")


def test_assistant_items_in_a_row_are_one_message_and_anything_else_ends_it() -> None:
    call: Wire = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    got = messages(
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "assistant", "content": "look"},
        call,
        call | {"call_id": "b"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "web_search_call", "id": "ws_1"},
        {"role": "assistant", "content": "done"},
        USER,
    )
    assert got == (
        Message("user", "hi"),
        Message("assistant", "look", "why", (ToolCall("f", "{}"), ToolCall("f", "{}"))),
        Message("tool", "2", name="f"),
        Message("tool", "1", name="f"),
        Message("assistant", "done"),
        Message("user", "hi"),
    )
    assert [message.tool_call_id for message in got] == ["", "", "b", "a", "", ""]


def test_images_are_parts_in_messages_and_in_results() -> None:
    picture = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
        {"type": "input_image", "image_url": "http://192.0.2.1/a.png"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    request = decode({"input": [
        {"role": "user", "content": picture},
        {"type": "function_call_output", "call_id": "a", "output": picture},
        {"type": "custom_tool_call_output", "call_id": "b", "output": picture},
    ]})  # fmt: skip
    pixel = Image("image/png", "iVBORw0=")
    assert [message.role for message in request.messages] == ["user", "tool", "tool"]
    for message in request.messages:
        assert message.parts == ("see", pixel, Image(url="http://192.0.2.1/a.png"), pixel)
        assert message.content == "\n".join(("see", IMAGE, IMAGE, IMAGE))
    assert request.ignored == ()


@pytest.mark.parametrize("part", [
    {"type": "input_file", "file_id": "f"},
    {"type": "input_audio", "data": ""},
    {"type": "input_image", "file_id": "f"},
])  # fmt: skip
def test_parts_that_cannot_be_read_leave_a_word_and_are_counted(part: Wire) -> None:
    request = decode({"input": [{"role": "user", "content": ["a", part]}]})
    name = part["type"].removeprefix("input_")
    assert request.messages[0].content == f"a\n[{name} omitted]"
    assert request.ignored == (f"input.*.content.*.{part['type']}",)


def test_unknown_items_and_fields_are_dropped_and_counted() -> None:
    said = {
        "store": False, "parallel_tool_calls": True, "prompt_cache_key": "k", "client_metadata": {"a": "b"},
        "truncation": "auto", "metadata": {"a": "b"}, "background": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "user": "", "service_tier": None,
        "include": ["reasoning.encrypted_content", "file_search_call.results", 7], "made_up": 1,
        "tool_choice": {"type": "web_search_preview"},
        "tools": [FUNCTION, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "tool_search"}],
        "input": [
            USER, {"type": "web_search_call", "id": "w"}, {"type": "made_up"}, {"type": "compaction_trigger"},
            {"role": "assistant", "content": "x", "phase": "commentary"},
        ],
    }  # fmt: skip
    request = decode(said)
    assert request.ignored == (
        "background", "client_metadata", "include.7", "include.file_search_call.results", "input.*.compaction_trigger",
        "input.*.made_up", "input.*.phase", "input.*.web_search_call", "made_up", "metadata", "parallel_tool_calls",
        "prompt_cache_key", "reasoning.effort", "store", "text.format", "text.verbosity", "tool_choice", "tools.*.mcp",
        "tools.*.tool_search", "tools.*.web_search", "truncation",
    )  # fmt: skip
    assert request.tool_choice == "auto"
    assert [tool.name for tool in request.tools] == ["bash"]


def test_sampling_that_was_asked_for_is_kept_and_null_is_absent() -> None:
    asked = decode({"input": "hi", "max_output_tokens": 7.0, "temperature": 0, "top_p": 0.5}).sampling
    assert asked == SamplingParams(temperature=0, top_p=0.5, max_tokens=7)
    nothing = decode({"input": "hi", "max_output_tokens": None, "temperature": None, "top_p": None, "tools": None})
    assert nothing.sampling == SamplingParams()


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [CUSTOM["format"], {"type": "text"}, None], ids=["grammar", "text", "none"])
@pytest.mark.parametrize(
    "text", ["*** Begin\n+é\n*** End", "", '{"input": "x"}', "  spaced\n", '"', "\\n", "7", "null"]
)
def test_case_93_a_freeform_tool_is_told_as_a_function_and_text_comes_out(form: Wire | None, text: str) -> None:
    body = BODY | {"tools": [CUSTOM | {"format": form}]}
    (tool,) = decode(body).tools
    assert tool.name == "apply_patch"
    assert tool.description.startswith("Edit files.")
    assert (GRAMMAR in tool.description) is (form == CUSTOM["format"])
    assert tool.parameters["required"] == ["input"]
    (item,) = called(say("", "", ToolCall("apply_patch", json.dumps({"input": text}), "call_1")), body)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", text)
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"}
    _, turn, result = decode(body | {"input": [USER, item, output]}).messages
    assert [(call.name, json.loads(call.arguments)) for call in turn.tool_calls] == [("apply_patch", {"input": text})]
    assert (result.role, result.content, result.name) == ("tool", "ok", "apply_patch")


def test_case_94_namespaced_tools_are_flattened_and_mapped_back_by_name() -> None:
    names = [tool.name for tool in decode(BODY).tools]
    assert names == ["bash", "apply_patch", "agents__spawn", "agents__note", "local_shell"]
    spawn, note, bare = called(
        say("", "", ToolCall("agents__spawn", '{"a":1}', "1"), ToolCall("agents__note", '{"input":"x"}', "2"),
            ToolCall("spawn", "{}", "3")), BODY,
    )  # fmt: skip
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert (note["type"], note["namespace"], note["name"]) == ("custom_tool_call", "agents", "note")
    assert (bare["type"], bare["name"], "namespace" in bare) == ("function_call", "spawn", False)
    _, turn = decode(BODY | {"input": [USER, spawn, note, bare]}).messages
    assert [call.name for call in turn.tool_calls] == ["agents__spawn", "agents__note", "spawn"]


def test_case_94_a_namespaces_own_description_is_told_once() -> None:
    _, _, spawn, note, _ = decode(BODY).tools
    assert (spawn.description, note.description) == ("Tools for agents.\n\nStart one.", "Note it.")


def function(name: str) -> Wire:
    return {"type": "function", "name": name}


def namespace(name: str, *tools: Wire) -> Wire:
    return {"type": "namespace", "name": name, "description": "", "tools": list(tools)}


COLLISIONS: dict[str, tuple[list[Wire], list[str]]] = {
    "a function of the flat name": (
        [namespace("a", function("b")), function("a__b")], ["a__b_2", "a__b"],
    ),
    "two namespaces that flatten alike": (
        [namespace("a__b", function("c")), namespace("a", function("b__c"))], ["a__b__c", "a__b__c_2"],
    ),
    "a namespace that ends in the joint": (
        [namespace("mcp__s__", function("t")), namespace("mcp__s", function("t"))], ["mcp__s__t", "mcp__s__t_2"],
    ),
    "a function and a free-form tool": ([function("p"), {"type": "custom", "name": "p"}], ["p", "p_2"]),
    "a function and the shell": ([function("local_shell"), SHELL], ["local_shell", "local_shell_2"]),
    "the number is taken, too": (
        [function("p"), {"type": "custom", "name": "p"}, function("p_2")], ["p", "p_3", "p_2"],
    ),
    "the same name in two namespaces": (
        [namespace("a", function("f")), namespace("b", function("f")), function("f")], ["a__f", "b__f", "f"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tools", "names"), COLLISIONS.values(), ids=COLLISIONS.keys())
def test_case_94_tools_that_share_a_name_are_told_apart_and_mapped_back(tools: list[Wire], names: list[str]) -> None:
    body = BODY | {"tools": tools}
    assert [tool.name for tool in decode(body).tools] == names
    calls = [ToolCall(name, '{"command": ["x"]}', f"call_{i}") for i, name in enumerate(names)]
    completion = complete(say("", "", *calls), body)
    items = DIALECT.encode(completion, incoming_of(body))["output"]
    told = {(item["type"], item.get("namespace"), item.get("name")) for item in items}
    assert len(told) == len(names)
    (turn,) = decode(body | {"input": items}, recall={completion.id: completion}.get).messages
    assert [call.name for call in turn.tool_calls] == names


def test_a_tool_that_is_listed_twice_is_told_once_and_counted() -> None:
    request = decode(BODY | {"tools": [FUNCTION, FUNCTION | {"description": "Other."}, NAMESPACE, NAMESPACE]})
    assert [tool.name for tool in request.tools] == ["bash", "agents__spawn", "agents__note"]
    assert request.tools[0].description == "Run it."
    assert request.ignored == ("tools.*.duplicate",)


def test_tools_among_the_input_items_are_offered_like_the_others() -> None:
    item: Wire = {"type": "additional_tools", "role": "developer", "tools": [CUSTOM, NAMESPACE]}
    body: Wire = {"model": "policy", "input": [item, USER]}
    assert [tool.name for tool in decode(body).tools] == ["apply_patch", "agents__spawn", "agents__note"]
    assert decode(body).messages == (Message("user", "hi"),)
    patch, spawn = called(say("", "", ToolCall("apply_patch", '{"input": "x"}'), ToolCall("agents__spawn", "{}")), body)
    assert (patch["type"], spawn["namespace"]) == ("custom_tool_call", "agents")
    both = decode(body | {"tools": [FUNCTION]}).tools
    assert [tool.name for tool in both] == ["bash", "apply_patch", "agents__spawn", "agents__note"]


def test_a_shell_call_is_an_action_and_its_output_its_result() -> None:
    action = {"command": ["ls"], "env": {"A": "b"}, "timeout_ms": 5, "user": "me", "working_directory": "/"}
    (item,) = called(say("", "", ToolCall("local_shell", json.dumps(action), "call_1")), BODY)
    assert (item["type"], item["action"], item["status"]) == (
        "local_shell_call",
        action | {"type": "exec"},
        "completed",
    )
    for output in ({"id": "call_1"}, {"call_id": "call_1", "id": "lsho_1"}):
        told = {"type": "local_shell_call_output", "output": "a"} | output
        _, turn, result = decode(BODY | {"input": [USER, item, told]}).messages
        assert json.loads(turn.tool_calls[0].arguments) == action
        assert (result.content, result.tool_call_id, result.name) == ("a", "call_1", "local_shell")


@pytest.mark.parametrize(("choice", "expected"), [
    (None, "auto"), ("auto", "auto"), ("none", "none"), ("required", "required"),
    ({"type": "function", "name": "bash"}, "bash"),
    ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
    ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
    ({"type": "local_shell"}, "local_shell"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]}, "auto"),
    ({"type": "allowed_tools", "mode": "required", "tools": [CUSTOM]}, "apply_patch"),
    ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION, CUSTOM]}, "required"),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, FUNCTION]}, "bash"),
    ({"type": "image_generation"}, "auto"),
])  # fmt: skip
def test_a_tool_choice_names_the_tool_as_the_model_knows_it(choice: Any, expected: str) -> None:
    request = decode(BODY | {"tool_choice": choice})
    assert request.tool_choice == expected
    dropped = isinstance(choice, dict) and choice["type"] in ("allowed_tools", "image_generation")
    assert ("tool_choice" in request.ignored) is dropped


def test_control_a_choice_of_a_tool_that_was_dropped_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"tool_choice\.name"):
        decode({"input": "hi", "tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "apply_patch"}})


# --- callers ----------------------------------------------------------------------------------------------------------

MAIN = {"thread_id": "t1", "session_id": "t1"}
CALLERS: dict[str, tuple[dict[str, str], str, Role]] = {
    "nobody in particular": ({}, "", Role.MAIN),
    "the main thread": (MAIN | {"x_codex_turn_metadata": '{"request_kind":"turn"}'}, "", Role.MAIN),
    "a sub-agent": (
        {"thread_id": "t2", "x_codex_parent_thread_id": "t1", "x_openai_subagent": "collab_spawn"},
        "t2", Role.SUB_AGENT,
    ),
    "a sub-agent known by its parent": ({"thread_id": "t2", "x_codex_parent_thread_id": "t1"}, "t2", Role.SUB_AGENT),
    "a sub-agent without a thread": ({"x_openai_subagent": "review"}, "review", Role.SUB_AGENT),
    "a sub-agent's thread": ({"thread_id": "t2", "x_openai_subagent": "review"}, "t2", Role.SUB_AGENT),
    "another client's sub-agent": ({"x_session_id": "s2", "x_parent_session_id": "s1"}, "s2", Role.SUB_AGENT),
    "another client's main thread": ({"x_session_id": "s1"}, "", Role.MAIN),
    "a compaction": (MAIN | {"x_codex_turn_metadata": '{"request_kind":"compaction"}'}, "", Role.COMPACTION),
    "a compaction of its own agent": (MAIN | {"x_openai_subagent": "compact"}, "", Role.COMPACTION),
    "a sub-agent's compaction": (
        {"thread_id": "t2", "x_codex_parent_thread_id": "t1", "x_codex_turn_metadata": '{"request_kind":"compaction"}'},
        "t2", Role.COMPACTION,
    ),
    "a call that warms up": (MAIN | {"x_codex_turn_metadata": '{"request_kind":"prewarm"}'}, "", Role.SIDE),
    "a side agent": ({"x_openai_subagent": "memory_consolidation"}, "memory_consolidation", Role.SIDE),
}  # fmt: skip


@pytest.mark.parametrize(("headers", "thread", "role"), CALLERS.values(), ids=CALLERS.keys())
def test_headers_tell_the_thread_and_what_a_call_is_for(headers: dict[str, str], thread: str, role: Role) -> None:
    request = decode(BODY, **headers)
    assert (request.thread, request.role) == (thread, role)


@pytest.mark.parametrize("value", [
    "", "{", "[]", "7", "null", '"turn"', '{"request_kind": 7}', '{"request_kind": {}}', "[" * 100_000, "\x00", "é",
    "NaN",
])  # fmt: skip
def test_malformed_headers_never_fail_a_request(value: str) -> None:
    request = decode(BODY, x_codex_turn_metadata=value, x_stainless_retry_count=value, thread_id=value)
    assert (request.thread, request.role) == ("", Role.MAIN)


@pytest.mark.parametrize(("count", "retry"), [("0", False), ("", False), ("1", True), ("3", True)])
def test_a_retry_says_so(count: str, retry: bool) -> None:
    assert decode(BODY, x_stainless_retry_count=count).retry is retry


# --- compaction -------------------------------------------------------------------------------------------------------


def compacted(*items: Wire, summary: str = "Half done.") -> tuple[ChatRequest, Wire]:
    """The compaction of a conversation: its request, and its one output item."""
    body: Wire = {"model": "policy", "input": list(items)}
    path = f"{PATH}/compact"
    completion = complete(say(summary), body, path=path)
    (item,) = DIALECT.encode(completion, incoming_of(body, path=path))["output"]
    return completion.request, item


def test_case_98_a_compaction_keeps_what_the_user_said_pictures_included() -> None:
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}, "é"]}
    request, item = compacted(USER, {"role": "assistant", "content": "no"}, picture, {"role": "system", "content": "s"})
    assert (request.role, request.stream) == (Role.COMPACTION, False)
    got = messages(item, {"role": "user", "content": "go"})
    assert [message.role for message in got] == ["user"] * 4
    assert got[:2] == (request.messages[0], request.messages[2])
    assert got[1].parts == (Image("image/png", "iVBORw0="), "é")
    assert "Half done." in got[2].content


def test_case_98_a_second_compaction_replaces_the_first_summary() -> None:
    _, first = compacted(USER, summary="One.")
    _, second = compacted(first, {"role": "user", "content": "more"}, summary="Two.")
    got = messages(second)
    assert [message.content for message in got[:-1]] == ["hi", "more"]
    assert "Two." in got[-1].content
    assert "One." not in got[-1].content


@pytest.mark.parametrize("stream", [False, True])
def test_case_98_a_trigger_at_the_end_of_the_input_compacts(stream: bool) -> None:
    body = BODY | {"input": [USER, {"type": "compaction_trigger"}]}
    request = decode(body)
    assert (request.role, len(request.messages), request.tool_choice) == (Role.COMPACTION, 2, "none")
    final = check(events_of(say("Half done."), body)) if stream else whole(say("Half done."), body)
    (item,) = final["output"]
    assert item["type"] == "compaction"
    assert "Half done." in messages(item)[-1].content


async def test_case_98_what_follows_a_compaction_by_its_id_follows_the_summary() -> None:
    engine = Scripted([say("Half done."), say("ok")])
    async with serving(engine) as (_, session, http):
        async with http.post(f"{PATH}/compact", json={"model": "m", "input": "make it", "stream": True}) as answer:
            response = await answer.json()
        assert (response["object"], session.completions[0].role) == ("response.compaction", Role.COMPACTION)
        body = {"model": "m", "previous_response_id": response["id"], "input": "go"}
        async with http.post(PATH, json=body) as answer:
            assert answer.status == 200
    contents = [message.content for message in engine.requests[1].messages]
    assert (contents[0], contents[-1], len(contents)) == ("make it", "go", 3)
    assert "Half done." in contents[1]


FORGED = [
    "[]", "{}", "7", "no JSON", "[" * 99_999, '{"users": 7, "summary": ""}', '{"users": [7], "summary": ""}',
    '{"users": [{"content": "x", "parts": [[1, 2, 3, 4]]}], "summary": ""}', '{"users": [{}], "summary": ""}',
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
def test_case_98_a_compaction_that_somebody_made_up_is_dropped_and_counted(forged: str) -> None:
    request = decode({"input": [USER, {"type": "compaction", "encrypted_content": seal("compaction", forged)}]})
    assert request.messages == (Message("user", "hi"),)
    assert request.ignored == ("input.*.compaction.encrypted_content",)


# --- what is told back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [
    {"tools": [FUNCTION | {"parameters": {"x": float("nan")}}]}, {"metadata": {"a": 7, "b": "c"}}, {"metadata": "x"},
    {"reasoning": "high"}, {"reasoning": {"effort": 7, "summary": []}}, {"text": "plain"}, {"text": {"format": "json"}},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"x": float("inf")}}}}, {"include": "all"},
    {"truncation": 7}, {"top_logprobs": "x"}, {"max_tool_calls": 1.5}, {"parallel_tool_calls": "x"}, {"user": 7},
    {"tool_choice": {"type": "allowed_tools", "tools": [FUNCTION | {"x": float("nan")}]}}, {"include": [["x"], {}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tools": [CUSTOM | {"format": {"type": "grammar"}}]},
    {"max_tool_calls": float("inf")}, {"prompt_cache_key": ["x"]}, {"tools": [NAMESPACE | {"description": None}]},
])  # fmt: skip
async def test_fields_of_odd_types_are_told_back_in_a_valid_shape(odd: Wire) -> None:
    async with serving(Scripted()) as (_, _, http):
        data = json.dumps(BODY | odd)
        async with http.post(PATH, data=data) as answer:
            assert answer.status == 200, await answer.text()
            Response.model_validate(await answer.json(), strict=True)
        async with http.post(PATH, data=json.dumps(BODY | odd | {"stream": True})) as answer:
            assert (await answer.text()).count("event: response.completed") == 1


def test_nothing_of_a_completion_is_needed_to_tell_a_failure() -> None:
    data = DIALECT.error_event(EngineError("died")).data
    assert isinstance(data, dict)
    assert data["response"]["error"] == {"code": "server_error", "message": "died"}


def test_a_completion_is_found_by_the_id_of_its_response() -> None:
    earlier: Completion = complete(say("ok", "why"), {"input": "hi", "instructions": "s"})
    ids = [f"resp_{earlier.id}", earlier.id]
    for name in ids:
        request = decode({"input": "more", "previous_response_id": name}, recall={earlier.id: earlier}.get)
        assert request.messages == (*earlier.request.messages, earlier.reply, Message("user", "more"))
    other = decode(
        {"input": "more", "previous_response_id": ids[0], "instructions": "t"}, recall={earlier.id: earlier}.get
    )
    assert [m.content for m in other.messages] == ["t", "hi", "ok", "more"]
