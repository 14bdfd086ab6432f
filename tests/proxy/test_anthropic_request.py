"""What Anthropic Messages requests mean: decoding as a pure function."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar_plugin.errors import BadRequest
from polar_plugin.proxy.anthropic_messages import AnthropicMessages
from polar_plugin.proxy.codec import Incoming
from polar_plugin.records import ChatRequest, Image, Message, Role, SamplingParams, Tool, ToolCall

DIALECT = AnthropicMessages()
USER = {"role": "user", "content": "hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.{}; cc_entrypoint=sdk-cli; cch={};"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH = {"name": "bash", "description": "Run it.", "input_schema": SCHEMA}
CACHED = {"cache_control": {"type": "ephemeral"}}


def decode(headers: dict[str, str] | None = None, **body: Any) -> ChatRequest:
    return DIALECT.decode(Incoming("/v1/messages", headers or {}, {}, {"messages": [USER], **body}))


def messages(*raw: dict[str, Any], **body: Any) -> tuple[Message, ...]:
    return decode(messages=list(raw), **body).messages


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def use(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


# --- system ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["a\nb", [text("a"), text("b", **CACHED)], [text("a\nb")]])
def test_the_system_prompt_is_read_as_a_text_and_as_blocks(system: Any) -> None:
    assert decode(system=system).messages == (Message("system", "a\nb"), Message("user", "hi"))


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_a_system_prompt_that_says_nothing_is_none(system: Any) -> None:
    assert decode(system=system).messages == (Message("user", "hi"),)


@pytest.mark.parametrize(
    "spell",
    [
        lambda line: [text(line), text("You help.")],
        lambda line: [text(line + "\n"), text("You help.", **CACHED)],
        lambda line: line + "\n\nYou help.",
        lambda line: [text(line + "\r\nYou help.")],
        lambda line: "You help.\n" + line,
        lambda line: [text("You help."), text("  " + line)],
    ],
    ids=["a block", "a block with a newline", "a line", "a crlf line", "the last line", "an indented block"],
)
def test_case_67_a_billing_line_that_changes_from_call_to_call_is_no_part_of_the_system_prompt(spell: Any) -> None:
    first, second = (decode(system=spell(BILLING.format(*hashes))) for hashes in (("b63", "1f2e3"), ("000", "aaaaa")))
    assert first.messages == second.messages
    assert first.messages[0].content.strip() == "You help."
    assert "system.*.x-anthropic-billing-header" in first.ignored


def test_case_67_a_system_prompt_of_nothing_but_the_billing_line_is_none() -> None:
    assert decode(system=BILLING.format("a", "b")).messages == (Message("user", "hi"),)


def test_a_user_may_write_about_the_billing_line() -> None:
    line = BILLING.format("a", "b")
    assert messages({"role": "user", "content": line}) == (Message("user", line),)


def test_case_68_system_messages_are_kept_where_they_stand() -> None:
    got = messages(
        {"role": "user", "content": [text("one")]},
        {"role": "system", "content": [text("environment", **CACHED)], "output_config": {"effort": "low"}},
        {"role": "assistant", "content": "two"},
        {"role": "system", "content": "a notice"},
        {"role": "system", "content": "another"},
        {"role": "user", "content": "three"},
        system="top",
    )
    assert [(m.role, m.content) for m in got] == [
        ("system", "top"),
        ("user", "one"),
        ("system", "environment"),
        ("assistant", "two"),
        ("system", "a notice"),
        ("system", "another"),
        ("user", "three"),
    ]


# --- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["hi", [text("hi")], [text("hi", **CACHED)], ["hi"]])
def test_a_text_and_a_list_of_one_text_are_the_same_message(content: Any) -> None:
    assert messages({"role": "user", "content": content}) == (Message("user", "hi"),)


def test_an_assistants_blocks_are_one_message_in_whatever_order_they_come() -> None:
    (got, _) = messages(
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": "s"},
                use("bash", "a", command="ls"),
                text("Look"),
                text(" \n"),
                use("read", "b"),
                text(" here."),
            ],
        },
        USER,
    )
    assert got == Message(
        "assistant", "Look here.", "hmm", (ToolCall("bash", '{"command": "ls"}'), ToolCall("read", "{}"))
    )
    assert [call.id for call in got.tool_calls] == ["a", "b"]


def test_results_and_texts_of_one_user_turn_become_messages_in_their_order() -> None:
    got = messages(
        USER,
        {"role": "assistant", "content": [use("bash", "a"), use("read", "b")]},
        {"role": "user", "content": [result("a", "A"), result("b", [text("B"), text("b")]), text("and"), text("more")]},
        {"role": "assistant", "content": [use("bash", "c")]},
        {"role": "user", "content": [text("before"), result("c", None), text("after")]},
    )
    assert [(m.role, m.name, m.content, m.tool_call_id) for m in got if m.role in ("user", "tool")] == [
        ("user", "", "hi", ""),
        ("tool", "bash", "A", "a"),
        ("tool", "read", "B\nb", "b"),
        ("user", "", "and\nmore", ""),
        ("user", "", "before", ""),
        ("tool", "bash", "", "c"),
        ("user", "", "after", ""),
    ]


def test_case_82_results_in_another_order_than_their_calls_are_paired_by_id() -> None:
    names = [f"tool_{i}" for i in range(6)]
    got = messages(
        USER,
        {"role": "assistant", "content": [use(name, f"id_{name}") for name in names]},
        {"role": "user", "content": [result(f"id_{name}", f"of {name}") for name in (names[::2] + names[1::2])]},
    )
    assert [m.name for m in got[2:]] == names[::2] + names[1::2], "the order in which they came is the harness's doing"
    assert all(m.content == f"of {m.name}" and m.tool_call_id == f"id_{m.name}" for m in got[2:])


def test_a_result_of_an_unknown_or_unnamed_call_has_no_name() -> None:
    got = messages(
        {"role": "assistant", "content": [{"type": "tool_use", "name": "bash", "input": {}}]},
        {"role": "user", "content": [result("nobody"), {"type": "tool_result"}]},
    )
    assert [(m.role, m.name, m.content) for m in got[1:]] == [("tool", "", "ok"), ("tool", "", "")]


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ("no such file", "[error]\nno such file"),
        ([text("a"), text("b")], "[error]\na\nb"),
        ("", "[error]\n"),
        ([], "[error]"),
    ],
)
def test_a_failed_call_is_told_to_the_model(content: Any, read: str) -> None:
    got = messages(USER, {"role": "user", "content": [result("a", content, is_error=True)]})
    assert got[1].content == read
    fine = messages(USER, {"role": "user", "content": [result("a", content, is_error=False)]})
    assert not fine[1].content.startswith("[error]")


def test_turns_of_one_role_in_a_row_are_one_turn_as_in_the_api() -> None:
    thinking = {"type": "thinking", "thinking": "hmm", "signature": "s"}
    got = messages(
        {"role": "user", "content": "one"},
        {"role": "user", "content": [text("two")]},
        {"role": "assistant", "content": [thinking]},
        {"role": "assistant", "content": [text("Look.")]},
        {"role": "assistant", "content": [use("bash", "a")]},
        {"role": "user", "content": [result("a")]},
        {"role": "user", "content": "go on"},
    )
    assert got == (
        Message("user", "one\ntwo"),
        Message("assistant", "Look.", "hmm", (ToolCall("bash", "{}"),)),
        Message("tool", "ok", name="bash"),
        Message("user", "go on"),
    )


def test_a_request_that_begins_the_reply_itself_is_refused_with_a_word_on_why() -> None:
    with pytest.raises(BadRequest, match=r"^messages\.1: .*prefill"):
        messages(USER, {"role": "assistant", "content": "The answer is ("})


@pytest.mark.parametrize("content", ["", [], [text(" \n")], [{"type": "thinking", "thinking": "x", "signature": ""}]])
def test_an_assistants_turn_at_the_end_that_says_nothing_is_dropped(content: Any) -> None:
    got = decode(messages=[USER, {"role": "assistant", "content": content}])
    assert got.messages == (Message("user", "hi"),)
    assert "messages.*.empty" in got.ignored


def test_an_empty_assistants_turn_in_the_middle_is_a_turn() -> None:
    assert messages(USER, {"role": "assistant", "content": []}, USER)[1] == Message("assistant")


# --- blocks ----------------------------------------------------------------------------------------------------------

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}
LINK = {"type": "image", "source": {"type": "url", "url": "https://example.invalid/a.png"}}
STORED = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}


def test_case_80_images_of_users_and_of_results_are_parts_and_are_counted() -> None:
    got = decode(messages=[USER, {"role": "user", "content": [result("a", [PNG, text("see")]), text("and"), LINK]}])
    _, shown, told = got.messages
    assert shown.content == "[image omitted]\nsee"
    assert shown.parts == (Image("image/png", "iVBORw0="), "see")
    assert told.content == "and\n[image omitted]"
    assert told.parts == ("and", Image(url="https://example.invalid/a.png"))
    assert got.ignored == ("messages.*.content.*.content.*.image", "messages.*.content.*.image")


def test_an_image_that_is_kept_elsewhere_leaves_its_placeholder() -> None:
    assert messages({"role": "user", "content": [STORED]}) == (Message("user", "[image omitted]"),)


@pytest.mark.parametrize("kind", ["document", "search_result", "container_upload", "server_tool_use", "novelty"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_block_that_cannot_be_said_leaves_a_placeholder_and_is_counted(role: str, kind: str) -> None:
    got = decode(messages=[{"role": role, "content": [text("see"), {"type": kind, "source": {"data": "x"}}]}, USER])
    assert got.messages[0].content.endswith(f"[{kind} omitted]" + ("\nhi" if role == "user" else ""))
    assert got.ignored == (f"messages.*.content.*.{kind}",)


def test_a_call_in_a_users_turn_is_no_call() -> None:
    got = decode(messages=[{"role": "user", "content": [use("bash", "a")]}])
    assert got.messages == (Message("user", "[tool_use omitted]"),)
    assert got.ignored == ("messages.*.content.*.tool_use",)


def test_what_another_provider_redacted_is_dropped_and_counted() -> None:
    blocks = [{"type": "redacted_thinking", "data": "EmwKAhgBEgy"}, text("four")]
    got = decode(messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert got.messages[1] == Message("assistant", "four")
    assert got.ignored == ("messages.*.content.*.redacted_thinking",)


@pytest.mark.parametrize("signature", ["", "sig_AAAA", "pp1-%%%", "pp1-gICA", "pp0-00"])
def test_a_signature_that_is_not_ours_is_accepted_and_tells_nothing(signature: str) -> None:
    blocks = [{"type": "thinking", "thinking": "", "signature": signature}, text("four")]
    assert messages(USER, {"role": "assistant", "content": blocks}, USER)[1] == Message("assistant", "four")
    blocks[0]["thinking"] = "two and two"
    assert messages(USER, {"role": "assistant", "content": blocks}, USER)[1].reasoning == "two and two"


# --- tools -----------------------------------------------------------------------------------------------------------


def test_tools_are_read_and_those_that_the_provider_runs_are_counted() -> None:
    got = decode(
        tools=[
            BASH | CACHED,
            BASH | {"name": "typed", "type": "custom", "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "bash_20250124", "name": "sh"},
            {"name": "bare", "input_schema": {}},
        ]
    )
    assert got.tools == (Tool("bash", "Run it.", SCHEMA), Tool("typed", "Run it.", SCHEMA), Tool("bare"))
    assert got.ignored == (
        "tools.*.bash_20250124",
        "tools.*.cache_control",
        "tools.*.eager_input_streaming",
        "tools.*.web_search_20250305",
    )


def test_a_tool_whose_loading_is_deferred_is_told_where_a_result_loads_it_and_the_prompt_stays_as_it_was() -> None:
    fetch = BASH | {"name": "fetch", "defer_loading": True}
    loads = {"role": "user", "content": [result("a", [{"type": "tool_reference", "tool_name": "fetch"}])]}
    before = decode(tools=[BASH], messages=[USER])
    after = decode(
        tools=[BASH, fetch], messages=[USER, {"role": "assistant", "content": [use("search", "a")]}, loads],
        tool_choice={"type": "tool", "name": "fetch"},
    )  # fmt: skip
    assert after.tools == before.tools
    assert after.tool_choice == "fetch"
    told = json.loads(after.messages[-1].content)
    assert told == {"name": "fetch", "description": "Run it.", "parameters": SCHEMA}
    assert after.ignored == ("tools.*.defer_loading",)


def test_a_tool_may_be_loaded_by_a_system_message_and_an_unknown_one_leaves_a_placeholder() -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "bash"}}
    unknown = {"type": "tool_reference", "tool_name": "nowhere"}
    got = messages(
        USER,
        {"role": "system", "content": [added]},
        {"role": "user", "content": [result("a", [unknown])]},
        tools=[BASH | {"defer_loading": True}],
    )
    assert json.loads(got[1].content)["name"] == "bash"
    assert got[2].content == "[tool nowhere omitted]"


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "bash"}, "bash"),
    ],
)
def test_tool_choices_are_read(choice: Any, read: str) -> None:
    assert decode(tools=[BASH], tool_choice=choice).tool_choice == read


def test_that_calls_should_not_be_parallel_is_recorded_as_ignored() -> None:
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert decode(tools=[BASH], tool_choice=one).ignored == ("tool_choice.disable_parallel_tool_use",)
    assert decode(tools=[BASH], tool_choice={"type": "auto", "disable_parallel_tool_use": False}).ignored == ()


# --- the rest of the body --------------------------------------------------------------------------------------------


def test_sampling_is_recorded_as_asked() -> None:
    got = decode(max_tokens=32000.0, temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["END", ""], stream=True)
    assert got.sampling == SamplingParams(0.5, 0.9, 40, 32000, ("END",))
    assert got.stream
    assert decode().sampling == SamplingParams()


def test_case_69_unknown_fields_are_dropped_and_counted() -> None:
    got = decode(
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        thinking={"type": "adaptive", "display": "omitted"},
        metadata={"user_id": "x"},
        service_tier="auto",
        betas=["context-management-2025-06-27"],
        novelty={"a": 1},
        container=None,
        mcp_servers=[],
    )
    assert got.messages == (Message("user", "hi"),)
    assert got.ignored == (
        "betas",
        "context_management",
        "metadata",
        "novelty",
        "output_config",
        "service_tier",
        "thinking",
    )


@pytest.mark.parametrize("model", ["claude-haiku-4-5-20251001", "rl-model", "", "org/any name"])
def test_case_83_any_model_name_is_taken_and_recorded(model: str) -> None:
    assert decode(model=model).model == model


def test_headers_tell_a_repeated_call_and_a_sub_agents_thread() -> None:
    assert not decode({"x-stainless-retry-count": "0"}).retry
    assert decode({"x-stainless-retry-count": "2"}).retry
    main, sub = decode(), decode({"x-claude-code-agent-id": "a3394f"})
    assert (main.thread, main.role) == ("", Role.MAIN)
    assert (sub.thread, sub.role) == ("a3394f", Role.SUB_AGENT)
    assert (sub.api, sub.messages) == ("anthropic_messages", main.messages)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    ({"messages": [USER, {"role": "user", "content": [7]}]}, "messages.1.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": 7}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [PNG | {"source": 7}]}]}, "messages.0.content.0.source"),
    ({"messages": [{"role": "user", "content": [result("a", 7)]}]}, "messages.0.content.0.content"),
    ({"messages": [{"role": "user", "content": [result("a", is_error="no")]}]}, "messages.0.content.0.is_error"),
    ({"messages": [{"role": "user", "content": [result("a", [{"type": "text", "text": 7}])]}]},
     "messages.0.content.0.content.0.text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, USER]},
     "messages.0.content.0.name"),
    ({"messages": [{"role": "assistant", "content": [use("f", "a") | {"input": "x"}]}, USER]},
     "messages.0.content.0.input"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": 7}]}, USER]},
     "messages.0.content.0.data"),
    ({"system": 7}, "system"),
    ({"system": [7]}, "system.0"),
    ({"system": [{"type": "text", "text": []}]}, "system.0.text"),
    ({"tools": [{"description": "x"}]}, "tools.0.name"),
    ({"tools": [BASH, BASH | {"input_schema": 7}]}, "tools.1.input_schema"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": ["a", 7]}, "stop_sequences.1"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"stream": "yes"}, "stream"),
    ({"model": 7}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path"), BAD, ids=[f"{path}-{i}" for i, (_, path) in enumerate(BAD)])
def test_bad_input_is_refused_with_the_path_of_what_is_wrong(body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(**body)
    assert caught.value.path == path


def test_decoding_changes_nothing_in_the_body() -> None:
    body = {
        "system": [text(BILLING.format("a", "b"))],
        "messages": [USER, {"role": "assistant", "content": [use("f", "a", x=1)]}, USER],
        "tools": [BASH | {"defer_loading": True}],
    }
    before = json.dumps(body)
    DIALECT.decode(Incoming("", {}, {}, body))
    assert json.dumps(body) == before


@pytest.mark.parametrize(
    ("path", "headers", "ours"),
    [
        ("/v1/models", {"anthropic-version": "2023-06-01", "authorization": "Bearer k"}, True),
        ("/v1/models/x", {"x-api-key": "k"}, True),
        ("/v1/models", {"authorization": "Bearer k"}, False),
        ("/v1/messages/batches", {}, True),
        ("/v1/files", {"x-api-key": "k"}, False),
        ("/v1/files", {"anthropic-version": "2023-06-01"}, True),
    ],
)
def test_shared_and_unknown_paths_are_ours_by_header_or_name(path: str, headers: dict[str, str], ours: bool) -> None:
    assert DIALECT.speaks(path, headers) is ours
