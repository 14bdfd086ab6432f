"""Any program that can be started from a shell and finds its model by the usual environment variables.

`agent.command` is a script (run by bash with pipefail, so that a crash before a pipe is seen) or an argument vector.
The instruction is a file, $INSTRUCTION_FILE; on the standard input as well where `settings.stdin: instruction` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError
from .base import Launch, LaunchContext

_SETTINGS = ("agent_files", "files", "finished", "ok_exit_codes", "stdin")


class Shell:
    """`settings`:

    * `files`: {path: text}, written before the start; relative paths lie in $HOME;
    * `agent_files`: a file or directory of this machine (or a list of them), copied into $HOME under its own name;
    * `stdin`: "instruction" to write the instruction to the program's standard input, which is empty otherwise;
    * `ok_exit_codes`: the exit codes that are no failure, [0] by default;
    * `finished`: a regular expression for the stdout line that ends the program's work (`Launch.finished`).
    """

    name = "shell"

    def launch(self, context: LaunchContext) -> Launch:
        """Raises ConfigError without a command, on an unknown setting, and where an agent file cannot be read."""
        settings, command = context.agent.settings, context.agent.command
        if not command:
            raise ConfigError("agent.command: the shell harness needs a script, or a list of arguments")
        if unknown := sorted(set(settings) - set(_SETTINGS)):
            raise ConfigError(f"agent.settings: the shell harness knows {', '.join(_SETTINGS)}, not {unknown}")
        if settings.get("stdin") not in (None, "instruction"):
            raise ConfigError(f"agent.settings.stdin is 'instruction' or absent, not {settings['stdin']!r}")
        files = {instruction_path(context): context.instruction.encode()} | _files(settings, context.home)
        if isinstance(command, str):
            script = f"{context.home}/.polar/agent.sh"
            files[script] = command.encode()
            command = ("bash", "-o", "pipefail", script)
        return Launch(
            command,
            files=files,
            env={**environment(context), **context.agent.env},
            stdin=context.instruction.encode() if settings.get("stdin") else b"",
            ok_exit_codes=frozenset(settings.get("ok_exit_codes", (0,))),
            finished=settings.get("finished", ""),
        )


def instruction_path(context: LaunchContext) -> str:
    return f"{context.home}/.polar/instruction.txt"


def environment(context: LaunchContext) -> dict[str, str]:
    """The model APIs' own variables, all leading to the proxy with the session's key."""
    url, key = context.base_url, context.session_key
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": context.agent.model_name,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": context.agent.model_name,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "INSTRUCTION_FILE": instruction_path(context),
    }


def _files(settings: Mapping[str, Any], home: str) -> dict[str, bytes]:
    texts = cast("Mapping[str, str]", settings.get("files", {}))
    written = {path if path.startswith("/") else f"{home}/{path}": text.encode() for path, text in texts.items()}
    sources = settings.get("agent_files", ())
    for source in (sources,) if isinstance(sources, str) else cast("tuple[str, ...]", sources):
        written |= {f"{home}/{name}": content for name, content in _read(Path(source))}
    return written


def _read(source: Path) -> Iterator[tuple[str, bytes]]:
    """(name below $HOME, content) of a file, or of each file of a directory."""
    try:
        found = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
        for path in found:
            yield str(path.relative_to(source.parent)), path.read_bytes()
    except OSError as error:
        raise ConfigError(f"agent.settings.agent_files: cannot read {source}: {error.strerror}") from error
