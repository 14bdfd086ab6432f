"""A directory with agent programs that is mounted from this machine."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from ..records import RuntimeSpec


def check_harness_root(spec: RuntimeSpec) -> None:
    """Raises ConfigError where `spec.harness_root` cannot be mounted at its own path."""
    root = spec.harness_root
    if root is None:
        return
    if not root.startswith("/"):
        raise ConfigError(f"runtime.harness_root must be absolute, as it is the same path inside, not {root!r}")
    if not Path(root).is_dir():
        raise ConfigError(
            f"runtime.harness_root: there is no {root}: `polar-plugin harness install NAME --root {root}`"
        )
