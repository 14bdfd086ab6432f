"""What a Google generateContent request is read as."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from polar_plugin.errors import BadRequest
from polar_plugin.proxy.codec import Incoming
from polar_plugin.proxy.google_generate import GoogleGenerate
from polar_plugin.proxy.google_request import UNPARSED
from polar_plugin.proxy.google_schema import json_schema
from polar_plugin.proxy.google_signature import signature
from polar_plugin.records import ChatRequest, Image, Message, SamplingParams, Tool, ToolCall

DIALECT = GoogleGenerate()
HI = {"role": "user", "parts": [{"text": "hi"}]}
MODEL = "/v1beta/models/policy"


def decode(method: str = ":generateContent", **body: Any) -> ChatRequest:
    body = {"contents": [HI]} | body
    before = copy.deepcopy(body)
    told = DIALECT.decode(Incoming(MODEL + method, {}, {}, body, {"model": "policy"}))
    assert body == before, "decoding changed the body"
    return told


def messages(*contents: Any) -> tuple[Message, ...]:
    return decode(contents=list(contents)).messages


def call(name: str = "bash", **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, **more}}


def result(response: Any = None, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"response": response, **more}}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


# --- contents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contents",
    [
        [HI],
        HI,
        [{"parts": [{"text": "hi"}]}],
        {"parts": {"text": "hi"}},
        {"role": None, "parts": {"text": "hi"}},
        [{"role": "user", "parts": ["hi"]}],
        ["hi"],
        "hi",
    ],
    ids=["list", "one", "no role", "one part", "null role", "bare part", "bare content", "bare contents"],
)
def test_contents_in_every_shape_that_the_api_takes_are_the_same(contents: Any) -> None:
    assert decode(contents=contents).messages == (Message("user", "hi"),)


@pytest.mark.parametrize("key", ["systemInstruction", "system_instruction"])
@pytest.mark.parametrize(
    "value",
    [
        "Be brief.",
        {"parts": [{"text": "Be brief."}]},
        {"role": "user", "parts": {"text": "Be brief."}},
        {"role": "system", "parts": ["Be brief."]},
        [{"text": "Be brief."}],
        ["Be brief."],
        {"text": "Be brief."},
    ],
    ids=["text", "content", "content of one part", "bare part", "parts", "texts", "part"],
)
def test_a_system_instruction_in_every_shape_comes_first(key: str, value: Any) -> None:
    told = decode(**{key: value})
    assert told.messages == (Message("system", "Be brief."), Message("user", "hi"))
    assert told.ignored == ()


@pytest.mark.parametrize("value", [None, {"parts": []}, {"role": "user", "parts": None}, {}, []])
def test_an_instruction_that_says_nothing_is_none(value: Any) -> None:
    assert decode(systemInstruction=value).messages == (Message("user", "hi"),)


def test_parts_are_lines_of_a_user_but_pieces_of_the_model() -> None:
    parts = [{"text": "one"}, {"text": "two"}]
    assert messages(user(*parts), model(*parts)) == (Message("user", "one\ntwo"), Message("assistant", "onetwo"))


def test_contents_of_the_model_in_a_row_are_one_turn_and_those_of_the_user_are_not() -> None:
    told = messages(HI, HI, model({"text": "a"}), model({"text": "b"}, call()), model(call("read")), HI)
    assert told == (
        Message("user", "hi"),
        Message("user", "hi"),
        Message("assistant", "ab", tool_calls=(ToolCall("bash", "{}"), ToolCall("read", "{}"))),
        Message("user", "hi"),
    )


def test_thoughts_are_reasoning_and_text_between_calls_is_text() -> None:
    thought = {"text": "hm", "thought": True}
    plain = {"text": "a", "thought": False}
    assert messages(model(thought, plain, call(), {"text": "b"}, thought)) == (
        Message("assistant", "ab", "hmhm", (ToolCall("bash", "{}"),)),
    )


def test_a_call_without_a_role_is_the_models() -> None:
    assert messages({"parts": [call(args={"a": 1})]})[0].tool_calls == (ToolCall("bash", '{"a": 1}'),)


@pytest.mark.parametrize(
    ("args", "read"),
    [
        ({"b": 1, "a": {"é": None}}, '{"b": 1, "a": {"é": null}}'),
        ({}, "{}"),
        (None, "{}"),
        ('{"a":  1}', '{"a":  1}'),
        ("", "{}"),
        ({UNPARSED: "no json"}, "no json"),
        ({UNPARSED: "x", "more": 1}, json.dumps({UNPARSED: "x", "more": 1})),
        ({UNPARSED: 1}, json.dumps({UNPARSED: 1})),
        ({"some_key": 1, "someKey": 2}, '{"some_key": 1, "someKey": 2}'),
    ],
)
def test_arguments_are_read_as_they_stand(args: Any, read: str) -> None:
    assert messages(model(call(args=args)))[0].tool_calls[0].arguments == read


def test_arguments_that_were_no_object_are_counted_when_they_come_back() -> None:
    told = decode(contents=[model(call(args={UNPARSED: "[1]"}))])
    assert told.ignored == (f"contents.*.parts.*.functionCall.args.{UNPARSED}",)


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a\nb"}, "a\nb"),
        ({"result": "a"}, "a"),
        ({"error": "failed"}, "failed"),
        ({"output": {"n": 1, "é": "ü"}}, '{"n": 1, "é": "ü"}'),
        ({"output": ""}, ""),
        ({"output": None}, ""),
        ({"output": 4}, "4"),
        ({"result": False}, "false"),
        ({"output": "a", "error": "b"}, '{"output": "a", "error": "b"}'),
        ({"stdout": "a"}, '{"stdout": "a"}'),
        ({}, "{}"),
        (None, ""),
        ("text", "text"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_a_response_is_told_in_one_fixed_way(response: Any, text: str) -> None:
    told = messages(HI, model(call(id="a")), user(result(response, id="a", name="bash")))
    assert told[2] == Message("tool", text, name="bash")


def paired(calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(call id, function, text) of each result."""
    told = messages(HI, model(*calls), user(*results))
    return [(one.tool_call_id, one.name, one.content) for one in told[2:]]


def test_results_find_their_calls_by_id_in_any_order() -> None:
    calls = [call("bash", id="a"), call("bash", id="b"), call("read", id="c")]
    results = [result("C", id="c", name="read"), result("B", id="b", name="bash"), result("A", id="a")]
    assert paired(calls, results) == [("c", "read", "C"), ("b", "bash", "B"), ("a", "bash", "A")]


def test_results_without_ids_find_their_calls_by_name_and_then_by_order() -> None:
    calls = [call("bash"), call("read"), call("bash")]
    results = [result("R", name="read"), result("1", name="bash"), result("2", name="bash")]
    assert paired(calls, results) == [("call_2", "read", "R"), ("call_1", "bash", "1"), ("call_3", "bash", "2")]
    assert paired(calls, [result("1"), result("2"), result("3")]) == [
        ("call_1", "bash", "1"),
        ("call_2", "read", "2"),
        ("call_3", "bash", "3"),
    ]


def test_results_with_ids_that_no_call_has_find_theirs_by_name() -> None:
    """Sub-agents of Gemini CLI name no id on the call and one of their own on its result."""
    results = [result("x", id="u#0-0", name="bash"), result("y", id="u#0-1", name="bash")]
    assert paired([call("bash"), call("bash")], results) == [("call_1", "bash", "x"), ("call_2", "bash", "y")]


def test_a_result_of_no_call_keeps_what_it_says_of_itself() -> None:
    results = [result("x", id="z", name="lost"), result("y", id="a"), result("y", id="a")]
    assert paired([call("bash", id="a")], results) == [("z", "lost", "x"), ("a", "bash", "y"), ("a", "", "y")]


def test_calls_of_an_earlier_turn_do_not_take_later_results() -> None:
    told = messages(HI, model(call("bash")), HI, model(call("bash")), user(result("x", name="bash")))
    assert told[-1].tool_call_id == "call_2"


@pytest.mark.parametrize("role", ["user", "function", "tool", None])
def test_results_come_in_contents_of_several_roles_and_amid_texts(role: str | None) -> None:
    parts = [{"text": "before"}, result("1"), result("2"), {"text": "after"}, {"text": "all"}]
    told = messages(HI, model(call(), call()), {"role": role, "parts": parts})
    assert [(one.role, one.content) for one in told[2:]] == [
        ("user", "before"),
        ("tool", "1"),
        ("tool", "2"),
        ("user", "after\nall"),
    ]


# --- images and other parts ------------------------------------------------------------------------------------------

PNG = {"inlineData": {"mimeType": "image/png", "data": "-_8="}}


def test_images_are_parts_of_users_and_results() -> None:
    link = {"fileData": {"mimeType": "image/jpeg", "fileUri": "https://example.invalid/a.jpg"}}
    told = decode(contents=[user({"text": "see"}, PNG, link), model(call()), user(result("shot", parts=[PNG]), PNG)])
    image = Image("image/png", "+/8=")
    assert told.messages[0].parts == ("see", image, Image("image/jpeg", url="https://example.invalid/a.jpg"))
    assert told.messages[0].content == "see\n[image omitted]\n[image omitted]"
    assert told.messages[2] == Message("tool", "shot\n[image omitted]", name="bash", parts=("shot", image))
    assert told.messages[3] == Message("user", "[image omitted]", parts=(image,))
    assert told.ignored == (
        "contents.*.parts.*.fileData",
        "contents.*.parts.*.functionResponse.parts.*.inlineData",
        "contents.*.parts.*.inlineData",
    )


@pytest.mark.parametrize(
    ("part", "placeholder", "path"),
    [
        ({"inlineData": {"mimeType": "audio/wav", "data": "AA=="}}, "[audio omitted]", "inlineData"),
        ({"inline_data": {"mime_type": "application/pdf", "data": "AA=="}}, "[application omitted]", "inlineData"),
        ({"inlineData": {"data": "AA=="}}, "[data omitted]", "inlineData"),
        ({"fileData": {"fileUri": "gs://a/b"}}, "[file omitted]", "fileData"),
        ({"file_data": {"mime_type": "video/mp4", "file_uri": "x"}}, "[video omitted]", "fileData"),
        ({"executableCode": {"language": "PYTHON", "code": "1"}}, "[executable code omitted]", "executableCode"),
        ({"code_execution_result": {"outcome": "OK"}}, "[code execution result omitted]", "codeExecutionResult"),
        ({"toolCall": {"id": "x"}}, "[tool call omitted]", "toolCall"),
        ({"somethingNew": 1}, "[something new omitted]", "somethingNew"),
    ],
)
def test_a_part_that_cannot_be_shown_leaves_a_placeholder_and_is_counted(
    part: Any, placeholder: str, path: str
) -> None:
    told = decode(contents=[user({"text": "see"}, part), model({"text": "x"}, part)])
    assert [one.content for one in told.messages] == [f"see\n{placeholder}", f"x{placeholder}"]
    assert told.ignored == (f"contents.*.parts.*.{path}",)


def test_what_stands_beside_a_text_leaves_no_placeholder_and_is_counted() -> None:
    told = decode(contents=[user({"text": "a", "videoMetadata": {"fps": 1}, "odd": 2}, {"partMetadata": {"x": 1}}, {})])
    assert told.messages == (Message("user", "a"),)
    assert told.ignored == (
        "contents.*.parts.*.odd",
        "contents.*.parts.*.partMetadata",
        "contents.*.parts.*.videoMetadata",
    )


# --- signatures ------------------------------------------------------------------------------------------------------

SIGNED = signature("two and two\ud83d é")
PLACES: dict[str, list[dict[str, Any]]] = {
    "beside the call": [{**call(), "thoughtSignature": SIGNED}, call("read")],
    "within the call": [call(thoughtSignature=SIGNED), call("read")],
    "within the call, in snake_case": [call(thought_signature=SIGNED), call("read")],
    "on a thought before it": [{"text": "", "thought": True, "thoughtSignature": SIGNED}, call(), call("read")],
    "on a thought cut short": [{"text": "two", "thought": True, "thoughtSignature": SIGNED}, call(), call("read")],
    "on a part of its own": [{"thoughtSignature": SIGNED}, call(), call("read")],
    "on an empty text": [{"text": "", "thoughtSignature": SIGNED}, call(), call("read")],
    "on every call": [{**call(), "thoughtSignature": SIGNED}, {**call("read"), "thoughtSignature": SIGNED}],
    "beside and within": [call(thoughtSignature=SIGNED) | {"thoughtSignature": SIGNED}, call("read")],
    "in the other alphabet": [
        {**call(), "thought_signature": SIGNED.replace("+", "-").replace("/", "_").rstrip("=")},
        call("read"),
    ],
}


@pytest.mark.parametrize("parts", PLACES.values(), ids=PLACES.keys())
def test_case_103_a_signature_is_taken_back_in_every_place_and_restores_the_reasoning(parts: Any) -> None:
    told = decode(contents=[HI, model(*parts)])
    assert told.messages[1] == Message(
        "assistant", "", "two and two\ud83d é", (ToolCall("bash", "{}"), ToolCall("read", "{}"))
    )
    assert told.ignored == ()


@pytest.mark.parametrize("place", ["beside", "within", "before"])
@pytest.mark.parametrize("foreign", ["c2lnbmF0dXJl", "skip_thought_signature_validator", "§", signature("a")[:-9]])
def test_case_103_a_signature_of_somebody_else_is_dropped_and_counted(place: str, foreign: str) -> None:
    parts = {
        "beside": [{**call(), "thoughtSignature": foreign}],
        "within": [call(thoughtSignature=foreign)],
        "before": [{"text": "hm", "thought": True, "thoughtSignature": foreign}, call()],
    }[place]
    if foreign == signature("a")[:-9]:
        assert len(foreign) > 20
    told = decode(contents=[model(*parts)])
    assert told.messages[0].reasoning == ("hm" if place == "before" else "")
    assert told.ignored == ("contents.*.parts.*.thoughtSignature",)


def test_case_103_a_missing_signature_is_no_error() -> None:
    told = decode(contents=[model({"text": "hm", "thought": True}, call()), user(result("x", name="bash"))])
    assert told.messages[0] == Message("assistant", "", "hm", (ToolCall("bash", "{}"),))


# --- tools -----------------------------------------------------------------------------------------------------------

EXACT = {"type": "object", "properties": {"x": {"type": ["string", "null"]}}, "required": ["x"]}


def test_case_102_both_ways_to_say_parameters_work_in_one_list() -> None:
    loose = {"type": "OBJECT", "properties": {"x": {"type": "STRING", "nullable": True}}, "required": ["x"]}
    declared = [
        {"name": "exact", "description": "E", "parametersJsonSchema": EXACT},
        {"name": "loose", "parameters": loose},
        {"name": "bare"},
        {"name": "json under the other name", "parameters": EXACT},
        {"name": "upper case under the other name", "parametersJsonSchema": loose},
        {"name": "snake", "parameters_json_schema": EXACT},
    ]
    told = decode(tools=[{"functionDeclarations": declared[:3]}, {"function_declarations": declared[3:]}])
    assert told.tools == (
        Tool("exact", "E", EXACT),
        Tool("loose", "", EXACT),
        Tool("bare"),
        Tool("json under the other name", "", EXACT),
        Tool("upper case under the other name", "", EXACT),
        Tool("snake", "", EXACT),
    )
    assert told.ignored == ()


KEYWORDS = ("type", "nullable", "any_of", "items", "ref")
SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every type": (
        {"anyOf": [{"type": t} for t in ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")]},
        {"anyOf": [{"type": t} for t in ("string", "number", "integer", "boolean", "array", "object", "null")]},
    ),
    "deep within": (
        {"items": {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": "STRING"}}}}},
        {"items": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}},
    ),
    "an unspecified type": ({"type": "TYPE_UNSPECIFIED", "description": "d"}, {"description": "d"}),
    "nullable": ({"type": "INTEGER", "nullable": True}, {"type": ["integer", "null"]}),
    "not nullable": ({"type": "INTEGER", "nullable": False}, {"type": "integer"}),
    "a nullable enum": (
        {"type": "STRING", "enum": ["a"], "nullable": True},
        {"type": ["string", "null"], "enum": ["a", None]},
    ),
    "nullable without a type": (
        {"anyOf": [{"type": "STRING"}], "nullable": True},
        {"anyOf": [{"anyOf": [{"type": "string"}]}, {"type": "null"}]},
    ),
    "counts as text": (
        {"type": "ARRAY", "minItems": "1", "max_items": "20", "items": {"type": "STRING", "maxLength": "9"}},
        {"type": "array", "minItems": 1, "maxItems": 20, "items": {"type": "string", "maxLength": 9}},
    ),
    "counts that are none": ({"minItems": "many", "maxItems": "9" * 5000},) * 2,
    "a format": ({"type": "NUMBER", "format": "double"}, {"type": "number", "format": "double"}),
    "snake_case": ({"any_of": [{"type": "STRING"}]}, {"anyOf": [{"type": "string"}]}),
    "an example": ({"type": "STRING", "example": "x"}, {"type": "string", "examples": ["x"]}),
    "references": (
        {"ref": "#/defs/a", "defs": {"a": {"type": "STRING"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    ),
    "properties named like keywords": (
        {"type": "OBJECT", "properties": {name: {"type": "STRING"} for name in KEYWORDS}},
        {"type": "object", "properties": {name: {"type": "string"} for name in KEYWORDS}},
    ),
    "values that look like schemas": (
        {"type": "OBJECT", "default": {"type": "STRING"}, "enum": [{"type": "STRING", "nullable": True}, "OBJECT"]},
        {"type": "object", "default": {"type": "STRING"}, "enum": [{"type": "STRING", "nullable": True}, "OBJECT"]},
    ),
    "JSON schema": (
        {
            "$schema": "x", "type": ["object", "null"], "additionalProperties": False, "$defs": {"a": True},
            "properties": {"snake_case": {"const": 1}, "b": {"oneOf": [{"$ref": "#/$defs/a"}], "minLength": 1}},
            "patternProperties": {"^x": {"not": {"type": "string"}}}, "if": {}, "items": [{"type": "string"}],
        },
    ) * 2,
}  # fmt: skip


@pytest.mark.parametrize(("schema", "told"), SCHEMAS.values(), ids=SCHEMAS.keys())
def test_case_102_the_apis_schemas_are_told_as_json_schema_and_json_schema_as_it_is(schema: Any, told: Any) -> None:
    before = copy.deepcopy(schema)
    assert json_schema(schema) == told
    assert schema == before
    assert json_schema(told) == told


def test_case_102_properties_stand_in_the_order_asked_for() -> None:
    schema = {"properties": {k: {} for k in "abc"}, "propertyOrdering": ["c", "a", "none", 1]}
    assert list(json_schema(schema)["properties"]) == ["c", "a", "b"]
    assert "propertyOrdering" not in json_schema(schema)


def test_built_in_tools_are_dropped_and_counted() -> None:
    told = decode(
        tools=[
            {"googleSearch": {}},
            {"code_execution": {}, "functionDeclarations": [{"name": "f", "response": {"type": "STRING"}}]},
            {"urlContext": {}, "googleMaps": None},
        ]
    )
    assert told.tools == (Tool("f"),)
    assert told.ignored == (
        "tools.*.codeExecution",
        "tools.*.functionDeclarations.*.response",
        "tools.*.googleSearch",
        "tools.*.urlContext",
    )


@pytest.mark.parametrize(
    "tools", [{"functionDeclarations": {"name": "f"}}, [{"functionDeclarations": [{"name": "f"}]}]]
)
def test_one_tool_stands_without_its_list(tools: Any) -> None:
    assert decode(tools=tools).tools == (Tool("f"),)


@pytest.mark.parametrize(
    ("calling", "choice", "ignored"),
    [
        ({}, "auto", False),
        ({"mode": "AUTO"}, "auto", False),
        ({"mode": "auto"}, "auto", False),
        ({"mode": "ANY"}, "required", False),
        ({"mode": "NONE"}, "none", False),
        ({"mode": "VALIDATED"}, "auto", False),
        ({"mode": "MODE_UNSPECIFIED"}, "auto", False),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, "f", False),
        ({"mode": "ANY", "allowed_function_names": ["g"]}, "g", False),
        ({"mode": "ANY", "allowedFunctionNames": ["f", "g"]}, "required", True),
        ({"mode": "AUTO", "allowedFunctionNames": ["f"]}, "auto", True),
    ],
)
@pytest.mark.parametrize("keys", [("toolConfig", "functionCallingConfig"), ("tool_config", "function_calling_config")])
def test_tool_choice(calling: Any, choice: str, ignored: bool, keys: tuple[str, str]) -> None:
    told = decode(tools=[{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}], **{keys[0]: {keys[1]: calling}})
    assert told.tool_choice == choice
    assert told.ignored == (("toolConfig.functionCallingConfig.allowedFunctionNames",) if ignored else ())


# --- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snake", [False, True])
def test_what_the_harness_asked_of_sampling_is_recorded(snake: bool) -> None:
    config = {
        "temperature": 0, "topP": 0.9, "topK": 20.0, "maxOutputTokens": 9, "stopSequences": ["END", ""], "seed": 7,
        "candidateCount": 1, "thinkingConfig": {"includeThoughts": True},
    }  # fmt: skip
    if snake:
        names = {"topP": "top_p", "topK": "top_k", "maxOutputTokens": "max_output_tokens"}
        names |= {"stopSequences": "stop_sequences", "candidateCount": "candidate_count"}
        config = {names.get(key, key): value for key, value in config.items()}
    told = decode(**{"generation_config" if snake else "generationConfig": config})
    assert told.sampling == SamplingParams(0.0, 0.9, 20, 9, ("END",), 7)
    assert (told.model, told.api, told.ignored) == ("policy", "google_generate", ())


def test_what_is_not_asked_is_left_at_its_default() -> None:
    unset = dict.fromkeys(["temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "candidateCount"])
    wanted = ChatRequest((Message("user", "hi"),), model="policy", api="google_generate")
    assert decode(generationConfig=unset, tools=None, toolConfig=None, systemInstruction=None) == decode() == wanted


@pytest.mark.parametrize(("method", "stream"), [(":generateContent", False), (":streamGenerateContent", True)])
def test_the_route_tells_whether_to_stream(method: str, stream: bool) -> None:
    assert decode(method).stream is stream


def test_what_has_no_meaning_here_is_dropped_and_named_once() -> None:
    told = decode(
        safetySettings=[{"category": "x"}, {"category": "y"}],
        cached_content="cachedContents/1",
        labels={},
        model="models/policy",
        generationConfig={
            "responseMimeType": "application/json", "responseJsonSchema": {"type": "OBJECT"},
            "response_schema": {"a": 1}, "presencePenalty": 0.5,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1},
        },
        contents=[HI | {"weight": 1}, model(call(willContinue=True)), user(result("x", scheduling="SILENT"))],
    )  # fmt: skip
    assert told.ignored == (
        "cachedContent",
        "contents.*.parts.*.functionCall.willContinue",
        "contents.*.parts.*.functionResponse.scheduling",
        "contents.*.weight",
        "generationConfig.presencePenalty",
        "generationConfig.responseJsonSchema",
        "generationConfig.responseMimeType",
        "generationConfig.responseSchema",
        "generationConfig.thinkingConfig.thinkingBudget",
        "safetySettings",
    )


def test_a_count_takes_the_contents_or_the_whole_request() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}]}]
    whole = {"model": "models/policy", "contents": [HI], "systemInstruction": "S", "tools": tools}
    wanted = (Message("system", "S"), Message("user", "hi"))
    for key in ("generateContentRequest", "generate_content_request"):
        told = DIALECT.decode(Incoming(f"{MODEL}:countTokens", {}, {}, {key: whole}, {"model": "policy"}))
        assert (told.messages, told.tools) == (wanted, (Tool("f"),))
    assert decode(":countTokens", **whole).messages == wanted


BAD: list[tuple[dict[str, Any], str]] = [
    ({"contents": []}, "contents"),
    ({"contents": None}, "contents"),
    ({"contents": 7}, "contents.0"),
    ({"contents": [HI, None]}, "contents.1"),
    ({"contents": [{"role": "wizard", "parts": []}]}, "contents.0.role"),
    ({"contents": [{"role": 1, "parts": []}]}, "contents.0.role"),
    ({"contents": [{"parts": [1]}]}, "contents.0.parts.0"),
    ({"contents": [user({"text": 1})]}, "contents.0.parts.0.text"),
    ({"contents": [model({"text": "x", "thought": "yes"})]}, "contents.0.parts.0.thought"),
    ({"contents": [model({"text": "x", "thoughtSignature": 1})]}, "contents.0.parts.0.thoughtSignature"),
    ({"contents": [user({"inlineData": "x"})]}, "contents.0.parts.0.inlineData"),
    ({"contents": [user({"inlineData": {"mimeType": "image/png", "data": 1}})]}, "contents.0.parts.0.inlineData.data"),
    ({"contents": [user({"fileData": {"fileUri": []}})]}, "contents.0.parts.0.fileData.fileUri"),
    ({"contents": [HI, model({"functionCall": {}})]}, "contents.1.parts.0.functionCall.name"),
    ({"contents": [HI, model({"functionCall": "x"})]}, "contents.1.parts.0.functionCall"),
    ({"contents": [HI, model(call(args=[1]))]}, "contents.1.parts.0.functionCall.args"),
    ({"contents": [HI, model(call(id=1))]}, "contents.1.parts.0.functionCall.id"),
    ({"contents": [user(call())]}, "contents.0.parts.0.functionCall"),
    ({"contents": [HI, model({"text": "x"}, result("x"))]}, "contents.1.parts.1.functionResponse"),
    ({"contents": [user({"functionResponse": []})]}, "contents.0.parts.0.functionResponse"),
    ({"contents": [user(result("x", name=1))]}, "contents.0.parts.0.functionResponse.name"),
    ({"contents": [user(result("x", parts=[1]))]}, "contents.0.parts.0.functionResponse.parts.0"),
    ({"systemInstruction": {"parts": [1]}}, "systemInstruction.parts.0"),
    ({"systemInstruction": 7}, "systemInstruction.parts.0"),
    ({"tools": [1]}, "tools.0"),
    ({"tools": [{"functionDeclarations": [1]}]}, "tools.0.functionDeclarations.0"),
    ({"tools": [{"functionDeclarations": [{}]}]}, "tools.0.functionDeclarations.0.name"),
    (
        {"tools": [{"functionDeclarations": [{"name": "f", "parameters": []}]}]},
        "tools.0.functionDeclarations.0.parameters",
    ),
    ({"toolConfig": []}, "toolConfig"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "toolConfig.functionCallingConfig.mode"),
    (
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}}},
        "toolConfig.functionCallingConfig.allowedFunctionNames.0",
    ),
    ({"generationConfig": 1}, "generationConfig"),
    ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
    ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
    ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
    ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
    ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences.0"),
    ({"generationConfig": {"thinkingConfig": 1}}, "generationConfig.thinkingConfig"),
    (
        {"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}},
        "generationConfig.thinkingConfig.includeThoughts",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "path"), BAD, ids=[path for _, path in BAD])
def test_what_is_wrong_is_told_with_its_path(body: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(**body)
    assert caught.value.path == path
    with pytest.raises(BadRequest) as caught:
        DIALECT.decode(Incoming(f"{MODEL}:countTokens", {}, {}, {"generateContentRequest": {"contents": [HI]} | body}))
    assert caught.value.path == f"generateContentRequest.{path}"
