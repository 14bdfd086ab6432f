"""Agent CLIs at the versions their presets are tested with, in the checkout's cache, by the library's own installer:
`python -m tests.cli.install pi codex`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from polar_plugin import harness_root
from polar_plugin.errors import InstallError
from polar_plugin.harnesses.packages import PACKAGES

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "cli"


def version_of(name: str) -> str:
    return harness_root.wanted(name).version


def root_of(name: str) -> Path:
    """Where a CLI is, or would be, installed."""
    return harness_root.wanted(name).directory(CACHE)


def installed(name: str) -> bool:
    return harness_root.wanted(name).installed(CACHE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PACKAGES, []], default=[], help="all, where none is named")
    failed = False
    for name in parser.parse_args(arguments).names or PACKAGES:
        try:
            sys.stdout.write(f"{name}: {harness_root.install(harness_root.wanted(name), CACHE)}\n")
        except InstallError as error:
            failed = True
            sys.stderr.write(f"{name}: {error}\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
