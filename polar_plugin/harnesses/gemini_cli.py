"""Gemini CLI (npm `@google/gemini-cli`), over Google's generateContent.

The prompt goes by the standard input. Its compaction knows no model's window but Google's, of 2**20 tokens, so the
share of it at which the history is compacted is set such that the trainer's context is kept. It compacts what lies
before a user's message: within a run of one instruction there is nothing, and where the context overflows, it ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from .base import Launch, LaunchContext
from .mcp import MCPServer, mcp_servers
from .preset import npm_versions, settings_of, skill_files, start

_SETTINGS: Mapping[str, type] = {"args": list, "root": str}
_WINDOW = 1_048_576
"""What it takes the context of any model for."""
_TOOL_OUTPUT = 40_000
"""Characters of one tool's output that it keeps, where it is not told less."""
_NEVER = "2000000000"
_MASKING_FLAGS = (45758817, 45758818)
"""Its names for the tokens of tool output that stay, and that must be there besides, before the oldest are masked."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class GeminiCLI:
    """`settings`:

    * `root`: the directory, inside, that npm installed it into (`npm install --prefix`), with `bin/node` or with
      Node.js on PATH; default: all on PATH;
    * `args`: more arguments for the `gemini` program.

    It takes a plain-http base URL on the loopback interface alone, which is where a sandbox has the proxy. Three things
    of it are off because they rewrite a conversation or call a model of their own: the router (a model is named), loop
    detection, and the masking of old tool outputs.
    """

    name = "gemini_cli"
    tested: ClassVar[tuple[str, str]] = ("0.61.0", "0.61.0")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting, a bad MCP server, or skills that cannot be read."""
        settings, home = settings_of(context, self.name, _SETTINGS), f"{context.home}/.gemini"
        files = skill_files(context.agent, f"{home}/skills")
        files[f"{home}/settings.json"] = json.dumps(_config(context)).encode()
        files[_flags_path(context)] = json.dumps(_flags()).encode()
        argv = ("gemini", "--yolo", "--model", context.agent.model_name, "--output-format", "json")
        return Launch(
            without_proxies(start((*argv, *settings.get("args", ())), settings.get("root"))),
            files=files,
            env={**_environment(context), **context.agent.env},
            stdin=plain_prompt(context.instruction),
            finished=r"^\}",  # it prints one object, over several lines
            versions=npm_versions("gemini", "@google/gemini-cli", self.tested, settings.get("root")),
        )


def plain_prompt(instruction: str) -> bytes:
    """As the standard input of Gemini CLI, or of Qwen Code, a fork of it: they take a first "/" for a command."""
    return f"{chr(10) if instruction.startswith('/') else ''}{instruction}".encode(errors="surrogateescape")


def without_proxies(script: str) -> str:
    """They send even what is meant for the loopback interface through an HTTP proxy."""
    return f"unset {' '.join(_PROXIES)}\n{script}"


def mcp_entries(servers: Iterable[MCPServer]) -> dict[str, Any]:
    """Their settings' `mcpServers`."""
    return {server.name: _mcp_entry(server) for server in servers}


def _mcp_entry(server: MCPServer) -> dict[str, Any]:
    if server.local:
        return {"command": server.command, "args": server.args, "env": server.env}
    return {"url" if server.transport == "sse" else "httpUrl": server.url, "headers": server.headers}


def _environment(context: LaunchContext) -> dict[str, str]:
    return {
        "GOOGLE_GEMINI_BASE_URL": context.base_url,
        "GEMINI_API_KEY": context.session_key,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",  # else it starts itself a second time
        "GEMINI_EXP": _flags_path(context),
    }


def _config(context: LaunchContext) -> dict[str, Any]:
    return {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {
            "name": context.agent.model_name,
            "disableLoopDetection": True,
            "compressionThreshold": _full(context) / _WINDOW,
        },
        "tools": {"truncateToolOutputThreshold": min(_TOOL_OUTPUT, context.context_length // 2)},
        "mcpServers": mcp_entries(mcp_servers(context.agent)),
    }


def _full(context: LaunchContext) -> int:
    """Tokens of a prompt from which on the history is compacted: a turn and two tool outputs still fit behind it."""
    length = context.context_length
    output = min(_TOOL_OUTPUT // 4, length // 8)
    return max(length // 2, length - context.max_tokens - 2 * output)


def _flags_path(context: LaunchContext) -> str:
    return f"{context.home}/.polar/gemini_flags.json"


def _flags() -> dict[str, Any]:
    return {"flags": [{"flagId": flag, "intValue": _NEVER} for flag in _MASKING_FLAGS], "experimentIds": []}
