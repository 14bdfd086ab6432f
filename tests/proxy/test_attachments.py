"""What a request can say in more than one place, and what it says that nobody here can do: read where it is text."""

from __future__ import annotations

from typing import Any

import pytest

from polar_plugin.records import ChatRequest, Image, Message, ToolCall

from .scripted import CHAT, Scripted, serving

pytestmark = pytest.mark.anyio

MESSAGES = "/v1/messages"
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
BASH = {"name": "bash", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}


async def read(path: str, **body: Any) -> ChatRequest:
    """What the engine is asked, once `body` was posted and answered."""
    engine = Scripted()
    body = {"model": "m", "messages": [USER]} | body
    async with serving(engine) as (_, _, http), http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
    (request,) = engine.requests
    return request


# --- Anthropic Messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [[SEARCH], [BASH, SEARCH]], ids=["alone", "beside another"])
async def test_a_choice_of_a_tool_that_the_provider_would_run_is_no_error(tools: list[Any]) -> None:
    """Claude Code's web search is a call of its own, with that one tool and that choice: a 400 would be tried again."""
    request = await read(MESSAGES, tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    assert request.tool_choice == "auto"
    assert request.ignored == ("tool_choice.name", "tools.*.web_search_20250305")


async def test_control_a_choice_of_a_tool_that_nobody_offered_is_refused() -> None:
    body = {"messages": [USER], "tools": [SEARCH], "tool_choice": {"type": "tool", "name": "nowhere"}}
    async with serving(Scripted()) as (_, _, http), http.post(MESSAGES, json=body) as response:
        assert response.status == 400
        assert "tool_choice.name" in await response.text()


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}
DOCUMENTS: dict[str, tuple[Any, str]] = {
    "plain text": ({"type": "text", "media_type": "text/plain", "data": "x = 1\ny"}, "x = 1\ny"),
    "a string": ({"type": "content", "content": "x = 1"}, "x = 1"),
    "blocks": ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
    "a picture": ({"type": "content", "content": [{"type": "text", "text": "a"}, PNG]}, "a\n[image omitted]"),
}


@pytest.mark.parametrize(("source", "told"), DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("place", ["user", "result"])
async def test_case_80_a_document_that_is_text_is_read_and_not_dropped(source: Any, told: str, place: str) -> None:
    block: Any = {"type": "document", "source": source, "title": "t"}
    call = {"type": "tool_use", "id": "t1", "name": "bash", "input": {}}
    if place == "result":
        block = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [block]}]
    request = await read(MESSAGES, messages=turns)
    assert request.messages[-1].content == told
    assert any(path.endswith("content.*.title") for path in request.ignored)


async def test_case_80_what_a_search_found_is_read_and_not_dropped() -> None:
    found = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]}
    request = await read(MESSAGES, messages=[{"role": "user", "content": [found]}])
    assert request.messages == (Message("user", "found"),)


# --- OpenAI Chat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "data:image/png;base64,iVBORw0="},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0="},
        {"type": "input_image", "image_url": {"url": "data:image/png;base64,iVBORw0="}},
    ],
    ids=["a bare url", "as in Responses", "half as in Responses"],
)
async def test_case_80_an_image_is_seen_however_its_address_is_written(part: Any) -> None:
    request = await read(CHAT, messages=[{"role": "user", "content": [part]}])
    assert request.messages == (Message("user", "[image omitted]", parts=(Image("image/png", "iVBORw0="),)),)
    assert request.ignored == ()


async def test_a_call_in_the_older_form_is_still_in_the_history() -> None:
    """`function_call` and the role `function` are what `tool_calls` and `tool` were; such a call has no id."""
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    result = {"role": "function", "name": "f", "content": "done"}
    request = await read(CHAT, messages=[USER, call, result])
    assert request.messages[1:] == (
        Message("assistant", tool_calls=(ToolCall("f", '{"a": 1}'),)),
        Message("tool", "done", name="f"),
    )
    assert request.ignored == ()
