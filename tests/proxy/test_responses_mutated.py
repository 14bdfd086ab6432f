"""Mutated Responses requests: each is answered or refused with the path of what is wrong, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from polar_plugin.errors import BadRequest
from polar_plugin.proxy import sse
from polar_plugin.proxy.codec import Incoming
from polar_plugin.records import ChatRequest, Completion

from .responses_stream import check, parse
from .responses_wire import DIALECT, PATH, REPLIES, TOOLS, Wire, complete, incoming_of
from .scripted import completion_of

REPLY = REPLIES["all in one turn"]
EARLIER: Completion = complete(REPLY)
ITEMS: list[Wire] = DIALECT.encode(EARLIER, incoming_of({"input": "hi", "tools": TOOLS}))["output"]
SEED: Wire = {
    "model": "policy", "instructions": "Be brief.", "stream": True, "store": False, "temperature": 1, "top_p": 0.5,
    "max_output_tokens": 99, "parallel_tool_calls": True, "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "high", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
    "metadata": {"a": "b"}, "truncation": "auto", "previous_response_id": "resp_c1", "prompt_cache_key": "k",
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "bash"}]},
    "tools": [*TOOLS, {"type": "web_search"}],
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}]},
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}, "x"]},
        *ITEMS,
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "local_shell_call_output", "id": "call_7", "output": "ok"},
        {"type": "item_reference", "id": "msg_c1_0"},
        {"type": "compaction", "encrypted_content": "polar.compaction.1.x.eA=="},
        {"type": "compaction_trigger"},
    ],
}  # fmt: skip
WORDS = st.sampled_from([
    "type", "function", "custom", "namespace", "local_shell", "reasoning", "message", "assistant", "auto", "required",
    "bash", "apply_patch", "agents", "item_reference", "compaction_trigger", "resp_c1", "rs_c1_0", "fc_c1_0",
    "ctc_c1_1", "lsh_c1_3", "fc_c1_99", "msg_c1_0", "exec", "\ud83d", "\x00", "",
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [found for key in keys for found in [(*path, key), *places(value[key], (*path, key))]]


PLACES = places(SEED)


def mutated(changes: list[tuple[tuple[Any, ...], Any, bool]]) -> Wire:
    body = copy.deepcopy(SEED)
    for (*way, key), value, dropped in changes:
        holder: Any = body
        try:
            for step in way:
                holder = holder[step]
            if dropped:
                del holder[key]
            else:
                holder[key] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    return body


CHANGES = st.lists(st.tuples(st.sampled_from(PLACES), VALUES, st.booleans()), min_size=1, max_size=4)


def read_or_refused(incoming: Incoming) -> ChatRequest | str:
    """The request, or the path of what is wrong with it."""
    try:
        return DIALECT.decode(incoming)
    except BadRequest as error:
        return error.path


@settings(max_examples=400, deadline=None)
@given(changes=CHANGES, path=st.sampled_from([PATH, f"{PATH}/compact", f"/s/key{PATH}"]))
def test_a_mutated_request_is_read_or_refused_with_a_path(changes: Any, path: str) -> None:
    body = mutated(changes)
    incoming = incoming_of(body, path=path, recall={"c1": EARLIER}.get)
    request = read_or_refused(incoming)
    if isinstance(request, str):
        assert request.split(".")[0] in SEED
        return
    completion = completion_of(REPLY, request)
    answer = json.loads(sse.to_json(DIALECT.encode(completion, incoming)))
    if answer["object"] == "response":
        Response.model_validate(answer, strict=True)
        check(parse(sse.SSE.encode(DIALECT.events(completion, incoming)).decode().split("\n")))


def test_control_the_seed_itself_is_read() -> None:
    request = DIALECT.decode(incoming_of(SEED, recall={"c1": EARLIER}.get))
    assert [message.role for message in request.messages] == [
        "system", "user", "assistant", "system", "user", "assistant", "tool", "tool", "assistant", "user",
    ]  # fmt: skip
