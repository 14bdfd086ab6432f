"""A runtime: the sandbox in which a harness, or an evaluator, runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..records import RuntimeSpec


@dataclass(frozen=True, slots=True)
class ProxyEndpoint:
    """Where the proxy listens, as the trainer's machine sees it."""

    url: str
    """As in "http://host:port"."""
    unix_socket: Path | None = None
    """The same server on a Unix socket, for sandboxes without a network."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command did. Output is kept as bytes; of long output the tail is kept (`truncated`)."""

    exit_code: int
    """The command's own, or 128 + n where signal n ended it; 137 where a deadline did."""
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    ended: bool = False
    """A `Watch` ended it: the exit code (137) is not the command's own."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """stdout then stderr, undecodable bytes replaced: for messages, not for patches."""
        return (self.stdout + self.stderr).decode(errors="replace")


class Watch(Protocol):
    """Looks at a command while it runs, and may end it."""

    def saw(self, stream: int, piece: bytes) -> None:
        """What it printed: stream 1 is stdout, 2 is stderr. Pieces are cut anywhere."""
        ...

    async def over(self) -> None:
        """Returns when the command is to be ended as at a deadline; cancelled when it ends by itself."""
        ...


class Runtime(Protocol):
    """One sandbox. `start` once, `stop` always (also after a failed or cancelled start; calling it twice is fine).

    All methods raise SandboxError when the sandbox itself fails; a command that fails is an ExecResult.
    """

    proxy_url: str
    """The proxy's base URL as programs inside see it; set by `start`."""
    workdir: str
    """Absolute path, inside, of the directory that commands start in; set by `start` at the latest."""

    @property
    def home(self) -> str:
        """Absolute path, inside, of a home directory of this attempt's own."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        watch: Watch | None = None,
    ) -> ExecResult:
        """Run a shell script (str) or an argument vector, never twice.

        Reading stdin gives `stdin` and then end-of-file. At `timeout` (seconds) every process the command started is
        killed, what it printed is kept, and `timed_out` is set; the same where `watch` says so, with `ended`.
        Cancelling kills them too.
        """
        ...

    async def upload(self, source: Path | bytes, target: str) -> None:
        """Copy a file, a directory tree, or bytes to `target` inside; parents are made, modes and links kept."""
        ...

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or directory tree from inside to `target`."""
        ...


class RuntimeFactory(Protocol):
    """A backend: its class, called once a sandbox. `labels` mark what it starts, for the sweep."""

    def __call__(self, spec: RuntimeSpec, *, proxy: ProxyEndpoint | None, labels: Mapping[str, str]) -> Runtime: ...
