"""Experts and choices of tokens as SGLang tells them: only what is new, joined over re-issues, refused if short."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.errors import EngineError
from tests.engine.fake_server import listening
from tests.engine.fake_sglang import FakeSGLang, aborted, sample, sampled

pytestmark = pytest.mark.anyio
WIDTH = 6


def row(position: int) -> list[int]:
    """The experts of the token at a position: layers times experts a token."""
    return [(position * 7 + at) % 128 for at in range(WIDTH)]


def encoded(start: int, end: int) -> str:
    flat = [one for position in range(start, end) for one in row(position)]
    return base64.b64encode(np.array(flat, "<i4").tobytes()).decode()


def told(body: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """The answer with what SGLang tells where it is asked."""
    ids, start = made["output_ids"], body["routed_experts_start_len"]
    end = len(body["input_ids"]) + len(ids) - 1
    made["meta_info"] |= {
        "routed_experts": encoded(start, end),
        "routed_experts_start_len": start,
        "output_token_sampling_mask": [[token, token + 1] for token in ids],
        "output_token_sampling_logprobs": [-0.125 * (token % 4 + 1) for token in ids],
    }
    return made


def answered(body: dict[str, Any]) -> dict[str, Any]:
    return told(body, sampled(body))


@pytest.fixture
async def fake() -> FakeSGLang:
    return FakeSGLang()


@pytest.fixture
async def engine(fake: FakeSGLang) -> AsyncIterator[SGLangEngine]:
    async with (
        listening(fake.app()) as url,
        SGLangEngine(url, retries=4, reissues=3, replay=["routed_experts", "top_p"]) as engine,
    ):
        yield engine


async def test_the_rows_of_what_is_new_are_asked_for_and_kept(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(answered)
    generation = await sample(engine, 4, replay_from=2)
    body = fake.bodies[0]
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)
    assert body["return_sampling_mask"] is True
    assert generation.routing is not None
    assert (generation.routing.start, generation.routing.end) == (2, 3 + 4 - 1)
    assert generation.routing.experts.tolist() == [row(position) for position in range(2, 6)]
    assert generation.routing.experts.dtype == np.int16


async def test_log_probabilities_are_over_the_choices_that_are_kept(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(answered)
    generation = await sample(engine, 3, top_p=0.9)
    assert generation.logprobs.tolist() == [-0.5, -0.125, -0.25]
    assert generation.nucleus is not None
    assert generation.nucleus.ids.tolist() == [3, 4, 4, 5, 5, 6]
    assert generation.nucleus.offsets.tolist() == [0, 2, 4, 6]


async def test_a_call_that_was_aborted_goes_on_with_the_rows_that_are_missing(
    engine: SGLangEngine, fake: FakeSGLang
) -> None:
    fake.answers += [
        lambda body: aborted(body, []),  # in the queue: nothing is told
        lambda body: told(body, aborted(body, [3, 4])),
        answered,
    ]
    generation = await sample(engine, 4)
    assert [body["routed_experts_start_len"] for body in fake.bodies] == [0, 0, 4]
    assert generation.routing is not None
    assert generation.routing.experts.tolist() == [row(position) for position in range(3 + 4 - 1)]
    assert generation.nucleus is not None
    assert generation.nucleus.offsets.tolist() == [0, 2, 4, 6, 8]


def without(name: str) -> Any:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        made = answered(body)
        del made["meta_info"][name]
        return made

    return answer


def instead(**meta: Any) -> Any:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        made = answered(body)
        made["meta_info"] |= meta
        return made

    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (without("routed_experts"), "start SGLang with --enable-return-routed-experts"),
        (without("output_token_sampling_mask"), "use an SGLang with return_sampling_mask"),
        (
            instead(routed_experts=base64.b64encode(bytes(4 * 7)).decode()),
            "7 experts, which is no multiple of 6",
        ),
        (instead(routed_experts=[-1] * 12), "experts from -1 to -1: such there are not"),
        (instead(routed_experts_start_len=1), "asked for from token 0 but begin at 1"),
        (instead(output_token_sampling_mask=[[1]] * 4), "output token 0 is 3, which is not among what it was drawn"),
        (instead(output_token_sampling_mask=[[3]]), "4 output ids, but choices of 1 and 4 probabilities"),
    ],
)
async def test_what_is_missing_or_does_not_fit_is_an_error_that_says_what_to_set(
    engine: SGLangEngine, fake: FakeSGLang, answer: Any, message: str
) -> None:
    fake.answers.append(answer)
    with pytest.raises(EngineError, match=message):
        await sample(engine, 4)


async def test_a_server_that_tells_no_experts_fails_the_probe(engine: SGLangEngine, fake: FakeSGLang) -> None:
    fake.answers.append(without("routed_experts"))
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        await engine.probe()
