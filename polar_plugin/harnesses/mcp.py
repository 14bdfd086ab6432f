"""MCP servers as a task names them (`agent.mcp_servers`), checked; presets write them in their programs' own forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import ConfigError
from ..records import AgentSpec

TRANSPORTS = ("stdio", "sse", "streamable-http")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class MCPServer:
    """One server: a program that speaks on its standard streams, or a URL."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: str
    transport: str = "stdio"
    command: str = ""
    args: list[str] = field(default_factory=list[str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def local(self) -> bool:
        """Whether the agent program starts it."""
        return self.transport == "stdio"


def mcp_servers(agent: AgentSpec) -> tuple[MCPServer, ...]:
    """The servers, in order. Raises ConfigError with the path of what is wrong."""
    servers = tuple(_server(given, f"agent.mcp_servers.{index}") for index, given in enumerate(agent.mcp_servers))
    names = [server.name for server in servers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"agent.mcp_servers: two servers have the name {twice[0]!r}")
    return servers


def _server(given: Mapping[str, Any], path: str) -> MCPServer:
    try:
        server = TypeAdapter(MCPServer).validate_python({**given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (path, *first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}") from error
    if not _NAME.fullmatch(server.name):
        raise ConfigError(f"{path}.name: letters, digits, - and _ only, not {server.name!r}")
    if server.transport not in TRANSPORTS:
        raise ConfigError(f"{path}.transport is one of {', '.join(TRANSPORTS)}, not {server.transport!r}")
    needed = "command" if server.local else "url"
    if not getattr(server, needed):
        raise ConfigError(f"{path}.{needed} is not set: a server with the transport {server.transport} needs it")
    return server
