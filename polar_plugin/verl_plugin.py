"""verl's plugin entry point (group `verl.plugins`): makes our trainers known to every process that imports verl.

It imports nothing of verl and starts nothing. verl loads it while `verl` itself is still being imported, in the
trainer, in each worker and in tools alike, so the trainers are registered when, and only where, verl's own are
(`verl.trainer.ppo.v1`). verl passes over a plugin that fails without a word: `check_loaded` tells.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .errors import ConfigError
from .verl_args import MODES

TRAINERS = "verl.trainer.ppo.v1"


class _Loader(importlib.abc.Loader):
    """verl's own loader, and our registration behind it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register_trainers()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if fullname != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register() -> None:
    """Register our trainers as soon as verl's own are imported; a second call changes nothing."""
    if TRAINERS in sys.modules:
        _register_trainers()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def check_loaded(trainer_mode: str) -> None:
    """Raise ConfigError where one of our trainers is asked for and verl in this process does not know it."""
    if trainer_mode not in MODES:
        return
    registry = importlib.import_module("verl.trainer.ppo.v1.trainer_base").TRAINER_REGISTRY
    if trainer_mode not in registry:
        raise ConfigError(
            f"trainer.v1.trainer_mode={trainer_mode} is unknown to verl: its plugin did not load. Install polar_plugin"
            " with pip in the environment of every node, and leave VERL_USE_EXTERNAL_PLUGINS unset or name"
            " `polar_plugin` in it"
        )


def _register_trainers() -> None:
    importlib.import_module("polar_plugin.verl_trainer").register_all()


register()
