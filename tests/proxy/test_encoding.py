"""Text that is hard to carry, over every dialect: half of a character, a NUL, five megabytes in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.scripted import ScriptedEngine
from polar_plugin.engine.turn import Conversation, Policy
from polar_plugin.proxy.server import Proxy
from polar_plugin.records import BreakReason, SamplingParams

from .scripted import Scripted, say, serving

pytestmark = pytest.mark.anyio
ODD = "half \ud83d of it, \0, \u2028 and 😀"
SAID = "you wrote \ud83d \0 \u2028"

Body = dict[str, Any]


def chat(output: str) -> Body:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    return {"messages": [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": output},
    ]}  # fmt: skip


def anthropic(output: str) -> Body:
    return {"max_tokens": 99, "messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "bash", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": output}]},
    ]}  # fmt: skip


def responses(output: str) -> Body:
    return {"input": [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]}  # fmt: skip


def google(output: str) -> Body:
    answer = {"id": "c", "name": "bash", "response": {"output": output}}
    return {"contents": [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "bash", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": answer}]},
    ]}  # fmt: skip


Asked = tuple[str, Callable[[str], Body], Callable[[Any], str]]
DIALECTS: dict[str, Asked] = {
    "openai_chat": ("/v1/chat/completions", chat, lambda told: told["choices"][0]["message"]["content"]),
    "anthropic_messages": ("/v1/messages", anthropic, lambda told: told["content"][0]["text"]),
    "openai_responses": ("/v1/responses", responses, lambda told: told["output"][0]["content"][0]["text"]),
    "google_generate": (
        "/v1beta/models/m:generateContent", google, lambda told: told["candidates"][0]["content"]["parts"][0]["text"],
    ),
}  # fmt: skip
every_dialect = pytest.mark.parametrize(("path", "asking", "text_of"), DIALECTS.values(), ids=DIALECTS.keys())


def written(body: Body, *, escaped: bool) -> bytes:
    """With its odd characters as JSON escapes, or as bytes, which for half a character are not even UTF-8."""
    return json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")


@every_dialect
@pytest.mark.parametrize("escaped", [True, False], ids=["escaped", "as bytes"])
async def test_case_116_lone_surrogates_and_nuls_come_in_and_go_out_as_they_are(
    path: str, asking: Callable[[str], Body], text_of: Callable[[Any], str], escaped: bool
) -> None:
    engine = Scripted([say(SAID)])
    data = written(asking(ODD), escaped=escaped)
    async with serving(engine) as (_, _, http), http.post(path, data=data) as response:
        assert response.status == 200, await response.text()
        assert text_of(json.loads(await response.read())) == SAID
    assert [message.content for message in engine.requests[0].messages if message.role == "tool"] == [ODD]


@every_dialect
async def test_case_116_five_megabytes_in_one_line_come_in_whole(
    path: str, asking: Callable[[str], Body], text_of: Callable[[Any], str]
) -> None:
    line = "x\ud83d" * (5 << 18)
    engine = Scripted([say("ok")])
    data = io.BytesIO(written(asking(line), escaped=False))
    async with serving(engine) as (_, _, http), http.post(path, data=data) as response:
        assert response.status == 200
        assert text_of(await response.json()) == "ok"
    assert engine.requests[0].messages[-1].content == line


@every_dialect
async def test_case_116_lone_surrogates_and_nuls_become_tokens_and_the_chain_goes_on(
    path: str, asking: Callable[[str], Body], text_of: Callable[[Any], str], tmp_path: Any
) -> None:
    renderer = load_renderer(resolve_model("tiny", tmp_path))
    engine = ScriptedEngine(["one \0 two", "end"], renderer.encode)
    conversation = Conversation(Policy(engine, renderer, SamplingParams(max_tokens=99), 32768), "s")
    async with (
        Proxy().serving() as proxy,
        proxy.session("s", conversation) as session,
        aiohttp.ClientSession(proxy.url, headers={"x-goog-api-key": session.key}) as http,
    ):
        async with http.post(path, data=written(asking(ODD), escaped=True)) as response:
            assert response.status == 200, await response.text()
            told = await response.json()
        assert text_of(told) == "one \0 two"
        async with http.post(path, data=written(_going_on(path, asking(ODD), told), escaped=False)) as response:
            assert response.status == 200, await response.text()
        assert [one.break_reason for one in session.completions] == [BreakReason.FIRST_CALL, None]
        assert "\0" in renderer.decode(session.completions[0].prompt_ids)


def _going_on(path: str, body: Body, told: Any) -> Body:
    """The request again, behind it its reply and another word."""
    if path == "/v1/responses":
        return body | {"input": [*body["input"], *told["output"], {"role": "user", "content": ODD}]}
    if path == "/v1/messages":
        said = {"role": "assistant", "content": told["content"]}
        return body | {"messages": [*body["messages"], said, {"role": "user", "content": ODD}]}
    if path == "/v1/chat/completions":
        said = told["choices"][0]["message"]
        return body | {"messages": [*body["messages"], said, {"role": "user", "content": ODD}]}
    contents = [*body["contents"], told["candidates"][0]["content"], {"role": "user", "parts": [{"text": ODD}]}]
    return body | {"contents": contents}
