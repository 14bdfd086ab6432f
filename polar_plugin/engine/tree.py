"""The conversations of a session as a tree: what was said so far, and which completions were asked and said there.

A node is reached by a chain of digests, one a unit (`meaning.Unit`), so requests that mean the same reach the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..records import Completion, Message, Tool
from .meaning import Digest, Unit

Key = tuple[Digest, Digest]
"""Of tools and of the system prompt: what a conversation begins with."""


@dataclass(slots=True, eq=False)
class Node:
    """A point of a conversation. Mutable: completions and children are added."""

    children: dict[Digest, Node] = field(default_factory=dict[Digest, "Node"])
    asked: list[Completion] = field(default_factory=list[Completion])
    """Those whose prompt ends here."""
    said: list[Completion] = field(default_factory=list[Completion])
    """Those whose reply ends here; one that says nothing ends where its prompt does."""

    def child(self, digest: Digest) -> Node:
        """The one below, made where it is not there; this one for a unit that says nothing."""
        return self.children.setdefault(digest, Node()) if digest else self

    def path(self, units: Iterable[Unit]) -> list[Node]:
        """The nodes after each unit, as far as there are any."""
        node, path = self, list[Node]()
        for unit in units:
            below = node.children.get(unit.digest) if unit.digest else node
            if below is None:
                break
            path.append(node := below)
        return path


@dataclass(slots=True, eq=False)
class Line:
    """One request in the tree. `path` grows when it is recorded."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    units: list[Unit]
    key: Key
    path: list[Node]
    """The nodes after each unit, as far as the tree knows them; the first is the conversation's root."""

    @property
    def end(self) -> Node | None:
        """Where its messages end, if all of them were said before."""
        return self.path[-1] if len(self.path) == len(self.units) else None

    @property
    def next(self) -> Message | None:
        """The first message that the tree does not know."""
        return None if self.end else self.messages[self.units[len(self.path)].start]
