"""mini-swe-agent (PyPI `mini-swe-agent`), over OpenAI Chat, whole replies.

The prompt goes by a configuration file, which is laid over one of its own. It has no compaction: where the context
overflows, it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

from .base import Launch, LaunchContext
from .preset import pypi_versions, settings_of, start, without_mcp, without_skills

_SETTINGS: Mapping[str, type] = {"args": list, "config": str, "root": str, "step_limit": int}


class MiniSWEAgent:
    """`settings`:

    * `root`: the virtual environment, inside, that pip installed it into; default: on PATH;
    * `config`: the configuration that it starts from, a file or a name of its own ones, mini.yaml by default;
    * `step_limit`: the number of model calls after which it ends, 0, the default, for any number;
    * `args`: more arguments for the `mini` program, as in [-c, environment.timeout=120].

    It counts no cost: it knows none of a model like yours, and would end for that.
    """

    name = "mini_swe_agent"
    tested: ClassVar[tuple[str, str]] = ("2.4.6", "2.4.6")
    """The oldest and the newest version that the suite has run."""

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError on an unknown setting, and where it is asked for MCP or skills: it has neither."""
        settings = settings_of(context, self.name, _SETTINGS)
        without_mcp(context.agent, self.name)
        without_skills(context.agent, self.name)
        path = f"{context.home}/.polar/mini.yaml"
        argv = ("mini", "--yolo", "--exit-immediately", "--output", f"{context.home}/.polar/trajectory.json")
        configs = ("-c", settings.get("config", "mini.yaml"), "-c", path)
        return Launch(
            start((*argv, *configs, *settings.get("args", ())), settings.get("root")),
            files={path: yaml.safe_dump(_config(context, settings)).encode()},
            env={**_environment(context), **context.agent.env},
            versions=pypi_versions("mini", "mini-swe-agent", self.tested, settings.get("root")),
        )


def _environment(context: LaunchContext) -> dict[str, str]:
    return {
        "OPENAI_API_KEY": context.session_key,
        "MSWEA_CONFIGURED": "true",  # else it asks for a model and a key
        "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.config/mini-swe-agent",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _config(context: LaunchContext, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "run": {"task": context.instruction},
        "agent": {"cost_limit": 0.0, "step_limit": settings.get("step_limit", 0)},
        "model": {
            "model_name": f"openai/{context.agent.model_name}",
            "cost_tracking": "ignore_errors",
            "model_kwargs": {
                "api_base": f"{context.base_url}/v1",
                "drop_params": True,
                "timeout": 3600,  # a weight update may hold a call for long
            },
        },
    }
