"""Trees as streams: the same on both sides, in bounded memory, and nothing made outside whatever a stream says."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from polar_plugin.runtimes import archive


def reader(pieces: list[bytes]) -> Callable[[int], bytes]:
    stream = io.BytesIO(b"".join(pieces))
    return stream.read


def hostile(*members: tuple[str, bytes, str]) -> Callable[[int], bytes]:
    """A stream of (name, type, link target); regular files hold "evil"."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o777
            info.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"evil"))
    stream.seek(0)
    return stream.read


REG, DIR, SYM, LNK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("/victim", REG, "")],
        [(".", DIR, ""), ("../victim", REG, "")],
        [(".", DIR, ""), ("./a/../../victim", REG, "")],
        [(".", SYM, ".."), ("./victim", REG, "")],
        [(".", DIR, ""), ("./l", SYM, ".."), ("./l/victim", REG, "")],
        [(".", DIR, ""), ("./l", SYM, "../victim"), ("./l/x", REG, "")],
        [(".", DIR, ""), ("./d", DIR, ""), ("./d", SYM, ".."), ("./d/victim", REG, "")],
    ],
)
def test_a_stream_that_leads_outside_is_refused_and_nothing_there_is_touched(
    members: list[tuple[str, bytes, str]], tmp_path: Path
) -> None:
    (tmp_path / "victim").write_text("untouched")
    with pytest.raises((ValueError, OSError)):
        archive.unpack(hostile(*members), str(tmp_path / "target"))
    assert (tmp_path / "victim").read_text() == "untouched"
    assert not Path("/victim").exists()


def test_a_file_in_place_of_a_link_leaves_what_the_link_led_to(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("untouched")
    members = [(".", DIR, ""), ("./f", SYM, "../victim"), ("./f", REG, "")]
    archive.unpack(hostile(*members), str(tmp_path / "target"))
    assert (tmp_path / "victim").read_text() == "untouched"
    assert (tmp_path / "target" / "f").read_text() == "evil"


def test_hard_links_devices_and_pipes_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("untouched")
    kinds = [("./h", LNK, "../victim"), ("./c", tarfile.CHRTYPE, ""), ("./p", tarfile.FIFOTYPE, "")]
    archive.unpack(hostile((".", DIR, ""), *kinds), str(tmp_path / "target"))
    assert list((tmp_path / "target").iterdir()) == []


def test_a_stream_that_breaks_off_or_holds_nothing_is_an_error(tmp_path: Path) -> None:
    whole = b"".join(archive.content(bytes(100_000)))
    for cut in (b"", whole[:100], whole[:50_000]):
        with pytest.raises(ValueError, match=r"no whole archive|empty|ends within"):
            archive.unpack(reader([cut]), str(tmp_path / "target"))


def test_long_odd_and_undecodable_names_modes_links_and_times_come_back(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    deep = tree / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    odd = os.fsdecode(b"odd \xff\n'\"")
    (deep / odd).write_bytes(b"x")
    (deep / odd).chmod(0o4751)
    os.utime(deep / odd, (1_000_000, 1_000_000))
    (tree / "link").symlink_to("t" * 200)
    (tree / "locked").mkdir(mode=0o500)
    archive.unpack(reader(list(archive.pack(str(tree)))), str(tmp_path / "back"))
    found = tmp_path / "back" / ("d" * 120) / ("e" * 120) / odd
    assert (found.stat().st_mode & 0o7777, found.stat().st_mtime) == (0o751, 1_000_000)
    assert (tmp_path / "back" / "link").readlink() == Path("t" * 200)
    assert (tmp_path / "back" / "locked").stat().st_mode & 0o777 == 0o500


def test_memory_does_not_grow_with_what_is_packed_and_unpacked(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 400 << 20)
    program = """
import resource, sys
from polar_plugin.runtimes import archive
pieces, held = archive.pack(sys.argv[1]), b""
def read(size):
    global held
    held = held or next(pieces, b"")
    piece, held = held[:size], held[size:]
    return piece
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
archive.unpack(read, sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    argv = [sys.executable, "-c", program, str(tmp_path / "large"), str(tmp_path / "back")]
    grown = int(subprocess.run(argv, capture_output=True, check=True).stdout)
    assert (tmp_path / "back").stat().st_size == 400 << 20
    assert grown < 16 * 1024, f"grew by {grown} KiB"
