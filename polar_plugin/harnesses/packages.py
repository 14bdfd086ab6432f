"""Where agent programs come from: a registry's package, and the file that proves it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Package:
    registry: Literal["npm", "pypi"]
    package: str
    program: str
    """Relative to the directory it is installed into."""


NODE = Package("npm", "node", "node_modules/.bin/node")
NODE_VERSION = "22.23.3"
PACKAGES: Mapping[str, Package] = {
    "pi": Package("npm", "@earendil-works/pi-coding-agent", "node_modules/.bin/pi"),
    "claude_code": Package("npm", "@anthropic-ai/claude-code", "node_modules/.bin/claude"),
    "codex": Package("npm", "@openai/codex", "node_modules/.bin/codex"),
    "gemini_cli": Package("npm", "@google/gemini-cli", "node_modules/.bin/gemini"),
    "qwen_code": Package("npm", "@qwen-code/qwen-code", "node_modules/.bin/qwen"),
    "opencode": Package("npm", "opencode-ai", "node_modules/.bin/opencode"),
    "mini_swe_agent": Package("pypi", "mini-swe-agent", "bin/mini"),
}
"""By the name of the preset (`plugins.HARNESSES`)."""
