"""What each recording is as traces: "<role> <completions>[ <why it begins>]" for each, and what is not trained.

A trace without a reason begins with the session's first call. Where a program has one conversation, there is one trace;
more of them, and what is left out, are the program's own doing:

* Claude Code writes a reminder into its first user message after an empty reply (fempty): the history is rewritten.
* Gemini CLI adds such a reminder behind it, takes it back later, and its side calls ask which model to use (basic).
* Qwen Code asks the same again after a reply that was cut, empty or no call (flen, fempty, fbadjson).
* opencode asks for a title first; Claude Code, Codex, Gemini CLI, opencode and Qwen Code have a sub-agent (long).
* Codex, opencode and Pi end where a reply was cut or empty, Gemini CLI where it was cut, or its stream (fdrop).
"""

EXPECTED: dict[str, dict[str, str]] = {
    "claude-code-2.1.332": {
        "basic": "main 2",
        "f429x2": "main 2",
        "fbadjson": "main 3",
        "fdrop": "main 2",
        "fempty": "main 1, main 2 history_rewritten",
        "flen": "main 3",
        "fmissing": "main 3",
        "funknown": "main 3",
        "long": "main 8, sub_agent 2 new_thread",
    },
    "codex-0.171.0": {
        "basic": "main 2",
        "f429x2": "main 2",
        "fbadjson": "main 3",
        "fdrop": "main 2",
        "fempty": "main 1",
        "flen": "main 1",
        "fmissing": "main 3",
        "funknown": "main 3",
        "gpt-5.5": "main 2",
        "long": "main 7, sub_agent 2 new_thread",
    },
    "gemini-cli-0.61.0": {
        "basic": "untrained side 5",
        "f429x2": "main 2",
        "fbadjson": "main 3",
        "fdrop": "",
        "fempty": "main 1, main 2 history_rewritten",
        "flen": "main 1",
        "fmissing": "main 3",
        "funknown": "main 3",
        "long": "main 8, sub_agent 3 new_thread",
        "m": "main 2",
    },
    "mini-swe-agent-2.4.6": {"basic": "main 2", "long": "main 5"},
    "opencode-1.18.33": {
        "basic": "main 2 new_thread, untrained side 1",
        "f429x2": "main 2 new_thread, untrained side 1",
        "fbadjson": "main 3 new_thread, untrained side 1",
        "fdrop": "main 2 new_thread, untrained side 1",
        "fempty": "main 1 new_thread, untrained side 1",
        "flen": "main 1 new_thread, untrained side 1",
        "fmissing": "main 3 new_thread, untrained side 1",
        "funknown": "main 3 new_thread, untrained side 1",
        "long": "main 8 new_thread, sub_agent 2 new_thread, untrained side 1",
    },
    "openhands-1.16.0": {"basic": "main 2", "long": "main 5"},
    "pi-1.6.0": {
        "basic": "main 2",
        "f429x2": "main 2",
        "fbadjson": "main 3",
        "fdrop": "main 2",
        "fempty": "main 1",
        "flen": "main 1",
        "fmissing": "main 3",
        "funknown": "main 3",
        "long": "main 7",
        "long-anthropic-messages": "main 7",
        "long-google-generative-ai": "main 7",
        "long-openai-responses": "main 7",
    },
    "qwen-code-0.24.4": {
        "basic": "main 2",
        "f429x2": "main 2",
        "fbadjson": "main 2, untrained discarded 1",
        "fdrop": "main 2",
        "fempty": "main 2, untrained discarded 1",
        "flen": "main 2, untrained discarded 1",
        "fmissing": "main 3",
        "funknown": "main 3",
        "long": "main 9, sub_agent 2 new_thread",
    },
}
