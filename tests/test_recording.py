"""A recorded session comes back exactly as it was, from any crash as far as it was written, and grows with its news."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polar_plugin.engine.buffer import TokenBuffer
from polar_plugin.errors import RecordingError
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.recording import End, Header, Recorder, iter_completions, load, record, redact
from polar_plugin.records import (
    IMAGE,
    BreakReason,
    ChatRequest,
    Completion,
    CompletionSession,
    Delivery,
    Evaluation,
    Failure,
    FinishReason,
    Generation,
    Image,
    Message,
    Role,
    SamplingParams,
    Status,
    Tool,
    ToolCall,
    VersionSpan,
    log_probs,
    token_ids,
)

SUFFIXES = ["jsonl", "jsonl.gz", "jsonl.zst"]
TEXT = st.text(st.characters(codec=None), max_size=8)  # lone surrogates and NUL among them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def plain(value: Any) -> Any:
    """Everything a record says, wire ids and the bits of floats (of NaN just that) included, for `==` to compare."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, (
            value if value.dtype.kind != "f" else np.where(np.isnan(value), np.float32("nan"), value)
        ).tobytes()
    if is_dataclass(value):
        return type(value).__name__, [(one.name, plain(getattr(value, one.name))) for one in fields(value)]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return [(key, plain(one)) for key, one in value.items()]
    return type(value).__name__, repr(value)


# --- sessions --------------------------------------------------------------------------------------------------------


CALLS = st.builds(ToolCall, TEXT, TEXT, TEXT)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT, TEXT, st.lists(CALLS, max_size=2).map(tuple), TEXT, TEXT,
    st.just(()) | st.lists(TEXT | st.builds(Image, TEXT, TEXT, TEXT), max_size=3).map(tuple),
)  # fmt: skip
TOOLS = st.builds(Tool, TEXT, TEXT, st.dictionaries(TEXT, JSON, max_size=2))
SAMPLING = st.builds(
    SamplingParams,
    st.floats(0, 2), st.floats(0, 1), st.integers(-1, 50), st.none() | st.integers(1, 99),
    st.lists(TEXT, max_size=2).map(tuple), st.none() | st.integers(),
)  # fmt: skip
LOGPROBS = arrays.arrays(np.float32, st.integers(0, 4), elements=st.floats(width=32))  # NaN and infinities among them


@st.composite
def completions(draw: st.DrawFn, name: str, earlier: list[Completion]) -> Completion:
    logprobs = draw(LOGPROBS)
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
    output = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(logprobs), max_size=len(logprobs)))
    parent = draw(st.none() | st.sampled_from(earlier)) if earlier else None
    new = draw(st.lists(MESSAGES, max_size=3))
    prompt, messages, tools = draw(ids), new, draw(st.lists(TOOLS, max_size=2))
    if parent and draw(st.booleans()):
        prompt = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist(), *prompt]
    if parent:
        before = [*parent.request.messages, parent.reply]
        messages = [*before[: draw(st.integers(0, len(before)))], *new]
        tools = draw(st.sampled_from([tools, list(parent.request.tools)]))
    return Completion(
        id=name,
        request=ChatRequest(
            tuple(messages), tuple(tools), draw(TEXT), draw(SAMPLING), draw(st.booleans()), draw(TEXT), draw(TEXT),
            draw(st.sampled_from(Role)), draw(TEXT), draw(st.booleans()), tuple(draw(st.lists(TEXT, max_size=2))),
        ),
        prompt_ids=token_ids(prompt),
        generation=Generation(
            token_ids(output), log_probs(logprobs), draw(st.sampled_from(FinishReason)),
            (VersionSpan(draw(TEXT), len(output)),) if draw(st.booleans()) else (), draw(st.none() | TEXT),
        ),
        reply=draw(MESSAGES),
        sampling=draw(SAMPLING),
        started=draw(st.floats(0, 2e9)),
        ended=draw(st.floats(0, 2e9)),
        parent=parent.id if parent else draw(st.none() | st.just("unknown")),
        break_reason=draw(st.none() | st.sampled_from(BreakReason)),
        malformed_calls=draw(st.integers(0, 3)),
    )  # fmt: skip


@st.composite
def sessions(draw: st.DrawFn) -> CompletionSession:
    made: list[Completion] = []
    for number in range(draw(st.integers(0, 4))):
        made.append(draw(completions(f"c{number}", made)))
    told = {one.id: draw(st.sampled_from(Delivery)) for one in made if draw(st.booleans())}
    counts = draw(st.dictionaries(TEXT, st.integers(), max_size=2))
    return CompletionSession(
        draw(TEXT), tuple(made), told, draw(TEXT), draw(st.dictionaries(TEXT, JSON, max_size=2)), counts
    )


def long_session(turns: int, words: str = "word " * 40) -> CompletionSession:
    """A conversation as a harness leads it: each request repeats the whole history, the reply in other words."""
    tools = (Tool("bash", "Run a command", {"type": "object", "properties": {"command": {"type": "string"}}}),)
    rng = np.random.default_rng(turns)
    made: list[Completion] = []
    messages: tuple[Message, ...] = (Message("system", "You are an agent."), Message("user", words))
    buffer, length = TokenBuffer(token_ids(rng.integers(0, 1000, 30))), 30
    for turn in range(turns):
        prompt = buffer.view(length)
        output = token_ids(rng.integers(0, 1000, 20))
        call = ToolCall("bash", json.dumps({"command": f"echo {turn}"}), f"call_{turn}")
        reply = Message("assistant", f"Turn {turn}. ", tool_calls=(call,))
        made.append(
            Completion(
                f"c{turn}", ChatRequest(messages, tools, stream=True), prompt,
                Generation(output, log_probs(-rng.random(20)), FinishReason.STOP, (VersionSpan("3", 20),)),
                reply, SamplingParams(max_tokens=100), float(turn), turn + 0.5, made[-1].id if made else None,
                None if made else BreakReason.FIRST_CALL,
            )
        )  # fmt: skip
        echo = replace(reply, content=reply.content.strip())
        messages = (*messages, echo, Message("tool", words, tool_call_id=f"call_{turn}"))
        buffer = buffer.extended(length, output).extended(length + 20, token_ids(rng.integers(0, 1000, 30)))
        length += 50
    return CompletionSession("s", tuple(made), {one.id: Delivery.DELIVERED for one in made}, "t", {"a": 1})


# --- the way there and back ------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(suffix=st.sampled_from(SUFFIXES), session=sessions())
def test_a_session_comes_back_as_it_was(suffix: str, session: CompletionSession, tmp_path: Path) -> None:
    path = tmp_path / f"session.{suffix}"
    record(path, session)
    found = load(path)
    assert plain(found.session) == plain(session)
    assert found.torn == 0
    assert [plain(one) for one in iter_completions(path)] == [plain(one) for one in session.completions]


def test_every_float32_is_written_so_that_it_comes_back(tmp_path: Path) -> None:
    values = np.frombuffer(np.random.default_rng(0).bytes(400_000), np.float32)
    values = values[np.isfinite(values)]
    completion = long_session(1).completions[0]
    generation = Generation(token_ids(np.zeros(len(values), np.int32)), log_probs(values), FinishReason.STOP)
    record(tmp_path / "s.jsonl", CompletionSession("s", (replace(completion, generation=generation),)))
    (found,) = load(tmp_path / "s.jsonl").session.completions
    assert found.generation.logprobs.tobytes() == generation.logprobs.tobytes()


def test_header_and_end_come_back(tmp_path: Path) -> None:
    header = Header("s", "t", "pi", "policy", {"name": "qwen", "vocab": 7}, {"group": 3})
    end = End(
        Status.FAILED, Evaluation(0.5, (0.25, 1.0), {"passed": ["a"]}), Failure("agent", "exit_code", "no"), {"x": 1}
    )
    record(tmp_path / "s.jsonl", long_session(2), header, end)
    found = load(tmp_path / "s.jsonl")
    assert (found.header, found.end) == (header, end)
    assert found.session.metadata == {"group": 3}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_read_session_merges_to_the_same_traces_and_shares_memory_along_its_chain(
    suffix: str, tmp_path: Path
) -> None:
    session = long_session(20)
    record(tmp_path / f"s.{suffix}", session)
    found = load(tmp_path / f"s.{suffix}").session
    traces = PrefixMerging().build(found)
    check(traces, found)
    assert plain(traces) == plain(PrefixMerging().build(session))
    assert len({id(one.prompt_ids.base) for one in found.completions}) < 8  # it doubles


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_the_file_grows_with_what_is_new_not_with_the_history(suffix: str, tmp_path: Path) -> None:
    sizes: dict[int, int] = {}
    for turns in (50, 100, 200):
        record(tmp_path / f"{turns}.{suffix}", long_session(turns))
        sizes[turns] = (tmp_path / f"{turns}.{suffix}").stat().st_size
    assert sizes[200] - sizes[100] < 2.1 * (sizes[100] - sizes[50])
    last = json.loads((tmp_path / "200.jsonl").read_bytes().splitlines()[-2]) if suffix == "jsonl" else None
    if last:
        assert (len(last["prompt_delta"]), len(last["request"]["messages_delta"])) == (30, 2)


def test_what_equality_overlooks_is_kept_wire_ids_and_the_spelling_of_schemas(tmp_path: Path) -> None:
    first, second = long_session(2).completions
    echo = replace(first.reply, tool_calls=tuple(replace(call, id="toolu_0") for call in first.reply.tool_calls))
    result = replace(second.request.messages[-1], tool_call_id="toolu_0")
    schema = {"minimum": 1, "maximum": 2}
    first = replace(first, request=replace(first.request, tools=(Tool("t", "", schema),)))
    for spelled in ({"minimum": True, "maximum": 2}, {"maximum": 2, "minimum": 1}, {"minimum": 1.0, "maximum": 2}):
        request = replace(
            second.request, messages=(*first.request.messages, echo, result), tools=(Tool("t", "", spelled),)
        )
        assert (echo, request.tools) == (first.reply, first.request.tools)
        session = CompletionSession("s", (first, replace(second, request=request)))
        record(tmp_path / "s.jsonl", session)
        assert plain(load(tmp_path / "s.jsonl").session) == plain(session)


def test_the_lines_are_as_documented(tmp_path: Path) -> None:
    record(tmp_path / "s.jsonl", long_session(2))
    session, first, second, end = map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines())
    assert (session["type"], session["version"], session["session_id"], session["task_id"]) == ("session", 1, "s", "t")
    assert (first["type"], first["parent"], first["break_reason"]) == ("completion", None, "first_call")
    assert len(first["prompt_ids"]) == 30
    assert set(first["request"]) >= {"messages", "tools", "sampling"}
    assert (second["parent"], second["weight_versions"], second["delivery"]) == ("c0", [["3", 20]], "delivered")
    assert "tools" not in second["request"]
    assert second["reply"]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "echo 1"}'}
    assert end["type"] == "end"


# --- as it happens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_was_recorded_can_be_read_while_the_session_goes_on(suffix: str, tmp_path: Path) -> None:
    session = long_session(3)
    path = tmp_path / f"s.{suffix}"
    with Recorder(path, Header("s"), fsync=True) as recorder:
        for number, completion in enumerate(session.completions, 1):
            recorder.completion(completion)
            assert len(load(path).session.completions) == number
        assert load(path).end is None


def test_the_last_word_on_delivery_counts(tmp_path: Path) -> None:
    first, second, third = long_session(3).completions
    with Recorder(tmp_path / "s.jsonl", Header("s")) as recorder:
        recorder.completion(first)
        recorder.delivery(first.id, Delivery.DELIVERED)
        recorder.completion(second)
        recorder.delivery(second.id, Delivery.UNDELIVERED)
        recorder.completion(third)
    found = load(tmp_path / "s.jsonl").session
    assert dict(found.delivery) == {"c0": Delivery.DELIVERED, "c1": Delivery.UNDELIVERED, "c2": Delivery.PENDING}
    assert [found.delivered(one) for one in found.completions] == [True, False, False]


def test_a_recorder_does_not_write_over_a_recording(tmp_path: Path) -> None:
    record(tmp_path / "s.jsonl", long_session(1))
    with pytest.raises(RecordingError, match="exists already"):
        Recorder(tmp_path / "s.jsonl", Header("other"))
    assert load(tmp_path / "s.jsonl").header.session_id == "s"


def test_recording_a_whole_session_again_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    record(tmp_path / "s.jsonl", long_session(1))
    record(tmp_path / "s.jsonl", long_session(2))
    with pytest.raises(RecordingError, match="not JSON"):
        record(tmp_path / "s.jsonl", replace(long_session(3), metadata={"path": object()}))
    assert len(load(tmp_path / "s.jsonl").session.completions) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["s.jsonl"]


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_anywhere_gives_what_was_written_whole(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"s.{suffix}"
    ends: list[int] = []
    with Recorder(path, Header("s")) as recorder:
        ends.append(path.stat().st_size)
        for completion in long_session(3).completions:
            recorder.completion(completion)
            ends.append(path.stat().st_size)
    data = path.read_bytes()
    for cut in range(ends[0], len(data) + 1, 7):
        (tmp_path / f"cut.{suffix}").write_bytes(data[:cut])
        found = load(tmp_path / f"cut.{suffix}")
        written = sum(cut >= end for end in ends) - 1
        assert written <= len(found.session.completions) <= written + 1  # the newline alone may be missing
        if suffix == "jsonl":
            assert found.torn == (data[:cut].split(b"\n")[-1] != b"" and len(found.session.completions) == written)


def test_a_bad_line_before_the_last_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    record(path, long_session(3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2][:40] + b"\n", *lines[3:]]))
    with pytest.raises(RecordingError, match=r"s\.jsonl:3: not JSON"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line | {"output_ids": [1]}, r":3: 1 output ids but 20 log-probabilities"),
        (lambda line: line | {"output_ids": [1.5] * 20}, r":3: token ids must be integers"),
        (lambda line: line | {"parent": "nobody"}, r":3: prompt_delta follows the completion 'nobody'"),
        (lambda line: {key: value for key, value in line.items() if key != "logprobs"}, r":3: lacks 'logprobs'"),
        (lambda line: line | {"finish_reason": "abort"}, r":3: 'abort' is not a valid FinishReason"),
        (lambda line: line | {"request": {"messages_kept": 9, "messages_delta": []}}, r":3: messages_kept is 9"),
        (lambda line: line | {"weight_versions": [["1", 3]]}, r":3: weight-version spans cover 3 tokens of 20"),
        (
            lambda line: line | {"weight_versions": [["1", 21], ["2", -1]]},
            r":3: a weight-version span cannot cover less",
        ),
        (
            lambda line: line | {"top_p_ids": [1, 2], "top_p_offsets": [0, 2, *[1] * 18, 2]},
            r":3: offsets must not fall",
        ),
        (lambda line: line | {"request": "text"}, r":3: `request` must be an object, got 'text'"),
        (lambda line: line | {"request": {"messages": ["text"]}}, r":3: a message must be an object, got 'text'"),
        (lambda line: line | {"reply": "text"}, r":3: a message must be an object, got 'text'"),
        (lambda line: line | {"reply": {"role": "robot"}}, r":3: `role` must be one of system, user, .* got 'robot'"),
        (
            lambda line: line | {"reply": {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}},
            r":3: `content` must be a string, got \[{'type': 'text'",
        ),
        (
            lambda line: (
                line | {"reply": {"role": "assistant", "tool_calls": [{"function": {"name": "ls", "arguments": {}}}]}}
            ),
            r":3: `arguments` must be a string, got {}",
        ),
        (lambda line: line | {"reply": {"role": "user", "parts": [5]}}, r":3: `parts` must be texts and images, got 5"),
        (
            lambda line: line | {"reply": {"role": "user", "parts": [{"url": 5}]}},
            r":3: `url` must be a string, got 5",
        ),
        (lambda line: line | {"sampling": 5}, r":3: `sampling` must be an object, got 5"),
        (lambda line: line | {"started": "now"}, r":3: `started` must be a number, got 'now'"),
        (lambda line: line | {"malformed_calls": "x"}, r":3: `malformed_calls` must be a number, got 'x'"),
        (lambda line: line | {"id": 5}, r":3: `id` must be a string, got 5"),
        (lambda line: line | {"prompt_delta": [[1, 2]]}, r":3: `prompt_delta` must be a list of numbers"),
        (lambda line: line | {"output_ids": 5}, r":3: `output_ids` must be a list of numbers"),
        (lambda line: {"type": "end", "session_counts": 5}, r":3: `session_counts` must be an object, got 5"),
        (lambda line: {"type": "end", "evaluation": 5}, r":3: `evaluation` must be an object, got 5"),
    ],
)
def test_case_15_a_line_that_contradicts_itself_is_refused_with_its_place(
    change: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.jsonl"
    record(path, long_session(2))
    lines = path.read_bytes().splitlines()
    lines[2] = json.dumps(change(json.loads(lines[2]))).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(RecordingError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"type": "completion"}\n', "this is no recording"),
        (b'{"type": "session", "version": 2, "session_id": "s"}\n', "version 2"),
        (b"[1]\n", 'not an object with a "type"'),
        (b'{"type": "session", "version": 1}\n', "session_id"),
        (
            b'{"type": "session", "version": 1, "session_id": "s", "metadata": [1]}\n',
            ":1: `metadata` must be an object",
        ),
        (b'{"type": "session", "version": 1, "session_id": "s", "tokenizer": "t"}\n', ":1: `tokenizer` must be an"),
        (
            b'{"type": "session", "version": 1, "session_id": "s", "end_of_turn": 5}\n',
            ":1: `end_of_turn` must be a list",
        ),
        (b"[" * 100_000 + b"\n", ":1: not JSON"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(content)
    with pytest.raises(RecordingError, match=message):
        load(tmp_path / "s.jsonl")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_not_there_or_damaged_is_a_recording_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"s.{suffix}"
    with pytest.raises(RecordingError, match=r"s\.jsonl"):
        load(path)
    record(path, long_session(5))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=r"s\.jsonl"):
        load(path)


def test_unknown_keys_and_lines_of_a_later_writer_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    record(path, long_session(1))
    lines = [json.loads(line) | {"later": 1} for line in path.read_text().splitlines()]
    lines[1]["request"]["later"] = lines[1]["sampling"]["later"] = lines[1]["reply"]["later"] = 1
    lines.insert(1, {"type": "later"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plain(load(path).session) == plain(long_session(1))


# --- redaction -------------------------------------------------------------------------------------------------------


def secretive() -> CompletionSession:
    session = long_session(4, words="the secret word")
    last = session.completions[-1]
    reply = replace(
        last.reply, content="secret ü", reasoning="secret", tool_calls=(ToolCall("bash", "no JSON secret"),)
    )
    shown = Image("image/png", "secret00"), Image(url="https://secret/a.png")
    seen = Message("user", f"secret: {IMAGE}{IMAGE}", parts=("secret: ", *shown))
    request = replace(last.request, messages=(*last.request.messages, seen))
    return replace(
        session,
        completions=(*session.completions[:-1], replace(last, reply=reply, request=request)),
        metadata={"path": "secret"},
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_redacted_recording_says_nothing_and_merges_as_before(suffix: str, tmp_path: Path) -> None:
    source, target = tmp_path / "s.jsonl", tmp_path / f"out.{suffix}"
    end = End(Status.FAILED, Evaluation(1.0, None, {"log": "secret"}), Failure("agent", "exit_code", "secret"))
    record(source, secretive(), Header("s", metadata={"path": "secret"}), end)
    redact(source, target)
    record(tmp_path / "plain.jsonl", load(target).session, end=load(target).end)
    text = (tmp_path / "plain.jsonl").read_text()
    assert "secret" not in text
    assert "echo" not in text
    assert "Run a command" not in text
    before, after = load(source).session, load(target).session
    assert [plain(t.response_ids) for t in PrefixMerging().build(after)] == [
        plain(t.response_ids) for t in PrefixMerging().build(before)
    ]
    for old, new in zip(before.completions, after.completions, strict=True):
        assert [len(message.content) for message in new.request.messages] == [
            len(message.content) for message in old.request.messages
        ]
        assert plain(new.generation.logprobs) == plain(old.generation.logprobs)
        assert new.request.tools[0].name == "bash"
    assert json.loads(after.completions[0].reply.tool_calls[0].arguments) == {"command": "xxxx x"}
    images = after.completions[-1].request.messages[-1].parts
    assert images == ("xxxxxxx ", Image("image/png", "x" * 8), Image(url="x" * 20))


def test_renumbered_ids_keep_prefixes_and_lengths_but_not_the_text(tmp_path: Path) -> None:
    record(tmp_path / "s.jsonl", secretive())
    redact(tmp_path / "s.jsonl", tmp_path / "out.jsonl", renumber_ids=True)
    before, after = load(tmp_path / "s.jsonl").session, load(tmp_path / "out.jsonl").session
    (old,), (new,) = PrefixMerging().build(before), PrefixMerging().build(after)
    check((new,), after)
    assert plain(new.loss_mask) == plain(old.loss_mask)
    assert new.prompt_ids.tolist()[:3] == [0, 1, 2]
    again: dict[int, int] = {}
    ids = [*old.prompt_ids.tolist(), *old.response_ids.tolist()]
    assert [*new.prompt_ids.tolist(), *new.response_ids.tolist()] == [again.setdefault(one, len(again)) for one in ids]


def test_a_compressed_recording_is_what_other_programs_read(tmp_path: Path) -> None:
    record(tmp_path / "s.jsonl.gz", long_session(1))
    record(tmp_path / "s.jsonl", long_session(1))
    assert gzip.decompress((tmp_path / "s.jsonl.gz").read_bytes()) == (tmp_path / "s.jsonl").read_bytes()
