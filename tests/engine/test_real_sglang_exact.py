"""Exact context through the real SGLang: the server's own scoring of a whole trace gives what its decoding recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest

from polar_plugin.config import load_config
from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.render import load_renderer
from polar_plugin.engine.sglang import SGLangEngine
from polar_plugin.engine.turn import Conversation
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.traces import counts
from polar_plugin.service import RolloutService
from tests.sglang_cpu.server import Served, sglang

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]
TOLERANCE = 1e-4  # float32; measured: about 1e-6


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with sglang(chat_model, tmp_path_factory.mktemp("log") / "server.log", "--dtype", "float32") as server:
        yield server


async def score(url: str, ids: list[int]) -> np.ndarray:
    """The server's own log-probability of each id after those before it: float32 [n - 1]."""
    payload = {
        "input_ids": ids,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=payload) as response:
        told = (await response.json())["meta_info"]["input_token_logprobs"]
    return np.array([entry[0] for entry in told[1:]], np.float32)


async def test_a_conversation_through_the_real_server_is_one_exact_trace(served: Served, chat_model: Path) -> None:
    renderer = load_renderer(chat_model)
    engine = SGLangEngine(served.url, vocab_size=renderer.vocab_size)
    config = load_config({"engine": {"kind": "sglang", "url": served.url}, "sampling": {"max_tokens": 24}})
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    with anyio.fail_after(120):
        async with (
            RolloutService(config, engine=engine, renderer=renderer) as service,
            aiohttp.ClientSession() as http,
            service.proxy.session("s", Conversation(service.policy, "s")) as session,
        ):
            for text in ("hello", "go on 👩‍🚀", "and on"):
                messages.append({"role": "user", "content": text})
                url = f"{service.proxy.url}/s/{session.key}/v1/chat/completions"
                async with http.post(url, json={"model": "m", "messages": messages}) as response:
                    assert response.status == 200, await response.text()
                    messages.append((await response.json())["choices"][0]["message"])
            sealed = session.seal()
    traces = PrefixMerging().build(sealed)
    check(traces, sealed)
    (trace,) = traces
    told = counts(sealed, traces)
    assert told["sampled_tokens"] == told["trained_tokens"] == trace.trained > 0
    again = await score(served.url, [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()])
    gap = np.abs(again[len(trace.prompt_ids) - 1 :] - trace.response_logprobs)[trace.loss_mask]
    print(f"real SGLang, float32: max |recorded - rescored| = {gap.max():.1e} over {len(gap)} tokens")  # noqa: T201
    assert float(gap.max()) <= TOLERANCE
