"""A harness: how one agent program is started. Data more than code: it returns files, environment and arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..records import AgentSpec


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a harness must know. Paths and URLs are as seen inside the sandbox."""

    agent: AgentSpec
    instruction: str
    base_url: str
    """The proxy, without "/v1": "http://127.0.0.1:PORT"."""
    session_key: str
    """Goes where the program expects its API key."""
    context_length: int
    max_tokens: int
    workdir: str
    home: str
    """A directory of this attempt's own for configuration files; also $HOME."""
    seconds: float | None = None
    """How long the program may take, for those that can be told; it is ended then in any case. None: not known."""


def deadline_file(home: str) -> str:
    """The file, inside, that appears some time before the program is ended: {"seconds_left": 60.0} as JSON.

    Programs find its path in $POLAR_DEADLINE_FILE.
    """
    return f"{home}/.polar/deadline.json"


@dataclass(frozen=True, slots=True)
class Versions:
    """Which versions of a program its preset was run with, and how to see which one is there."""

    program: str
    ask: str
    """A shell script that prints the program's version, and nothing where it cannot tell; it takes no time."""
    oldest: str
    newest: str

    def tested(self, version: str) -> bool:
        """Whether it lies between the oldest and the newest; a pre-release counts as what it precedes."""
        return _numbers(self.oldest) <= _numbers(version) <= _numbers(self.newest)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the program."""

    command: str | tuple[str, ...]
    """A shell script, or an argument vector. Prompts go by file or stdin, never on a long command line."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Absolute path inside -> content, written before the start."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    stdin: bytes = b""
    ok_exit_codes: frozenset[int] = frozenset({0})
    finished: str = ""
    """A regular expression for the beginning of the stdout line (4096 bytes of it) with which the program is done.

    For programs that may print their result and not exit: where it stays the last line for `budgets.linger` seconds and
    no call is made, they are ended, and the attempt counts as completed. "": there is no such line.
    """
    versions: Versions | None = None
    """None: any version will do."""


class Harness(Protocol):
    """One agent program."""

    name: str

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError where `context.agent` lacks something."""
        ...
