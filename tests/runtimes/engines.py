"""The Docker engine and the images that tests run: started and made by `tests/runtimes/docker.sh`."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

IMAGE = "polar-test-base:latest"


@cache
def missing() -> str:
    """Why no container can be run here; "" where one can."""
    if shutil.which("docker") is None:
        return "Docker is not installed: make test-docker"
    told = subprocess.run(("docker", "image", "inspect", IMAGE), capture_output=True, text=True, check=False)
    return "" if told.returncode == 0 else f"{told.stderr.strip()}: make test-docker"


def docker(*arguments: str) -> str:
    """What the engine's own client says."""
    return subprocess.run(("docker", *arguments), capture_output=True, text=True, check=True).stdout.strip()


def containers(label: str) -> list[str]:
    """Names of the containers, running or not, that have this label, as in "polar.session=s"."""
    return docker("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}").split()
