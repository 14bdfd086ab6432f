"""The sessions of one prompt, which verl runs side by side in one worker: what a failed one returns depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class _Group:
    """The sessions of a prompt that have started in this process. verl starts all of them before any can end."""

    started: int = 0
    ended: int = 0
    counted: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Member:
    """One session of a group."""

    def __init__(self, group: _Group) -> None:
        self._group = group
        self._ended = False
        group.started += 1

    def end(self, *, counted: bool) -> None:
        """Once it is known whether the session has something to train; a second call changes nothing."""
        if self._ended:
            return
        self._ended = True
        group = self._group
        group.ended += 1
        group.counted += counted
        if group.ended == group.started:
            group.settled.set()

    async def survivors(self) -> int:
        """How many sessions of the group count, once all of them have ended."""
        await self._group.settled.wait()
        return self._group.counted


class Groups:
    """By the prompt's uid, for as long as one of its sessions is under way."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[_Group, set[Member]]] = {}

    @contextmanager
    def joined(self, uid: str) -> Generator[Member]:
        """A session's time in its group. One that leaves without having ended counts for nothing."""
        group, members = self._groups.setdefault(uid, (_Group(), set()))
        member = Member(group)
        members.add(member)
        try:
            yield member
        finally:
            member.end(counted=False)
            members.discard(member)
            if not members:
                self._groups.pop(uid, None)
