"""What the presets of real agent programs have in common: checked settings, a start from where npm or pip put them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..records import AgentSpec
from .base import LaunchContext, Versions

_NODE_CHECK = """\
found=$(node --version 2>&1) || found=none
if [ "$(printf '%s\\n' v{least} "$found" | sort -V | head -n 1)" != v{least} ]; then
  echo "{program} needs Node.js >= {least} on PATH or in settings.root, and finds $found" >&2
  exit 127
fi"""
_NPM_VERSION = """\
found=$(command -v {program}) || exit 0
at=$(realpath "$found")
while [ "$at" != / ]; do
  at=$(dirname "$at")
  if grep -q '"name" *: *"{package}"' "$at/package.json" 2>/dev/null; then
    grep -o '"version" *: *"[^"]*"' "$at/package.json" | head -n 1 | cut -d '"' -f 4
    exit 0
  fi
done
"$found" --version 2>/dev/null | grep -oE '[0-9]+[.][0-9]+[.][0-9]+' | head -n 1
"""
_PYPI_VERSION = """\
found=$(command -v {program}) || exit 0
python=$(head -n 1 "$found" | sed -n 's/^#! *//p')
$python -c 'from importlib.metadata import version; print(version("{package}"))' 2>/dev/null || true
"""


def settings_of(context: LaunchContext, harness: str, known: Mapping[str, type]) -> Mapping[str, Any]:
    """`agent.settings`, each of which is one of `known` and of its type. Raises ConfigError with the path."""
    settings = context.agent.settings
    if unknown := sorted(set(settings) - set(known)):
        raise ConfigError(f"agent.settings: the {harness} harness knows {', '.join(sorted(known))}, not {unknown}")
    for name, value in settings.items():
        wanted = known[name]
        if not isinstance(value, list | tuple if wanted is list else wanted):
            raise ConfigError(f"agent.settings.{name}: the {harness} harness takes a {wanted.__name__}, not {value!r}")
    return settings


def without_mcp(agent: AgentSpec, harness: str) -> None:
    """Raises ConfigError where MCP servers are asked of a program that has no MCP."""
    if agent.mcp_servers:
        raise ConfigError(f"agent.mcp_servers: the {harness} harness has no MCP")


def without_skills(agent: AgentSpec, harness: str) -> None:
    """Raises ConfigError where skills are asked of a program that has none."""
    if agent.skills_path is not None:
        raise ConfigError(f"agent.skills_path: the {harness} harness has no skills")


def start(argv: Sequence[str], root: str | None, *, node: str | None = None) -> str:
    """A shell script that becomes the program `argv`, found below `root` first: the directory, inside, of an
    `npm install --prefix` or of a virtual environment. `root/bin` is for a Node.js of its own, too.

    `node`: the Node.js that the program needs at least, as in "22.19"; with an older one it exits with 127, as what was
    not started.
    """
    lines = [f"exec {shlex.join(argv)}"]
    if node is not None:
        lines.insert(0, _NODE_CHECK.format(program=argv[0], least=node))
    return "\n".join([*_path(root), *lines, ""])


def npm_versions(program: str, package: str, tested: tuple[str, str], root: str | None) -> Versions:
    """Of a program that npm installs, from its package's own manifest. What came another way is asked."""
    script = _NPM_VERSION.format(program=program, package=package)
    return Versions(program, "\n".join([*_path(root), script]), *tested)


def pypi_versions(program: str, package: str, tested: tuple[str, str], root: str | None) -> Versions:
    """Of a program that pip installs, from the Python that runs it."""
    script = _PYPI_VERSION.format(program=program, package=package)
    return Versions(program, "\n".join([*_path(root), script]), *tested)


def _path(root: str | None) -> list[str]:
    if root is None:
        return []
    place = shlex.quote(root)
    return [f'export PATH={place}/node_modules/.bin:{place}/bin:"$PATH"']


def skill_files(agent: AgentSpec, directory: str) -> dict[str, bytes]:
    """The content of `agent.skills_path`, a directory of this machine, by where it goes below `directory`, inside.

    It has one directory a skill, with a SKILL.md. Raises ConfigError where there is none, or one cannot be read.
    """
    if agent.skills_path is None:
        return {}
    source = Path(agent.skills_path)
    if not any(source.glob("*/SKILL.md")):
        raise ConfigError(f"agent.skills_path: {agent.skills_path!r} has no directory with a SKILL.md")
    found = sorted(path for path in source.rglob("*") if path.is_file())
    try:
        return {f"{directory}/{path.relative_to(source).as_posix()}": path.read_bytes() for path in found}
    except OSError as error:
        raise ConfigError(f"agent.skills_path: cannot read {error.filename!r}: {error.strerror}") from error
