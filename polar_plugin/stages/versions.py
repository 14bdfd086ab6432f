"""Whether the agent program in a sandbox is one that its preset was run with."""

from __future__ import annotations

import logging

from ..harnesses.base import Launch
from ..runtimes.base import Runtime

_SECONDS = 20.0
_log = logging.getLogger("polar_plugin.stages")
_told: set[tuple[str, str]] = set()
"""(program, version) of which this process has warned: once is enough, the counts tell how often."""


async def doubts(runtime: Runtime, launch: Launch) -> tuple[str, ...]:
    """What to count: "harness_version_untested", "harness_version_unknown", or nothing.

    An untested version is run all the same: most changes of a program are none to us. Raises SandboxError.
    """
    versions = launch.versions
    if versions is None:
        return ()
    asked = await runtime.exec(versions.ask, env=launch.env, timeout=_SECONDS)
    version = asked.stdout.decode(errors="replace").strip()
    if version and versions.tested(version):
        return ()
    if (versions.program, version) not in _told:
        _told.add((versions.program, version))
        _log.warning(
            "%s: %s; its preset was run with %s",
            versions.program,
            f"version {version} is untested" if version else "cannot tell its version",
            versions.newest if versions.oldest == versions.newest else f"{versions.oldest} to {versions.newest}",
        )
    return ("harness_version_untested" if version else "harness_version_unknown",)
