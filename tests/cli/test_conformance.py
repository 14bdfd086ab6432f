"""The page of what real agent programs do is made of what the suite saw, and of nothing else."""

from __future__ import annotations

from . import install
from .clis import CLIS
from .conformance import PAGE, Results, page
from .scenarios import SCENARIOS


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text() == page(Results.load().seen), "run `python -m tests.cli.conformance`"


def test_every_program_is_on_the_page_at_the_version_that_is_installed_and_with_every_scenario_it_is_put_through() -> (
    None
):
    seen = Results.load().seen
    assert {cli.name: (cli.version, set(cli.expects)) for cli in CLIS} == {
        name: (row["version"], set(row["scenarios"])) for name, row in seen.items()
    }


def test_what_was_seen_is_what_is_foreseen() -> None:
    for cli in CLIS:
        for name, expected in cli.expects.items():
            outcome = Results.load().seen[cli.name]["scenarios"][name]
            told = {**expected.facts(), "untrained": sorted(expected.untrained)}
            assert {key: outcome[key] for key in told} == told, (cli.name, name)


def test_every_program_is_put_through_every_scenario_or_it_is_said_why_not() -> None:
    assert {cli.package for cli in CLIS} <= install.PACKAGES.keys()
    for cli in CLIS:
        assert cli.expects.keys() | cli.lacks.keys() == SCENARIOS.keys(), f"{cli.name}: a scenario, or why it lacks it"
        assert not cli.expects.keys() & cli.lacks.keys(), cli.name
    assert len({cli.name for cli in CLIS}) == len(CLIS)
