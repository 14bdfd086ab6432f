"""File trees as tar streams: read and written piece by piece, in memory that does not grow with them.

Used on both sides of a sandbox's wall, so it needs the standard library alone. What comes out of a sandbox was written
by an agent: `unpack` makes nothing outside its target, whatever the stream says.
"""

# ruff: noqa: PTH101, PTH102, PTH108, PTH115, PTH118, PTH123, PTH208, PTH211 - runs inside too, where each import costs

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, cast

PIECE = 1 << 18
"""Bytes that are read, written and sent at once."""


def pack(source: str) -> Iterator[bytes]:
    """The stream of a file, link or directory, whose members are "." and "./NAME"; sockets and devices are left out.

    Raises OSError where something cannot be read.
    """
    pieces: list[bytes] = []
    size = 0
    for piece in _members(source, "."):
        pieces.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(pieces)
            pieces, size = [], 0
    yield b"".join((*pieces, bytes(2 * tarfile.BLOCKSIZE)))


def content(data: bytes) -> Iterator[bytes]:
    """The stream of a file that holds `data`."""
    info = tarfile.TarInfo(".")
    info.size, info.mode = len(data), 0o644
    yield _header(info)
    yield from (data[at : at + PIECE] for at in range(0, len(data), PIECE))
    yield bytes(-len(data) % tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE)


def directories(paths: dict[str, tuple[int, int, int]]) -> bytes:
    """The stream of empty directories: path to (mode, uid, gid)."""
    headers: list[bytes] = []
    for path, (mode, uid, gid) in paths.items():
        info = tarfile.TarInfo(path.lstrip("/"))
        info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, uid, gid
        headers.append(_header(info))
    return b"".join((*headers, bytes(2 * tarfile.BLOCKSIZE)))


def _members(path: str, name: str) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    found = os.lstat(path)
    info.mode, info.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if stat.S_ISLNK(found.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        yield _header(info)
    elif stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
        yield _header(info)
        for child in sorted(os.listdir(path)):
            yield from _members(os.path.join(path, child), f"{name}/{child}")
    elif stat.S_ISREG(found.st_mode):
        info.size = found.st_size
        yield _header(info)
        yield from _padded(path, found.st_size)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")


def _padded(path: str, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes, zeros where the file has shrunk, and zeros to the end of the block."""
    left = size
    with open(path, "rb", buffering=0) as stream:
        while left and (piece := stream.read(min(left, PIECE))):
            left -= len(piece)
            yield piece
    while left:
        yield bytes(min(left, PIECE))
        left -= min(left, PIECE)
    yield bytes(-size % tarfile.BLOCKSIZE)


class _Source:
    """What `tarfile` reads a stream from, with a bound on how much."""

    def __init__(self, read: Callable[[int], bytes], limit: int | None) -> None:
        self._read, self._left = read, limit

    def read(self, size: int) -> bytes:
        """What there is: waiting for more than the archive has would be for ever, as its sender waits for us."""
        piece = self._read(size)
        if self._left is not None:
            self._left -= len(piece)
            if self._left < 0:
                raise ValueError("it is larger than allowed")
        return piece


def unpack(read: Callable[[int], bytes], target: str, *, limit: int | None = None) -> None:
    """Make at `target` what the stream holds: a file or link in place of what is there, a directory over it.

    `read(n)` gives up to n bytes, b"" at the end. Modes are kept but for set-uid bits, owners are not. A stream that
    names a place outside, or goes through a link, more than `limit` bytes, or an end that comes too early is a
    ValueError; what cannot be written is an OSError. Directories get their modes last.
    """
    modes: list[tuple[str, int]] = []
    empty = True
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Source(read, limit)), mode="r|", errorlevel=1) as stream:
            for member in stream:
                empty = False
                _make(stream, member, _place(target, member.name), modes)
    except tarfile.TarError as error:
        raise ValueError(f"the stream is no whole archive ({error})") from error
    finally:
        for path, mode in reversed(modes):
            with contextlib.suppress(OSError):
                os.chmod(path, mode)
    if empty:
        raise ValueError("the stream is empty")


def _place(target: str, name: str) -> str:
    """Where a member goes; every directory on the way is one, and no link."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise ValueError(f"the stream names a place outside: {name!r}")
    path = target
    for part in parts:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise ValueError(f"the stream goes through what is no directory: {name!r}")
        path = os.path.join(path, part)
    return path


def _make(stream: tarfile.TarFile, member: tarfile.TarInfo, path: str, modes: list[tuple[str, int]]) -> None:
    if member.isdir():
        if not _is_directory(path):
            _clear(path)
            os.mkdir(path, 0o700)
        os.chmod(path, member.mode & 0o1777 | 0o700)
        modes.append((path, member.mode & 0o1777))
    elif member.issym():
        _clear(path)
        os.symlink(member.linkname, path)
    elif member.isreg():
        _clear(path)
        _write(stream, member, path)


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _clear(path: str) -> None:
    """A directory in the way of a file stays, and is an error, as with `cp`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write(stream: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    source = stream.extractfile(member)
    assert source is not None
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with source, os.fdopen(fd, "wb", buffering=0) as sink:
        shutil.copyfileobj(source, sink, PIECE)
        if sink.tell() != member.size:
            raise ValueError(f"the stream ends within {member.name!r}")
        os.fchmod(fd, member.mode & 0o1777)
        os.utime(fd, (member.mtime, member.mtime))
