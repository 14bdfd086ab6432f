"""Pi (npm `@earendil-works/pi-coding-agent`; needs Node >= 22.19), over any of the four APIs.

Pi reads its providers from ~/.pi/agent/models.json and its prompt from the standard input. It compacts by the
`contextWindow` it is told, so it is told the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import ConfigError
from .base import Launch, LaunchContext
from .preset import npm_versions, settings_of, skill_files, start, without_mcp

_SETTINGS: Mapping[str, type] = {"api": str, "args": list, "reasoning": bool, "root": str}
_BASE_PATHS = {
    "openai-completions": "/v1",
    "openai-responses": "/v1",
    "anthropic-messages": "",
    "google-generative-ai": "/v1beta",
}
_KEY = "POLAR_SESSION_KEY"
_PROVIDER = "polar"


class Pi:
    """`settings`:

    * `root`: the directory, inside, that npm installed Pi and Node into (`npm install --prefix`); default: on PATH;
    * `api`: which model API it speaks, openai-completions by default;
    * `reasoning`: whether the model reasons, false by default;
    * `args`: more arguments for the `pi` program.
    """

    name = "pi"
    tested: ClassVar[tuple[str, str]] = ("1.6.0", "1.6.0")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting or API."""
        settings = settings_of(context, self.name, _SETTINGS)
        without_mcp(context.agent, self.name)
        api = settings.get("api", "openai-completions")
        if api not in _BASE_PATHS:
            raise ConfigError(f"agent.settings.api is one of {', '.join(_BASE_PATHS)}, not {api!r}")
        home = f"{context.home}/.pi/agent"
        files = {
            "models": _models(context, api, reasoning=bool(settings.get("reasoning", False))),
            "settings": {"compaction": _compaction(context.context_length)},
        }
        return Launch(
            _script(context),
            files={f"{home}/{name}.json": json.dumps(told).encode() for name, told in files.items()}
            | skill_files(context.agent, f"{home}/skills"),
            env={_KEY: context.session_key, "PI_OFFLINE": "1", **context.agent.env},
            stdin=context.instruction.encode(errors="surrogateescape"),
            versions=npm_versions("pi", "@earendil-works/pi-coding-agent", self.tested, settings.get("root")),
            finished=r'^\{"type":"agent_(end|settled)"',
        )


def _script(context: LaunchContext) -> str:
    settings, model = context.agent.settings, context.agent.model_name
    argv = ("pi", "--print", "--mode", "json", "--no-session", "--provider", _PROVIDER, "--model", model)
    return start((*argv, *settings.get("args", ())), settings.get("root"), node="22.19")


def _compaction(context_length: int) -> dict[str, int]:
    """Pi's own numbers where they fit: in a small context they leave nothing that could be summed up, and Pi ends."""
    share = context_length // 4
    return {"reserveTokens": min(16384, share), "keepRecentTokens": min(20000, share)}


def _models(context: LaunchContext, api: str, *, reasoning: bool) -> dict[str, Any]:
    model = {
        "id": context.agent.model_name,
        "name": context.agent.model_name,
        "reasoning": reasoning,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": context.context_length,
        "maxTokens": context.max_tokens,
    }
    if api == "openai-completions":
        model["compat"] = {"supportsDeveloperRole": False, "supportsReasoningEffort": False}
    provider = {
        "baseUrl": f"{context.base_url}{_BASE_PATHS[api]}",
        "api": api,
        "apiKey": f"${_KEY}",
        "models": [model],
    }
    return {"providers": {_PROVIDER: provider}}
