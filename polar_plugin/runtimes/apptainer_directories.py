"""An attempt's directories on this machine, and what of them is seen inside, and where."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import SandboxError
from ..records import RuntimeSpec
from .apptainer_argv import START_SCRIPT, Box, Way
from .apptainer_container import Relay
from .apptainer_inside import KIT
from .apptainer_options import ApptainerOptions
from .bubblewrap import CONTROL, HOME, Mounts
from .kit import Kit

SOCKET = f"{CONTROL}/proxy.sock"
GIVEN = f"{CONTROL}/in"
WORKSPACE = "/workspace"
_NAMES = ("overlay", "home", "tmp", "workspace", "in", "start")


def make(directory: Path, labels: Mapping[str, str]) -> None:
    """Raises SandboxError."""
    try:
        directory.mkdir(parents=True, mode=0o700)
        for name in _NAMES:
            (directory / name).mkdir()
        (directory / "tmp").chmod(0o1777)
        script = directory / "start" / "script"
        script.write_text("#!/bin/sh\nexit 0\n")
        script.chmod(0o755)
        (directory / "labels.json").write_text(json.dumps(dict(labels)))
    except OSError as error:
        raise SandboxError(f"cannot make the attempt's directories: {error}") from error


def box(
    directory: Path, spec: RuntimeSpec, options: ApptainerOptions, way: Way, *, kit: Kit, relay: Relay | None
) -> Box:
    """`relay`: what commands of `mode: one_shot` relay by themselves."""
    writable = {"/tmp": directory / "tmp", HOME: directory / "home"}
    if spec.workdir is None:
        writable[WORKSPACE] = directory / "workspace"
    shown = {GIVEN: directory / "in", KIT: kit.directory}
    if options.mode == "instance":
        shown[START_SCRIPT] = directory / "start" / "script"
    elif relay is not None:
        shown[SOCKET] = relay.socket
    if spec.harness_root is not None:
        shown[spec.harness_root] = Path(spec.harness_root)
    shown |= dict(_bind(bind) for bind in options.ro_binds)
    image = Path(str(spec.image)).absolute()
    if way.writable == "copy":
        image = directory / "image"
        _make_places(image, {**writable, **shown})
    return Box(
        image=str(image),
        mounts=Mounts(writable, shown),
        share_network=spec.network == "host",
        flags=(*options.flags, *(("--nv",) if spec.gpus else ())),
        as_root=os.getuid() == 0,
        overlay=directory / "overlay",
    )


def _bind(text: str) -> tuple[str, Path]:
    host, _, inside = text.partition(":")
    return inside or host, Path(host)


def _make_places(image: Path, mounts: Mapping[str, Path]) -> None:
    """What is mounted over must be there in an image that is written to itself. Links of the image are not followed."""
    for place, host in mounts.items():
        parts = place.strip("/").split("/")
        for depth in range(1, len(parts)):
            _make_place(image.joinpath(*parts[:depth]), is_file=False)
        _make_place(image.joinpath(*parts), is_file=not host.is_dir())


def _make_place(path: Path, *, is_file: bool) -> None:
    if path.is_symlink():
        path.unlink()
    if is_file:
        path.touch()
    else:
        path.mkdir(exist_ok=True)
