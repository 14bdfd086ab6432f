"""Real agent programs, installed from their registries, through the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_plugin.records import Status

from . import install
from .clis import CLI, CLIS
from .conformance import Results
from .running import run
from .scenarios import SCENARIOS

pytestmark = [pytest.mark.anyio, pytest.mark.cli]


def _cases() -> list[object]:
    return [
        pytest.param(cli, name, id=f"{cli.name.lower().replace(', ', '-').replace(' ', '_')}-{name}")
        for cli in CLIS
        for name in cli.expects
    ]


@pytest.mark.parametrize(("cli", "name"), _cases())
async def test_a_real_agent_program_does_its_task_and_gives_one_exact_trace_a_conversation(
    cli: CLI, name: str, tmp_path: Path, conformance: Results | None
) -> None:
    if not install.installed(cli.package):
        pytest.skip(f"not installed: python -m tests.cli.install {cli.package}")
    ran = await run(cli, SCENARIOS[name], tmp_path)
    assert SCENARIOS[name].seen in ran.model.prompts[0]
    expected, counts = cli.expects[name], ran.trajectory.counts
    told = (ran.trajectory.failure, ran.model.asked, ran.ignored, dict(counts))
    assert {key: ran.outcome[key] for key in expected.facts()} == expected.facts(), told
    assert not ran.misjudged, (ran.misjudged, told)
    assert ran.ignored <= cli.ignored, told
    assert not ran.elsewhere, told
    assert not [name for name in counts if name.startswith("harness_version")], told
    assert counts["malformed_calls"] == 0
    assert counts["trained_tokens"] == sum(trace.trained for trace in ran.trajectory.traces)
    assert counts.get("untrained_unexplained", 0) == 0
    if expected.status is not Status.INFRA_ERROR:  # MergeError is one: the invariants of merge.check held
        assert ran.trajectory.failure is None or ran.trajectory.failure.boundary == "agent"
    if conformance is not None:
        conformance.add(cli, name, ran)
