"""A scripted model that answers by what it is asked: whose conversation it is, and whether that is to be summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from polar_plugin.engine.scripted import Call, Reply
from polar_plugin.records import FinishReason, Role, TokenIds

from .words import HANGING, MAIN, Turn

SUMMARY = f"{MAIN} The file `result` is to say mended. Parts have been listed; go on."
_ROLES = {"main": Role.MAIN, "sub": Role.SUB_AGENT, "summary": Role.COMPACTION}


def asks_for_summary(prompt: str) -> bool:
    """Whether the last message of a Qwen3 prompt is a user's that speaks of a summary, and has none of ours.

    Gemini CLI and its fork call it a snapshot of the state. In these scenarios nobody else asks for either.
    """
    last = prompt.removesuffix("<|im_start|>assistant\n").rpartition("<|im_start|>")[2]
    spoken = last.startswith("user\n") and not last.startswith("user\n<tool_response>")
    return spoken and any(word in last.lower() for word in ("summar", "state_snapshot")) and SUMMARY not in last


class Model:
    """The script of a `ScriptedEngine` for one session: pass it as `replies`, and its `delay` as `delay`."""

    def __init__(
        self,
        main: Sequence[Turn],
        sub: Sequence[Turn],
        decode: Callable[[TokenIds], str],
        *,
        is_summary: Callable[[str], bool],
        directory: Path,
    ) -> None:
        """`is_summary` tells from the end of a prompt that a CLI asks for a summary of the conversation.

        `directory` is where the sandbox's workspace appears.
        """
        self._turns = {"main": main, "sub": sub or main}
        self._decode = decode
        self._is_summary = is_summary
        self._directory = directory
        self._taken: dict[str, Turn] = {}
        self.asked: Counter[str] = Counter()
        """Calls by thread: "main", "sub", "summary"."""
        self.roles: dict[str, Role] = {}
        """What each call was for, by its id."""
        self.prompts: list[str] = []

    def __call__(self, call: Call) -> Reply:
        prompt = self._decode(call.prompt_ids)
        self.prompts.append(prompt)
        thread = "summary" if self._is_summary(prompt) else "main" if MAIN in prompt else "sub"
        self.roles[call.request_id] = _ROLES[thread]
        position = self.asked[thread]
        self.asked[thread] += 1
        if thread == "summary":
            return Reply(f"<summary>\n{SUMMARY}\n</summary>")
        turns = self._turns[thread]
        turn = turns[min(position, len(turns) - 1)]
        self._taken[call.request_id] = turn
        reason = FinishReason.LENGTH if turn.cut else FinishReason.STOP
        return Reply(turn.written(prompt), finish_reason=reason, raises=turn.raises)

    async def delay(self, call: Call) -> None:
        turn = self._taken.get(call.request_id, Turn())
        if turn.hangs:
            for workspace in self._directory.glob("*/workspace"):
                (workspace / HANGING).touch()
            await anyio.sleep_forever()
        await anyio.sleep(turn.takes)
