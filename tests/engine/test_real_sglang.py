"""The SGLang client against the real SGLang 0.5.23 on this CPU (`tests/sglang_cpu/install.sh`)."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
from transformers import AutoTokenizer

from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.errors import EngineError
from polar_plugin.records import FinishReason, Generation, SamplingParams, TokenIds, token_ids
from tests.sglang_cpu.server import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    Served,
    real_sglang_fixture,  # noqa: F401  (requested by name)
    router,
    sglang,
    tiny_model_fixture,  # noqa: F401
)

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

PROMPT = token_ids(np.arange(20))
FLOAT32_TOLERANCE = 1e-5  # measured: 5e-7
BFLOAT16_TOLERANCE = 2**-6  # two steps of bfloat16 logits between 1 and 2; measured: 0.002 to 0.008


class Server:
    """What a trainer does to the server behind our back."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def post(self, path: str, **payload: Any) -> Any:
        async with self._http.post(self._url + path, json=payload) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def load(self) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/v1/loads?include=core") as response:
            return (await response.json())["loads"][0]

    async def until(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 30) -> None:
        """Poll the server's load."""
        with anyio.fail_after(seconds):
            while not holds(await self.load()):
                await anyio.sleep(0.02)

    async def score(self, ids: TokenIds) -> np.ndarray:
        """The server's own log-probabilities of `ids`, by prefill; the first has none."""
        answer = await self.post(
            "/generate",
            input_ids=ids.tolist(),
            return_logprob=True,
            logprob_start_len=0,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
        )
        return np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


@pytest.fixture
async def server(real_sglang: Served) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as http:
        yield Server(real_sglang.url, http)


@pytest.fixture
async def engine(real_sglang: Served) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(real_sglang.url, vocab_size=VOCAB_SIZE) as engine:
        yield engine


_numbers = itertools.count()


async def sample(
    engine: SGLangEngine, max_tokens: int, *, prompt: TokenIds = PROMPT, stop_ids: tuple[int, ...] = (), **sampling: Any
) -> Generation:
    with anyio.fail_after(120):
        return await engine.generate(
            prompt,
            SamplingParams(max_tokens=max_tokens, **sampling),
            request_id=f"request{next(_numbers):06d}",
            session_id="session",
            stop_ids=stop_ids,
        )


async def sample_while(
    engine: SGLangEngine, server: Server, max_tokens: int, meanwhile: Callable[[], Awaitable[object]]
) -> Generation:
    """Sample, and do `meanwhile` once tokens have come."""
    results: list[Generation] = []

    async def keep() -> None:
        results.append(await sample(engine, max_tokens))

    async with anyio.create_task_group() as group:
        group.start_soon(keep)
        await server.until(lambda load: load["num_running_reqs"] == 1 and load["num_used_tokens"] > len(PROMPT) + 20)
        await meanwhile()
    return results[0]


async def difference(server: Server, generation: Generation, prompt: TokenIds = PROMPT) -> float:
    scored = await server.score(token_ids(np.concatenate([prompt, generation.output_ids])))
    return float(np.abs(scored[len(prompt) - 1 :] - generation.logprobs).max())


async def test_the_probe_finds_model_context_and_weight_version(engine: SGLangEngine, server: Server) -> None:
    await server.post("/update_weight_version", new_version="step-1")
    info = await engine.probe()
    assert (info.model, info.weight_version) == ("tiny", "step-1")
    assert CONTEXT_LENGTH - 8 <= info.context_length <= CONTEXT_LENGTH


async def test_logprobs_of_float32_weights_are_those_the_server_scores(engine: SGLangEngine, server: Server) -> None:
    generation = await sample(engine, 200)
    assert len(generation.output_ids) == 200
    found = await difference(server, generation)
    print(f"float32: max |difference| {found:.2g}")  # noqa: T201
    assert found <= FLOAT32_TOLERANCE


async def test_logprobs_of_bfloat16_weights_are_those_the_server_scores(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with sglang(tiny_model, log, "--dtype", "bfloat16") as served:
        async with aiohttp.ClientSession() as http, SGLangEngine(served.url) as engine:
            found = await difference(Server(served.url, http), await sample(engine, 200))
    print(f"bfloat16: max |difference| {found:.2g}; boot {served.boot_seconds:.0f} s")  # noqa: T201
    assert found <= BFLOAT16_TOLERANCE


async def test_logprobs_are_at_the_sampling_temperature(engine: SGLangEngine, server: Server) -> None:
    cold = await sample(engine, 100, temperature=0.2)
    assert await difference(server, cold) > 0.1
    assert cold.logprobs.mean() > (await sample(engine, 100)).logprobs.mean()


async def test_sampling_ends_at_max_tokens(engine: SGLangEngine) -> None:
    generation = await sample(engine, 7)
    assert (len(generation.output_ids), generation.finish_reason) == (7, FinishReason.LENGTH)


async def test_a_stop_id_ends_sampling_and_is_kept(engine: SGLangEngine) -> None:
    stop_ids = tuple(range(0, VOCAB_SIZE, 4))
    generation = await sample(engine, 500, stop_ids=stop_ids)
    assert generation.finish_reason is FinishReason.STOP
    assert generation.stop is None
    assert [int(token) in stop_ids for token in generation.output_ids].index(True) == len(generation.output_ids) - 1


async def test_a_stop_string_ends_sampling_and_keeps_the_ids_that_spell_it(
    engine: SGLangEngine, tiny_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for first in range(200):
        prompt = token_ids(np.arange(first, first + 20))
        greedy = (await sample(engine, 40, prompt=prompt, temperature=0.0)).output_ids.tolist()
        found = re.search("[A-Za-z]{2}", str(tokenizer.decode(greedy)))
        if found:
            break
    else:
        pytest.fail("no prompt is continued with two letters in a row")
    stopped = await sample(engine, 40, prompt=prompt, temperature=0.0, stop=(found[0],))
    assert (stopped.finish_reason, stopped.stop) == (FinishReason.STOP, found[0])
    assert stopped.output_ids.tolist() == greedy[: len(stopped.output_ids)]
    assert str(tokenizer.decode(stopped.output_ids.tolist())).endswith(found[0])


async def test_cancelling_a_call_leaves_the_server_idle(engine: SGLangEngine, server: Server) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(sample, engine, 4000)
        await server.until(lambda load: load["num_running_reqs"] == 1)
        group.cancel_scope.cancel()
    await server.until(lambda load: load["num_running_reqs"] == 0, seconds=2)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_in_mid_request_gives_one_seamless_generation(
    engine: SGLangEngine, server: Server, mode: str
) -> None:
    async def pause() -> None:
        await server.post("/pause_generation", mode=mode)
        await server.post("/continue_generation")

    generation = await sample_while(engine, server, 400, pause)
    assert (len(generation.output_ids), generation.finish_reason) == (400, FinishReason.LENGTH)
    assert await difference(server, generation) <= FLOAT32_TOLERANCE


async def test_an_abort_of_a_request_that_waits_retracted_gives_one_seamless_generation(
    engine: SGLangEngine, server: Server
) -> None:
    async def pause_and_abort() -> None:
        await server.post("/pause_generation", mode="retract")
        await server.post("/update_weight_version", new_version="newer", abort_all_requests=True)
        await server.post("/continue_generation")

    generation = await sample_while(engine, server, 400, pause_and_abort)
    assert (len(generation.output_ids), generation.finish_reason) == (400, FinishReason.LENGTH)
    assert sum(span.count for span in generation.versions) == 400
    assert await difference(server, generation) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("abort_all", [True, False])
async def test_a_weight_update_in_mid_request_gives_two_version_spans_that_cover_it(
    engine: SGLangEngine, server: Server, abort_all: bool
) -> None:
    await server.post("/update_weight_version", new_version="old")

    async def update() -> None:
        await server.post("/update_weight_version", new_version="new", abort_all_requests=abort_all)

    generation = await sample_while(engine, server, 400, update)
    assert [span.version for span in generation.versions] == ["old", "new"]
    assert min(span.count for span in generation.versions) > 0
    assert sum(span.count for span in generation.versions) == len(generation.output_ids) == 400


async def test_many_calls_at_once_keep_their_tokens_apart(engine: SGLangEngine, server: Server) -> None:
    prompts = [token_ids(np.arange(number, number + 10)) for number in range(24)]
    results: dict[int, Generation] = {}

    async def call(number: int) -> None:
        results[number] = await sample(engine, 30, prompt=prompts[number])

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(call, number)
    for number in (0, 11, 23):
        assert await difference(server, results[number], prompts[number]) <= FLOAT32_TOLERANCE


async def test_an_id_out_of_the_vocabulary_is_refused_by_us_and_the_server_lives_on(engine: SGLangEngine) -> None:
    with pytest.raises(EngineError, match=f"token id {VOCAB_SIZE} is out of the vocabulary"):
        await sample(engine, 4, prompt=token_ids([1, VOCAB_SIZE]))
    assert len((await sample(engine, 4)).output_ids) == 4


async def test_the_context_that_the_probe_tells_can_be_filled_to_the_last_token(engine: SGLangEngine) -> None:
    context = (await engine.probe()).context_length
    prompt = token_ids(np.arange(context - 5) % VOCAB_SIZE)
    assert len((await sample(engine, 5, prompt=prompt)).output_ids) == 5
    full = token_ids(np.arange(context - 1) % VOCAB_SIZE)
    assert len((await sample(engine, 1, prompt=full)).output_ids) == 1
    with pytest.raises(EngineError, match="exceed the context"):
        await sample(engine, 6, prompt=prompt)


async def test_what_the_server_refuses_is_an_error_in_its_own_words_and_not_sent_again(engine: SGLangEngine) -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"refused the call \(400\).*top_p"):
        await sample(engine, 4, top_p=7.0)
    assert time.monotonic() - started < 5


async def test_an_idle_longer_than_the_servers_keep_alive_costs_nothing(engine: SGLangEngine) -> None:
    await sample(engine, 2)
    await anyio.sleep(6)  # the case itself: uvicorn closes idle connections after 5 s
    assert len((await sample(engine, 2)).output_ids) == 2


async def test_through_the_real_router_calls_work_and_a_cancelled_one_reaches_its_worker(
    real_sglang: Served,
    server: Server,
    tmp_path: Path,
) -> None:
    with router([real_sglang.url], tmp_path / "router.log") as routed:
        async with SGLangEngine(routed.url, vocab_size=VOCAB_SIZE) as engine:
            assert (await engine.probe()).context_length > 4000
            assert await difference(server, await sample(engine, 50)) <= FLOAT32_TOLERANCE
            async with anyio.create_task_group() as group:
                group.start_soon(sample, engine, 4000)
                await server.until(lambda load: load["num_running_reqs"] == 1)
                group.cancel_scope.cancel()
            await server.until(lambda load: load["num_running_reqs"] == 0, seconds=2)
