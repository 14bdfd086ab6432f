"""Programs that run inside an image that need not have a Python of its own, by the interpreter of the kit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import SandboxError
from .base import ExecResult
from .kit import Kit

KIT = "/run/polar/kit"
PROBE = """
import json, os, sys
os.makedirs(sys.argv[1], exist_ok=True)
open("/.polar", "w").close()
os.unlink("/.polar")
shells = [shell for shell in ("/bin/bash", "/usr/bin/bash", "/bin/sh") if os.path.exists(shell)]
json.dump({"env": dict(os.environ), "shell": (shells or ["/bin/sh"])[0]}, sys.stdout)
"""
UNPACK = """
import os, sys
from polar_plugin.runtimes import archive
source, target = sys.argv[1:]
os.makedirs(os.path.dirname(target) or "/", exist_ok=True)
pieces, rest = archive.pack(source), b""
def read(size):
    global rest
    rest = rest or next(pieces, b"")
    taken, rest = rest[:size], rest[size:]
    return taken
try:
    archive.unpack(read, target)
except (OSError, ValueError) as error:
    sys.exit(str(error))
"""
PACK = """
import sys
from polar_plugin.runtimes import archive
try:
    for piece in archive.pack(sys.argv[1]):
        sys.stdout.buffer.write(piece)
except OSError as error:
    sys.exit(str(error))
"""

_OURS = ("APPTAINER_", "SINGULARITY_", "PROMPT_COMMAND", "PS1", "PWD", "OLDPWD", "SHLVL", "HOME", "TERM", "LC_CTYPE")


@dataclass(frozen=True, slots=True)
class Interior:
    """What `PROBE` found inside."""

    env: Mapping[str, str]
    """The environment that the image sets."""
    shell: str


def interior(probed: ExecResult) -> Interior:
    """Raises SandboxError, with what was said instead."""
    try:
        told = json.loads(probed.stdout)
    except ValueError as error:
        raise SandboxError(probed.text.strip()[-2000:] or f"exit code {probed.exit_code}") from error
    env = {name: value for name, value in told["env"].items() if not name.startswith(_OURS)}
    return Interior(env, told["shell"])


def interpreter(kit: Kit) -> list[str]:
    """Its command line, where the kit is mounted at `KIT`."""
    loaded = [f"{KIT}/{kit.loader}", "--library-path", f"{KIT}/libraries"] if kit.loader else []
    return [*loaded, f"{KIT}/bin/python", "-I", "-S", "-X", "utf8"]


def supervisor(kit: Kit) -> list[str]:
    """The command line of `forward`."""
    (found,) = kit.directory.rglob("forward.py")
    return [*interpreter(kit), f"{KIT}/{found.relative_to(kit.directory)}"]
