"""Every reason for which a trace starts anew: what brings it about, and which setting avoids it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..records import BreakReason

BRANCH = "branch"
ASKED_AGAIN = "asked_again"
TOKENS_DIFFER = "tokens_differ"
UNRECORDED = "unrecorded"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a completion starts a trace of its own."""

    cause: str
    remedy: str
    """What to set so that it does not; "" where nothing is amiss."""


_AGENT = "the agent program's own settings (task.agent.settings, or its configuration file)"

REASONS: Mapping[str, Reason] = {
    BreakReason.FIRST_CALL: Reason("nothing was recorded before", ""),
    BreakReason.NEW_THREAD: Reason(
        "a conversation of its own: a sub-agent, a title, another system prompt and other tools",
        "none is needed; to leave such calls out of training set builder.config.roles, as in {sub_agent: drop}",
    ),
    BreakReason.TOOLS_CHANGED: Reason(
        "the agent program offers other tools than before, and tools stand at the beginning of the prompt",
        f"keep the tools as they are for a whole session, in {_AGENT}: MCP servers that connect before the first call,"
        " no deferred or on-demand tools",
    ),
    BreakReason.SYSTEM_CHANGED: Reason(
        "the agent program wrote its system prompt anew: a date, a git status, a mode, a list of files",
        f"switch the changing part off in {_AGENT}; where it means nothing, add a row to harnesses/noise.py",
    ),
    BreakReason.HISTORY_REWRITTEN: Reason(
        "the agent program changed a message of its own: it masked or cut an old result, added a reminder, rewound",
        f"switch pruning, masking or context editing off in {_AGENT}",
    ),
    BreakReason.ASSISTANT_REWRITTEN: Reason(
        "the agent program tells a sampled turn such that it means something else",
        "where it means the same to the model, add a row to harnesses/noise.py; else it is the program's doing",
    ),
    BreakReason.TEMPLATE_REWRITE: Reason(
        "the chat template writes earlier turns otherwise once new messages follow: it drops their reasoning",
        "renderer.history: sampled",
    ),
    BreakReason.COMPACTION: Reason(
        "the agent program replaced its history by a summary",
        "a larger engine.context_length, or a later compaction in " + _AGENT,
    ),
    BreakReason.TRUNCATED_PARENT: Reason(
        "an answer was cut by its length, and the agent program went on without it or with another text",
        "a larger sampling.max_tokens",
    ),
    BreakReason.UNDELIVERED_PARENT: Reason(
        "the agent program hung up before it had the whole answer, and went on without it",
        "a longer request timeout in " + _AGENT + "; more engine capacity, or fewer attempts at once (stages.run)",
    ),
    BreakReason.BOUNDARY_UNKNOWN: Reason(
        "nothing tells where the sampled turn ends in the chat format, or which of several equal answers is continued",
        "renderer.kind: the model's family of the `renderers` package, or `template`; `polar-plugin doctor` shows what"
        " each can extend",
    ),
    BRANCH: Reason(
        "the conversation that it continues was continued otherwise as well: a rewind, a part of an answer, a fork",
        "none is needed: what both have in common is context in the second trace",
    ),
    ASKED_AGAIN: Reason(
        "the same prompt was answered before: a retry, or an answer that the agent program did not accept",
        "to train the answer that it did not go on with as well: builder.config.discarded: train",
    ),
    TOKENS_DIFFER: Reason(
        "the recording names a completion that it continues, but the prompt does not begin with its tokens",
        "record the token ids that were sent to the engine, and not a later rendering of the messages",
    ),
    UNRECORDED: Reason(
        "the recording does not tell why: its writer keeps no break reasons",
        "see who changed what: a template that rewrites turns asks for renderer.history: sampled, and an agent program"
        " that rewrites its history for other settings of its own",
    ),
}
