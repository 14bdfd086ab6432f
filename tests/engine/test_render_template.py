"""TemplateRenderer over templates of many habits: it proves an extension, or says why it makes none."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_plugin.engine.render import LibraryRenderer, extension_report, load_renderer
from polar_plugin.engine.template import TemplateRenderer
from polar_plugin.engine.tokenizer import load_tokenizer
from polar_plugin.errors import BadRequest, ConfigError
from polar_plugin.records import BreakReason, Message, ToolCall
from tests import tokenizers
from tests.engine.conversations import TOOLS, assistant, parent, result, system, user, weather, whole

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
LISTED = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
NEXT_ROLE_ENDS = (  # no end token: a turn ends where the next role begins
    LISTED + "{% for m in messages %}{% if m.role == 'user' %}<|box_start|>\n{{ m.content }}"
    "{% elif m.role == 'system' %}<|quad_start|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|im_start|>\n{{ m.content }}" + CALLS + "{% else %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|vision_start|>{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
USER, RESULT = "<|box_start|>", "<|vision_start|>"


@functools.cache
def base(name: str) -> Any:
    return load_tokenizer(tokenizers.load(name)).hf


def with_template(template: str, **options: Any) -> TemplateRenderer:
    hf = copy.copy(base("qwen3"))
    hf.chat_template = template
    renderer = load_renderer(hf, kind="template", **options)
    assert isinstance(renderer, TemplateRenderer)
    return renderer


@functools.cache
def next_role_ends() -> TemplateRenderer:
    return with_template(NEXT_ROLE_ENDS)


def extension(renderer: Any, history: Any, reply: Message, output: Any, new: Any, tools: Any = ()) -> Any:
    made = parent(history, reply, renderer.render(history, tools), output, tools)
    return renderer.extend(made, whole(made), new, tools)


# --- templates without tools ------------------------------------------------------------------------------------------


def test_a_template_without_tools_serves_agents_by_tagged_json() -> None:
    renderer = with_template(CHATML)
    assert [check for check in extension_report(renderer) if not check.ok] == []
    assert len(renderer.notes) == 1
    text = renderer.decode(renderer.render([system("Be brief."), user("Weather?")], TOOLS))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools")
    assert '"name": "get_weather"' in text
    calls = assistant("Both.", weather("Paris", "a"), weather("Rome", "b"))
    text = renderer.decode(renderer.render([user("?"), calls, result("21", "a"), result("19", "b")], TOOLS))
    assert 'Both.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "user\n<tool_response>\n21\n</tool_response>\n<tool_response>\n19\n</tool_response><|im_end|>" in text


def test_tools_are_described_even_where_there_is_no_system_message() -> None:
    text = with_template(CHATML).decode(with_template(CHATML).render([user("Weather?")], TOOLS))
    assert text.startswith("<|im_start|>system\nYou can call these tools")


def test_another_call_format_needs_a_template_with_tools() -> None:
    with pytest.raises(ConfigError, match="no words for tools"):
        with_template(CHATML, tool_parser="qwen3.5")


# --- templates that lack words ----------------------------------------------------------------------------------------


def test_a_template_that_refuses_or_drops_late_system_messages_hears_them_as_user_messages() -> None:
    drops = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + CHATML.split("%}", 1)[1].replace(
        "{% endfor %}", "{% endif %}{% endfor %}", 1
    )
    refuses = "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    for template in (drops, refuses + CHATML):
        renderer = with_template(template)
        assert not renderer.shape.mid_system
        history, new = [system("S"), user("u")], [system("Mind the gap."), user("v")]
        delta = extension(renderer, history, assistant("ok"), [1, 2], new)
        full = renderer.render([*history, assistant("ok"), *new], ())
        assert full[len(full) - len(delta) :].tolist() == delta.tolist()
        assert "<|im_start|>user\nMind the gap.<|im_end|>" in renderer.decode(delta)


def test_a_template_without_system_messages_hears_them_in_the_first_user_message() -> None:
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    renderer = with_template(refuses + CHATML)
    text = renderer.decode(renderer.render([system("S"), user("u")], TOOLS))
    assert text.startswith("<|im_start|>user\nS\n\nYou can call these tools")
    assert [check for check in extension_report(renderer) if not check.ok] == []


def test_a_template_that_wants_arguments_as_text_gets_them_as_text() -> None:
    calls = CALLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
    template = LISTED + CHATML.replace("{{ m.content }}", "{{ m.content }}" + calls)
    renderer = with_template(template)
    assert renderer.shape.tools
    assert renderer.shape.arguments_as_text
    said = renderer.decode(renderer.render([user("?"), assistant("", ToolCall("bash", '{"a":  1}', "c"))], TOOLS))
    assert '"arguments": {"a":  1}}' in said
    assert [check for check in extension_report(renderer) if not check.ok] == []


# --- turns without an end token of their own --------------------------------------------------------------------------


def test_a_turn_that_the_next_role_ends_is_extended_by_that_role() -> None:
    renderer = next_role_ends()
    assert renderer.shape.tools
    assert [check for check in extension_report(renderer) if not check.ok] == []
    ends = {renderer.decode([index]) for index in renderer.stop_ids}
    assert {USER, RESULT} <= ends


def test_a_sampled_role_token_is_kept_and_the_right_one_follows() -> None:
    renderer = next_role_ends()
    opened_user, opened_result = renderer.encode(USER)[0], renderer.encode(RESULT)[0]
    plain, called = assistant("ok"), assistant("", weather("Paris"))
    said = functools.partial(extension, renderer, [user("u")])
    assert renderer.decode(said(plain, [1, opened_user], [user("v")])) == "\nv<|im_start|>"
    assert renderer.decode(said(plain, [1], [user("v")])) == USER + "\nv<|im_start|>"
    tail = "\n<tool_response>\n21\n</tool_response><|im_start|>"
    assert renderer.decode(said(called, [1, opened_result], [result("21", "c0")], TOOLS)) == tail
    assert renderer.decode(said(called, [1, opened_user], [result("21", "c0")], TOOLS)) == RESULT + tail


def test_a_system_message_is_part_of_the_delta_where_roles_end_turns() -> None:
    delta = extension(next_role_ends(), [user("u")], assistant("ok"), [1], [system("Mind."), user("v")])
    assert next_role_ends().decode(delta) == "<|quad_start|>\nMind.<|box_start|>\nv<|im_start|>"


def test_a_role_whose_opening_token_is_not_known_is_not_stepped_over() -> None:
    new = [assistant("Put into my mouth."), user("v")]
    assert extension(next_role_ends(), [user("u")], assistant("ok"), [1], new) is BreakReason.BOUNDARY_UNKNOWN


# --- what is not extended ---------------------------------------------------------------------------------------------


def test_a_template_without_any_special_end_is_never_extended() -> None:
    template = "{% for m in messages %}\n{{ m.role | upper }}: {{ m.content }}{% endfor %}\nASSISTANT:"
    renderer = with_template(template)
    assert extension(renderer, [user("u")], assistant("ok"), [1], [user("v")]) is BreakReason.BOUNDARY_UNKNOWN


def test_a_delta_that_depends_on_the_history_is_not_extended() -> None:
    counted = CHATML.replace("{{ m.content }}", "{{ loop.index0 }} {{ m.content }}")
    renderer = with_template(counted)
    assert extension(renderer, [user("u")], assistant("ok"), [1], [user("v")]) is BreakReason.BOUNDARY_UNKNOWN


def test_a_template_that_moves_tools_to_the_last_user_message_is_not_extended_by_one() -> None:
    find = "{% set at = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    find += "{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
    said = "{% if loop.index0 == at.user %}" + LISTED + "{% endif %}{{ m.content }}" + CALLS
    renderer = with_template(find + CHATML.replace("{{ m.content }}", said))
    assert renderer.shape.tools
    assert isinstance(extension(renderer, [user("u")], assistant("ok"), [1], [user("v")], TOOLS), BreakReason)
    called = assistant("", weather("Paris"))
    assert not isinstance(extension(renderer, [user("u")], called, [1], [result("21", "c0")], TOOLS), BreakReason)


def test_a_template_that_rewrites_what_came_before_is_not_extended() -> None:
    shortened = CHATML.replace("{{ m.content }}", "{{ m.content if loop.revindex < 4 else m.content[:2] }}")
    renderer = with_template(shortened)
    history = [user("A long beginning."), assistant("ok"), user("u")]
    assert extension(renderer, history, assistant("ok"), [1], [user("v")]) is BreakReason.TEMPLATE_REWRITE


def test_a_role_header_before_the_end_token_is_not_taken_for_the_turn() -> None:
    """One token both ends plain turns and divides headers; turns with calls do not end at all."""
    template = (
        LISTED + "{% for m in messages %}{{ m.role }}<|im_end|>{{ m.content }}" + CALLS + "{% if not m.tool_calls %}"
        "<|im_end|>{% endif %}\n{% endfor %}assistant<|im_end|>"
    )
    renderer = with_template(template)
    made = extension(renderer, [user("u")], assistant("", weather("Paris")), [1], [result("21", "c0")], TOOLS)
    assert made is BreakReason.BOUNDARY_UNKNOWN


def test_new_messages_that_the_template_refuses_are_not_extended() -> None:
    refuses = (
        "{% for m in messages %}{% if 'forbidden' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    renderer = with_template(refuses + CHATML)
    assert extension(renderer, [user("u")], assistant("ok"), [1], [user("forbidden")]) is BreakReason.BOUNDARY_UNKNOWN
    with pytest.raises(BadRequest):
        renderer.render([user("forbidden")], ())


# --- any conversation -------------------------------------------------------------------------------------------------

_SNIPPETS = [
    "<think>",
    "</think>",
    "<tool_response>",
    "<|im_end|>",
    "{}",
    "\n\n",
    " ",
    "\x00",
    "\ud83d",
    "你好",
    "<|im_start|>",
]
_TEXT = st.lists(st.one_of(st.sampled_from(_SNIPPETS), st.text(max_size=8)), max_size=4).map("".join)


@st.composite
def _turn(draw: Any, first: int) -> list[Message]:
    """An assistant turn with what answers it."""
    calls = tuple(
        ToolCall("get_weather", f'{{"city": "{index}"}}', f"call{first}{index}")
        for index in range(draw(st.integers(0, 3)))
    )
    reply = Message("assistant", draw(_TEXT), draw(st.sampled_from(["", "Hm."])), calls)
    answers = [result(draw(_TEXT), call.id) for call in calls]
    more = draw(st.lists(st.builds(Message, st.sampled_from(["user", "system"]), _TEXT), max_size=2))
    return [reply, *(answers + more or [user(draw(_TEXT))])]


@st.composite
def _conversation(draw: Any) -> tuple[list[Message], list[Message], bool]:
    head = draw(st.sampled_from([[], [system("Be brief.")]]))
    turns = [draw(_turn(index)) for index in range(draw(st.integers(0, 3)))]
    history = [*head, user(draw(_TEXT)), *(message for turn in turns for message in turn)]
    return history, draw(_turn(9)), draw(st.booleans())


@functools.cache
def _renderers() -> dict[str, LibraryRenderer | TemplateRenderer]:
    named = {name: load_renderer(base(name), kind="template") for name in tokenizers.NAMES}
    return {**named, "library": load_renderer(base("qwen3"), kind="qwen3"), "next role ends": next_role_ends()}


@pytest.mark.parametrize("name", [*tokenizers.NAMES, "library", "next role ends"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversation=_conversation())
def test_whatever_is_extended_ends_as_the_full_render_ends(
    name: str, conversation: tuple[list[Message], list[Message], bool]
) -> None:
    renderer = _renderers()[name]
    history, (reply, *new), with_tools = conversation
    tools = TOOLS if with_tools else ()
    delta = extension(renderer, history, reply, renderer.encode("Words."), new, tools)
    assert not isinstance(delta, BreakReason)
    full = renderer.render([*history, reply, *new], tools)
    assert np.array_equal(full[len(full) - len(delta) :], delta)
