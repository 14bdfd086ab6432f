"""Qwen Code (npm `@qwen-code/qwen-code`, a fork of Gemini CLI; needs Node >= 22), over OpenAI Chat.

The prompt goes by the standard input. It compacts by the window that it is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Launch, LaunchContext
from .gemini_cli import mcp_entries, plain_prompt, without_proxies
from .mcp import mcp_servers
from .preset import npm_versions, settings_of, skill_files, start

_SETTINGS: Mapping[str, type] = {"args": list, "root": str}


class QwenCode:
    """`settings`:

    * `root`: the directory, inside, that npm installed it into (`npm install --prefix`), with `bin/node` or with
      Node.js on PATH; default: all on PATH;
    * `args`: more arguments for the `qwen` program, as in [--bare], which halves the prompt, or [--max-session-turns,
      "50"].

    Commands run in a terminal of its own, since without one it loses the output of fast ones. Its memory and the
    clearing of old tool outputs are off: they call the model by themselves, or rewrite the conversation. Told a limit
    for a turn, it takes a turn cut by it as it is, where it would ask again and throw the first answer away.
    """

    name = "qwen_code"
    tested: ClassVar[tuple[str, str]] = ("0.24.4", "0.24.4")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting, a bad MCP server, or skills that cannot be read."""
        settings, home = settings_of(context, self.name, _SETTINGS), f"{context.home}/.qwen"
        files = skill_files(context.agent, f"{home}/skills")
        files[f"{home}/settings.json"] = json.dumps(_config(context)).encode()
        argv = ("qwen", "--yolo", "--auth-type", "openai", "--output-format", "json")
        return Launch(
            without_proxies(start((*argv, *settings.get("args", ())), settings.get("root"))),
            files=files,
            env={**_environment(context), **context.agent.env},
            stdin=plain_prompt(context.instruction),
            finished=r'^\[\{"type":"system"',
            versions=npm_versions("qwen", "@qwen-code/qwen-code", self.tested, settings.get("root")),
        )


def _environment(context: LaunchContext) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{context.base_url}/v1",
        "OPENAI_API_KEY": context.session_key,
        "OPENAI_MODEL": context.agent.model_name,
        "QWEN_HOME": f"{context.home}/.qwen",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    }


def _config(context: LaunchContext) -> dict[str, Any]:
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "tools": {"shell": {"enableInteractiveShell": True}},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
        "agents": {"crossSessionMessaging": False},
        "context": {"clearContextOnIdle": {"toolResultsThresholdMinutes": -1, "toolResultsTotalCharsThreshold": -1}},
        "model": {
            "name": context.agent.model_name,
            "skipLoopDetection": True,
            "generationConfig": {
                "contextWindowSize": context.context_length,
                "samplingParams": {"max_tokens": context.max_tokens},
                "timeout": 3_600_000,  # a weight update may hold a call for long
                "retryInitialDelayMs": 1_000,  # else a minute
                "retryErrorCodes": [500, 502, 504],  # besides 429 and 503; it finds them in a stream's error, too
            },
        },
        "mcpServers": mcp_entries(mcp_servers(context.agent)),
    }
