"""A harness root: a real agent program from its registry, in sandboxes that have no Node.js of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar_plugin.records import Status

from ..runtimes import apptainer, engines
from ..runtimes.boxes import sandbox
from . import install, running
from .clis import CLIS
from .scenarios import SCENARIOS

ISOLATIONS = [
    "bubblewrap",
    pytest.param("instance", marks=pytest.mark.apptainer),
    pytest.param("docker", marks=pytest.mark.docker),
]
pytestmark = [pytest.mark.anyio, pytest.mark.cli]
(PI,) = (
    cli for cli in CLIS if cli.package == "pi" and "openai-completions" in str(cli.settings or "openai-completions")
)


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if not install.installed("pi"):
        pytest.skip("not installed: python -m tests.cli.install pi")
    if request.node.get_closest_marker("apptainer") and (reason := apptainer.missing()):
        pytest.skip(reason)
    if request.node.get_closest_marker("docker") and (reason := engines.missing()):
        pytest.skip(reason)


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_program_runs_from_the_root_which_is_read_only(isolation: str, tmp_path: Path) -> None:
    root = str(install.CACHE)
    async with sandbox(isolation=isolation, root=tmp_path, harness_root=root) as box:
        path = f"PATH={root}/pi/node_modules/.bin:{root}/pi/bin:$PATH"
        told = await box.exec(f"{path}; pi --version", timeout=120)
        assert (told.exit_code, told.text.strip()) == (0, install.version_of("pi"))
        assert not (await box.exec(f"echo > {root}/x")).ok
        if isolation != "bubblewrap":
            assert not (await box.exec("node --version")).ok  # the image has none


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_preset_finds_its_program_and_its_tested_version_there(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = running.payload

    def payload(*arguments: Any) -> dict[str, Any]:
        task = told(*arguments)
        settings = {name: value for name, value in PI.settings.items() if name != "root"}
        runtime: dict[str, Any] = {"harness_root": str(install.CACHE), "kwargs": {"root": str(tmp_path)}}
        if isolation == "instance":
            runtime |= {"backend": "apptainer", "image": str(apptainer.IMAGE)}
            runtime["kwargs"]["program"] = apptainer.program()
        elif isolation == "docker":
            runtime |= {"backend": "docker", "image": engines.IMAGE, "kwargs": {}}
        agent = {"harness": "pi", "model_name": "rl-model", "settings": settings}
        return {**task, "agent": agent, "runtime": runtime, "evaluator": {"strategy": "session_completed"}}

    monkeypatch.setattr(running, "payload", payload)
    ran = await running.run(PI, SCENARIOS["basic"], tmp_path)
    assert ran.trajectory.status is Status.COMPLETED, ran.trajectory.failure
    assert len(ran.trajectory.traces) == 1
    assert not [name for name in ran.trajectory.counts if name.startswith("harness_version")]
