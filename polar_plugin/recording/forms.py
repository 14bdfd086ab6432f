"""Records as the JSON objects of a recording's lines, and back. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from ..engine.buffer import TokenBuffer
from ..errors import RecordingError
from ..merge.parents import extends
from ..merge.traces import tool_json
from ..records import (
    BreakReason,
    ChatRequest,
    Completion,
    Delivery,
    Evaluation,
    Failure,
    FinishReason,
    Generation,
    JSONObject,
    Message,
    Nucleus,
    Role,
    Routing,
    SamplingParams,
    Status,
    TokenIds,
    Tool,
    VersionSpan,
    log_probs,
    token_ids,
)
from .fields import known, numbers, shallow, typed
from .messages import message_json, message_of, tool_of

VERSION = 1


@dataclass(frozen=True, slots=True)
class Header:
    """What a recording says of its session before the first call."""

    session_id: str
    task_id: str = ""
    harness: str = ""
    model: str = ""
    tokenizer: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    end_of_turn: tuple[int, ...] = ()
    """The ids that end an assistant's turn; read back into the session's metadata."""


@dataclass(frozen=True, slots=True)
class End:
    """How the session's attempt ended."""

    status: Status | None = None
    evaluation: Evaluation | None = None
    failure: Failure | None = None
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """The trajectory's."""
    session_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """The sealed session's own: `CompletionSession.counts`."""


def encode(line: JSONObject) -> bytes:
    """One line with its newline; arrays become lists. Raises TypeError or ValueError on what JSON cannot say."""
    try:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_list).encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can carry
        text = json.dumps(line, separators=(",", ":"), default=_list).encode()
    return text + b"\n"


def _list(value: object) -> list[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is not JSON")
    array = cast("NDArray[Any]", value)
    if array.dtype != np.float32 or not np.isfinite(array).all():
        return array.tolist()
    return orjson.loads(orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY))


# --- records to lines ------------------------------------------------------------------------------------------------


def header_json(header: Header) -> JSONObject:
    return {"type": "session", "version": VERSION, **shallow(header)}


def end_json(end: End) -> JSONObject:
    return {
        "type": "end",
        "status": end.status,
        "evaluation": shallow(end.evaluation) if end.evaluation else None,
        "failure": shallow(end.failure) if end.failure else None,
        "counts": dict(end.counts),
        "session_counts": dict(end.session_counts),
    }


def delivery_json(completion_id: str, delivery: Delivery) -> JSONObject:
    return {"type": "delivery", "id": completion_id, "delivery": delivery}


def completion_json(completion: Completion, parent: Completion | None, delivery: Delivery | None) -> JSONObject:
    """`parent` is the completion that `completion.parent` names, where it was recorded before."""
    generation = completion.generation
    line: JSONObject = {
        "type": "completion",
        "id": completion.id,
        "parent": completion.parent,
        "role": completion.request.role,
        "break_reason": completion.break_reason,
        "started": completion.started,
        "ended": completion.ended,
        "api": completion.request.api,
        "request": _request_json(completion.request, parent),
        "sampling": shallow(completion.sampling),
        **_prompt_json(completion.prompt_ids, parent),
        "output_ids": generation.output_ids,
        "logprobs": generation.logprobs,
        "finish_reason": generation.finish_reason,
        "stop": generation.stop,
        "weight_versions": [[span.version, span.count] for span in generation.versions],
        "reply": message_json(completion.reply),
        "malformed_calls": completion.malformed_calls,
        "images_omitted": completion.images_omitted,
    }
    line |= _replay_json(generation)
    return line if delivery is None else {**line, "delivery": delivery}


def _replay_json(generation: Generation) -> JSONObject:
    """Nothing where nothing is told, as of most engines."""
    told: JSONObject = {}
    if (routing := generation.routing) is not None:
        data = base64.b64encode(routing.experts.astype("<i2").tobytes()).decode()
        told["routed_experts"] = {"start": routing.start, "width": routing.experts.shape[1], "data": data}
    if (nucleus := generation.nucleus) is not None:
        told |= {"top_p_ids": nucleus.ids, "top_p_offsets": nucleus.offsets}
    return told


def _prompt_json(prompt: TokenIds, parent: Completion | None) -> JSONObject:
    if parent and extends(prompt, parent):
        return {"prompt_delta": prompt[parent.length :]}
    return {"prompt_ids": prompt}


def _request_json(request: ChatRequest, parent: Completion | None) -> JSONObject:
    told: JSONObject = {
        "tool_choice": request.tool_choice,
        "sampling": shallow(request.sampling),
        "stream": request.stream,
        "model": request.model,
        "thread": request.thread,
        "retry": request.retry,
        "ignored": list(request.ignored),
    }
    kept = _common((*parent.request.messages, parent.reply), request.messages) if parent else 0
    delta = [message_json(message) for message in request.messages[kept:]]
    told.update({"messages_kept": kept, "messages_delta": delta} if kept else {"messages": delta})
    if parent is None or not _same_tools(request.tools, parent.request.tools):
        told["tools"] = [tool_json(tool) for tool in request.tools]
    return told


def _common(base: Sequence[Message], messages: Sequence[Message]) -> int:
    """How many messages both begin with, wire ids included."""
    for position, (left, right) in enumerate(zip(base, messages, strict=False)):
        if left is not right and (left != right or _wire_ids(left) != _wire_ids(right)):
            return position
    return min(len(base), len(messages))


def _wire_ids(message: Message) -> tuple[str, ...]:
    return message.tool_call_id, *(call.id for call in message.tool_calls)


def _same_tools(left: Sequence[Tool], right: Sequence[Tool]) -> bool:
    """Equal as text: `==` would take True for 1 and overlook the order of keys, which templates print."""
    return left is right or repr(left) == repr(right)


# --- lines to records ------------------------------------------------------------------------------------------------


def header_of(line: JSONObject) -> Header:
    """Raises RecordingError on a line of another kind or a later version."""
    if line.get("type") != "session":
        raise RecordingError('does not begin with a line {"type": "session", ...}: this is no recording')
    if line.get("version") != VERSION:
        raise RecordingError(
            f"has version {line.get('version')!r}, and this release reads version {VERSION}:"
            " read it with the release of polar-plugin that wrote it"
        )
    for key in ("metadata", "tokenizer"):
        typed(line, key, dict)
    told = known(Header, line)
    told["end_of_turn"] = tuple(typed(line, "end_of_turn", list) or ())
    return Header(**told)


def end_of(line: JSONObject) -> End:
    evaluation, failure = typed(line, "evaluation", dict), typed(line, "failure", dict)
    return End(
        status=Status(line["status"]) if line.get("status") else None,
        evaluation=_evaluation(evaluation) if evaluation else None,
        failure=Failure(**known(Failure, failure)) if failure else None,
        counts=typed(line, "counts", dict) or {},
        session_counts=typed(line, "session_counts", dict) or {},
    )


def _evaluation(line: JSONObject) -> Evaluation:
    told = known(Evaluation, line)
    if told.get("trace_rewards") is not None:
        told["trace_rewards"] = tuple(told["trace_rewards"])
    return Evaluation(**told)


class CompletionReader:
    """Completion lines, in the order recorded, to completions. Mutable: each may be the parent of later ones.

    Prompts along a chain are views of one growing buffer, as they were when they were sampled.
    """

    def __init__(self) -> None:
        self._known: dict[str, Completion] = {}
        self._buffers: dict[str, TokenBuffer] = {}

    def read(self, line: JSONObject) -> Completion:
        """Raises KeyError, TypeError or ValueError on what the line lacks or has wrong."""
        parent = self._known.get(line.get("parent") or "")
        buffer, prompt = self._prompt(line, parent)
        output = token_ids(numbers(line, "output_ids"))
        typed(line, "id", str)
        completion = Completion(
            id=line["id"],
            request=_request(line, parent),
            prompt_ids=prompt,
            generation=Generation(
                output_ids=output,
                logprobs=log_probs(numbers(line, "logprobs")),
                finish_reason=FinishReason(line.get("finish_reason") or FinishReason.STOP),
                versions=tuple(VersionSpan(str(name), count) for name, count in line.get("weight_versions") or ()),
                stop=line.get("stop"),
                routing=_routing(line.get("routed_experts")),
                nucleus=_nucleus(line),
            ),
            reply=message_of(line.get("reply") or {"role": "assistant"}),
            sampling=_sampling(typed(line, "sampling", dict)),
            started=typed(line, "started", (int, float)) or 0.0,
            ended=typed(line, "ended", (int, float)) or 0.0,
            parent=line.get("parent"),
            break_reason=BreakReason(line["break_reason"]) if line.get("break_reason") else None,
            malformed_calls=typed(line, "malformed_calls", int) or 0,
            images_omitted=typed(line, "images_omitted", int) or 0,
        )
        self._known[completion.id] = completion
        self._buffers[completion.id] = buffer.extended(len(prompt), output)
        return completion

    def _prompt(self, line: JSONObject, parent: Completion | None) -> tuple[TokenBuffer, TokenIds]:
        if "prompt_delta" not in line:
            ids = token_ids(numbers(line, "prompt_ids"))
            buffer, length = TokenBuffer(ids), len(ids)
        elif parent is None:
            raise ValueError(f"prompt_delta follows the completion {line.get('parent')!r}, which no line before has")
        else:
            delta = token_ids(numbers(line, "prompt_delta"))
            buffer, length = self._buffers[parent.id].extended(parent.length, delta), parent.length + len(delta)
        return buffer, buffer.view(length)


def _routing(told: JSONObject | None) -> Routing | None:
    if told is None:
        return None
    flat = np.frombuffer(base64.b64decode(told["data"]), "<i2").astype(np.int16)
    experts = flat.reshape(-1, told["width"]) if told["width"] else flat.reshape(0, 0)
    experts.flags.writeable = False
    return Routing(experts, told["start"])


def _nucleus(line: JSONObject) -> Nucleus | None:
    if line.get("top_p_offsets") is None:
        return None
    return Nucleus(token_ids(line["top_p_ids"]), token_ids(line["top_p_offsets"]))


def _request(line: JSONObject, parent: Completion | None) -> ChatRequest:
    told: JSONObject = typed(line, "request", dict) or {}
    asked = known(ChatRequest, told)
    asked["messages"], asked["tools"] = _messages(told, parent), _tools(told, parent)
    asked["sampling"] = _sampling(typed(told, "sampling", dict))
    asked["api"], asked["role"] = line.get("api") or "", Role(line.get("role") or Role.MAIN)
    asked["ignored"] = tuple(told.get("ignored") or ())
    return ChatRequest(**asked)


def _messages(told: JSONObject, parent: Completion | None) -> tuple[Message, ...]:
    if "messages_delta" not in told:
        return tuple(message_of(message) for message in told.get("messages") or ())
    if parent is None:
        raise ValueError("messages_delta without a parent in the lines before")
    base = (*parent.request.messages, parent.reply)
    kept = told.get("messages_kept", len(base))
    if not 0 <= kept <= len(base):
        raise ValueError(f"messages_kept is {kept}, but the parent has {len(base)} messages with its reply")
    return (*base[:kept], *(message_of(message) for message in told["messages_delta"]))


def _tools(told: JSONObject, parent: Completion | None) -> tuple[Tool, ...]:
    if "tools" not in told:
        return parent.request.tools if parent else ()
    return tuple(tool_of(tool) for tool in told["tools"] or ())


def _sampling(told: JSONObject | None) -> SamplingParams:
    asked = known(SamplingParams, told or {})
    asked["stop"] = tuple(asked.get("stop") or ())
    return SamplingParams(**asked)
