"""The kit: an interpreter with all it needs, as one directory that works in any Linux image of this architecture.

The programs that run inside a container (`inside`) need a Python, and images need not have one. So this interpreter,
its loader, its libraries and the modules that those programs import are copied once; mounted read-only, they run by
their own loader in an image with another C library, or with none.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode

from ..config import cache_directory
from ..errors import SandboxError
from . import archive, forward, inside
from .supervised import python

_PROGRAMS = (archive.__file__, forward.__file__, inside.__file__)
_ENTRY = "from polar_plugin.runtimes.inside import main; main()"
_STDLIB = Path(sys.platlibdir, Path(sysconfig.get_path("stdlib")).name)
_DISCOVER = """
import json, sys
sys.path.append(sys.argv[1])
from polar_plugin.runtimes import archive, forward, inside
import encodings.ascii, encodings.latin_1, encodings.utf_8, resource
with open("/proc/self/maps") as stream:
    mapped = sorted({line.split(None, 5)[5].strip() for line in stream if "/" in line})
print(json.dumps([[m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)], mapped]))
"""


@dataclass(frozen=True, slots=True)
class Kit:
    """The directory on this machine, and what is in it."""

    directory: Path
    loader: str | None
    """The dynamic loader's file name; None where the interpreter is static."""

    def argv(self, place: str, *arguments: str) -> list[str]:
        """The command line that runs a program of `inside`, where the kit is mounted at `place`."""
        loaded = [f"{place}/{self.loader}", "--library-path", f"{place}/libraries"] if self.loader else []
        return [*loaded, f"{place}/bin/supervisor", "-I", "-S", "-X", "utf8", "-c", _ENTRY, *arguments]


@cache
def installed() -> Kit:
    """The kit of this interpreter, made in the cache directory where it is not there yet. Raises SandboxError."""
    try:
        directory = cache_directory() / "kits" / _version()
        if not directory.exists():
            _make(directory)
        return Kit(directory, (directory / "loader").read_text() or None)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise SandboxError(f"cannot copy this interpreter for use inside containers: {error}") from error


def _version() -> str:
    """Another interpreter, or another version of the programs, is another kit."""
    found = python().stat()
    told = hashlib.sha256(f"1 {python()} {found.st_size} {found.st_mtime_ns} {sys.version}".encode())
    for program in (*_PROGRAMS, __file__):
        told.update(Path(program).read_bytes())
    return told.hexdigest()[:16]


def _make(directory: Path) -> None:
    """Beside its place, then moved there: whoever comes second finds a whole one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        new = Path(name, "kit")
        _copy_programs(new / _STDLIB)
        loader = _copy_interpreter(new)
        (new / "loader").write_text(loader or "")
        unchecked = PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(new / _STDLIB, quiet=2, invalidation_mode=unchecked, stripdir=str(new))
        _readable(new)
        if not directory.exists():
            new.rename(directory)


def _copy_programs(stdlib: Path) -> None:
    package = stdlib / "polar_plugin" / "runtimes"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    for program in _PROGRAMS:
        shutil.copy(program, package)


def _copy_interpreter(new: Path) -> str | None:
    """Interpreter, modules and libraries, as a run of the programs uses them; the loader's name."""
    argv = [str(python()), "-I", "-S", "-c", _DISCOVER, str(new / _STDLIB)]
    told = subprocess.run(argv, check=True, capture_output=True, env={}).stdout
    modules, mapped = (list(map(Path, found)) for found in json.loads(told))
    _copy(python(), new / "bin" / "python")
    (new / "bin" / "supervisor").hardlink_to(new / "bin" / "python")  # many a program kills what is called python
    own = Path(sysconfig.get_path("stdlib")).resolve()
    for module in modules:
        if module.suffix == ".so":
            _copy(module, new / _STDLIB / "lib-dynload" / module.name)
        elif module.resolve().is_relative_to(own):
            _copy(module, new / _STDLIB / module.resolve().relative_to(own))
    (new / _STDLIB / "lib-dynload").mkdir(exist_ok=True)
    return _copy_libraries(new, [path for path in mapped if path not in modules])


def _copy_libraries(new: Path, mapped: Sequence[Path]) -> str | None:
    loader: str | None = None
    for library in _libraries(mapped):
        if library.name.startswith(("ld-linux", "ld-musl", "ld64", "ld.so")):
            loader = library.name
            _copy(library, new / loader)
        else:
            _copy(library, new / "libraries" / library.name)
    return loader


def _libraries(mapped: Sequence[Path]) -> Iterator[Path]:
    """Under the names that they are asked for by: a mapped file may be what such a name links to."""
    for path in mapped:
        stem, found, _ = path.name.partition(".so")
        if found and path.is_file():
            yield from (name for name in path.parent.glob(f"{stem}.so*") if name.samefile(path))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    shutil.copymode(source, target)


def _readable(directory: Path) -> None:
    """By whoever commands run as."""
    for folder, _, files in os.walk(directory):
        Path(folder).chmod(0o755)
        for name in files:
            path = Path(folder, name)
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
