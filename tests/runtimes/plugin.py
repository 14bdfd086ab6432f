"""A backend of somebody's own, as an import path names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes.base import ExecResult, ProxyEndpoint
from polar_plugin.runtimes.local import LocalRuntime


class Noted(LocalRuntime):
    """The local one, which keeps a note of what it was made for and has run; `kwargs` of its own: `note`."""

    notes: ClassVar[list[str]] = []

    def __init__(self, spec: RuntimeSpec, *, proxy: ProxyEndpoint | None, labels: Mapping[str, str]) -> None:
        kwargs = dict(spec.kwargs)
        self.notes.append(f"{kwargs.pop('note', '')}: {labels['purpose']}")
        super().__init__(RuntimeSpec(network=spec.network, kwargs=kwargs), proxy=proxy, labels=labels)

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        self.notes.append("exec")
        return await super().exec(command, **options)


class Unlike:
    """No backend: it does not take what a backend is given."""
