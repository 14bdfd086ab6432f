"""The two seams of the token side: an Engine (ids in, ids out) and a Renderer (messages to ids and back)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..records import BreakReason, ChatRequest, Completion, Generation, Message, SamplingParams, TokenIds, Tool


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What `Engine.probe` found out."""

    model: str
    context_length: int
    """Prompt and output tokens together."""
    weight_version: str = ""


class Engine(Protocol):
    """Token-in, token-out sampling. An async context manager: entered before use, left when the service ends."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def probe(self) -> EngineInfo:
        """Reach the engine and sample one token, so that missing ids or log-probabilities show before any training.

        Raises EngineError that says what to change.
        """
        ...

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        """Sample until a stop id, a stop string, or `sampling.max_tokens` (never None here).

        `request_id` names the call for aborts, `session_id` routes the calls of a session to one worker.
        Cancelling the call aborts it upstream. An upstream abort (a weight update) is never returned: the call is
        re-issued with the tokens so far. Raises EngineBusy where nothing was sampled and a retry may help, else
        EngineError.
        """
        ...


class Replaying(Protocol):
    """An engine that also tells what trainers replay: `Generation.routing` or `nucleus`."""

    @property
    def replay(self) -> Sequence[str]:
        """What it was made to tell: "routed_experts", "top_p"."""
        ...

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        *,
        request_id: str,
        session_id: str,
        stop_ids: Sequence[int] = (),
        replay_from: int = 0,
    ) -> Generation:
        """As `Engine.generate`. The experts of the first `replay_from` tokens are known: only later rows are told.

        So what a turn costs follows what is new in it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """An assistant turn read out of sampled ids. `reply.tool_calls` have no ids yet."""

    reply: Message
    malformed_calls: int = 0


class Renderer(Protocol):
    """One model family's chat format, over its own tokenizer. Pure CPU work; thread-safe."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Ids at or above it never reach an engine."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant turn."""
        ...

    @property
    def multimodal(self) -> bool:
        """Whether it reads `Message.parts` and says images as ids; engines are sent ids and nothing else.

        Without it the model reads the text `records.IMAGE` where an image stood, or the request is refused
        (`engine.turn.Policy.images`).
        """
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> TokenIds:
        """The whole prompt, generation prompt included. Raises BadRequest where the format cannot say it."""
        ...

    def extend(
        self, parent: Completion, prompt_and_output: TokenIds, new: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenIds | BreakReason:
        """The ids T such that `prompt_and_output ‖ T` is the next prompt after `parent`'s reply and then `new`.

        T closes the assistant turn where the sampled ids do not, and ends with the generation prompt. No sampled token
        is ever re-rendered. A BreakReason where the format cannot be extended here; the caller renders in full.
        Cost follows `new`, not the history.
        """
        ...

    def parse(self, output_ids: TokenIds, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        """Reasoning, text and tool calls of a sampled turn. Malformed calls stay text and are counted.

        `prompt_ids` tells whether the generation prompt opened a reasoning block already.
        """
        ...

    def decode(self, ids: TokenIds) -> str:
        """Text of `ids`, special tokens shown."""
        ...
