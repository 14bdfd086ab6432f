"""Reading calls and reasoning out of sampled text, format by format."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from polar_plugin.engine.tokenizer import Tokenizer
from polar_plugin.engine.toolcalls import Found, guess_tool_parser, split_reasoning, tool_parser, without_half_call
from polar_plugin.errors import ConfigError
from polar_plugin.records import Tool
from tests import tokenizers
from tests.engine.conversations import TOOLS

EDIT = Tool(
    "edit",
    "",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "line": {"type": "integer"}, "deep": {"type": "object"}},
    },
)


@functools.cache
def tokenizer() -> Tokenizer:
    """Qwen3's, with GLM's argument tokens added."""
    hf: Any = AutoTokenizer.from_pretrained(tokenizers.load("qwen3"))
    hf.add_tokens(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
    return Tokenizer(hf)


def read(name: str, text: str, tools: Any = (*TOOLS, EDIT)) -> Found:
    return tool_parser(name, tokenizer())(text, tools)


def calls(found: Found) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


# --- <tool_call> JSON -------------------------------------------------------------------------------------------------


def test_json_calls_are_read_in_order_with_the_text_around_them() -> None:
    one, two = block('{"name": "a", "arguments": {"x": 1}}'), block('{"name": "b", "arguments": {}}')
    found = read("hermes", f"Before.\n{one}\nBetween.\n{two}\nAfter.")
    assert calls(found) == [("a", {"x": 1}), ("b", {})]
    assert (found.content, found.malformed) == ("Before.\nBetween.\nAfter.", 0)


@pytest.mark.parametrize("inner", ["</tool_call>", "<tool_call>", '"}}</tool_call>'])
def test_a_tag_inside_an_argument_does_not_end_the_call(inner: str) -> None:
    found = read("hermes", block(json.dumps({"name": "bash", "arguments": {"command": inner}})))
    assert calls(found) == [("bash", {"command": inner})]
    assert found.malformed == 0


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [
        ('"{\\"x\\": 1}"', {"x": 1}),
        ('""', {}),
        ("null", {}),
        ('{"x": {"y": [1, {"z": "}"}]}}', {"x": {"y": [1, {"z": "}"}]}}),
    ],
)
def test_arguments_written_oddly_but_clearly_are_an_object(arguments: str, read_as: Any) -> None:
    assert calls(read("hermes", block(f'{{"name": "a", "arguments": {arguments}}}'))) == [("a", read_as)]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": "no object"}',
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "a", "arguments": {"x": "a\nb"}}',
        '{"name": "a", "arguments": {}}}',
        '{"name": "a", "arguments": ' + '{"x": ' * 5000,
    ],
)
def test_a_call_no_harness_could_run_is_text_and_counted(body: str) -> None:
    found = read("hermes", "Sure.\n" + block(body))
    assert (found.calls, found.malformed) == ((), 1)
    assert found.content == "Sure.\n" + block(body)


def test_a_call_after_one_that_never_closed_is_read() -> None:
    good = block('{"name": "b", "arguments": {}}')
    found = read("hermes", '<tool_call>\n{"name": "a", "argu\n' + good)
    assert [call.name for call in found.calls] == ["b"]
    assert found.malformed == 1


def test_text_that_only_resembles_a_tag_is_no_call() -> None:
    assert read("hermes", "a <tool> b") == Found("a <tool> b")
    assert read("hermes", "cut: <tool_ca").malformed == 1


@given(st.text(alphabet='<>/tol_ca{}[]":,name rgumts1\\\n', max_size=80))
def test_what_is_read_is_always_runnable(text: str) -> None:
    found = read("hermes", f'<tool_call>{{"name": "a", "arguments": {text}')
    for call in found.calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(
    st.dictionaries(
        st.text(max_size=5), st.recursive(st.none() | st.text(max_size=5) | st.integers(), st.lists, max_leaves=5)
    )
)
def test_any_arguments_come_back_as_they_were_written(arguments: dict[str, Any]) -> None:
    raw = json.dumps(arguments, ensure_ascii=False, separators=(" , ", ": "))
    (call,) = read("hermes", block(f'{{"arguments": {raw}, "name": "f"}}')).calls
    assert call.arguments == raw


# --- other formats ----------------------------------------------------------------------------------------------------


def test_llama_json_turns_are_calls() -> None:
    found = read("llama3", '<|python_tag|>{"name": "a", "parameters": {"x":  1}}; {"name": "b", "parameters": {}}')
    assert [(call.name, call.arguments) for call in found.calls] == [("a", '{"x":  1}'), ("b", "{}")]
    assert read("llama3", "Just {text}.") == Found("Just {text}.")
    assert read("llama3", '{"answer": 42}') == Found('{"answer": 42}', malformed=0)


@pytest.mark.parametrize(
    "half", ['{"na', '{"name": "a", "para', '{"name": "a", "parameters": {"x": "y', '{"name": "a", "parameters": {}']
)
def test_half_a_llama_call_is_text_and_counted(half: str) -> None:
    assert read("llama3", half) == Found(half, malformed=1)


def test_xml_calls_take_their_types_from_the_tools() -> None:
    body = "<function=edit>\n<parameter=text>\n123\n</parameter>\n<parameter=line>\n4\n</parameter>\n</function>"
    found = read("qwen3_coder", f"Ok.\n{block(body)}")
    assert calls(found) == [("edit", {"text": "123", "line": 4})]
    assert (found.content, found.malformed) == ("Ok.", 0)


def test_xml_values_against_their_schema_still_make_a_call() -> None:
    body = "<function=edit>\n<parameter=line>\nfour\n</parameter>\n<parameter=new>\nword\n</parameter>\n</function>"
    assert calls(read("qwen3.5", block(body))) == [("edit", {"line": "four", "new": "word"})]


@pytest.mark.parametrize("cut", ["<tool_call>", "<function=ed", "<parameter=te", "hel", "</parameter>", "</function>"])
def test_half_an_xml_call_is_text_and_counted(cut: str) -> None:
    text = block("<function=edit>\n<parameter=text>\nhello\n</parameter>\n</function>")
    found = read("qwen3.5", "Ok.\n" + text[: text.index(cut) + len(cut)])
    assert (found.calls, found.malformed) == ((), 1)
    assert found.content.startswith("Ok.\n<tool_call>")


def test_an_xml_call_that_lost_a_parameter_is_text() -> None:
    found = read("qwen3.5", block("<function=edit>\n<parameter=text>\nhello\n</function>"))
    assert (found.calls, found.malformed) == ((), 1)


def test_glm_calls_are_read_and_half_ones_are_not() -> None:
    text = (
        "Ok.\n<tool_call>edit\n<arg_key>text</arg_key>\n<arg_value>hi</arg_value>\n"
        "<arg_key>line</arg_key>\n<arg_value>4</arg_value>\n</tool_call>"
    )
    found = read("glm45", text)
    assert calls(found) == [("edit", {"text": "hi", "line": 4})]
    assert (found.content, found.malformed) == ("Ok.", 0)
    for cut in ("<tool_call>", "edit", "<arg_key>te", "</arg_key>", "hi", "</arg_value>"):
        half = read("glm", text[: text.index(cut) + len(cut)])
        assert (half.calls, half.malformed) == ((), 1), cut


def test_a_parser_whose_tokens_are_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a token '<｜tool▁calls▁begin｜>'"):
        tool_parser("deepseek-v3", tokenizer())
    with pytest.raises(ConfigError, match=r"unknown 'x'; use one of deepseek-v3, .*hermes"):
        tool_parser("x", tokenizer())


def test_the_format_is_guessed_from_the_templates_text() -> None:
    assert guess_tool_parser("<tool_call>\n<function=name>") == "qwen3.5"
    assert guess_tool_parser('<tool_call>{"name"') == "hermes"
    assert guess_tool_parser("plain") == "none"


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nOk.", False, ("Hm.", "\n\nOk.", False)),
        ("Hm.</think>Ok.", True, ("Hm.", "Ok.", False)),
        ("Ok.", False, ("", "Ok.", False)),
        ("Ok </think> then", False, ("", "Ok </think> then", False)),
        ("<think>Hm", False, ("Hm", "", True)),
        ("Hm", True, ("Hm", "", True)),
        ("<think>Hm<tool_call>x", False, ("Hm", "<tool_call>x", False)),
        ("<think>a<tool_call>b</think>c", False, ("a<tool_call>b", "c", False)),
        ("About <think> tags", False, ("", "About <think> tags", False)),
    ],
)
def test_reasoning_is_one_block_at_the_start(text: str, opened: bool, expected: tuple[str, str, bool]) -> None:
    assert split_reasoning(text, opened=opened) == expected


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('I look.\n<tool_call>\n{"name": "bash", "argu', "I look."),
        ("I look.\n<tool_c", "I look."),
        ('<|python_tag|>{"name": "bash", "param', ""),
        ('{"name": "ba', ""),
        ('{"na', ""),
        ('{"answer": 4', '{"answer": 4'),
        ("I look.\n<function=bash>\n<parameter=command>\nls", "I look."),
        ("Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ba", "Hm."),
        ("<tool_call>\n{]\n</tool_call>\nI meant", "<tool_call>\n{]\n</tool_call>\nI meant"),
        ("if a < b:", "if a < b:"),
    ],
)
def test_case_114_of_a_turn_cut_within_a_call_only_the_text_before_it_is_an_answer(text: str, kept: str) -> None:
    assert without_half_call(text) == kept
