"""A small coding agent: one model, one tool, a loop. Python's standard library only.

It reads its task from $INSTRUCTION_FILE (or the arguments), speaks OpenAI Chat at $OPENAI_BASE_URL, and works in the
current directory until the model answers without calling the tool, at most $AGENT_MAX_TURNS times. AGENT_STREAM=1
streams the answers.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

SYSTEM = "You fix bugs in a small Python project in the current directory. Use the bash tool to look and to edit."
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in bash and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
COMMAND_SECONDS = 60
OUTPUT_CHARACTERS = 4000


def main() -> int:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction()}]
    for _ in range(int(os.environ.get("AGENT_MAX_TURNS", "12"))):
        try:
            reply = ask(messages)
        except urllib.error.HTTPError as error:
            print(f"the model API answered {error.code}: {error.read().decode(errors='replace')}", file=sys.stderr)
            return 1
        messages.append(reply)
        if reply.get("content"):
            print(reply["content"], flush=True)
        if not reply.get("tool_calls"):
            return 0
        messages.extend(answer(call) for call in reply["tool_calls"])
    print("no turns left", file=sys.stderr)
    return 0


def instruction() -> str:
    path = os.environ.get("INSTRUCTION_FILE")
    return Path(path).read_text(encoding="utf-8") if path else " ".join(sys.argv[1:])


def ask(messages: list) -> dict:
    """The assistant's next message, as it goes back into the history."""
    stream = os.environ.get("AGENT_STREAM") == "1"
    body = {"model": os.environ.get("OPENAI_MODEL", "model"), "messages": messages, "tools": [TOOL], "stream": stream}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        reply = joined(response) if stream else json.load(response)["choices"][0]["message"]
    return {"role": "assistant", **{key: reply.get(key) for key in ("content", "tool_calls") if key in reply}}


def joined(lines) -> dict:
    """One message out of the chunks of a stream."""
    content, calls = "", {}
    for line in lines:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        for choice in json.loads(line[5:]).get("choices", []):
            delta = choice.get("delta", {})
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {}})
                call["id"] = part.get("id") or call["id"]
                for key, text in (part.get("function") or {}).items():
                    call["function"][key] = call["function"].get(key, "") + (text or "")
    return {"content": content or None, "tool_calls": [calls[index] for index in sorted(calls)]}


def answer(call: dict) -> dict:
    return {"role": "tool", "tool_call_id": call["id"], "content": result_of(call["function"])}


def result_of(function: dict) -> str:
    """What the tool says. A call that makes no sense is told so, for the model to mend."""
    if function.get("name") != "bash":
        return f"error: there is no tool {function.get('name')!r}, only bash"
    try:
        command = json.loads(function.get("arguments") or "{}")["command"]
        return run(str(command))
    except (ValueError, TypeError, KeyError) as error:
        return f'error: the arguments must be JSON like {{"command": "ls"}} ({error!r})'


def run(command: str) -> str:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(["bash", "-c", command], start_new_session=True, **pipes)
    try:
        output, note = process.communicate(timeout=COMMAND_SECONDS)[0], ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, note = process.communicate()[0], f"\n(killed after {COMMAND_SECONDS} s)"
    text = output.decode(errors="replace")
    if len(text) > OUTPUT_CHARACTERS:
        half = OUTPUT_CHARACTERS // 2
        text = f"{text[:half]}\n... {len(text) - OUTPUT_CHARACTERS} characters left out ...\n{text[-half:]}"
    return f"{text}{note}\n(exit code {process.returncode})"


if __name__ == "__main__":
    sys.exit(main())
