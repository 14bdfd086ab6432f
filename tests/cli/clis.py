"""The CLIs that are run for real, and what each makes of each scenario.

To add one:

1. its package in `polar_plugin/harnesses/packages.py`, its preset in `polar_plugin/harnesses` and `plugins.HARNESSES`;
2. a `CLI` in `CLIS`: its tools in `Words`, its settings, and `expects` with the scenarios it is put through. Start with
   `{"basic": Expect(2)}` and run `pytest -m cli tests/cli -k NAME`; a difference is shown as expected against seen,
   with the fields of requests that were ignored. Then add scenario after scenario. What a CLI does not have
   (sub-agents, say) is left out, and the table says so;
3. `pytest -m cli tests/cli --conformance` writes what was seen to `results.json`, and
   `python -m tests.cli.conformance` makes docs/conformance.md of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polar_plugin.records import Status

from . import install
from .model import asks_for_summary
from .words import Call, Words


@dataclass(frozen=True, slots=True)
class Expect:
    """What must come of a scenario. Beyond it, always: no token lost without a reason, one trace a conversation."""

    calls: int
    """Model calls, failed ones and summaries among them."""
    traces: int = 1
    status: Status = Status.COMPLETED
    exit_code: int = 0
    reward: float = 1.0
    summaries: int = 0
    """Calls that asked for a summary of the conversation."""
    delivered: bool = True
    untrained: frozenset[str] = frozenset()
    """Why some sampled tokens are not trained; none, for most."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More `agent.settings`, for this scenario."""
    note: str = ""
    """What the conformance table says beside it: the CLI's own way of taking it."""

    def facts(self) -> dict[str, Any]:
        """As `running.Ran.outcome` has them."""
        return {
            "calls": self.calls,
            "traces": self.traces,
            "status": self.status.value,
            "exit_code": self.exit_code,
            "reward": self.reward,
            "summaries": self.summaries,
            "delivered": self.delivered,
            "untrained": self.untrained,
        }


@dataclass(frozen=True, slots=True)
class CLI:
    """One row of the conformance table: a program, by one of the APIs that it speaks."""

    name: str
    package: str
    """In `harnesses.packages.PACKAGES`."""
    harness: str
    api: str
    words: Words
    expects: Mapping[str, Expect]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`agent.settings`, besides `root`."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """The scenarios that it is not put through, each with the reason."""
    ignored: frozenset[str] = frozenset()
    """Request fields that this CLI sends and that mean nothing to a policy."""
    context: int = 100_000
    tight_context: int = 50_000
    """The context's length in the scenarios that fill it."""
    is_summary: Callable[[str], bool] = asks_for_summary
    """Whether a prompt asks for a summary; see `model.Model`."""

    @property
    def version(self) -> str:
        return install.version_of(self.package)


_PI = Words(
    shell=lambda command: Call("bash", {"command": command}),
    read=lambda path: Call("read", {"path": path}),
    edit=lambda path, old, new: Call("edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}),
)


def _pi(api: str, name: str, **more: Any) -> CLI:
    return CLI(
        name=name,
        package="pi",
        harness="pi",
        api=api,
        words=_PI,
        settings={"api": api},
        expects={
            "basic": Expect(2),
            "long": Expect(8),
            "busy": Expect(4),
            "cut_stream": Expect(3),
            "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
            "empty": Expect(2, note="ends"),
            "length": Expect(2, status=Status.TRUNCATED, note="ends"),
            "fill": Expect(10, traces=3, summaries=1),
            "overflow": Expect(8, traces=3, summaries=1),
            "skills": Expect(2),
        },
        lacks={"sub_agent": "has no sub-agents", "mcp": "has no MCP"},
        **more,
    )


_CLAUDE_CODE = Words(
    shell=lambda command: Call("Bash", {"command": command, "description": "Runs a command"}),
    read=lambda path: Call("Read", {"file_path": path}),
    edit=lambda path, old, new: Call("Edit", {"file_path": path, "old_string": old, "new_string": new}),
    agent=lambda prompt: Call(
        "Agent",
        {
            "description": "Mends a file",
            "prompt": prompt,
            "subagent_type": "general-purpose",
            "run_in_background": False,
        },
    ),
    mend=lambda path: Call("mcp__mender__mend", {"path": path}),
)
_CODEX = Words(
    shell=lambda command: Call("exec_command", {"cmd": command}),
    agent=lambda prompt: Call("multi_agent_v1__spawn_agent", {"message": prompt}),
    awaits=lambda prompt: Call(
        "multi_agent_v1__wait_agent",
        {"targets": re.findall(r'"agent_id": ?"([^"]+)"', prompt)[-1:], "timeout_ms": 60_000},
    ),
    mend=lambda path: Call("mcp__mender__mend", {"path": path}),
)

_CACHE_CONTROL = frozenset({"messages.*.content.*.cache_control", "system.*.cache_control"})
_CLAUDE_EXPECTS = {
    "basic": Expect(2),
    "long": Expect(8),
    "busy": Expect(4),
    "cut_stream": Expect(3),
    "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
    "empty": Expect(3, note="asks again"),
    "length": Expect(3, note="asks to go on"),
    "fill": Expect(10, traces=3, summaries=1),
    "overflow": Expect(8, traces=3, summaries=1),
    "sub_agent": Expect(4, traces=2),
    "mcp": Expect(2),
    "skills": Expect(2),
}
_CODEX_EXPECTS = {
    "basic": Expect(2),
    "long": Expect(8),
    "busy": Expect(4),
    "cut_stream": Expect(3),
    "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
    "empty": Expect(2, note="ends"),
    "length": Expect(2, status=Status.FAILED, exit_code=1, note="ends"),
    "fill": Expect(10, traces=3, summaries=1),
    "overflow": Expect(5, status=Status.FAILED, exit_code=1, reward=0.0, note="ends"),
    "sub_agent": Expect(5, traces=2, settings={"multi_agent": True}),
    "mcp": Expect(2),
    "skills": Expect(2),
}

_MINI_SWE_AGENT = Words(
    shell=lambda command: Call("bash", {"command": command}),
    done=Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
)
_QWEN_CODE = Words(
    shell=lambda command: Call("run_shell_command", {"command": command, "is_background": False}),
    read=lambda path: Call("read_file", {"file_path": path}),
    edit=lambda path, old, new: Call("edit", {"file_path": path, "old_string": old, "new_string": new}),
    agent=lambda prompt: Call(
        "agent",
        {
            "description": "Mends a file",
            "prompt": prompt,
            "subagent_type": "general-purpose",
            "run_in_background": False,
        },
    ),
    mend=lambda path: Call("mcp__mender__mend", {"path": path}),
)
_OPENCODE = Words(
    shell=lambda command: Call("bash", {"command": command}),
    read=lambda path: Call("read", {"filePath": path}),
    edit=lambda path, old, new: Call("edit", {"filePath": path, "oldString": old, "newString": new}),
    agent=lambda prompt: Call("task", {"description": "Mends a file", "prompt": prompt, "subagent_type": "general"}),
    mend=lambda path: Call("mender_mend", {"path": path}),
)
_GEMINI_CLI = Words(
    shell=lambda command: Call("run_shell_command", {"command": command, "is_background": False}),
    read=lambda path: Call("read_file", {"file_path": path}),
    edit=lambda path, old, new: Call(
        "replace", {"file_path": path, "instruction": "Mend it.", "old_string": old, "new_string": new}
    ),
    agent=lambda prompt: Call("invoke_agent", {"agent_name": "generalist", "prompt": prompt}),
    mend=lambda path: Call("mcp_mender_mend", {"path": path}),
    reports=Call("complete_task", {"result": {"response": "It is mended."}}),
)

_GEMINI_EXPECTS = {
    "basic": Expect(2),
    "long": Expect(8),
    "busy": Expect(4),
    "cut_stream": Expect(3),
    "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
    "empty": Expect(2, note="ends"),
    "length": Expect(2, status=Status.TRUNCATED, note="ends"),
    "overflow": Expect(5, status=Status.FAILED, exit_code=144, reward=0.0, note="ends"),
    "sub_agent": Expect(4, traces=2),
    "mcp": Expect(2),
    "skills": Expect(2),
}
_QWEN_EXPECTS = {
    "basic": Expect(2),
    "long": Expect(8),
    "busy": Expect(4),
    "cut_stream": Expect(3),
    "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
    "empty": Expect(3, traces=2, note="asks the same again"),
    "length": Expect(2, status=Status.TRUNCATED, note="ends"),
    "sub_agent": Expect(4, traces=2),
    "mcp": Expect(2),
    "skills": Expect(2),
}
_OPENCODE_EXPECTS = {
    "basic": Expect(2),
    "long": Expect(8),
    "busy": Expect(4),
    "cut_stream": Expect(3),
    "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
    "empty": Expect(2, note="ends"),
    "length": Expect(2, status=Status.TRUNCATED, note="ends"),
    "fill": Expect(10, traces=3, summaries=1),
    "overflow": Expect(8, traces=3, summaries=1, status=Status.FAILED, exit_code=1),
    "sub_agent": Expect(4, traces=2),
    "mcp": Expect(2),
    "skills": Expect(2),
}
_MINI_EXPECTS = {
    "basic": Expect(2),
    "long": Expect(8),
    "busy": Expect(4),
    "cut_stream": Expect(3),
    "hang_up": Expect(2, status=Status.FAILED, exit_code=137),
    "empty": Expect(3, note="asks again"),
    "length": Expect(3, traces=2, note="drops it and asks again"),
    "overflow": Expect(5, status=Status.FAILED, exit_code=1, reward=0.0, note="ends"),
}
_MINI_LACKS = {
    "fill": "compaction",
    "sub_agent": "sub-agents",
    "mcp": "MCP",
    "skills": "skills",
}

CLIS: tuple[CLI, ...] = (
    _pi("openai-completions", "Pi, OpenAI Chat", ignored=frozenset({"store"})),
    _pi(
        "anthropic-messages",
        "Pi, Anthropic Messages",
        ignored=_CACHE_CONTROL | {"tools.*.cache_control", "tools.*.eager_input_streaming"},
    ),
    _pi("openai-responses", "Pi, OpenAI Responses", ignored=frozenset({"prompt_cache_key", "store"})),
    _pi("google-generative-ai", "Pi, Google"),
    CLI(
        "Codex",
        "codex",
        "codex",
        "openai-responses",
        _CODEX,
        _CODEX_EXPECTS,
        ignored=frozenset({"client_metadata", "parallel_tool_calls", "prompt_cache_key", "store"}),
    ),
    CLI(
        "Claude Code",
        "claude_code",
        "claude_code",
        "anthropic-messages",
        _CLAUDE_CODE,
        _CLAUDE_EXPECTS,
        ignored=_CACHE_CONTROL | {"context_management", "metadata", "output_config", "thinking"},
        tight_context=60_000,
    ),
    CLI(
        "Gemini CLI",
        "gemini_cli",
        "gemini_cli",
        "google-generative-ai",
        _GEMINI_CLI,
        _GEMINI_EXPECTS,
        lacks={"fill": "compacts only before a user's message: not within one instruction"},
    ),
    CLI(
        "Qwen Code",
        "qwen_code",
        "qwen_code",
        "openai-completions",
        _QWEN_CODE,
        _QWEN_EXPECTS,
        lacks=dict.fromkeys(("fill", "overflow"), "compacts, but once or twice from run to run: nothing to hold it to"),
    ),
    CLI(
        "opencode",
        "opencode",
        "opencode",
        "openai-completions",
        _OPENCODE,
        _OPENCODE_EXPECTS,
        tight_context=40_000,
    ),
    CLI(
        "mini-swe-agent",
        "mini_swe_agent",
        "mini_swe_agent",
        "openai-completions",
        _MINI_SWE_AGENT,
        _MINI_EXPECTS,
        lacks={name: f"has no {what}" for name, what in _MINI_LACKS.items()},
    ),
)
