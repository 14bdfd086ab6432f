"""The installer of agent CLIs, over a stand-in of npm: what it does not install, it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import install

PI = install.PACKAGES["pi"]


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is first on PATH; write a program `npm` into it."""
    monkeypatch.setattr(install, "CACHE", tmp_path / "cache")
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


def test_it_installs_the_pinned_version_under_the_node_that_it_needs_and_only_once(npm: Path) -> None:
    write(npm, INSTALLS)
    root = install.install("pi")
    assert (root, root.name) == (install.root_of("pi"), f"pi@{PI.version}")
    assert (root / "bin" / "node").exists()
    assert install.install("pi") == root
    node, pi = (npm / "log").read_text().splitlines()
    assert node.endswith(f"node@{install.NODE.version}")
    assert pi.startswith("v22.23.3 ")  # npm itself ran under Node.js 22, by which it chooses
    assert pi.endswith(f"{PI.package}@{PI.version}")


@pytest.mark.parametrize("said", ["npm error code ETARGET", "npm error 404 Not Found - E404"])
def test_a_version_that_the_registry_no_longer_has_is_said(
    npm: Path, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(npm, f"echo '{said}' >&2; exit 1")
    assert install.main(["pi"]) == 1
    told = capsys.readouterr().err
    assert "no longer" in told
    assert said in told
    assert not install.installed("pi")


def test_a_version_that_npm_took_instead_is_said(npm: Path) -> None:
    write(npm, INSTALLS.replace("$version", "0.1.0"))
    with pytest.raises(install.InstallError, match=r"npm installed node 0\.1\.0, not 22"):
        install.install("pi")


def test_an_installation_that_was_broken_off_is_made_again(npm: Path) -> None:
    write(npm, INSTALLS)
    left = install.root_of("pi") / "node_modules" / "half"
    left.mkdir(parents=True)
    assert not install.installed("pi")
    install.install("pi")
    assert not left.exists()


def test_without_npm_it_says_what_is_missing(npm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(npm))
    with pytest.raises(install.InstallError, match=r"comes from npm: install Node\.js"):
        install.install("pi")


def test_pins_are_whole_versions() -> None:
    for package in install.PACKAGES.values():
        assert json.loads(f'"{package.version}"').count(".") == 2
