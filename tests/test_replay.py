"""`polar-plugin explain`, `polar-plugin replay` and `polar_plugin.testing` over recordings of real agent programs."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from polar_plugin.cli import app
from polar_plugin.engine.render import load_renderer
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.changes import Change
from polar_plugin.merge.expect import Expectation
from polar_plugin.merge.explain import Break, Call, Difference, Explanation
from polar_plugin.merge.reasons import REASONS
from polar_plugin.merge.untrained import Untrained
from polar_plugin.recording import Header, load, record
from polar_plugin.records import BreakReason, ChatRequest, Message, Role, Tool
from polar_plugin.testing import (
    assert_breaks,
    assert_expected,
    assert_fractions,
    assert_masks,
    assert_traces,
    assert_untrained,
    mask_runs,
    recorded,
)

from . import tokenizers
from .merge.build import Ledger
from .recorded.replay import replay

NAMES = {"reminded": "claude-code-2.1.332/fempty", "again": "qwen-code-0.24.4/flen", "plain": "pi-1.6.0/basic"}
"""Claude Code adds a reminder to the task after an empty answer; Qwen Code asks again after an answer that was cut;
Pi breaks nothing."""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of recordings, made by asking our own proxy again what real programs asked."""
    directory, tokenizer = tmp_path_factory.mktemp("sessions"), tokenizers.load("qwen3")
    renderer, encoder = load_renderer(tokenizer), AutoTokenizer.from_pretrained(str(tokenizer))
    for short, name in NAMES.items():
        session = anyio.run(replay, name, renderer, encoder).session
        header = Header(f"id-{short}", harness=name, tokenizer={"name": str(tokenizer)})
        record(directory / f"{short}.jsonl.gz", session, header)
    return directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def told(*arguments: object, code: int = 0) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return result.output


# --- explain ---------------------------------------------------------------------------------------------------------


def test_a_changed_message_is_explained_with_the_words_on_both_sides(sessions: Path) -> None:
    text = told("explain", sessions / "reminded.jsonl.gz")
    assert "3 calls, 2 traces, 1 breaks; 47 tokens sampled, 100.0% delivered, 100.0% trained" in text
    changed = text[text.index("history_rewritten") :]
    assert (
        "changed by:      the harness: message 1 (user): content differs: '…lo.txt that contains hi.' became" in changed
    )
    assert 'before ".<|im_end|>' in changed
    assert 'now    ".\\n\\n<system-reminder>' in changed
    assert "masking" in changed


def test_an_answer_that_was_asked_for_again_is_not_trained_and_says_what_would_train_it(sessions: Path) -> None:
    (line,) = told("explain", sessions, "--session", "id-again", "--format", "json").splitlines()
    first, second, third = json.loads(line)["calls"]
    assert (first["untrained"], first["finish_reason"]) == ("discarded", "length")
    assert second["start"]["reason"] == "asked_again"
    assert (second["trace"], third["trace"], third["start"]) == (0, 0, None)
    policy = told("explain", sessions / "again.jsonl.gz", "--config", "{discarded: train}")
    assert "100.0% trained" in policy


@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_what_an_agent_program_calls_things_does_no_harm_to_a_terminal_or_a_page(form: str, tmp_path: Path) -> None:
    name = "<script>\ud83d\x00\x1b[31m"
    ledger = Ledger()
    for number, tools in enumerate(((), (Tool(name),))):
        request = ChatRequest((Message("user", "hi"),), tools, thread=name)
        ledger.say([1, number], [2], request=request, break_reason=BreakReason.TOOLS_CHANGED)
    record(tmp_path / "s.jsonl", ledger.sealed())
    output = run("explain", tmp_path / "s.jsonl", "--format", form).stdout_bytes
    assert b"tools added" in output
    assert not any(one in output for one in (b"\x00", b"\x1b", b"\xed\xa0\xbd"))
    assert form != "html" or b"<script" not in output


def test_a_directory_becomes_one_page(sessions: Path) -> None:
    page = told("explain", sessions, "--format", "html")
    assert page.count("<section>") == 3
    assert "&lt;system-reminder&gt;" in page
    assert "<script" not in page


def test_a_tokenizer_that_is_not_here_shows_ids_and_one_of_another_model_is_refused(
    sessions: Path, tmp_path: Path
) -> None:
    session = load(sessions / "reminded.jsonl.gz").session
    record(tmp_path / "a.jsonl", session, Header("a", tokenizer={"name": "/no/such/directory"}))
    record(tmp_path / "b.jsonl", session, Header("b"))
    assert "'/no/such/directory' is not on this machine" in told("explain", tmp_path / "a.jsonl")
    assert "the recording names no tokenizer" in told("explain", tmp_path / "b.jsonl")
    shown = told("explain", tmp_path / "b.jsonl", "--tokenizer", tokenizers.load("qwen3"))
    assert 'now    ".\\n\\n<system-reminder>' in shown
    refused = told("explain", tmp_path / "b.jsonl", "--tokenizer", tokenizers.load("llama3_1"), code=2)
    assert "has the token 151" in refused.replace("\n", " ")


# --- replay ----------------------------------------------------------------------------------------------------------


def test_another_builder_is_shown_side_by_side(sessions: Path) -> None:
    text = told(
        "replay", sessions / "again.jsonl.gz", "--against", "per_request", "--against-config", "{discarded: train}"
    )
    assert "only per_request trains #1" in text
    assert "prefix_merging trace 0: #2-#3; 17,321 prompt + 111 response tokens, 53 trained" in text
    assert "per_request trace 2: #3;" in text
    assert "prefix_merging makes the same traces" in told("replay", sessions, "--against", "prefix_merging")


def test_an_expectation_file_that_was_written_holds_and_one_that_disagrees_fails(
    sessions: Path, tmp_path: Path
) -> None:
    file = tmp_path / "expected.yaml"
    told("replay", sessions, "--write-expect", file)
    told("replay", sessions, "--expect", file)
    assert_expected(recorded(sessions), file)
    wrong = told("replay", sessions, "--expect", file, "--builder", "per_request", code=1)
    assert "session again: traces is 2, expected 1" in wrong
    with pytest.raises(AssertionError, match="session plain: masks is"):
        assert_expected(recorded(sessions, builder="per_request"), file)


def test_an_expectation_file_brings_its_builder_and_says_only_what_it_says(sessions: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    again: dict[str, Any] = {"min_trained_fraction": 1.0, "breaks": {"first_call": 2}}
    told_by = {"config": {"discarded": "train"}, "sessions": {"again": again}}
    file.write_text(json.dumps(told_by))
    told("replay", sessions / "again.jsonl.gz", "--expect", file)
    again["untrained"] = {"discarded": 5}
    file.write_text(json.dumps({"sessions": {"again": again, "gone": {}}}))
    wrong = told("replay", sessions / "again.jsonl.gz", "--expect", file, code=1)
    assert "trained_fraction is 0.913793, expected at least 1" in wrong
    assert "session gone is not among the recordings" in wrong
    assert "untrained.discarded" not in wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sessions: {again: {trace: 1}}", "unknown key `sessions.again.trace`"),
        ("version: 2\nsessions: {}", "version"),
        ("[]", "--write-expect"),
        ("sessions: {again: {min_trained_fraction: .nan}}", "`sessions.again.min_trained_fraction`"),
        ("{", "neither YAML nor JSON"),
    ],
)
def test_a_bad_expectation_file_says_what_is_wrong(sessions: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(text)
    text = told("replay", sessions / "again.jsonl.gz", "--expect", file, code=2)
    assert message in " ".join(text.split())


def test_bad_recordings_say_what_to_do(sessions: Path, tmp_path: Path) -> None:
    lines = gzip.decompress((sessions / "plain.jsonl.gz").read_bytes()).splitlines(keepends=True)
    corrupt, later, empty = tmp_path / "corrupt.jsonl", tmp_path / "later.jsonl", tmp_path / "nothing"
    corrupt.write_bytes(lines[0] + b"{oops\n" + b"".join(lines[1:]))
    later.write_bytes(json.dumps({**json.loads(lines[0]), "version": 7}).encode() + b"\n")
    empty.mkdir()
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for arguments, messages in (
        (["explain", corrupt], ["corrupt.jsonl:2", "copied to a file"]),
        (["explain", later], ["version 7", "the release of polar-plugin that wrote it"]),
        (["replay", empty], ["has no recordings", ".jsonl.gz"]),
        (["replay", tmp_path / "gone.jsonl"], ["gone.jsonl", "recording.directory"]),
        (["explain", sessions, "--session", "nobody"], ["no session 'nobody'", "plain (id-plain)"]),
        (["replay", sessions, "--builder", "nobody"], ["unknown builder", "prefix_merging"]),
        (["replay", sessions, "--config", "{max_tokens: 3}"], ["does not take config"]),
        (["replay", sessions, "--config", "max_tokens"], ["must be a mapping"]),
        (["replay", sessions, "--config", tmp_path / "bytes.yaml"], ["bytes.yaml", "neither YAML nor JSON"]),
        (["replay", sessions, "--builder", "json:JSONDecoder"], ["json:JSONDecoder", "no method `build`"]),
        (["replay", sessions, "--builder", ":Builder"], ["unknown builder ':Builder'", "prefix_merging"]),
        (["replay", sessions, "--against-config", "{discarded: train}"], ["--against-config", "give --against"]),
        (["replay", sessions, "--against", "per_request", "--json"], ["--against", "--json", "leave one out"]),
    ):
        text = " ".join(told(*arguments, code=2).split())
        assert all(message in text for message in messages), text


@pytest.mark.parametrize("torn", [True, False])
def test_a_recording_that_a_crash_cut_short_is_read_as_far_as_it_goes_and_each_command_says_so(
    sessions: Path, tmp_path: Path, torn: bool
) -> None:
    data, file = gzip.decompress((sessions / "plain.jsonl.gz").read_bytes()), tmp_path / "plain.jsonl"
    file.write_bytes(data[: data.index(b'{"type":"end"') + 9] if torn else data)
    for command in (["replay"], ["explain"], ["explain", "--format", "html"]):
        assert ("cut short by a crash" in told(*command, file)) is torn, command
    for command in (["replay", "--json"], ["explain", "--format", "json"]):
        assert json.loads(told(*command, file))["torn"] is torn, command


class Asynchronous(PrefixMerging):
    """A builder that has to wait for something."""

    async def build(self, session: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return super().build(session)


def test_builders_that_must_be_awaited_are(sessions: Path) -> None:
    name = f"{__name__}:{Asynchronous.__name__}"
    assert "makes the same traces" in told("replay", sessions / "plain.jsonl.gz", "--against", name)


# --- polar_plugin.testing --------------------------------------------------------------------------------------------


def test_assertions_hold_on_what_is(sessions: Path) -> None:
    again, plain, reminded = recorded(sessions)
    assert [one.name for one in (again, plain, reminded)] == ["again", "plain", "reminded"]
    assert_traces(again, [[2, 3]])
    assert_traces(reminded, 2)
    assert_fractions(again, delivered=1.0, trained=0.9)
    assert_breaks(reminded, first_call=1, history_rewritten=1)
    assert_untrained(again, discarded=5)
    assert_untrained(plain)
    assert_masks(plain, [mask_runs(trace) for trace in plain.traces])


def test_assertions_that_fail_show_the_words_that_they_are_about(sessions: Path) -> None:
    again, plain, reminded = recorded(sessions)
    with pytest.raises(AssertionError, match="traces train the calls #2-#3, expected 3") as shown:
        assert_traces(again, 3)
    assert "asked_again" in str(shown.value)
    with pytest.raises(AssertionError, match=r"of the tokens are trained, not 0\.99"):
        assert_fractions(again, trained=0.99)
    with pytest.raises(AssertionError, match="break reasons are") as shown:
        assert_breaks(reminded, first_call=1)
    assert "<system-reminder>" in str(shown.value)
    with pytest.raises(AssertionError, match=r"untrained tokens are \{'discarded': 5\}, expected \{\}"):
        assert_untrained(again)
    trained, context, last = mask_runs(plain.traces[0])
    with pytest.raises(AssertionError, match=f"run 1 \\(context\\) begins at response token {trained}") as shown:
        assert_masks(plain, [[trained, context - 1, last]])
    assert "assistant" in str(shown.value)
    with pytest.raises(AssertionError, match="1 traces, expected 2"):
        assert_masks(plain, [[1], [2]])


def test_a_written_expectation_file_is_what_the_page_says(sessions: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.yaml"
    told("replay", sessions / "again.jsonl.gz", "--write-expect", file)
    written = yaml.safe_load(file.read_text())
    assert (written["version"], written["builder"], written["config"]) == (1, "prefix_merging", {})
    assert set(written["sessions"]["again"]) == {
        "traces", "trained_tokens", "min_delivered_fraction", "min_trained_fraction", "breaks", "untrained", "masks",
    }  # fmt: skip


# --- docs/traces.md --------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "traces.md").read_text()


@pytest.fixture
def beside_sessions(sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sessions").symlink_to(sessions)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("beside_sessions")
def test_the_commands_of_the_page_run_in_their_order() -> None:
    commands = re.findall(r"^polar-plugin (.+?)(?: > \S+)?$", PAGE, re.M)
    assert len(commands) >= 8
    for command in commands:
        told(*shlex.split(command))


@pytest.mark.usefixtures("beside_sessions")
def test_the_tests_of_the_page_pass() -> None:
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "def test_" in one)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "page", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_page_names_every_reason_role_and_key() -> None:
    keys = {one.name for record in (Break, Call, Change, Difference, Explanation) for one in fields(record)}
    for name in (*REASONS, *Untrained, *Role, *keys, *(one.name for one in fields(Expectation))):
        assert f"`{name}`" in PAGE, name
