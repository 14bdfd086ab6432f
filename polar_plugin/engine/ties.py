"""Which of several completions that mean the same a request continues. Never a guess. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..records import Completion, Message

Step = tuple[Sequence[Message], Mapping[str, Completion]]
"""How a request tells one turn, and by candidate id the completion that the candidate has there."""


def told_apart(
    candidates: Sequence[Completion], steps: Iterable[Step], thread: str, delivered: Callable[[str], bool]
) -> Completion | None:
    """The one that is continued; None where nothing tells.

    Evidence, the first that tells: ids of tool calls that are one's own, reasoning that is one's own (in the last turn,
    then in the turns before it), the thread's name, an answer that arrived over one that did not. Candidates of the
    same tokens need none. A turn tells nothing of a candidate whose own tokens do not reach back to it: it was asked
    with such a turn too.
    """
    left: list[Completion] = list(candidates)
    for messages, here in steps if len(left) > 1 else ():
        for holds in (_own_ids, _own_reasoning):
            told = {one.id for one in left if one.id in here and holds(messages, here[one.id])}
            left = [one for one in left if not told or one.id in told or one.id not in here]
        if len(left) == 1:
            break
    left = _only(left, [one for one in left if one.request.thread == thread])
    left = _only(left, [one for one in left if delivered(one.id)])
    return left[-1] if all(_same_tokens(one, left[-1]) for one in left[:-1]) else None


def _only(left: list[Completion], evident: list[Completion]) -> list[Completion]:
    return evident or left


def _own_ids(messages: Sequence[Message], sampled: Completion) -> bool:
    told = {call.id for message in messages for call in message.tool_calls}
    own = {call.id for call in sampled.reply.tool_calls}
    return bool(own) and "" not in own and own <= told


def _own_reasoning(messages: Sequence[Message], sampled: Completion) -> bool:
    own = sampled.reply.reasoning.strip()
    return bool(own) and any(message.reasoning.strip() == own for message in messages)


def _same_tokens(one: Completion, other: Completion) -> bool:
    return np.array_equal(one.generation.output_ids, other.generation.output_ids) and np.array_equal(
        one.prompt_ids, other.prompt_ids
    )
