"""Claude Code (npm `@anthropic-ai/claude-code`), over Anthropic Messages.

The prompt goes by the standard input. What it would guess of a model that it does not know, a window of a million
tokens for one, it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from .base import Launch, LaunchContext
from .mcp import MCPServer, mcp_servers
from .preset import npm_versions, settings_of, skill_files, start

_SETTINGS: Mapping[str, type] = {"args": list, "root": str, "tools": list}


class ClaudeCode:
    """`settings`:

    * `root`: the directory, inside, that npm installed it into (`npm install --prefix`); default: on PATH;
    * `tools`: the built-in tools that the model gets, as in [Bash, Read, Edit, Write]. All of them, without this
      setting, are some 20 000 tokens of every prompt;
    * `args`: more arguments for the `claude` program, as in [--bare] or [--max-turns, "50"].

    Tools are never loaded on demand (ENABLE_TOOL_SEARCH): each loading would change the tools in mid-conversation, and
    so end a trace. `agent.env` has the last word.
    """

    name = "claude_code"
    tested: ClassVar[tuple[str, str]] = ("2.1.332", "2.1.332")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting, a bad MCP server, or skills that cannot be read."""
        settings, home = settings_of(context, self.name, _SETTINGS), f"{context.home}/.claude"
        servers = mcp_servers(context.agent)
        files = skill_files(context.agent, f"{home}/skills")
        if servers:
            files[_mcp_path(context)] = json.dumps(_mcp_config(servers)).encode()
        return Launch(
            start(tuple(_argv(context, settings, mcp=bool(servers))), settings.get("root")),
            files=files,
            env={**_environment(context), **context.agent.env},
            stdin=context.instruction.encode(errors="surrogateescape"),
            versions=npm_versions("claude", "@anthropic-ai/claude-code", self.tested, settings.get("root")),
            finished=r'^\{("type":"result"|.*"(duration_api_ms|total_cost_usd)":)',
        )


def _argv(context: LaunchContext, settings: Mapping[str, Any], *, mcp: bool) -> Iterator[str]:
    yield from ("claude", "--print", "--dangerously-skip-permissions", "--output-format", "json")
    yield from ("--model", context.agent.model_name)
    if "tools" in settings:
        yield from ("--tools", ",".join(settings["tools"]))
    if mcp:
        yield from ("--mcp-config", _mcp_path(context), "--strict-mcp-config")
    yield from settings.get("args", ())


def _environment(context: LaunchContext) -> dict[str, str]:
    model = context.agent.model_name
    return {
        "ANTHROPIC_BASE_URL": context.base_url,
        "ANTHROPIC_API_KEY": context.session_key,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "CLAUDE_CONFIG_DIR": f"{context.home}/.claude",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # its line in the system prompt changes from call to call
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ENABLE_TOOL_SEARCH": "0",
        "SLASH_COMMAND_TOOL_CHAR_BUDGET": "16000",  # skills' descriptions; by default less, the smaller the window
        "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
        "API_TIMEOUT_MS": "3600000",  # a weight update may hold a call for long
    }


def _mcp_path(context: LaunchContext) -> str:
    return f"{context.home}/.polar/mcp.json"


def _mcp_config(servers: Sequence[MCPServer]) -> dict[str, Any]:
    return {"mcpServers": {server.name: _mcp_entry(server) for server in servers}}


def _mcp_entry(server: MCPServer) -> dict[str, Any]:
    if server.local:
        return {"type": "stdio", "command": server.command, "args": server.args, "env": server.env}
    kind = "sse" if server.transport == "sse" else "http"
    return {"type": kind, "url": server.url, "headers": server.headers}
