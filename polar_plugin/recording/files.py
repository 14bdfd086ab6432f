"""Recordings on disk: appended to a line at a time, read as a stream."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecordingError
from ..records import Completion, CompletionSession, Delivery, JSONObject
from .forms import (
    CompletionReader,
    End,
    Header,
    completion_json,
    delivery_json,
    encode,
    end_json,
    end_of,
    header_json,
    header_of,
)

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording, read."""

    header: Header
    session: CompletionSession
    end: End | None
    """None where the session's end was not recorded: a crash."""
    torn: int
    """1 where a crash cut the file short, so that what its last line began to say is not here; else 0."""


class Recorder:
    """Writes one session as it happens; a context manager. For one thread at a time.

    Each line reaches the operating system before the call returns (with `fsync` the disk), so a crash costs at most the
    line being written. All methods raise RecordingError.
    """

    def __init__(self, path: Path, header: Header, *, fsync: bool = False) -> None:
        """Makes `path`, which must not exist yet, and its folders."""
        self._written: dict[str, Completion] = {}
        self._lines = LineWriter(path, fsync=fsync)
        try:
            self._lines.write(header_json(header))
        except RecordingError:
            self._lines.close()
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def completion(self, completion: Completion, delivery: Delivery | None = Delivery.PENDING) -> None:
        """Append a completion; `delivery` None leaves it unsaid, which counts as delivered."""
        parent = self._written.get(completion.parent or "")
        self._lines.write(completion_json(completion, parent, delivery))
        self._written[completion.id] = completion

    def delivery(self, completion_id: str, delivery: Delivery) -> None:
        """Append what became of an answer."""
        self._lines.write(delivery_json(completion_id, delivery))

    def end(self, end: End) -> None:
        self._lines.write(end_json(end))

    def close(self) -> None:
        self._lines.close()


def record(path: Path, session: CompletionSession, header: Header | None = None, end: End | None = None) -> None:
    """Write a whole session at once, in place of what `path` held; readers see the old file or the new one.

    Without `header` the session's own ids and metadata are written. Raises RecordingError.
    """
    header = header or Header(session.session_id, session.task_id, metadata=session.metadata)
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        with Recorder(unfinished, header) as recorder:
            for completion in session.completions:
                recorder.completion(completion, session.delivery.get(completion.id))
            recorder.end(end or End(session_counts=session.counts))
        with _told(path):
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: Path) -> Recording:
    """Raises RecordingError with the file and line."""
    header, end, torn = Header(""), None, 0
    completions: list[Completion] = []
    delivery: dict[str, Delivery] = {}
    reader = CompletionReader()
    for number, line in read_lines(path):
        if line is None:
            torn += 1
            continue
        with _told(path, number):
            if number == 1:
                header = header_of(line)
            elif line["type"] == "completion":
                completions.append(reader.read(line))
            elif line["type"] == "end":
                end = end_of(line)
            if "delivery" in line:
                delivery[line["id"]] = Delivery(line["delivery"])
    session = CompletionSession(
        session_id=header.session_id,
        completions=tuple(completions),
        delivery=delivery,
        task_id=header.task_id,
        metadata={**({"end_of_turn": list(header.end_of_turn)} if header.end_of_turn else {}), **header.metadata},
        counts=end.session_counts if end else dict[str, int](),
    )
    return Recording(header, session, end, torn)


def load_header(path: Path) -> Header:
    """The first line alone. Raises RecordingError."""
    number, line = next(read_lines(path))
    with _told(path, number):
        return header_of(line or {})


def recordings(path: Path) -> list[Path]:
    """`path` itself, or the recordings that lie in it where it is a directory. Raises RecordingError where none is."""
    if not path.exists():
        raise RecordingError(
            f"{path}: no such file or directory; sessions are recorded where recording.directory points, one file each"
        )
    if not path.is_dir():
        return [path]
    found = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIXES) and not one.name.startswith("."))
    if not found:
        raise RecordingError(f"{path}: has no recordings in it ({', '.join(SUFFIXES)})")
    return found


def name_of(path: Path) -> str:
    """A recording's file name without its suffix: the session id, where nobody renamed the file."""
    return next((path.name.removesuffix(one) for one in SUFFIXES if path.name.endswith(one)), path.stem)


def iter_completions(path: Path) -> Iterator[Completion]:
    """The completions one by one, each as soon as its line is read. Raises RecordingError."""
    reader = CompletionReader()
    for number, line in read_lines(path):
        with _told(path, number):
            if line and number == 1:
                header_of(line)
            elif line and line["type"] == "completion":
                yield reader.read(line)


def read_lines(path: Path) -> Iterator[tuple[int, JSONObject | None]]:
    """(number from 1, object) a line; None for a last line that a crash cut short.

    Raises RecordingError on a file that cannot be opened, has no first line, or has a bad line that is not the last.
    """
    number = 0
    for number, raw in enumerate(_raw_lines(path), 1):
        line: Any = None
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            if raw.endswith(b"\n") or number == 1:
                raise RecordingError(
                    f"{path}:{number}: not JSON ({error}); the lines before it can be read if they are copied to a file"
                    " of their own"
                ) from error
        if line is not None and not (isinstance(line, dict) and "type" in line):
            raise RecordingError(f'{path}:{number}: not an object with a "type"')
        yield number, line
    if not number:
        raise RecordingError(f"{path}: is empty: this is no recording")


def _raw_lines(path: Path) -> Iterator[bytes]:
    with _told(path), _opened(path) as stream:
        try:
            yield from stream
        except EOFError:
            yield b""  # compressed data cut short: no JSON, no newline


class LineWriter:
    """Appends JSON lines to a new file, each flushed whole; gzip or zstandard by suffix. Raises RecordingError."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self._path = path
        self._fsync = fsync
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            raise RecordingError(f"{path} exists already: record each session to a file of its own") from error
        except OSError as error:
            raise RecordingError(f"{path}: cannot be written ({error})") from error
        self._stream: Any = self._file
        if path.suffix == ".gz":
            self._stream = gzip.GzipFile(filename="", fileobj=self._file, mode="wb", mtime=0)
        elif path.suffix == ".zst":
            self._stream = _zstandard(path).ZstdCompressor().stream_writer(self._file, closefd=False)

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, line: JSONObject) -> None:
        with _told(self._path):
            data = encode(line)
            if self._stream is self._file:
                _write_all(self._file, data)
            else:
                self._stream.write(data)
                self._stream.flush()  # both end a block: what is in the file can be read
            if self._fsync:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        with _told(self._path), self._file:
            if self._stream is not self._file:
                self._stream.close()


def _write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@contextmanager
def _opened(path: Path) -> Generator[Iterable[bytes]]:
    """The lines; a file that is damaged, not cut short, raises RecordingError."""
    with path.open("rb") as file:
        if path.suffix == ".gz":
            try:
                yield gzip.GzipFile(fileobj=file)
            except zlib.error as error:
                raise RecordingError(f"{path}: damaged ({error})") from error
        elif path.suffix == ".zst":
            zstandard = _zstandard(path)
            try:
                yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
            except zstandard.ZstdError as error:
                raise RecordingError(f"{path}: damaged ({error})") from error
        else:
            yield file


def _zstandard(path: Path) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise RecordingError(f"{path}: .zst needs the package zstandard: pip install 'polar-plugin[zstd]'") from error


@contextmanager
def _told(path: Path, line: int | None = None) -> Generator[None]:
    """What goes wrong inside becomes a RecordingError that names the file and line."""
    where = f"{path}:{line}" if line else f"{path}"
    try:
        yield
    except RecordingError as error:
        raise error if str(error).startswith(str(path)) else RecordingError(f"{where}: {error}") from error
    except KeyError as error:
        raise RecordingError(f"{where}: lacks {error}") from error
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise RecordingError(f"{where}: {error}") from error
