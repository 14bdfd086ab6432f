"""The SGLang client's calls: what is sent, what is read, what is refused, what is asked for again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.errors import ConfigError, EngineBusy, EngineError
from polar_plugin.records import FinishReason, VersionSpan, token_ids
from tests.engine.fake_server import listening
from tests.engine.fake_sglang import FakeSGLang, aborted, sample, sampled, status

pytestmark = pytest.mark.anyio


@pytest.fixture
async def fake() -> FakeSGLang:
    return FakeSGLang()


@pytest.fixture
async def url(fake: FakeSGLang) -> AsyncIterator[str]:
    async with listening(fake.app()) as address:
        yield address


@pytest.fixture
async def engine(url: str) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine(url, retries=4, reissues=3) as engine:
        yield engine


# --- what is sent, and what is read --------------------------------------------------------------------------------


async def test_a_call_carries_ids_sampling_and_the_sessions_routing_key(engine: SGLangEngine, fake: FakeSGLang) -> None:
    await sample(
        engine, 9, stop_ids=(2, 3), stop=("END",), temperature=0.5, top_p=0.9, top_k=40, session_id="a-session"
    )
    body = fake.bodies[0]
    assert body["input_ids"] == [5, 6, 7]
    assert body["sampling_params"] == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["END"],
        "stop_token_ids": [2, 3],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert fake.headers[0]["X-SMG-Routing-Key"] == "a-session"


async def test_a_seed_is_sent_only_where_one_is_given(engine: SGLangEngine, fake: FakeSGLang) -> None:
    await sample(engine)
    await sample(engine, seed=3)
    assert [body["sampling_params"].get("sampling_seed") for body in fake.bodies] == [None, 3]


async def test_ids_logprobs_and_versions_are_the_engines(engine: SGLangEngine) -> None:
    generation = await sample(engine, 3)
    assert generation.output_ids.tolist() == [3, 4, 5]
    assert generation.logprobs.tolist() == [-1.0, -0.25, -0.5]
    assert generation.versions == (VersionSpan("1", 3),)
    assert (generation.finish_reason, generation.stop) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize(("matched", "stop"), [(2, None), ("END", "END"), (None, None)])
async def test_a_stop_names_the_string_that_ended_it(
    engine: SGLangEngine, fake: FakeSGLang, matched: object, stop: str | None
) -> None:
    fake.answers.append(lambda body: sampled(body, [9, 2], finish={"type": "stop", "matched": matched}))
    generation = await sample(engine)
    assert (generation.finish_reason, generation.stop) == (FinishReason.STOP, stop)


async def test_version_spans_over_a_bump_cover_the_output(engine: SGLangEngine, fake: FakeSGLang) -> None:
    spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 4}]
    fake.answers.append(lambda body: sampled(body, weight_versions=spans))
    assert (await sample(engine)).versions == (VersionSpan("7", 3), VersionSpan("8", 1))


async def test_a_server_that_tells_one_version_only_has_one_span(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(lambda body: sampled(body, weight_versions=None, weight_version="5"))
    assert (await sample(engine)).versions == (VersionSpan("5", 4),)


async def test_a_prompt_of_a_quarter_million_ids_goes_out_whole(engine: SGLangEngine, fake: FakeSGLang) -> None:
    prompt = token_ids(np.arange(250_000) % 150_000)
    fake_app_limit = 1024**2
    assert len(orjson.dumps(prompt.tolist())) > fake_app_limit
    async with listening(_large(fake)) as address, SGLangEngine(address) as large:
        assert len((await sample(large, 2, prompt=prompt)).output_ids) == 2
    assert fake.bodies[0]["input_ids"] == prompt.tolist()


def _large(fake: FakeSGLang) -> web.Application:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", fake.generate)
    return app


# --- answers that cannot be trusted --------------------------------------------------------------------------------


def _edit(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        good = sampled(body)
        meta = {**good["meta_info"], **changes.pop("meta_info", {})} if changes.get("meta_info", 1) else None
        return {**good, "meta_info": meta, **{key: value for key, value in changes.items() if key != "meta_info"}}

    return answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta_info": None}, "no `meta_info`: a proxy or router in between drops fields"),
        ({"meta_info": {"output_token_logprobs": None}}, "no `meta_info.output_token_logprobs`: a proxy or router"),
        ({"output_ids": None}, "no `output_ids`: a proxy or router"),
        ({"output_ids": [3, 4, 5]}, "3 output ids but 4 log-probabilities"),
        ({"output_ids": [3, 4, 5, 6, 7]}, "5 output ids but 4 log-probabilities"),
        ({"output_ids": [3, 4, 9, 6]}, "disagree at 2: 9 against 5"),
        ({"output_ids": ["3", 4, 5, 6]}, "disagree at 0: 3 against 3"),
        ({"output_ids": [-3, 4, 5, 6]}, "disagree at 0: -3 against 3"),
        (
            {"meta_info": {"output_token_logprobs": [[-1, 3], [None, 4], [-1, 5], [-1, 6]]}},
            "no finite log-prob.* token 1",
        ),
        ({"meta_info": {"output_token_logprobs": [-1.0, -1.0, -1.0, -1.0]}}, "cannot be read"),
        ({"meta_info": {"weight_versions": [{"version": "1", "start": 0, "end": 3}]}}, "spans cover 3 tokens of 4"),
        ({"meta_info": {"finish_reason": None}}, "cannot be read"),
        ({"meta_info": {"prompt_tokens": 2}}, "3 prompt tokens were sent but the engine read 2"),
        ({"meta_info": {"finish_reason": {"type": "abort", "status_code": 500, "message": "boom"}}}, "abort: boom"),
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error_and_is_not_asked_for_again(
    engine: SGLangEngine, fake: FakeSGLang, changes: dict[str, Any], message: str
) -> None:
    fake.answers.append(_edit(**changes))
    with pytest.raises(EngineError, match=message):
        await sample(engine)
    assert len(fake.bodies) == 1


async def test_an_answer_that_is_no_json_is_an_error_that_shows_it(engine: SGLangEngine, fake: FakeSGLang) -> None:
    async def answer(body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text="<html>gateway</html>")

    fake.answers.append(answer)
    with pytest.raises(EngineError, match="no JSON: <html>gateway"):
        await sample(engine)


# --- what never leaves us ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([1, 100], 4, "token id 100 is out of the vocabulary of 100 ids"),
        ([], 4, "the prompt is empty"),
        ([1] * 60, 5, "60 prompt tokens and max_tokens 5 exceed the context of 64 tokens"),
        ([1], 0, "max_tokens is 0"),
    ],
)
async def test_what_no_engine_can_serve_is_refused_before_it_is_sent(
    url: str, fake: FakeSGLang, prompt: list[int], max_tokens: int, message: str
) -> None:
    async with SGLangEngine(url, vocab_size=100, context_length=64) as engine:
        with pytest.raises(EngineError, match=message):
            await sample(engine, max_tokens, prompt=token_ids(prompt))
    assert fake.bodies == []


def test_an_address_without_a_scheme_is_refused_by_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"engine.url: '127.0.0.1:30000' is no address"):
        SGLangEngine("127.0.0.1:30000")


# --- aborts by the engine: weight updates --------------------------------------------------------------------------


async def test_an_abort_in_mid_request_is_continued_into_one_generation(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers += [
        lambda body: aborted(body, [3, 4], weight_versions=[{"version": "1", "start": 0, "end": 2}]),
        lambda body: sampled(body, weight_version="2", weight_versions=[{"version": "2", "start": 0, "end": 4}]),
    ]
    generation = await sample(engine, 6)
    assert [body["input_ids"] for body in fake.bodies] == [[5, 6, 7], [5, 6, 7, 3, 4]]
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [6, 4]
    assert generation.output_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert generation.logprobs.tolist() == [-1.0, -0.25, -0.5, -0.75, -1.0, -0.25]
    assert generation.versions == (VersionSpan("1", 2), VersionSpan("2", 4))
    assert generation.finish_reason is FinishReason.LENGTH


async def test_spans_of_one_version_join_over_a_reissue(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(lambda body: aborted(body, [3, 4]))
    assert (await sample(engine, 6)).versions == (VersionSpan("1", 6),)


async def test_an_abort_in_the_waiting_queue_starts_again_from_the_prompt(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    def queued(body: dict[str, Any]) -> dict[str, Any]:
        answer = aborted(body, [], weight_versions=[{"version": "1", "start": 0, "end": 0}])
        del answer["meta_info"]["prompt_tokens"]
        return answer

    fake.answers.append(queued)
    assert len((await sample(engine)).output_ids) == 4
    assert [body["input_ids"] for body in fake.bodies] == [[5, 6, 7]] * 2


@pytest.mark.parametrize(("ids", "reason"), [([3, 2], FinishReason.STOP), ([3, 4, 5, 6], FinishReason.LENGTH)])
async def test_an_abort_that_lands_on_the_last_token_samples_nothing_beyond_it(
    engine: SGLangEngine, fake: FakeSGLang, ids: list[int], reason: FinishReason
) -> None:
    fake.answers.append(lambda body: aborted(body, ids))
    generation = await sample(engine, 4, stop_ids=(2,))
    assert (generation.output_ids.tolist(), generation.finish_reason) == (ids, reason)
    assert len(fake.bodies) == 1


async def test_a_call_that_is_aborted_again_and_again_is_busy(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers += [lambda body: aborted(body, [])] * 4
    with pytest.raises(EngineBusy, match="aborted this call 4 times in a row"):
        await sample(engine)
    assert len(fake.bodies) == 4


async def test_progress_between_aborts_resets_their_count(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers += [lambda body: aborted(body, []), lambda body: aborted(body, [1])] * 4
    assert len((await sample(engine, 10)).output_ids) == 10


async def test_what_takes_longer_than_the_deadline_is_busy_and_aborted(url: str, fake: FakeSGLang) -> None:
    fake.answers.append(fake.hold)
    async with SGLangEngine(url, request_timeout=0.2) as engine:
        with pytest.raises(EngineBusy, match=r"no whole answer in 0\.2 s"):
            await sample(engine)
    assert len(fake.aborts) == 1


# --- what is sent again, and what is not ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [503, 429])
async def test_a_busy_engine_is_asked_again_until_it_takes_the_call(
    engine: SGLangEngine, fake: FakeSGLang, code: int
) -> None:
    fake.answers += [status(code, "paused for a weight update")] * 2
    assert len((await sample(engine)).output_ids) == 4
    assert len(fake.bodies) == 3


async def test_an_engine_that_stays_busy_says_so_with_its_own_words(url: str, fake: FakeSGLang) -> None:
    fake.answers.append(status(503, "circuit breaker open", **{"Retry-After": "7"}))
    async with SGLangEngine(url, retries=0) as engine:
        with pytest.raises(EngineBusy, match=r"is busy \(503\): circuit breaker open") as caught:
            await sample(engine)
    assert caught.value.retry_after == 7.0


@pytest.mark.parametrize("code", [400, 401, 404, 422, 500, 502])
async def test_any_other_refusal_is_an_error_at_once(engine: SGLangEngine, fake: FakeSGLang, code: int) -> None:
    fake.answers.append(status(code, "the engine's own words"))
    with pytest.raises(EngineError, match=rf"\({code}\): the engine's own words") as caught:
        await sample(engine)
    assert not isinstance(caught.value, EngineBusy)
    assert len(fake.bodies) == 1


# --- the probe -----------------------------------------------------------------------------------------------------


async def test_the_probe_tells_model_context_and_version_and_bounds_later_calls(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    info = await engine.probe()
    assert (info.model, info.context_length, info.weight_version) == ("tiny", 58, "7")
    with pytest.raises(EngineError, match="exceed the context of 58"):
        await sample(engine, 56)
    assert fake.bodies[0]["sampling_params"]["max_new_tokens"] == 1


async def test_case_17_the_probe_fails_where_a_router_strips_ids_and_says_what_to_set(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    fake.answers.append(lambda body: {"text": "x"})
    with pytest.raises(EngineError, match=r"no `meta_info`.*Set engine.url to a SGLang server itself"):
        await engine.probe()


async def test_the_probe_of_an_engine_that_does_not_tell_its_context_asks_for_it(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    fake.server_info = {}
    with pytest.raises(EngineError, match=r"set engine.context_length"):
        await engine.probe()


async def test_the_probe_of_an_absent_engine_names_the_setting(fake: FakeSGLang) -> None:
    async with listening(fake.app()) as address:
        pass
    async with SGLangEngine(address) as engine:
        with pytest.raises(EngineError, match=r"no engine can be reached at .*/health .*mend engine.url"):
            await engine.probe()


async def test_a_vocabulary_that_the_server_tells_is_kept_to(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.info["vocab_size"] = 7
    await engine.probe()
    with pytest.raises(EngineError, match="token id 7 is out of the vocabulary of 7"):
        await sample(engine)
