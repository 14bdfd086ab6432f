"""What a RolloutConfig names, made: the engine, the renderer over its tokenizer, the policy for groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from . import plugins
from .config import RolloutConfig, cache_directory
from .engine.base import Engine, Renderer
from .engine.render import load_renderer
from .errors import ConfigError
from .stages.groups import GroupPolicy


def make_engine(config: RolloutConfig, *, vocab_size: int) -> Engine:
    """The engine that `config.engine` names, not yet entered; no id from `vocab_size` on is sent. ConfigError."""
    engine = config.engine
    options: dict[str, Any] = dict(engine.options)
    if engine.kind == "sglang":
        options = {"replay": engine.replay, **options}
    if engine.kind in ("sglang", "vllm"):
        if not engine.url:
            raise ConfigError(f"engine.url is not set: the {engine.kind} engine needs the address of its server")
        options = {"url": engine.url, "vocab_size": vocab_size, "context_length": engine.context_length, **options}
    if engine.kind == "transformers":
        options = {"context_length": engine.context_length, **options, "model": model_directory(config)}
    elif engine.model is not None:
        options["model"] = engine.model
    return cast("Engine", plugins.create(engine.kind, plugins.ENGINES, "engine", options))


def group_policy(config: RolloutConfig) -> GroupPolicy:
    """What `config` says about groups."""
    told = config.groups
    return GroupPolicy(
        refills=told.refills,
        refill_pause=told.refill_pause,
        train_if=None if told.incomplete_group == "drop" else told.incomplete_group.train_if,
        min_usable=told.min_usable,
        on_timeout=config.on_timeout,
    )


def check_replay(config: RolloutConfig, engine: Engine) -> None:
    if missing := set(config.engine.replay) - set(getattr(engine, "replay", ())):
        raise ConfigError(
            f"engine.replay asks for {', '.join(sorted(missing))}, which the engine {config.engine.kind!r} does not"
            " tell: set engine.kind to sglang, or take it out of engine.replay"
        )


def model_directory(config: RolloutConfig) -> Path:
    """The directory of the embedded engine's model; fetched or made where it is one of ours. Raises ConfigError."""
    from .engine.models import resolve_model

    if not config.engine.model:
        raise ConfigError("engine.model is not set: a Hugging Face directory, `smollm2` or `tiny`")
    return resolve_model(config.engine.model, cache_directory())


def tokenizer_of(config: RolloutConfig) -> str:
    """The tokenizer's directory, absolute, or its name; "" where `config` names none."""
    name = config.renderer.tokenizer or config.engine.model or ""
    if not config.renderer.tokenizer and config.engine.kind == "transformers" and name:
        name = str(model_directory(config))
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def make_renderer(config: RolloutConfig) -> Renderer:
    """The renderer for `config`, over the tokenizer it names. Raises ConfigError."""
    renderer, tokenizer = config.renderer, tokenizer_of(config)
    if not tokenizer:
        raise ConfigError("renderer.tokenizer is not set: the tokenizer's Hugging Face directory or name")
    return load_renderer(
        tokenizer,
        kind=renderer.kind,
        history=renderer.history,
        tool_parser=renderer.tool_parser,
        reasoning_parser=renderer.reasoning_parser,
        chat_template_kwargs=renderer.chat_template_kwargs,
    )
