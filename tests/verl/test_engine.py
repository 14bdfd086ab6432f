"""verl's server client as an engine, told by what its servers do. Needs no verl."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from polar_plugin.errors import EngineBusy, EngineError
from polar_plugin.records import FinishReason, SamplingParams, VersionSpan, token_ids
from polar_plugin.verl_engine import VerlEngine, global_steps

pytestmark = pytest.mark.anyio
STOP = 99


@dataclass
class Output:
    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"min_global_steps": 3, "max_global_steps": 3})

    def __post_init__(self) -> None:
        if self.log_probs is None:
            self.log_probs = [-0.5] * len(self.token_ids)


class Client:
    def __init__(self, *outputs: Output | Exception) -> None:
        self._outputs = list(outputs)
        self.calls: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.calls.append((request_id, prompt_ids, sampling_params))
        output = self._outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output


def engine(client: Client, **told: Any) -> VerlEngine:
    return VerlEngine(
        client, model="m", context_length=100, vocab_size=200, decode=lambda ids: "".join(map(chr, ids)), **told
    )


FIVE = SamplingParams(max_tokens=5)


async def sample(client: Client, sampling: SamplingParams = FIVE, **told: Any) -> Any:
    made = engine(client, **told)
    return await made.generate(token_ids([1, 2]), sampling, request_id="c0", session_id="s0", stop_ids=(STOP,))


async def test_a_call_is_the_sessions_with_all_that_verls_servers_would_guess() -> None:
    client = Client(Output([5, STOP]))
    generation = await sample(client, SamplingParams(0.7, 0.9, 4, 5))
    assert (generation.output_ids.tolist(), generation.finish_reason) == ([5, STOP], FinishReason.STOP)
    assert generation.versions == (VersionSpan("3", 2),)
    assert client.calls == [
        ("s0", [1, 2], {
            "temperature": 0.7, "top_p": 0.9, "top_k": 4, "repetition_penalty": 1.0, "logprobs": True,
            "max_tokens": 5, "stop_token_ids": [STOP],
        }),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "reason", "finish"),
    [
        ([5, 6, 7, 8, 9], "completed", FinishReason.LENGTH),  # vLLM says so of both
        ([5, 6, 7, 8, STOP], "completed", FinishReason.STOP),
        ([5, 6], "length", FinishReason.LENGTH),
        ([5, 6], "stop", FinishReason.STOP),
    ],
)
async def test_length_is_told_from_the_ids(ids: list[int], reason: str, finish: FinishReason) -> None:
    assert (await sample(Client(Output(ids, stop_reason=reason)))).finish_reason is finish


async def test_an_aborted_call_goes_on_where_it_stopped() -> None:
    late = Output([7, STOP], extra_fields={"min_global_steps": 4, "max_global_steps": 5})
    client = Client(Output([5, 6], stop_reason="aborted"), late)
    generation = await sample(client)
    assert generation.output_ids.tolist() == [5, 6, 7, STOP]
    assert (client.calls[1][1], client.calls[1][2]["max_tokens"]) == ([1, 2, 5, 6], 3)
    assert generation.versions == (VersionSpan("3", 2), VersionSpan("4-5", 2))
    assert global_steps(generation.versions, 9) == (3, 5)


def test_rows_whose_servers_told_no_version_have_that_of_their_step() -> None:
    assert global_steps((VersionSpan("", 3),), 9) == (9, 9)


@pytest.mark.parametrize(("stop_strings", "ends"), [(True, []), (False, [STOP])])
async def test_a_stop_string_is_found_in_what_was_sampled(stop_strings: bool, ends: Sequence[int]) -> None:
    """SGLang under verl cannot stop at strings: it is asked for none, and the text is cut all the same."""
    client = Client(Output([*map(ord, "ab!"), *ends]))
    generation = await sample(client, SamplingParams(max_tokens=9, stop=("!", "b")), stop_strings=stop_strings)
    assert (generation.stop, generation.finish_reason) == ("b", FinishReason.STOP)
    assert ("stop" in client.calls[0][2]) is stop_strings


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        (Output([5, 6], log_probs=[-0.5]), EngineError, "2 ids but 1 log-probabilities"),
        (Output([], stop_reason="stop"), EngineError, "sampled nothing"),
        (ValueError("prompt too long"), EngineError, "ValueError: prompt too long"),
        (RuntimeError("No available servers in load balancer"), EngineBusy, "no server"),
    ],
)
async def test_a_server_that_fails_is_infrastructure(output: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        await sample(Client(output))
    assert caught.type is kind


async def test_missing_log_probabilities_say_what_to_set() -> None:
    output = Output([5])
    output.log_probs = None
    with pytest.raises(EngineError, match="calculate_log_probs"):
        await sample(Client(output))


async def test_what_does_not_fit_is_refused_before_it_is_sent() -> None:
    client = Client()
    with pytest.raises(EngineError, match="out of the vocabulary"):
        await engine(client).generate(token_ids([200]), SamplingParams(max_tokens=1), request_id="c", session_id="s")
    with pytest.raises(EngineError, match="exceed the context of 100"):
        await sample(client, SamplingParams(max_tokens=99))
    assert client.calls == []


async def test_a_call_that_is_cancelled_ends() -> None:
    class Never(Client):
        async def generate(self, *args: Any, **told: Any) -> Any:
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    call = asyncio.create_task(sample(Never()))
    await asyncio.wait_for(started.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 5)


async def test_the_probe_tells_the_weights() -> None:
    info = await engine(Client(Output([5]))).probe()
    assert (info.model, info.context_length, info.weight_version) == ("m", 100, "3")
