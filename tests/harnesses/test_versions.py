"""Which version of an agent program is in the sandbox, and whether its preset was ever run with it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from polar_plugin import plugins
from polar_plugin.harnesses.base import Launch, LaunchContext, Versions
from polar_plugin.runtimes.base import ExecResult
from polar_plugin.stages import versions
from polar_plugin.stages.attempt import Budgets, run_attempt

from ..runtimes.boxes import sandbox
from ..stages.doubles import MemoryHarness, MemorySessions, World, attempt, parts, stages
from .test_presets import PROGRAMS, launched

pytestmark = pytest.mark.anyio
NPM = sorted(PROGRAMS)


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_told", set())


def newest(name: str) -> str:
    return plugins.resolve(name, plugins.HARNESSES, "harness").tested[1]


def installed(root: Path, name: str, version: str | None, says: str = "") -> None:
    """A stand-in as npm would install it: a link to a script of a package with a manifest."""
    package = root / "node_modules" / "package"
    (package / "dist").mkdir(parents=True)
    (package / "dist" / "cli.js").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{says}"\n')
    (package / "dist" / "cli.js").chmod(0o755)
    (package / "dist" / "package.json").write_text('{"type": "module"}')
    if version is not None:
        manifest = {"name": launched(name).versions.ask.split('"name" *: *"')[1].split('"')[0], "version": version}
        (package / "package.json").write_text(json.dumps(manifest))
    (root / "node_modules" / ".bin").mkdir()
    (root / "node_modules" / ".bin" / PROGRAMS[name]).symlink_to("../package/dist/cli.js")


async def doubts(name: str, root: Path) -> tuple[str, ...]:
    """What the attempt would count, from a real sandbox."""
    launch = launched(name, settings={"root": str(root)})
    async with sandbox(network="none", kwargs={"ro_binds": [str(root)]}) as box:
        return await versions.doubts(box, launch)


@pytest.mark.parametrize("name", NPM)
async def test_a_tested_version_raises_no_doubt_and_another_does(name: str, tmp_path: Path) -> None:
    for version, expected in ((newest(name), ()), ("0.0.1", ("harness_version_untested",))):
        installed(tmp_path / version, name, version)
        assert await doubts(name, tmp_path / version) == expected


async def test_a_program_that_npm_did_not_install_is_asked_itself(tmp_path: Path) -> None:
    for says, expected in (
        (f"{newest('claude_code')} (Claude Code)", ()),
        ("99.0.0 (Claude Code)", ("harness_version_untested",)),
        ("", ("harness_version_unknown",)),
    ):
        root = tmp_path / str(len(says))
        installed(root, "claude_code", None, says)
        assert await doubts("claude_code", root) == expected


async def test_of_a_program_in_python_its_own_interpreter_is_asked(tmp_path: Path) -> None:
    """The stand-in's interpreter has no such package, as pip would have installed it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mini").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "bin" / "mini").chmod(0o755)
    assert await doubts("mini_swe_agent", tmp_path) == ("harness_version_unknown",)
    package = tmp_path / "site" / "mini_swe_agent-0.0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mini-swe-agent\nVersion: 0.0.1\n")
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec python3 "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "bin" / "mini").write_text(f"#!{tmp_path}/bin/python\n")
    assert await doubts("mini_swe_agent", tmp_path) == ("harness_version_untested",)


async def test_it_is_counted_on_the_trajectory_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Harness(MemoryHarness):
        def launch(self, context: LaunchContext) -> Launch:
            return replace(super().launch(context), versions=Versions("mender", "mender --version", "1.2.0", "1.4.0"))

    world = World(result=ExecResult(0, b"1.10.0\n", b"", 0.0))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trajectory = await run_attempt(
                attempt(),
                parts=parts(world, harness=Harness()),
                sessions=MemorySessions(world),
                stages=stages(),
                budgets=Budgets(),
            )
            assert trajectory.counts["harness_version_untested"] == 1
    (record,) = caplog.records
    assert record.message == "mender: version 1.10.0 is untested; its preset was run with 1.2.0 to 1.4.0"


@pytest.mark.parametrize(
    ("version", "tested"), [("1.2.0", True), ("1.3.99", True), ("1.4.0-beta.2", True), ("1.4.1", False), ("1", False)]
)
def test_versions_are_compared_by_their_numbers(version: str, tested: bool) -> None:
    assert Versions("x", "", "1.2.0", "1.4.0").tested(version) is tested
