"""Codex (npm `@openai/codex`), over OpenAI Responses.

The prompt goes by the standard input, which ends: on an open one Codex waits for ever. It compacts by the usage that it
is told and dies where the context overflows, so its limits leave room for a turn and for what tools print.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

from ..errors import ConfigError
from .base import Launch, LaunchContext
from .mcp import MCPServer, mcp_servers
from .preset import npm_versions, settings_of, skill_files, start

_SETTINGS: Mapping[str, type] = {"args": list, "multi_agent": bool, "root": str}
_KEY = "POLAR_SESSION_KEY"
_PROVIDER = "polar"
_TOOL_OUTPUT = 10_000
"""Tokens of one tool's output that Codex keeps, where it is not told less."""
_OFF = (
    "apps",
    "goals",
    "image_generation",
    "plugins",
    "remote_plugin",
    "shell_snapshot",
    "unbounded_connection_retries",
)
"""Features that reach for other hosts, change the prompt from run to run, or never give up."""
_KNOWN_MODELS = ("gpt-", "o1", "o3", "o4", "codex-")


class Codex:
    """`settings`:

    * `root`: the directory, inside, that npm installed it into (`npm install --prefix`), with `bin/node` or with
      Node.js on PATH; default: all on PATH;
    * `multi_agent`: whether it may start agents of its own, false by default;
    * `args`: more arguments for `codex exec`, as in [-c, 'web_search="live"'].

    `agent.model_name` must be none of OpenAI's: by those Codex changes its tools and its way of calling them.
    """

    name = "codex"
    tested: ClassVar[tuple[str, str]] = ("0.171.0", "0.171.0")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting or a model name that Codex knows, as for MCP servers and skills."""
        settings, home = settings_of(context, self.name, _SETTINGS), f"{context.home}/.codex"
        model = context.agent.model_name
        if model.rpartition("/")[2].startswith(_KNOWN_MODELS):
            raise ConfigError(
                f"agent.model_name: Codex knows {model!r} and gives it tools of its own kind; name it otherwise"
            )
        files = skill_files(context.agent, f"{home}/skills")
        files[f"{home}/config.toml"] = _toml(_config(context, settings)).encode()
        argv = ("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json")
        return Launch(
            start((*argv, *settings.get("args", ()), "-"), settings.get("root")),
            files=files,
            env={"CODEX_HOME": home, _KEY: context.session_key, **context.agent.env},
            stdin=context.instruction.encode(errors="surrogateescape"),
            versions=npm_versions("codex", "@openai/codex", self.tested, settings.get("root")),
            finished=r'^\{"type":"turn\.completed"',
        )


def _config(context: LaunchContext, settings: Mapping[str, Any]) -> dict[str, Any]:
    length = context.context_length
    output = min(_TOOL_OUTPUT, length // 8)
    return {
        "model": context.agent.model_name,
        "model_provider": _PROVIDER,
        "model_context_window": length,
        "model_auto_compact_token_limit": max(length // 2, length - context.max_tokens - 2 * output),
        "tool_output_token_limit": output,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "model_providers": {
            _PROVIDER: {
                "name": _PROVIDER,
                "base_url": f"{context.base_url}/v1",
                "env_key": _KEY,
                "wire_api": "responses",
                "stream_idle_timeout_ms": 3_600_000,  # a weight update may hold a call for long
            }
        },
        "analytics": {"enabled": False},
        "agents": {"enabled": settings.get("multi_agent", False)},
        "features": dict.fromkeys(_OFF, False),
        "mcp_servers": {server.name: _mcp_entry(server) for server in mcp_servers(context.agent)},
    }


def _mcp_entry(server: MCPServer) -> dict[str, Any]:
    if server.local:
        return {"command": server.command, "args": server.args, "env": server.env}
    if server.transport == "sse":
        raise ConfigError(f"agent.mcp_servers: Codex speaks stdio and streamable-http, and {server.name!r} is sse")
    return {"url": server.url, "http_headers": server.headers}


def _toml(table: Mapping[str, Any]) -> str:
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Keys with plain values come first: in TOML those after a table's heading belong to that table."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and plain:
        yield f"[{'.'.join(_value(part) for part in path)}]"
    yield from (f"{_value(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(cast("Mapping[str, Any]", value), (*path, key))


def _value(value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's, once no character is written as two surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
