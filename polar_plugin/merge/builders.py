"""Builders: a sealed session to traces."""

from __future__ import annotations

from typing import Protocol

from ..records import CompletionSession, Trace


class Builder(Protocol):
    """Built with `**BuilderSpec.config`. Pure, and linear in tokens."""

    def build(self, session: CompletionSession) -> tuple[Trace, ...]: ...
