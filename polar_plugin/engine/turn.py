"""One turn: a chat request becomes a completion.

Find the parent, extend its tokens (or render in full, and say why), clamp to the context, sample, parse.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

import anyio.to_thread
import numpy as np

from ..errors import BadRequest, ContextOverflow, EngineError
from ..merge.parents import extends
from ..records import (
    BreakReason,
    ChatRequest,
    Completion,
    FinishReason,
    Generation,
    Image,
    Message,
    SamplingParams,
    TokenIds,
    Tool,
)
from .base import Engine, Parsed, Renderer, Replaying
from .buffer import TokenBuffer
from .history import History, Place
from .toolcalls import without_half_call

T = TypeVar("T")
_SCHEMA_CHARACTERS = 500  # a guess
_INLINE_CHARACTERS = 16_384  # about 5 ms of tokenisation: beyond it the event loop is left


async def _at_once() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Policy:
    """What every session of a service shares."""

    engine: Engine
    renderer: Renderer
    sampling: SamplingParams
    """The trainer's; `max_tokens` is its limit for one turn."""
    context_length: int
    images: Literal["placeholder", "reject"] = "placeholder"
    """Where the renderer sees no images: the text `records.IMAGE` in their place, counted, or a BadRequest."""
    replay: bool = False
    """Whether the engine is a `Replaying` one, asked for the experts of what is new in a prompt alone."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to send, and how they came about."""

    buffer: TokenBuffer
    ids: TokenIds
    parent: Completion | None
    break_reason: BreakReason | None
    place: Place


class Conversation:
    """The token side of one session: call it with a request, get the completion. Several calls may be under way."""

    def __init__(
        self,
        policy: Policy,
        session_id: str,
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        delivered: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`delivered` tells by completion id whether the harness got the answer."""
        self._policy = policy
        self._session_id = session_id
        self._clock = clock
        self._new_id = new_id
        self._history = History(delivered)
        self._buffers: dict[str, TokenBuffer] = {}

    async def __call__(self, request: ChatRequest, ready: Callable[[], Awaitable[None]] = _at_once) -> Completion:
        """Raises ContextOverflow, BadRequest (the format cannot say it) or EngineError; then nothing is kept.

        The first two before `ready` is awaited, and nothing is sampled until it returns.
        """
        started = self._clock()
        prompt = await self._prompt(request)
        sampling = self._sampling(request, len(prompt.ids))
        await ready()
        completion_id = self._new_id()
        generation = await self._generate(prompt, sampling, completion_id)
        request = replace(prompt.place.request, role=prompt.place.role)
        parsed = await self._parse(generation, request, prompt.ids)
        completion = Completion(
            id=completion_id,
            request=request,
            prompt_ids=prompt.ids,
            generation=generation,
            reply=self._with_call_ids(parsed.reply),
            sampling=sampling,
            started=started,
            ended=self._clock(),
            parent=prompt.parent.id if prompt.parent else None,
            break_reason=prompt.break_reason,
            malformed_calls=parsed.malformed_calls,
            images_omitted=self._omitted(request, prompt.parent),
        )
        self._remember(completion, prompt)
        return completion

    async def _generate(self, prompt: Prompt, sampling: SamplingParams, completion_id: str) -> Generation:
        engine, session, stops = self._policy.engine, self._session_id, self._policy.renderer.stop_ids
        if not self._policy.replay:
            return await engine.generate(
                prompt.ids, sampling, request_id=completion_id, session_id=session, stop_ids=stops
            )
        told = prompt.parent.generation.routing if prompt.parent else None
        return await cast("Replaying", engine).generate(
            prompt.ids,
            sampling,
            request_id=completion_id,
            session_id=session,
            stop_ids=stops,
            replay_from=told.end if told else 0,
        )

    async def count(self, request: ChatRequest) -> int:
        """The number of ids that a call with this request would send now. Nothing is sampled or kept."""
        place = self._history.find(request)
        if place.again:
            return len(place.again.prompt_ids)
        parent, ids, _ = await self._rendered(request, place)
        return (parent.length if parent else 0) + len(ids)

    async def _prompt(self, request: ChatRequest) -> Prompt:
        place = self._history.find(request)
        request = place.request
        if (again := place.again) is not None:  # the very ids, however the harness tells the messages now
            buffer, length = self._buffers[again.id], len(again.prompt_ids)
            parent = place.parent if again.parent else None
            return Prompt(buffer, buffer.view(length), parent, again.break_reason, place)
        parent, ids, reason = await self._rendered(request, place)
        if parent is None:
            buffer, length = TokenBuffer(ids), len(ids)
        else:
            buffer, length = self._buffers[parent.id].extended(parent.length, ids), parent.length + len(ids)
        return Prompt(buffer, buffer.view(length), parent, reason, place)

    async def _rendered(
        self, request: ChatRequest, place: Place
    ) -> tuple[Completion | None, TokenIds, BreakReason | None]:
        """The completion that is continued and the ids that follow its own; without one all ids, and why."""
        self._refuse_images(request)
        reason, renderer = place.reason, self._policy.renderer
        if place.parent is not None:
            delta = await self._extend(place.parent, place.new, request)
            if not isinstance(delta, BreakReason):
                self._check(delta)
                return place.parent, delta, None
            reason = delta
        size = _characters(request.messages) + _characters_of_tools(request.tools)
        ids = await _cpu(lambda: renderer.render(request.messages, request.tools), size)
        self._check(ids)
        if place.parent is not None and extends(ids, place.parent):  # what the renderer could not tell beforehand
            return place.parent, ids[place.parent.length :], None
        return None, ids, reason

    async def _extend(
        self, parent: Completion, new: tuple[Message, ...], request: ChatRequest
    ) -> TokenIds | BreakReason:
        tokens, renderer = self._buffers[parent.id].view(parent.length), self._policy.renderer
        return await _cpu(lambda: renderer.extend(parent, tokens, new, request.tools), _characters(new))

    def _refuse_images(self, request: ChatRequest) -> None:
        if self._policy.images == "placeholder" or self._policy.renderer.multimodal:
            return
        for i, message in enumerate(request.messages):
            if message.parts:
                raise BadRequest("this model sees no images; send text (renderer.images)", path=f"messages.{i}")

    def _omitted(self, request: ChatRequest, parent: Completion | None) -> int:
        """Images for which this prompt has a text, its parent's aside."""
        known = len(parent.request.messages) + 1 if parent else 0
        parts = (part for message in request.messages[known:] for part in message.parts)
        return 0 if self._policy.renderer.multimodal else sum(isinstance(part, Image) for part in parts)

    def _check(self, ids: TokenIds) -> None:
        """One id out of range kills some engines, so none leaves us."""
        name, size = self._policy.renderer.name, self._policy.renderer.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            raise EngineError(
                f"the renderer {name!r} made token id {int(ids.max())}, but the vocabulary has {size} ids:"
                " tokenizer and model do not belong together"
            )

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        """The trainer's parameters; only `max_tokens` (the smaller one) and extra stop strings are the harness's."""
        room = self._policy.context_length - prompt_tokens
        if room < 1:
            raise ContextOverflow(prompt_tokens, self._policy.context_length)
        pinned, asked = self._policy.sampling, request.sampling
        limits = [limit for limit in (pinned.max_tokens, asked.max_tokens, room) if limit is not None]
        stop = (*pinned.stop, *(text for text in asked.stop if text not in pinned.stop))
        return replace(pinned, max_tokens=max(1, min(limits)), stop=stop)

    async def _parse(self, generation: Generation, request: ChatRequest, prompt_ids: TokenIds) -> Parsed:
        renderer = self._policy.renderer
        parsed = await _cpu(
            lambda: renderer.parse(generation.output_ids, request, prompt_ids), 4 * len(generation.output_ids)
        )
        reply, stop = parsed.reply, generation.stop
        if stop is not None:
            reply = _before(stop, reply)
        if parsed.malformed_calls and (generation.finish_reason is FinishReason.LENGTH or stop is not None):
            reply = replace(reply, content=without_half_call(reply.content))
        return replace(parsed, reply=reply)

    def _with_call_ids(self, reply: Message) -> Message:
        calls = tuple(replace(call, id=call.id or f"call_{self._new_id()[:24]}") for call in reply.tool_calls)
        return replace(reply, tool_calls=calls)

    def _remember(self, completion: Completion, prompt: Prompt) -> None:
        output = completion.generation.output_ids
        self._buffers[completion.id] = prompt.buffer.extended(len(prompt.ids), np.asarray(output, np.int32))
        self._history.add(completion, prompt.place)


def _before(stop: str, reply: Message) -> Message:
    """The reply without the stop string that ended it and what its last token says beyond it: clients are not told."""
    content, found, _ = reply.content.partition(stop)
    if found:
        return replace(reply, content=content)
    reasoning, found, _ = reply.reasoning.partition(stop)
    return replace(reply, reasoning=reasoning) if found and not reply.content else reply


async def _cpu(work: Callable[[], T], characters: int) -> T:
    if characters <= _INLINE_CHARACTERS:
        return work()
    return await anyio.to_thread.run_sync(work)


def _characters(messages: tuple[Message, ...]) -> int:
    calls = (call for message in messages for call in message.tool_calls)
    texts = sum(len(message.content) + len(message.reasoning) for message in messages)
    return texts + sum(len(call.arguments) for call in calls)


def _characters_of_tools(tools: tuple[Tool, ...]) -> int:
    return sum(len(tool.description) + _SCHEMA_CHARACTERS for tool in tools)
