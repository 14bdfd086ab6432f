"""The layers of ARCHITECTURE.md, enforced: who may import whom, and which outside packages the inner layers may use."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polar_plugin

PACKAGE = Path(polar_plugin.__file__).parent

LAYERS: list[tuple[int, tuple[str, ...]]] = [
    (0, ("records", "errors")),
    (
        1,
        (
            "config", "placeholders", "plugins", "rewards",
            "proxy.codec", "proxy.fields", "proxy.sse", "proxy.parts", "proxy.openai_chat", "proxy.openai_chat_request",
            "proxy.body", "proxy.memory", "proxy.resent",
            "proxy.anthropic_messages", "proxy.anthropic_request", "proxy.anthropic_events",
            "proxy.openai_responses", "proxy.responses_request", "proxy.responses_events", "proxy.responses_items",
            "proxy.responses_tools", "proxy.responses_caller",
            "proxy.google_generate", "proxy.google_request", "proxy.google_schema", "proxy.google_signature",
            "engine.base", "engine.render", "engine.template", "engine.library", "engine.toolcalls", "engine.chat",
            "engine.probes", "engine.tokenizer", "engine.limits", "engine.gguf_file", "engine.history", "engine.buffer",
            "engine.meaning", "engine.tree", "engine.ties", "engine.breaks",
            "merge", "harnesses", "runtimes.base", "evaluators.base",
        ),
    ),
    (2, ("recording", "engine", "proxy", "runtimes", "evaluators", "stages.stage", "stages.batch")),
    (3, ("stages",)),
    (4, ("service", "execution", "wiring", "admin")),
    (
        5,
        (
            "slime_rollout", "slime_samples", "slime_args", "slime_evaluation", "slime_metrics", "slime_service",
            "slime_types", "verl_rollout", "verl_samples", "verl_args", "verl_engine",
            "verl_groups", "verl_service", "verl_plugin", "verl_trainer", "verl_weights",
            "slime_sessions", "slime_collect", "slime_hooks",
            "slime_data", "slime_async", "slime_stored",
            "harness_root", "quickstart", "doctor", "replayed", "testing", "cli", "__main__",
        ),
    ),
]  # fmt: skip
TRAINERS = {"slime", "verl", "ray"}
PURE_LIBRARIES = {"numpy", "orjson", "pydantic", "yaml", "jinja2", "renderers", "transformers", "tokenizers"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(module: str) -> int:
    """The most specific entry decides: "proxy.codec" before "proxy"."""
    found = [
        (len(prefix), layer)
        for layer, prefixes in LAYERS
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    assert found, f"{module} is in no layer: add it to the table here and in ARCHITECTURE.md"
    return max(found)[1]


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether it is ours); relative ones made absolute within the package."""
    folder = list(path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, alias.name.split(".")[0] == "polar_plugin") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - node.level + 1]
            if node.module:
                yield ".".join([*base, node.module]), True
            else:
                yield from ((".".join([*base, alias.name]), True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", (node.module or "").split(".")[0] == "polar_plugin"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    module = name_of(path)
    layer = layer_of(module)
    for imported, ours in imports_of(path):
        top = imported.split(".")[0]
        if not ours:
            assert layer == 5 or top not in TRAINERS, f"{module} imports {imported}: only the bridges know trainers"
            if layer <= 1:
                allowed = sys.stdlib_module_names | PURE_LIBRARIES
                assert top in allowed, f"{module} (pure) imports {imported}"
            continue
        target = imported.removeprefix("polar_plugin.")
        if target == "polar_plugin":
            continue
        assert layer_of(target) <= layer, f"{module} (layer {layer}) imports {target} (layer {layer_of(target)})"
        siblings = layer == 2 and layer_of(target) == 2 and target.split(".")[0] != module.split(".")[0]
        assert not siblings, f"{module} imports {target}: folders of layer 2 do not import each other"


def test_importing_the_package_needs_no_heavy_library() -> None:
    heavy = {"torch", "transformers", "slime", "verl", "ray", "aiodocker", "openai", "anthropic"}
    code = f"import sys, polar_plugin; print(sorted({heavy!r} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    missing = [name for name in polar_plugin.__all__ if not hasattr(polar_plugin, name)]
    assert not missing
    assert list(polar_plugin.__all__) == sorted(polar_plugin.__all__)
