"""opencode (npm `opencode-ai`), over OpenAI Chat, OpenAI Responses or Anthropic Messages.

The prompt goes by the standard input: as an argument it would reach the model in double quotes. On an input that never
ends opencode waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import Launch, LaunchContext
from .mcp import MCPServer, mcp_servers
from .preset import npm_versions, settings_of, skill_files, start

_SETTINGS: Mapping[str, type] = {"api": str, "args": list, "reasoning": bool, "root": str}
_PACKAGES = {
    "openai-completions": "@ai-sdk/openai-compatible",
    "openai-responses": "@ai-sdk/openai",
    "anthropic-messages": "@ai-sdk/anthropic",
}
"""Its clients of the APIs. They are built in: nothing is fetched."""
_KEY = "POLAR_SESSION_KEY"
_PROVIDER = "polar"
_NOTHING_TO_INSTALL = {
    "node_modules/.keep": b"",
    "package-lock.json": json.dumps({"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}).encode(),
}
"""Else it asks npm's registry for this package at each start, to offer it to plugins of the user's."""


class OpenCode:
    """`settings`:

    * `root`: the directory, inside, that npm installed it into (`npm install --prefix`); default: on PATH;
    * `api`: which model API it speaks, openai-completions by default, openai-responses or anthropic-messages;
    * `reasoning`: whether the model reasons, false by default;
    * `args`: more arguments for `opencode run`.

    It ends with exit code 1 where the context overflowed before it compacted, also when the task was done after that.
    """

    name = "opencode"
    tested: ClassVar[tuple[str, str]] = ("1.18.33", "1.18.33")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting or API, a bad MCP server, or skills that cannot be read."""
        settings, home = settings_of(context, self.name, _SETTINGS), f"{context.home}/.config/opencode"
        api = settings.get("api", "openai-completions")
        if api not in _PACKAGES:
            raise ConfigError(f"agent.settings.api is one of {', '.join(_PACKAGES)}, not {api!r}")
        files = skill_files(context.agent, f"{home}/skills")
        files[f"{home}/opencode.json"] = json.dumps(_config(context, settings, _PACKAGES[api])).encode()
        files |= {f"{home}/{name}": content for name, content in _NOTHING_TO_INSTALL.items()}
        # Without a title it asks the model for one.
        argv = ("opencode", "run", "--title", "task", "--format", "json", *settings.get("args", ()))
        return Launch(
            start(argv, settings.get("root")),
            files=files,
            env={**_environment(context), **context.agent.env},
            stdin=context.instruction.encode(errors="surrogateescape"),
            versions=npm_versions("opencode", "opencode-ai", self.tested, settings.get("root")),
            finished=r'^\{"type":"step_finish".*"reason":"(stop|length)"',
        )


def _environment(context: LaunchContext) -> dict[str, str]:
    return {
        _KEY: context.session_key,
        "XDG_CONFIG_HOME": f"{context.home}/.config",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_PRUNE": "1",  # it would rewrite old tool outputs
        "OPENCODE_DISABLE_SHARE": "1",
    }


def _config(context: LaunchContext, settings: Mapping[str, Any], package: str) -> dict[str, Any]:
    model = context.agent.model_name
    return {
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "permission": {"*": "allow"},
        "compaction": {"auto": True, "prune": False},
        "model": f"{_PROVIDER}/{model}",
        "small_model": f"{_PROVIDER}/{model}",
        "enabled_providers": [_PROVIDER],
        "provider": {
            _PROVIDER: {
                "npm": package,
                "name": _PROVIDER,
                "options": {
                    "baseURL": f"{context.base_url}/v1",
                    "apiKey": f"{{env:{_KEY}}}",
                    "timeout": False,  # of the whole reply, else five minutes
                },
                "models": {
                    model: {
                        "name": model,
                        "reasoning": settings.get("reasoning", False),
                        "tool_call": True,
                        "limit": {"context": context.context_length, "output": context.max_tokens},
                    }
                },
            }
        },
        "mcp": {server.name: _mcp_entry(server) for server in mcp_servers(context.agent)},
    }


def _mcp_entry(server: MCPServer) -> dict[str, Any]:
    if server.local:
        return {"type": "local", "command": [server.command, *server.args], "environment": server.env}
    return {"type": "remote", "url": server.url, "headers": server.headers}
