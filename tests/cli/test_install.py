"""The installer of agent CLIs, over a stand-in of npm: what it does not install, it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_plugin import harness_root, plugins
from polar_plugin.cli import app
from polar_plugin.errors import ConfigError, InstallError
from polar_plugin.harness_root import Wanted, wanted
from polar_plugin.harnesses.packages import NODE_VERSION, PACKAGES

from . import install

PI = wanted("pi")


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is first on PATH; write a program `npm` into it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def write(directory: Path, script: str) -> None:
    """`$root` is where npm is told to install, `$package` and `$version` what; each run is a line of `log`."""
    (directory / "npm").write_text(
        f"""#!/bin/sh
echo "$(node --version 2>/dev/null) $*" >> {directory}/log
while [ "$1" != --prefix ]; do shift; done
root=$2; package=${{3%@*}}; version=${{3##*@}}
{script}
"""
    )
    (directory / "npm").chmod(0o755)


INSTALLS = """
mkdir -p $root/node_modules/$package $root/node_modules/.bin
echo "{\\"version\\": \\"$version\\"}" > $root/node_modules/$package/package.json
printf '#!/bin/sh\\necho v22.23.3\\n' > $root/node_modules/.bin/node
printf '#!/bin/sh\\n' > $root/node_modules/.bin/pi
chmod +x $root/node_modules/.bin/*
"""


def test_it_installs_the_version_under_the_node_that_it_needs_and_asks_no_registry_again(npm: Path) -> None:
    write(npm, INSTALLS)
    root = npm / "root"
    directory = harness_root.install(PI, root)
    assert directory == root / f"pi@{PI.version}"
    assert (directory / "bin" / "node").exists()
    assert (root / "pi").readlink() == Path(directory.name)
    (npm / "npm").unlink()
    assert harness_root.install(PI, root) == directory
    node, pi = (npm / "log").read_text().splitlines()
    assert node.endswith(f"node@{NODE_VERSION}")
    assert pi.startswith("v22.23.3 ")  # npm itself ran under that Node.js, by which it chooses
    assert pi.endswith(f"{PI.package.package}@{PI.version}")


def test_the_version_that_was_installed_last_is_the_one_that_the_name_leads_to(npm: Path) -> None:
    write(npm, INSTALLS)
    for version in ("1.6.0", "1.7.0", "1.6.0"):
        harness_root.install(Wanted("pi", version), npm)
        assert (npm / "pi").readlink() == Path(f"pi@{version}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("npm error code ETARGET", "no such version"),
        ("npm error 404 Not Found - E404", "no such version"),
        ("npm error code ENOTFOUND", "cannot be reached"),
        ("npm error code ECONNREFUSED", "cannot be reached"),
        ("npm error ENOSPC: no space left on device", "disk is full"),
        ("something else", "something else"),
    ],
)
def test_what_the_registry_said_is_told_with_what_it_means(npm: Path, said: str, told: str) -> None:
    write(npm, f"echo '{said}' >&2; exit 1")
    ran = CliRunner().invoke(app, ["harness", "install", "pi", "--root", str(npm / "root")], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert told in ran.output
    assert said in ran.output
    assert not PI.installed(npm / "root")


def test_a_version_that_npm_took_instead_is_said(npm: Path) -> None:
    write(npm, INSTALLS.replace("$version", "0.1.0"))
    with pytest.raises(InstallError, match=r"npm installed node 0\.1\.0, not 22"):
        harness_root.install(PI, npm)


def test_an_installation_that_was_broken_off_is_made_again(npm: Path) -> None:
    write(npm, INSTALLS)
    left = PI.directory(npm) / "node_modules" / "half"
    left.mkdir(parents=True)
    assert not PI.installed(npm)
    harness_root.install(PI, npm)
    assert not left.exists()


def test_without_npm_it_says_what_is_missing(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(npm))
    with pytest.raises(InstallError, match=r"comes from npm: install Node\.js"):
        harness_root.install(PI, npm)


@pytest.mark.parametrize(
    ("text", "told"), [("nonsense", "claude_code, codex"), ("pi@latest", r"written out, as in pi@\d"), ("shell", "pi")]
)
def test_a_name_or_version_that_cannot_be_is_refused_with_what_can(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        wanted(text)


def test_a_version_outside_of_the_tested_ones_is_installed_and_warned_of(npm: Path) -> None:
    write(npm, INSTALLS)
    arguments = ["harness", "install", "pi@99.0.1", "pi", "--root", str(npm / "root")]
    ran = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert f"warn pi 99.0.1 is untested; its preset was run with {PI.version}" in ran.output
    assert Wanted("pi", "99.0.1").installed(npm / "root")
    assert ran.output.count("untested") == 1


def test_every_preset_that_comes_from_a_registry_has_a_package_and_a_whole_tested_version() -> None:
    assert PACKAGES.keys() == plugins.HARNESSES.keys() - {"shell"}
    for name in PACKAGES:
        assert wanted(name).version.count(".") == 2
        assert wanted(name).tested


def test_the_suites_installer_is_the_librarys(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "CACHE", npm / "cache")
    write(npm, INSTALLS)
    assert install.main(["pi"]) == 0
    assert install.installed("pi")
    assert install.root_of("pi") == npm / "cache" / f"pi@{install.version_of('pi')}"
