"""The vLLM client against vLLM's token endpoint as its source writes it down, and against a live vLLM.

The live tests run where VLLM_URL is set:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs --port 8000
    VLLM_URL=http://127.0.0.1:8000 python -m pytest tests/engine/test_vllm.py
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import anyio
import numpy as np
import orjson
import pytest
from aiohttp import web

from polar_plugin.engine.vllm import VLLMEngine
from polar_plugin.errors import EngineBusy, EngineError
from polar_plugin.records import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan, token_ids
from tests.engine.fake_server import listening

pytestmark = pytest.mark.anyio

PROMPT = token_ids([5, 6, 7])

# vLLM 0.32.0, vllm/entrypoints/scale_out/token_in_token_out/protocol.py, class GenerateRequest: its fields.
REQUEST_FIELDS = {
    *("request_id", "token_ids", "token_offsets", "features", "content_parts", "sampling_params", "model"),
    *("reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode", "stream", "stream_options"),
    *("cache_salt", "priority", "kv_transfer_params", "ec_transfer_params"),
}
# vllm/sampling_params.py, class SamplingParams: the fields used here, and their types.
SAMPLING_TYPES: dict[str, type | tuple[type, ...]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,  # 0 and -1 switch it off
    "seed": int,
    "stop": list,
    "stop_token_ids": list,
    "max_tokens": int,
    "logprobs": int,  # 0: the sampled token's own
    "allowed_token_ids": list,
    "skip_special_tokens": bool,
    "spaces_between_special_tokens": bool,
}
VOCAB_SIZE = 100

Answer = Callable[[dict[str, Any]], dict[str, Any] | Awaitable[web.StreamResponse]]


def sampled(body: dict[str, Any], ids: list[int] | None = None, **choice: Any) -> dict[str, Any]:
    """GenerateTokensResponse with one GenerateTokensChoice (protocol.py): ids count on from the prompt's length."""
    first, params = len(body["token_ids"]), body["sampling_params"]
    ids = list(range(first, first + params["max_tokens"])) if ids is None else ids
    content = [{"token_id": token, "logprob": -0.25, "rank": 1, "top_logprobs": []} for token in ids]
    return {
        "request_id": f"generate-tokens-{body['request_id']}",
        "output_mode": "tokens",
        "usage": {"prompt_tokens": first, "completion_tokens": len(ids), "total_tokens": first + len(ids)},
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": ids,
                "logprobs": {"content": content},
                "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
                **choice,
            }
        ],
    }


class FakeVLLM:
    """Refuses what the schema refuses; answers with what is queued, else with `sampled`."""

    def __init__(self, *, processed: bool = True) -> None:
        self.processed = processed
        self.answers: deque[Answer] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.aborts: list[list[str]] = []
        self.started = anyio.Event()
        self.was_aborted = anyio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/inference/v1/abort_requests", self.abort)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/weight_info", self.weight_info)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        refusal = refuse(body)
        if refusal:
            return error(400, refusal)
        allowed = body["sampling_params"].get("allowed_token_ids")
        if allowed:
            return _json(self._masked(body, allowed[:1]))
        made = (self.answers.popleft() if self.answers else sampled)(body)
        return _json(made) if isinstance(made, dict) else await made

    def _masked(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        answer = sampled(body, ids)
        if self.processed:
            answer["choices"][0]["logprobs"]["content"][0]["logprob"] = 0.0
        return answer

    async def hold(self, body: dict[str, Any]) -> web.StreamResponse:
        self.started.set()
        await anyio.sleep_forever()
        return web.Response()

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.append((await request.json())["request_ids"])
        self.was_aborted.set()
        return web.Response()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "max_model_len": 64}]})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "7"})


def refuse(body: dict[str, Any]) -> str:
    """What is wrong with a GenerateRequest; the real one ignores unknown fields, so this is stricter."""
    unknown = set(body) - REQUEST_FIELDS
    if unknown:
        return f"unknown fields {sorted(unknown)}"
    ids, params = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        return "token_ids must be a non-empty list of non-negative integers"
    if max(ids) >= VOCAB_SIZE:
        return f"Token id {max(ids)} is out of vocabulary"
    if not isinstance(params, dict) or not isinstance(body.get("request_id"), str):
        return "sampling_params and request_id are required"
    wrong = [key for key, value in params.items() if not isinstance(value, SAMPLING_TYPES.get(key, ()))]
    return f"sampling_params {wrong}" if wrong else ""


def error(status: int, message: str) -> web.Response:
    """ErrorResponse (vllm/entrypoints/serve/engine/protocol.py)."""
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status)


def failing(status: int, message: str) -> Answer:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return error(status, message)

    return answer


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


@pytest.fixture
async def fake() -> FakeVLLM:
    return FakeVLLM()


@pytest.fixture
async def engine(fake: FakeVLLM) -> AsyncIterator[VLLMEngine]:
    async with listening(fake.app()) as url, VLLMEngine(url, model="tiny", retries=3) as engine:
        yield engine


_numbers = itertools.count()


async def sample(
    engine: VLLMEngine,
    max_tokens: int = 4,
    *,
    prompt: TokenIds = PROMPT,
    stop_ids: tuple[int, ...] = (),
    request_id: str | None = None,
    **sampling: Any,
) -> Generation:
    with anyio.fail_after(60):
        return await engine.generate(
            prompt,
            SamplingParams(max_tokens=max_tokens, **sampling),
            request_id=request_id or f"{os.getpid()}-{next(_numbers):06d}",
            session_id="session",
            stop_ids=stop_ids,
        )


async def test_a_call_carries_ids_and_sampling_in_vllms_words(engine: VLLMEngine, fake: FakeVLLM) -> None:
    await sample(engine, 9, stop_ids=(2, 3), stop=("END",), temperature=0.5, top_p=0.9, top_k=40, seed=3)
    body = fake.bodies[0]
    assert (body["model"], body["token_ids"]) == ("tiny", [5, 6, 7])
    assert body["sampling_params"] == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 3,
        "stop": ["END"],
        "stop_token_ids": [2, 3],
        "logprobs": 0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


async def test_ids_logprobs_and_versions_are_the_engines(engine: VLLMEngine) -> None:
    generation = await sample(engine, 3)
    assert generation.output_ids.tolist() == [3, 4, 5]
    assert generation.logprobs.tolist() == [-0.25] * 3
    assert generation.versions == (VersionSpan("1", 3),)
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("reason", "stop"), [(2, None), ("END", "END"), (None, None)])
async def test_a_stop_names_the_string_that_ended_it(
    engine: VLLMEngine, fake: FakeVLLM, reason: object, stop: str | None
) -> None:
    fake.answers.append(lambda body: sampled(body, [9, 2], finish_reason="stop", stop_reason=reason))
    generation = await sample(engine)
    assert (generation.finish_reason, generation.stop) == (FinishReason.STOP, stop)


async def test_an_abort_in_mid_request_is_continued_into_one_generation(engine: VLLMEngine, fake: FakeVLLM) -> None:
    fake.answers += [
        lambda body: sampled(body, [], finish_reason="abort", logprobs=None),
        lambda body: sampled(body, [3, 4], finish_reason="abort"),
    ]
    generation = await sample(engine, 6)
    assert generation.output_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert [body["token_ids"] for body in fake.bodies] == [[5, 6, 7], [5, 6, 7], [5, 6, 7, 3, 4]]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"logprobs": None}, "4 output ids but 0 log-probabilities"),
        ({"token_ids": [3, 4, 5]}, "3 output ids but 4 log-probabilities"),
        ({"token_ids": [3, 4, 9, 6]}, "disagree at 2: 9 against 5"),
        ({"token_ids": None}, "0 output ids but 4 log-probabilities"),
        ({"finish_reason": "error"}, "ended the call with 'error'"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 3}]}, "spans cover 3 tokens of 4"),
        ({"logprobs": {"content": [{"token_id": 3}]}}, "cannot be read"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error_and_is_not_asked_for_again(
    engine: VLLMEngine, fake: FakeVLLM, choice: dict[str, Any], message: str
) -> None:
    fake.answers.append(lambda body: sampled(body, **choice))
    with pytest.raises(EngineError, match=message):
        await sample(engine)
    assert len(fake.bodies) == 1


async def test_an_endpoint_that_is_switched_off_names_the_flag(engine: VLLMEngine, fake: FakeVLLM) -> None:
    fake.answers.append(failing(403, "Scale-out endpoints are disabled."))
    with pytest.raises(EngineError, match=r"\(403\): Scale-out endpoints are disabled.*--enable-scale-out"):
        await sample(engine)


async def test_what_vllm_refuses_is_an_error_in_its_own_words(engine: VLLMEngine, fake: FakeVLLM) -> None:
    with pytest.raises(EngineError, match=f"Token id {VOCAB_SIZE} is out of vocabulary"):
        await sample(engine, prompt=token_ids([VOCAB_SIZE]))
    assert len(fake.bodies) == 1


async def test_a_busy_engine_is_asked_again_until_it_takes_the_call(engine: VLLMEngine, fake: FakeVLLM) -> None:
    fake.answers += [failing(503, "overloaded")] * 2
    assert len((await sample(engine)).output_ids) == 4
    fake.answers += [failing(503, "overloaded")] * 9
    with pytest.raises(EngineBusy, match="overloaded"):
        await sample(engine)


async def test_hanging_up_aborts_the_call_once_by_the_id_that_vllm_gave_it(engine: VLLMEngine, fake: FakeVLLM) -> None:
    fake.answers.append(fake.hold)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(sample, engine, request_id="the-call"))
            await fake.started.wait()
            group.cancel_scope.cancel()
        await fake.was_aborted.wait()
    assert fake.aborts == [[f"generate-tokens-{fake.bodies[0]['request_id']}"]]


async def test_the_probe_tells_model_context_and_version_and_bounds_later_calls(engine: VLLMEngine) -> None:
    info = await engine.probe()
    assert (info.model, info.context_length, info.weight_version) == ("tiny", 64, "7")
    with pytest.raises(EngineError, match="exceed the context of 64"):
        await sample(engine, 62)


async def test_the_probe_for_a_model_that_is_not_served_lists_those_that_are(fake: FakeVLLM) -> None:
    async with listening(fake.app()) as url, VLLMEngine(url, model="other") as engine:
        with pytest.raises(EngineError, match="does not serve 'other' but: tiny"):
            await engine.probe()


async def test_logprobs_of_another_temperature_are_refused_before_they_are_sampled() -> None:
    fake = FakeVLLM(processed=False)
    async with listening(fake.app()) as url, VLLMEngine(url) as engine:
        await engine.probe()
        await sample(engine, top_p=0.9)
        with pytest.raises(EngineError, match=r"at temperature 1, not at 0\.7: .*--logprobs-mode processed_logprobs"):
            await sample(engine, temperature=0.7)


@pytest.mark.parametrize("truncated", [{"top_p": 0.9}, {"top_k": 40}])
async def test_logprobs_over_a_truncated_vocabulary_are_refused(engine: VLLMEngine, truncated: dict[str, Any]) -> None:
    await engine.probe()
    await sample(engine, temperature=0.7)
    with pytest.raises(EngineError, match="set top_p to 1 and top_k to -1"):
        await sample(engine, temperature=0.7, **truncated)


# --- live ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def live() -> AsyncIterator[VLLMEngine]:
    url = os.environ.get("VLLM_URL")
    if not url:
        pytest.skip("no live vLLM: set VLLM_URL (see the top of this file)")
    async with VLLMEngine(url) as engine:
        yield engine


async def _post(path: str, **payload: Any) -> Any:
    async with aiohttp.ClientSession() as http, http.post(os.environ["VLLM_URL"] + path, json=payload) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def _score(ids: TokenIds) -> np.ndarray:
    """The server's own log-probabilities of `ids` after the first, by prefill."""
    sampling = {"max_tokens": 1, "prompt_logprobs": 0}
    answer = await _post("/inference/v1/generate", token_ids=ids.tolist(), sampling_params=sampling)
    scored = answer["prompt_logprobs"][1:]
    return np.array([entry[str(token)]["logprob"] for entry, token in zip(scored, ids[1:].tolist(), strict=True)])


async def test_live_logprobs_are_those_the_server_scores(live: VLLMEngine) -> None:
    await live.probe()
    generation = await sample(live, 100)
    scored = await _score(token_ids(np.concatenate([PROMPT, generation.output_ids])))
    assert np.abs(scored[len(PROMPT) - 1 :] - generation.logprobs).max() < 5e-3


async def test_live_pause_and_weight_update_in_mid_request_give_one_generation(live: VLLMEngine) -> None:
    results: list[Generation] = []

    async def call() -> None:
        results.append(await sample(live, 1000))

    await _post("/update_weight_version", new_version="old")
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await anyio.sleep(1.5)  # the server does not tell when it has begun
        await _post("/pause?mode=abort")
        await _post("/update_weight_version", new_version="new")
        await _post("/resume")
    generation = results[0]
    assert len(generation.output_ids) == 1000
    assert [span.version for span in generation.versions] == ["old", "new"]
    scored = await _score(token_ids(np.concatenate([PROMPT, generation.output_ids])))
    assert np.abs(scored[len(PROMPT) - 1 :] - generation.logprobs).max() < 5e-3


async def test_live_cancelling_a_call_leaves_the_server_idle(live: VLLMEngine) -> None:
    async def running() -> float:
        async with aiohttp.ClientSession() as http, http.get(os.environ["VLLM_URL"] + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    async with anyio.create_task_group() as group:
        group.start_soon(sample, live, 3000)
        with anyio.fail_after(20):
            while not await running():
                await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    with anyio.fail_after(5):
        while await running():
            await anyio.sleep(0.05)
