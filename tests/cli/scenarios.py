"""What the CLIs are put through. Each scenario is data: an instruction, what the model says, and what must come of it.

A scenario's turns are written once for all CLIs, in `Words`; what each CLI makes of it stands in the table of CLIs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar_plugin.errors import ContextOverflow, EngineBusy, EngineError

from .words import HANGING, MAIN, Call, Turn, Words

WORKSPACE = "/workspace"
_NOTES = f"{WORKSPACE}/notes.txt"
SUB_AGENT = "[other task] Write the word mended to the file result in the workspace, then say so."


class TooManyRequests(EngineBusy):
    """As a server with a rate limit says it."""

    status = 429


@dataclass(frozen=True, slots=True)
class Scenario:
    """`main` and `sub` are what the model says in the main conversation and in a sub-agent's, in order.

    A model that is asked once more than it has turns repeats the last one; the number of calls then tells.
    """

    name: str
    feature: str
    """The column of the conformance table."""
    main: Callable[[Words], Sequence[Turn]]
    sub: Callable[[Words], Sequence[Turn]] = lambda words: ()
    instruction: str = f"{MAIN} Mend the file `result`."
    test: str = "grep -qx mended result"
    """Decides, in a fresh sandbox with the agent's changes, whether the task's result is there."""
    tight: bool = False
    """Whether the context is the CLI's `tight_context`, not its usual one."""
    agent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More of the task's `agent`."""
    image: Path | None = None
    """What is in the workspace at the start."""
    seen: str = ""
    """What the model's first prompt must have in it."""


def _mend(words: Words) -> Call:
    return words.shell("echo mended > result")


def _basic(words: Words) -> Sequence[Turn]:
    return Turn("I write it.", (_mend(words),)), Turn("Done.")


def _long(words: Words) -> Sequence[Turn]:
    """Eight turns: parallel calls, an edit, a read, a command that fails, text that is not ASCII, odd arguments."""
    return (
        Turn("I look around.", (words.shell("pwd"), words.shell("ls -la"))),
        Turn("", (words.shell(f"printf 'one\\nbroken\\nthree\\n' > {_NOTES}"),)),
        Turn("Reading it.", (words.reads(_NOTES),)),
        Turn("Now I change it.", (words.edits(_NOTES, "broken", "mended"),)),
        Turn("This one fails.", (words.shell("cat /nowhere/at/all; exit 3"),)),
        Turn("Größe: 5 µm, 漢字 🙂.", (words.shell("printf 'Gr\\303\\266\\303\\237e \\360\\237\\231\\202\\n'"),)),
        Turn("", (words.shell(f"sed -n 2p {_NOTES} > result"), words.shell('echo "it\'s \\"quoted\\""'))),
        Turn("All is done: `result` says *mended*."),
    )


def _busy(words: Words) -> Sequence[Turn]:
    return (
        Turn(raises=EngineBusy("the engine is full", retry_after=1.0)),
        Turn("I write it.", (_mend(words),)),
        Turn(raises=TooManyRequests("slow down", retry_after=1.0)),
        Turn("Done."),
    )


def _cut_stream(words: Words) -> Sequence[Turn]:
    """The engine fails when the answer's headers are long sent: all that is left is to break the stream off."""
    return (
        Turn("I write it.", (_mend(words),)),
        Turn(raises=EngineError("a worker fell over"), takes=1.5),
        Turn("Done."),
    )


def _hang_up(words: Words) -> Sequence[Turn]:
    """A process of the sandbox, out of reach of the terminal whose end would take it along, kills the program."""
    killer = f"touch /tmp/armed; while [ ! -e {WORKSPACE}/{HANGING} ]; do sleep 0.1; done; kill -9 -1"
    start = (
        f"echo mended > result; (setsid nohup bash -c '{killer}' > /dev/null 2>&1 < /dev/null &); "
        "until [ -e /tmp/armed ]; do sleep 0.1; done"
    )
    return Turn("I write it.", (words.shell(start),)), Turn(hangs=True)


def _empty(words: Words) -> Sequence[Turn]:
    return Turn("I write it.", (_mend(words),)), Turn(""), Turn("Done.")


def _length(words: Words) -> Sequence[Turn]:
    return Turn("I write it.", (_mend(words),)), Turn("What I did is to", cut=True), Turn("Done.")


def _flood(words: Words, parts: int) -> Sequence[Turn]:
    """Commands whose outputs have 5000 tokens each."""
    text = "the quick brown fox jumps over the lazy dog and runs on"
    commands = (f"yes 'Part {part}: {text}' | head -n 300" for part in range(parts))
    return [Turn(f"Part {part}.", (words.shell(command),)) for part, command in enumerate(commands)]


def _fill(words: Words) -> Sequence[Turn]:
    """The context fills up, as the CLI sees by the usage that it is told: it is to make room by itself."""
    return *_flood(words, 7), Turn("I write it.", (_mend(words),)), Turn("Done.")


def _overflow(words: Words) -> Sequence[Turn]:
    """It is full sooner than the CLI would have thought."""
    full = Turn(raises=ContextOverflow(60_000, 50_000))
    return *_flood(words, 4), full, Turn("I write it.", (_mend(words),)), Turn("Done.")


def _sub_agent(words: Words) -> Sequence[Turn]:
    assert words.agent is not None
    waiting = [Turn("I wait.", follows=words.awaits)] if words.awaits else []
    return Turn("Somebody else does it.", (words.agent(SUB_AGENT),)), *waiting, Turn("Done.")


def _mcp(words: Words) -> Sequence[Turn]:
    assert words.mend is not None
    return Turn("I have a tool for that.", (words.mend(f"{WORKSPACE}/result"),)), Turn("Done.")


_MENDER = {"name": "mender", "command": "python3", "args": [f"{WORKSPACE}/server.py"]}
_HERE = Path(__file__).parent

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("basic", "task", _basic),
        Scenario("long", "long task", _long),
        Scenario("busy", "429, 503", _busy),
        Scenario("cut_stream", "stream cut", _cut_stream),
        Scenario("hang_up", "hang-up", _hang_up),
        Scenario("empty", "empty reply", _empty),
        Scenario("length", "length stop", _length),
        Scenario("fill", "context fills up", _fill, tight=True),
        Scenario("overflow", "context overflow", _overflow, tight=True),
        Scenario("sub_agent", "sub-agent", _sub_agent, sub=lambda words: _basic(words)),
        Scenario("mcp", "MCP", _mcp, agent={"mcp_servers": [_MENDER]}, image=_HERE / "mender"),
        Scenario("skills", "skills", _basic, agent={"skills_path": str(_HERE / "skills")}, seen="skill-marker-41"),
    )
}
