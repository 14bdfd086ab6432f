"""A name, or "pkg.mod:Class", to an object. The tables are literal: no entry points, no decorators."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError

ENGINES: Mapping[str, str] = {
    "sglang": "polar_plugin.engine.sglang:SGLangEngine",
    "vllm": "polar_plugin.engine.vllm:VLLMEngine",
    "transformers": "polar_plugin.engine.transformers:TransformersEngine",
    "scripted": "polar_plugin.engine.scripted:ScriptedEngine",
}
RUNTIMES: Mapping[str, str] = {
    "local": "polar_plugin.runtimes.local:LocalRuntime",
    "docker": "polar_plugin.runtimes.docker:DockerRuntime",
    "apptainer": "polar_plugin.runtimes.apptainer:ApptainerRuntime",
}
HARNESSES: Mapping[str, str] = {
    "shell": "polar_plugin.harnesses.shell:Shell",
    "pi": "polar_plugin.harnesses.pi:Pi",
    "gemini_cli": "polar_plugin.harnesses.gemini_cli:GeminiCLI",
    "qwen_code": "polar_plugin.harnesses.qwen_code:QwenCode",
    "opencode": "polar_plugin.harnesses.opencode:OpenCode",
    "mini_swe_agent": "polar_plugin.harnesses.mini_swe_agent:MiniSWEAgent",
    "claude_code": "polar_plugin.harnesses.claude_code:ClaudeCode",
    "codex": "polar_plugin.harnesses.codex:Codex",
}
BUILDERS: Mapping[str, str] = {
    "prefix_merging": "polar_plugin.merge.builders:PrefixMerging",
    "per_request": "polar_plugin.merge.builders:PerRequest",
}
EVALUATORS: Mapping[str, str] = {
    "session_completed": "polar_plugin.evaluators.session_completed:SessionCompleted",
    "test_on_output": "polar_plugin.evaluators.test_on_output:TestOnOutput",
}


def resolve(name: str, table: Mapping[str, str], kind: str) -> Any:
    """The object behind a registered name or an import path.

    Raises ConfigError that lists the registered names, or says which part of the path does not exist.
    """
    target = table.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not (module_name and attribute):
        raise ConfigError(f"unknown {kind} {name!r}: use one of {', '.join(sorted(table))}, or 'package.module:Class'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{kind} {name!r}: cannot import {module_name!r} ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no {attribute!r}") from error


def create(name: str, table: Mapping[str, str], kind: str, config: Mapping[str, Any]) -> Any:
    """Resolve and construct with `**config`; a constructor that refuses its config is a ConfigError."""
    factory = resolve(name, table, kind)
    try:
        return factory(**config)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r} does not take config {dict(config)!r}: {error}") from error
