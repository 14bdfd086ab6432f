"""Renderers over real tokenizers: what they say, how they extend, which one is chosen."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from polar_plugin.engine.chat import named
from polar_plugin.engine.library import LibraryRenderer
from polar_plugin.engine.render import extension_report, load_renderer
from polar_plugin.engine.template import TemplateRenderer
from polar_plugin.engine.tokenizer import load_tokenizer
from polar_plugin.errors import BadRequest, ConfigError
from polar_plugin.records import BreakReason, ChatRequest, Message, TokenIds, Tool, ToolCall
from tests import tokenizers
from tests.engine.conversations import (
    TOOLS,
    assistant,
    parent,
    result,
    system,
    user,
    weather,
    whole,
)

Renderer = LibraryRenderer | TemplateRenderer
FAMILIES = [("qwen3", "qwen3"), ("qwen3", "template"), ("llama3_1", "template")]
FAMILIES += [("deepseek_v3", "template"), ("deepseek_v3", "deepseek-v3"), ("gemma3", "template")]

_LOADED: dict[tuple[str, str, str], Renderer] = {}


@functools.cache
def tokenizer(name: str) -> Any:
    """A transformers tokenizer, loaded once."""
    return load_tokenizer(tokenizers.load(name)).hf


def renderer_of(name: str, kind: str, history: Any = "sampled") -> Renderer:
    key = (name, kind, history)
    if key not in _LOADED:
        ends = [151643] if name == "qwen3" else []  # <|endoftext|>: what its generation_config adds
        _LOADED[key] = load_renderer(tokenizer(name), kind=kind, history=history, stop_ids=ends)
    return _LOADED[key]


@pytest.fixture(params=FAMILIES, ids=lambda pair: f"{pair[0]}-by-{pair[1]}")
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return renderer_of(*request.param)


@pytest.fixture(params=["qwen3", "template"])
def qwen(request: pytest.FixtureRequest) -> Renderer:
    return renderer_of("qwen3", request.param)


def apply(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    """The reference: transformers' own rendering."""
    return tokenizer(name).apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def wire(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def extend(
    renderer: Renderer, history: list[Message], reply: Message, output: list[int], new: list[Message], tools: Any = ()
) -> TokenIds:
    """prompt ‖ output ‖ T, where T is made."""
    made = parent(history, reply, renderer.render(history, tools), output, tools)
    delta = renderer.extend(made, whole(made), new, tools)
    assert not isinstance(delta, BreakReason), delta
    return np.concatenate([whole(made), delta])


def delta_of(
    renderer: Renderer, history: list[Message], reply: Message, output: list[int], new: list[Message], tools: Any = ()
) -> list[int]:
    full = extend(renderer, history, reply, output, new, tools)
    return full[len(renderer.render(history, tools)) + len(output) :].tolist()


def ends_with(full: TokenIds, tail: list[int]) -> bool:
    return full[len(full) - len(tail) :].tolist() == tail


# --- what is said -----------------------------------------------------------------------------------------------------


def test_qwen3_prompts_with_tools_are_those_of_its_chat_template(qwen: Renderer) -> None:
    messages = [
        system("You are terse."),
        user("Weather in Paris and Rome?"),
        assistant("Let me look.", weather("Paris", "a"), weather("Rome", "b"), reasoning="Two calls."),
        result('{"celsius": 21}', "a"),
        result("rain — 你好", "b"),
    ]
    calls = [
        {"type": "function", "id": i, "function": {"name": "get_weather", "arguments": {"city": c}}}
        for i, c in (("a", "Paris"), ("b", "Rome"))
    ]
    reference = apply(
        "qwen3",
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "Weather in Paris and Rome?"},
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "Two calls.",
                "tool_calls": calls,
            },
            {"role": "tool", "content": '{"celsius": 21}'},
            {"role": "tool", "content": "rain — 你好"},
        ],
        [wire(tool) for tool in TOOLS],
    )
    assert qwen.render(messages, TOOLS).tolist() == reference


@pytest.mark.parametrize("name", tokenizers.NAMES)
def test_plain_prompts_are_those_of_the_chat_template(name: str) -> None:
    said = [("system", "Be brief. 你好"), ("user", " Hi\n"), ("assistant", "Hello 😀"), ("user", "Again?")]
    reference = apply(name, [{"role": role, "content": text} for role, text in said])
    ours = renderer_of(name, "template").render([Message(role, text) for role, text in said], ())  # type: ignore[arg-type]
    assert ours.tolist() == reference


def test_both_renderers_of_qwen3_say_the_same_and_extend_the_same() -> None:
    library, template = renderer_of("qwen3", "qwen3"), renderer_of("qwen3", "template")
    history = [system("s"), user("u")]
    for reply, new in (
        (assistant("Fine."), [user("More?")]),
        (assistant("", weather("Paris")), [result("21", "c0")]),
        (assistant("x", weather("Paris"), weather("Rome", "c1")), [result("21", "c0"), result("19", "c1"), user("?")]),
        (assistant("Fine."), [system("Reminder."), user("More?")]),
    ):
        assert (
            library.render([*history, reply, *new], TOOLS).tolist()
            == template.render([*history, reply, *new], TOOLS).tolist()
        )
        for output in ([100, 200, 151645], [100, 200], [], [151643]):
            ours = delta_of(template, history, reply, output, new, TOOLS)
            assert ours == delta_of(library, history, reply, output, new, TOOLS)


def test_a_prompt_is_a_read_only_int32_array(renderer: Renderer) -> None:
    ids = renderer.render([user("Hi")], ())
    assert ids.dtype == np.int32
    assert not ids.flags.writeable


def test_a_deepseek_tokenizer_keeps_its_spaces() -> None:
    renderer = renderer_of("deepseek_v3", "template")
    text = "def f(x):\n    return x + 1  # é"
    assert renderer.decode(renderer.encode(text)) == text
    assert text in renderer.decode(renderer.render([user(text)], ()))


# --- extension --------------------------------------------------------------------------------------------------------


def test_every_extension_that_agents_need_is_the_tail_of_the_full_render(renderer: Renderer) -> None:
    report = extension_report(renderer)
    failing = [check for check in report if not check.ok]
    if renderer.name == "deepseek-v3":  # its format has no place for definitions; that it says so is the point
        assert [check.name for check in failing] == ["the prompt describes the tools"]
    else:
        assert failing == []
    assert len(report) >= 9


def test_prompt_output_and_delta_are_the_full_render_where_the_template_only_appends() -> None:
    renderer = renderer_of("llama3_1", "template")
    history, reply, new = [system("s"), user("u")], assistant("Sure thing."), [user("Next.")]
    output = [*renderer.encode("Sure thing.").tolist(), renderer.stop_ids[0]]
    full = renderer.render([*history, reply, *new], ())
    assert extend(renderer, history, reply, output, new).tolist() == full.tolist()


def test_two_results_of_parallel_calls_merge_as_the_template_merges_them(qwen: Renderer) -> None:
    """Case 9: no end of turn and new user turn between two tool results."""
    history = [user("Both?")]
    reply = assistant("", weather("Paris", "a"), weather("Rome", "b"))
    delta = delta_of(qwen, history, reply, [151645], [result("21", "a"), result("19", "b")], TOOLS)
    text = qwen.decode(delta)
    assert text.count("<|im_start|>user") == 1
    assert ends_with(qwen.render([*history, reply, result("21", "a"), result("19", "b")], TOOLS), delta)


def test_an_end_token_that_was_sampled_is_not_repeated_and_one_that_was_not_is_context(renderer: Renderer) -> None:
    """Case 14: an engine may or may not hand the end token over."""
    history, reply, new = [user("u")], assistant("ok"), [user("v")]
    words = renderer.encode("ok").tolist()
    end = delta_of(renderer, history, reply, words, new)[0]
    assert end in renderer.stop_ids
    with_end = extend(renderer, history, reply, [*words, end], new)
    without = extend(renderer, history, reply, words, new)
    assert with_end.tolist() == without.tolist()
    prompt = renderer.render(history, ())
    assert with_end[len(prompt) :].tolist().count(end) == without[len(prompt) :].tolist().count(end)


def test_sampled_ids_are_kept_even_where_no_tokenizer_would_write_them(renderer: Renderer) -> None:
    """Case 2: " Pantom" spelled letter by letter stays spelled letter by letter."""
    spelled = [index for letter in " Pantom" for index in renderer.encode(letter).tolist()]
    assert renderer.decode(spelled) == " Pantom"
    assert spelled != renderer.encode(" Pantom").tolist()
    history, reply = [user("Name?")], assistant("Pantom")
    full = extend(renderer, history, reply, spelled, [user("Again?")])
    begin = len(renderer.render(history, ()))
    assert full[begin : begin + len(spelled)].tolist() == spelled


def test_an_empty_completion_in_the_middle_goes_on(renderer: Renderer) -> None:
    """Case 21."""
    history, new = [user("u")], [user("Say something.")]
    full = extend(renderer, history, assistant(""), [], new)
    tail = renderer.decode(full[len(renderer.render(history, ())) :])
    assert "Say something." in tail
    assert ends_with(
        renderer.render([*history, assistant("x"), *new], ()), delta_of(renderer, history, assistant(""), [], new)
    )


def test_reasoning_of_earlier_turns_is_kept_by_default_and_a_break_where_the_template_is_followed() -> None:
    """Case 1: a new user message does not split a thinking model's session."""
    history, reply, new = [user("u")], assistant("ok", reasoning="Hm."), [user("v")]
    for kind in ("qwen3", "template"):
        kept = renderer_of("qwen3", kind)
        sampled = kept.encode("<think>\nHm.\n</think>\n\nok").tolist()
        assert "<think>\nHm." in kept.decode(extend(kept, history, reply, [*sampled, 151645], new))
        following = renderer_of("qwen3", kind, "template")
        made = parent(history, reply, following.render(history, ()), [*sampled, 151645])
        assert following.extend(made, whole(made), new, ()) is BreakReason.TEMPLATE_REWRITE
        tools = parent(history, assistant("", weather("Paris")), made.prompt_ids, [151645], TOOLS)
        assert not isinstance(following.extend(tools, whole(tools), [result("21", "c0")], TOOLS), BreakReason)


def test_reasoning_cut_by_length_is_closed_as_context(qwen: Renderer) -> None:
    output = qwen.encode("<think>\nLet me see, if").tolist()
    delta = delta_of(qwen, [user("u")], assistant(reasoning="Let me see, if"), output, [user("v")])
    assert qwen.decode(delta).startswith("</think><|im_end|>\n<|im_start|>user\nv")


def test_a_turn_that_ended_inside_its_reasoning_is_extended_as_it_stands(qwen: Renderer) -> None:
    output = [*qwen.encode("<think>\nLet me see").tolist(), 151645]
    delta = delta_of(qwen, [user("u")], assistant(reasoning="Let me see"), output, [user("v")])
    assert qwen.decode(delta).startswith("\n<|im_start|>user\nv")


def test_sampled_tokens_behind_an_end_token_are_never_cut_off(qwen: Renderer) -> None:
    """An engine that was not told of an end token samples on: what it sampled stays, or there is no extension."""
    made = parent([user("u")], assistant("ok"), qwen.render([user("u")], ()), [100, 151645, 200])
    delta = qwen.extend(made, whole(made), [user("v")], ())
    if isinstance(qwen, LibraryRenderer):
        assert delta is BreakReason.BOUNDARY_UNKNOWN
    else:
        assert qwen.decode(delta).startswith("<|im_end|>\n<|im_start|>user\nv")


def test_extending_by_nothing_is_no_extension(renderer: Renderer) -> None:
    made = parent([user("u")], assistant("x"), renderer.render([user("u")], ()), [])
    assert renderer.extend(made, whole(made), [], ()) is BreakReason.BOUNDARY_UNKNOWN


def test_the_delta_does_not_depend_on_the_length_of_the_history(qwen: Renderer) -> None:
    new, reply = [result("21", "c0")], assistant("", weather("Paris"))
    short = delta_of(qwen, [user("u")], reply, [151645], new, TOOLS)
    long = [user("u"), *[assistant("a"), user("word <think> " * 400)] * 10]
    assert delta_of(qwen, long, reply, [151645], new, TOOLS) == short


@pytest.mark.parametrize(
    "text", ["a\x00b", "half \ud83d of a pair", "你好 😀 \u202e", "", " ", "\n\n", "<|im_end|> said"]
)
def test_odd_texts_neither_crash_nor_differ_between_render_and_extend(renderer: Renderer, text: str) -> None:
    """Case 116."""
    history, reply, new = [user(text)], assistant("ok"), [user(text)]
    full = renderer.render([*history, reply, *new], ())
    assert ends_with(full, delta_of(renderer, history, reply, renderer.encode("ok").tolist(), new))


def test_lone_surrogates_in_tools_and_arguments_do_not_crash(renderer: Renderer) -> None:
    odd = Tool("get_weather", "bad \udc00 text", {"type": "object", "properties": {"c": {"description": "\ud800"}}})
    call = weather("\\ud83d")
    text = renderer.decode(renderer.render([user("u"), assistant("", call), result("\ud83d", "c0")], (odd,)))
    assert "\ufffd" in text


def test_the_name_of_a_results_function_is_found_by_its_call_id_or_its_place() -> None:
    calls = (ToolCall("bash", "{}", "a"), ToolCall("get_weather", "{}", "b"))
    by_id = named([assistant("", *calls), result("1", "b"), result("2", "a")])
    assert [message.name for message in by_id[1:]] == ["get_weather", "bash"]
    by_place = named([assistant("", *calls), result("1"), result("2"), result("3")])
    assert [message.name for message in by_place[1:]] == ["bash", "get_weather", ""]


ADDED = {
    "glm-4.5": ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "/nothink"],
    "qwen3.5": [],
}


@pytest.mark.parametrize("family", ["glm-4.5", "qwen3.5"])
def test_other_families_extend_as_their_own_full_renders(family: str) -> None:
    """Formats with no end token, with an opened reasoning block, without late system messages."""
    hf: Any = AutoTokenizer.from_pretrained(tokenizers.load("qwen3"))
    tags = [f"<{slash}arg_{part}>" for part in ("key", "value") for slash in ("", "/")]
    hf.add_tokens([*ADDED[family], *(tags if family.startswith("glm") else [])], special_tokens=True)
    renderer = load_renderer(hf, kind=family)
    assert [check for check in extension_report(renderer) if not check.ok] == []
    if family == "qwen3.5":
        assert renderer.notes == ("system messages in mid-conversation become user messages",)


def test_many_threads_may_share_a_renderer(renderer: Renderer) -> None:
    def once(index: int) -> list[int]:
        history = [user(f"u{index}")]
        return delta_of(renderer, history, assistant("ok"), [], [user(f"v{index} " * 50)])

    alone = [once(index) for index in range(24)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(once, range(24))) == alone


# --- parsing ----------------------------------------------------------------------------------------------------------


def test_reasoning_text_and_calls_are_read_with_the_arguments_as_written(qwen: Renderer) -> None:
    raw = '{"city":  "Paris",\t"days": 3}'
    text = (
        f'<think>\nHm.\n</think>\n\nLooking.\n<tool_call>\n{{"name": "get_weather", "arguments": {raw}}}\n</tool_call>'
    )
    parsed = qwen.parse(
        np.concatenate([qwen.encode(text), [151645]]), ChatRequest((user("u"),), TOOLS), qwen.render([user("u")], TOOLS)
    )
    assert parsed.malformed_calls == 0
    assert (parsed.reply.reasoning, parsed.reply.content) == ("Hm.", "Looking.")
    assert [(call.name, call.arguments) for call in parsed.reply.tool_calls] == [("get_weather", raw)]


def test_a_tag_that_was_sampled_letter_by_letter_is_still_a_call(qwen: Renderer) -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    spelled = [index for letter in text for index in qwen.encode(letter).tolist()]
    assert 151657 not in spelled
    parsed = qwen.parse(
        np.array([*spelled, 151645], np.int32), ChatRequest((user("u"),), TOOLS), qwen.render([user("u")], TOOLS)
    )
    assert [call.arguments for call in parsed.reply.tool_calls] == ['{"command": "ls"}']


@pytest.mark.parametrize(
    "cut", ["<tool_call>", '"name": "get_', '"arguments"', '"city": "Par', '"Paris"}}', "\n</tool"]
)
@pytest.mark.parametrize("pair", [pair for pair in FAMILIES if pair[1] != "deepseek-v3"])
def test_half_a_call_is_text_and_counted_wherever_it_is_cut(pair: tuple[str, str], cut: str) -> None:
    """Case 114: cut in the tag, the name, a key, a string, the closing tag."""
    renderer = renderer_of(*pair)
    text = 'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    half = text[: text.index(cut) + len(cut)]
    parsed = renderer.parse(
        renderer.encode(half), ChatRequest((user("u"),), TOOLS), renderer.render([user("u")], TOOLS)
    )
    assert parsed.reply.tool_calls == ()
    assert parsed.malformed_calls == 1
    assert parsed.reply.content.startswith("Sure.")
    assert half.removeprefix("Sure.").strip() in parsed.reply.content


def test_half_a_deepseek_call_is_text_and_counted() -> None:
    renderer = renderer_of("deepseek_v3", "deepseek-v3")
    text = (
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n"
        '```json\n{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    for cut in ("<｜tool▁call▁begin｜>", "function", "bash", '"comm', '"ls', "}", "\n```"):
        half = text[: text.index(cut) + len(cut)]
        parsed = renderer.parse(
            renderer.encode(half), ChatRequest((user("u"),), TOOLS), renderer.render([user("u")], ())
        )
        assert (parsed.reply.tool_calls, parsed.malformed_calls) == ((), 1), half
    parsed = renderer.parse(renderer.encode(text), ChatRequest((user("u"),), TOOLS), renderer.render([user("u")], ()))
    assert [(call.name, call.arguments) for call in parsed.reply.tool_calls] == [("bash", '{"command": "ls"}')]


def test_a_good_call_survives_a_malformed_one_and_text_behind_it(qwen: Renderer) -> None:
    good = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "bash", "arguments": {]}\n</tool_call>'
    parsed = qwen.parse(
        qwen.encode(f"A\n{bad}\n{good}\nB"), ChatRequest((user("u"),), TOOLS), qwen.render([user("u")], ())
    )
    assert [call.name for call in parsed.reply.tool_calls] == ["bash"]
    assert parsed.malformed_calls == 1
    assert bad in parsed.reply.content
    assert parsed.reply.content.startswith("A")
    assert parsed.reply.content.endswith("B")


def test_nonsense_never_crashes_the_parser(renderer: Renderer) -> None:
    prompt = renderer.render([user("u")], ())
    rng = np.random.default_rng(0)
    texts = [
        "<tool_call>" + "[" * 20000,
        '<tool_call>{"name": {}, "arguments": []}</tool_call>',
        "</think></think>",
        "",
    ]
    texts += ['<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>', "<tool_call></tool_call>"]
    for text in texts:
        parsed = renderer.parse(renderer.encode(text), ChatRequest((user("u"),)), prompt)
        assert parsed.reply.tool_calls == ()
    for _ in range(20):
        noise = rng.integers(0, renderer.vocab_size, 60).astype(np.int32)
        for call in renderer.parse(noise, ChatRequest((user("u"),)), prompt).reply.tool_calls:
            json.loads(call.arguments)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_a_known_family_is_recognised_by_what_its_template_says() -> None:
    renderer = load_renderer(tokenizers.load("qwen3"))
    assert (type(renderer), renderer.name) == (LibraryRenderer, "qwen3")


def test_a_family_that_differs_from_the_template_is_never_taken_whatever_the_model_is_called() -> None:
    for name, model in (("qwen3", "Qwen/Qwen3.5-4B"), ("llama3_1", "meta-llama/Llama-3.2-1B-Instruct")):
        assert isinstance(load_renderer(tokenizer(name), model_name=model), TemplateRenderer)


def test_a_changed_template_is_followed(tmp_path: Path) -> None:
    source = tokenizers.load("qwen3")
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("# Tools", "# Your tools")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").symlink_to(source / "tokenizer.json")
    renderer = load_renderer(tmp_path)
    assert isinstance(renderer, TemplateRenderer)
    assert "# Your tools" in renderer.decode(renderer.render([user("u")], TOOLS))


def test_a_family_may_be_named_without_its_dashes() -> None:
    assert load_renderer(tokenizer("deepseek_v3"), kind="deepseekv3").name == "deepseek-v3"


def test_the_files_beside_a_tokenizer_tell_vocabulary_and_stop_ids(tmp_path: Path) -> None:
    for file in tokenizers.load("qwen3").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    renderer = load_renderer(tmp_path, kind="template", stop_ids=[7])
    assert renderer.vocab_size == 151936
    assert set(renderer.stop_ids) == {151645, 151643, 7}


def test_an_id_outside_the_models_vocabulary_is_refused() -> None:
    renderer = load_renderer(tokenizer("qwen3"), kind="template", vocab_size=151_000)
    with pytest.raises(ConfigError, match="outside the model's vocabulary of 151000"):
        renderer.render([user("u")], ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "qwen33"}, "renderer.kind: unknown 'qwen33'; use auto, template, or one of qwen3"),
        ({"kind": "glm45"}, "'glm-4.5' does not fit this tokenizer"),
        ({"kind": "qwen3", "tool_parser": "glm"}, "brings its own parsers"),
        ({"kind": "template", "tool_parser": "wrong"}, "renderer.tool_parser: unknown 'wrong'; use one of"),
        ({"kind": "template", "tool_parser": "deepseek-v3"}, "needs a token"),
        ({"kind": "template", "reasoning_parser": "wrong"}, "renderer.reasoning_parser: unknown 'wrong'"),
        ({"history": "wrong"}, "renderer.history"),
        ({"kind": "qwen3", "chat_template_kwargs": {"wrong": 1}}, "does not fit"),
    ],
)
def test_a_wrong_setting_is_told_with_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_renderer(tokenizer("qwen3"), **options)


def test_a_directory_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        load_renderer(tmp_path / "missing")


def test_template_options_reach_the_template() -> None:
    renderer = load_renderer(tokenizer("qwen3"), kind="template", chat_template_kwargs={"enable_thinking": False})
    assert renderer.decode(renderer.render([user("u")], ())).endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_conversation_the_template_refuses_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="alternate"):
        renderer_of("gemma3", "template").render([assistant("I begin."), assistant("And go on.")], ())
