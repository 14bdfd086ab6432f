"""Agent CLIs at pinned versions, from npm and PyPI into the checkout's cache: `python -m tests.cli.install pi codex`.

Each lies in a directory of its own, `.cache/cli/NAME@VERSION`, which sandboxes see read-only at the same path and which
presets get as `settings.root`: programs in `node_modules/.bin` (npm) or `bin` (a virtual environment). `bin/node` is
the Node.js that all npm programs are installed with and run on.

The versions are pinned for more than repeatability: asked for no version, npm installs the newest one whose `engines`
field fits the Node.js that runs *npm*, and says nothing about having taken an old one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "cli"
SECONDS = 900


@dataclass(frozen=True, slots=True)
class Package:
    """What to install, and the file that proves it is there."""

    registry: str
    """"npm" or "pypi"."""
    package: str
    version: str
    program: str
    """Relative to the directory it is installed into."""
    extras: tuple[str, ...] = ()
    """More packages that it needs, each with its version."""


NODE = Package("npm", "node", "22.23.3", "node_modules/.bin/node")
PACKAGES: Mapping[str, Package] = {
    "pi": Package("npm", "@earendil-works/pi-coding-agent", "1.6.0", "node_modules/.bin/pi"),
    "claude_code": Package("npm", "@anthropic-ai/claude-code", "2.1.332", "node_modules/.bin/claude"),
    "codex": Package("npm", "@openai/codex", "0.171.0", "node_modules/.bin/codex"),
    "gemini_cli": Package("npm", "@google/gemini-cli", "0.61.0", "node_modules/.bin/gemini"),
    "qwen_code": Package("npm", "@qwen-code/qwen-code", "0.24.4", "node_modules/.bin/qwen"),
    "opencode": Package("npm", "opencode-ai", "1.18.33", "node_modules/.bin/opencode"),
    "mini_swe_agent": Package("pypi", "mini-swe-agent", "2.4.6", "bin/mini"),
}


class InstallError(RuntimeError):
    """A pinned version cannot be installed; the message says which, and what the registry's client said."""


def root_of(name: str) -> Path:
    """Where a CLI is, or would be, installed."""
    return CACHE / f"{name}@{PACKAGES[name].version}"


def installed(name: str) -> bool:
    return _stamp(root_of(name)).exists()


def install(name: str) -> Path:
    """Install one CLI where it is not there yet; its directory. Raises InstallError."""
    package, root = PACKAGES[name], root_of(name)
    if not installed(name):
        if package.registry == "npm":
            _npm(package, root, _node())
        else:
            _pypi(package, root)
        _finish(package, root)
    return root


def _node() -> Path:
    """The directory of Node.js 22, which is itself installed from npm."""
    root = CACHE / f"node@{NODE.version}"
    if not _stamp(root).exists():
        _npm(NODE, root, None)
        _finish(NODE, root)
    return root


def _npm(package: Package, root: Path, node: Path | None) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError(f"{package.package} comes from npm: install Node.js, any version that has npm")
    _fresh(root)
    path = os.environ["PATH"] if node is None else f"{node}/node_modules/.bin:{os.environ['PATH']}"
    command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(root)]
    _run([*command, f"{package.package}@{package.version}", *package.extras], package, env={"PATH": path})
    if node is not None:
        (root / "bin").mkdir(exist_ok=True)
        _link((node / NODE.program).resolve(), root / "bin" / "node")


def _pypi(package: Package, root: Path) -> None:
    _fresh(root)
    _run([sys.executable, "-m", "venv", str(root)], package)
    pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, f"{package.package}=={package.version}", *package.extras], package)


def _fresh(root: Path) -> None:
    """Nothing of an installation that was broken off is kept."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _run(command: Sequence[str], package: Package, env: Mapping[str, str] | None = None) -> None:
    told = f"{package.package} {package.version} from {package.registry}"
    try:
        done = subprocess.run(
            command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{told}: not done within {SECONDS} s") from error
    if done.returncode:
        raise InstallError(f"{told}: {Path(command[0]).name} ended with {done.returncode}\n{_why(done)}")


def _why(done: subprocess.CompletedProcess[str]) -> str:
    text = (done.stderr or done.stdout).strip()
    gone = ("ETARGET", "No matching version", "No matching distribution", "E404")
    if any(sign in text for sign in gone):
        return f"the registry has this version no longer (or not yet): change the pin in {__file__}\n{text[-2000:]}"
    return text[-2000:]


def _finish(package: Package, root: Path) -> None:
    """Mark as complete what has its program, and is the version that was asked for."""
    if not (root / package.program).exists():
        raise InstallError(f"{package.package} {package.version} was installed without {package.program}")
    if package.registry == "npm":
        manifest = json.loads((root / "node_modules" / package.package / "package.json").read_text())
        if manifest["version"] != package.version:
            raise InstallError(f"npm installed {package.package} {manifest['version']}, not {package.version}")
    _stamp(root).touch()


def _stamp(root: Path) -> Path:
    return root / ".installed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*PACKAGES, []], default=[], help="all, where none is named")
    failed = False
    for name in parser.parse_args(arguments).names or PACKAGES:
        try:
            sys.stdout.write(f"{name}: {install(name)}\n")
        except InstallError as error:
            failed = True
            sys.stderr.write(f"{name}: {error}\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
