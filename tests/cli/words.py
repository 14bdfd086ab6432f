"""What a scripted model says: turns of text and tool calls, in the words that one CLI's tools have for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAIN = "[main task]"
"""Stands in every instruction, and in no sub-agent's: by it the scripted model knows whose turn it is."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call, by the CLI's own name for the tool."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model, or what the engine does instead of it."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    follows: Callable[[str], Call] | None = None
    """One more call, made from the prompt: with an id, say, that the CLI has told the model."""
    raises: Exception | None = None
    """The engine fails the call: before the answer's headers, or after them where it `takes` more than a second."""
    takes: float = 0.0
    """Seconds that the engine needs."""
    cut: bool = False
    """Ended by length after `text`."""
    hangs: bool = False
    """The engine never answers; the workspace gets the file `HANGING`, so that a script can hang up."""

    def written(self, prompt: str) -> str:
        """As a model with Qwen3's chat format writes it."""
        made = (self.follows(prompt),) if self.follows else ()
        calls = (json.dumps({"name": call.tool, "arguments": call.arguments}) for call in (*self.calls, *made))
        return "\n".join([*([self.text] if self.text else []), *(f"<tool_call>\n{c}\n</tool_call>" for c in calls)])


HANGING = ".hanging"


@dataclass(frozen=True, slots=True)
class Words:
    """A CLI's tools. Where it has no tool for something, the shell does it."""

    shell: Callable[[str], Call]
    """From a command."""
    read: Callable[[str], Call] | None = None
    """From a path in the workspace, absolute."""
    edit: Callable[[str, str, str], Call] | None = None
    """From a path, the old text and the new one."""
    agent: Callable[[str], Call] | None = None
    """From a sub-agent's instruction. It is waited for, or else there is `awaits`."""
    awaits: Callable[[str], Call] | None = None
    """From the prompt after `agent`: waits for the sub-agent."""

    mend: Callable[[str], Call] | None = None
    """From a path: the tool `mend` of the MCP server `mender`."""
    done: Call | None = None
    """What ends the task, where a reply without a call does not."""
    reports: Call | None = None
    """What ends a sub-agent's task, where a reply without a call does not."""

    def reads(self, path: str) -> Call:
        return self.read(path) if self.read else self.shell(f"cat {path}")

    def edits(self, path: str, old: str, new: str) -> Call:
        return self.edit(path, old, new) if self.edit else self.shell(f"sed -i 's/{old}/{new}/' {path}")


def ended(turns: Sequence[Turn], call: Call | None) -> Sequence[Turn]:
    """Turns of which the last one makes the call that ends a task, where one does."""
    return [*turns[:-1], replace(turns[-1], calls=(call,))] if call and turns else turns
