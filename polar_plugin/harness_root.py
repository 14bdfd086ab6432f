"""Agent programs at fixed versions, from npm and PyPI, in one directory that sandboxes see read-only at the same path.

    ROOT/node@22.23.3               the Node.js that npm programs are installed with, and run on
    ROOT/claude_code@2.1.332        an `npm install --prefix`; bin/node is that Node.js
    ROOT/claude_code                a link to the version that was installed last

A directory is complete once it has its `.installed`; then it is not touched again, and no registry is asked.

Versions are fixed for more than repeatability: asked for no version, npm installs the newest one whose `engines` field
fits the Node.js that runs *npm*, and says nothing about having taken an old one. So npm runs on the Node.js above.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import plugins
from .errors import ConfigError, InstallError
from .harnesses.base import Versions
from .harnesses.packages import NODE, NODE_VERSION, PACKAGES, Package

SECONDS = 900
_VERSION = re.compile(r"\d+(\.\d+)+[-+.\w]*")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A preset's program at a version."""

    harness: str
    version: str

    @property
    def package(self) -> Package:
        return PACKAGES[self.harness]

    @property
    def tested(self) -> bool:
        """Whether its preset was run with this version, or with older and newer ones."""
        return Versions(self.harness, "", *tested(self.harness)).tested(self.version)

    def directory(self, root: Path) -> Path:
        return root / f"{self.harness}@{self.version}"

    def installed(self, root: Path) -> bool:
        return _stamp(self.directory(root)).exists()


def tested(harness: str) -> tuple[str, str]:
    """The oldest and the newest version that its preset was run with."""
    return plugins.resolve(harness, plugins.HARNESSES, "harness").tested


def wanted(text: str) -> Wanted:
    """ "NAME" (the newest tested version) or "NAME@VERSION". Raises ConfigError."""
    name, _, version = text.partition("@")
    if name not in PACKAGES:
        raise ConfigError(f"harness {name!r} is not installed from a registry: one of {', '.join(sorted(PACKAGES))}")
    version = version or tested(name)[1]
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"harness {text!r}: a version is written out, as in {name}@{tested(name)[1]}")
    return Wanted(name, version)


def install(one: Wanted, root: Path) -> Path:
    """Install where it is not there yet; its directory. Raises InstallError."""
    root = root.absolute()
    directory = one.directory(root)
    if not one.installed(root):
        if one.package.registry == "npm":
            _npm(one.package, one.version, directory, _node(root))
        else:
            _pypi(one.package, one.version, directory)
        _finish(one.package, one.version, directory)
    _point(root / one.harness, directory.name)
    return directory


def _node(root: Path) -> Path:
    """The directory of Node.js, which is itself installed from npm."""
    directory = root / f"node@{NODE_VERSION}"
    if not _stamp(directory).exists():
        _npm(NODE, NODE_VERSION, directory, None)
        _finish(NODE, NODE_VERSION, directory)
    return directory


def _npm(package: Package, version: str, directory: Path, node: Path | None) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError(f"{package.package} comes from npm: install Node.js, any version that has npm")
    _fresh(directory)
    path = os.environ["PATH"] if node is None else f"{node}/node_modules/.bin:{os.environ['PATH']}"
    command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(directory)]
    _run([*command, f"{package.package}@{version}"], package, version, env={"PATH": path})
    if node is not None:
        (directory / "bin").mkdir(exist_ok=True)
        _link((node / NODE.program).resolve(), directory / "bin" / "node")


def _pypi(package: Package, version: str, directory: Path) -> None:
    _fresh(directory)
    _run([sys.executable, "-m", "venv", str(directory)], package, version)
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, f"{package.package}=={version}"], package, version)


def _fresh(directory: Path) -> None:
    """Nothing of an installation that was broken off is kept."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise InstallError(f"cannot make {directory}: {error.strerror}") from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _point(link: Path, target: str) -> None:
    """Relative, so that the root can be moved; replaced at once, so that it is never missing."""
    if link.is_symlink() and str(link.readlink()) == target:
        return
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.symlink_to(target)
    new.replace(link)


def _run(command: Sequence[str], package: Package, version: str, env: Mapping[str, str] | None = None) -> None:
    told = f"{package.package} {version} from {package.registry}"
    try:
        done = subprocess.run(
            command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{told}: not done within {SECONDS} s") from error
    if done.returncode:
        raise InstallError(f"{told}: {Path(command[0]).name} ended with {done.returncode}. {_why(done)}")


_SIGNS = {
    "the registry has no such version (or no longer): ask for another": (
        "ETARGET", "No matching version", "No matching distribution", "E404",
    ),
    "the registry cannot be reached; a root that was made elsewhere can be copied here": (
        "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH", "NewConnectionError",
    ),
    "the disk is full": ("ENOSPC", "No space left"),
}  # fmt: skip


def _why(done: subprocess.CompletedProcess[str]) -> str:
    text = (done.stderr or done.stdout).strip()
    told = [words for words, signs in reversed(_SIGNS.items()) if any(sign in text for sign in signs)]
    return "\n".join([*told[:1], text[-2000:]])


def _finish(package: Package, version: str, directory: Path) -> None:
    """Mark as complete what has its program, and is the version that was asked for."""
    if not (directory / package.program).exists():
        raise InstallError(f"{package.package} {version} was installed without {package.program}")
    if package.registry == "npm":
        manifest = json.loads((directory / "node_modules" / package.package / "package.json").read_text())
        if manifest["version"] != version:
            raise InstallError(f"npm installed {package.package} {manifest['version']}, not {version}")
    _stamp(directory).touch()


def _stamp(directory: Path) -> Path:
    return directory / ".installed"
