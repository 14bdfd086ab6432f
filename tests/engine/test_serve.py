"""The embedded engine behind SGLang's HTTP surface, asked by a real client over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import numpy as np
import pytest

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.serve import serve
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.records import token_ids

pytestmark = pytest.mark.anyio
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 470, 40)]


@dataclass(frozen=True)
class Server:
    engine: TransformersEngine
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, status: int = 200, **kwargs: Any) -> Any:
        with anyio.fail_after(30):
            async with self.http.post(path, json=body, **kwargs) as response:
                raw = await response.read()
                assert response.status == status, raw
                return await response.json() if raw else None

    async def get(self, path: str) -> Any:
        with anyio.fail_after(30):
            async with self.http.get(path) as response:
                assert response.status == 200
                return await response.json() if await response.read() else None

    async def generate(self, *, status: int = 200, ids: Any = IDS, sampling: Any = None, **body: Any) -> Any:
        params = {"max_new_tokens": 8, "ignore_eos": True, **(sampling or {})}
        return await self.post("/generate", {"input_ids": ids, "sampling_params": params, **body}, status)

    async def underway(self, *, calls: int = 1, tokens: int = 1) -> None:
        with anyio.fail_after(30):
            while len(progress := await self.engine.progress()) < calls or min(progress.values()) < tokens:
                await anyio.lowlevel.checkpoint()

    async def idle(self) -> None:
        with anyio.fail_after(30):
            while await self.engine.progress():
                await anyio.lowlevel.checkpoint()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture
async def server(tiny: Path) -> AsyncIterator[Server]:
    engine = TransformersEngine(tiny, threads=1, version="step-1")
    async with anyio.create_task_group() as group:
        url: str = await group.start(lambda *, task_status: serve(engine, port=0, task_status=task_status))
        async with aiohttp.ClientSession(url) as http:
            yield Server(engine, http)
        group.cancel_scope.cancel()


async def test_generate_answers_ids_and_the_logprobs_they_were_drawn_with(server: Server) -> None:
    answer = await server.generate(return_logprob=True, logprob_start_len=-1, rid="call-1")
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("call-1", 40, 8)
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert [i for _, i, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["weight_versions"] == [{"version": "step-1", "start": 0, "end": 8}]
    assert meta["weight_version"] == "step-1"
    assert meta["input_token_logprobs"] == []
    scored = await server.engine.score(token_ids([*IDS, *answer["output_ids"]]))
    assert np.abs(scored[39:] - [lp for lp, _, _ in meta["output_token_logprobs"]]).max() <= 1e-4
    assert answer["text"] == server.engine.tokenizer.decode(answer["output_ids"], skip_special_tokens=True)


async def test_without_return_logprob_there_are_none(server: Server) -> None:
    assert "output_token_logprobs" not in (await server.generate())["meta_info"]


async def test_no_tokens_asked_for_scores_the_prompt(server: Server) -> None:
    answer = await server.generate(sampling={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    pairs = answer["meta_info"]["input_token_logprobs"]
    assert [i for _, i, _ in pairs] == IDS
    assert pairs[0][0] is None
    assert np.allclose([lp for lp, _, _ in pairs[1:]], await server.engine.score(IDS))
    assert (answer["output_ids"], answer["meta_info"]["output_token_logprobs"]) == ([], [])


async def test_a_stop_id_is_in_the_ids_and_trimmed_from_the_text_unless_asked_to_stay(server: Server) -> None:
    free = (await server.generate(sampling={"sampling_seed": 1}))["output_ids"]
    stop, cut = free[4], free[: free.index(free[4]) + 1]
    decode = server.engine.tokenizer.decode
    sampling = {"sampling_seed": 1, "stop_token_ids": [stop]}
    trimmed = await server.generate(sampling=sampling)
    kept = await server.generate(sampling={**sampling, "no_stop_trim": True, "skip_special_tokens": False})
    assert trimmed["output_ids"] == kept["output_ids"] == cut
    assert trimmed["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert (trimmed["text"], kept["text"]) == (decode(cut[:-1], skip_special_tokens=True), decode(cut))


async def test_the_models_own_end_stops_unless_ignored(server: Server) -> None:
    (end,) = server.engine.eos_ids
    forced = {"temperature": 5.0, "max_new_tokens": 20000, "ignore_eos": False}
    answer = await server.generate(sampling=forced)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert answer["output_ids"].count(end) == 1


async def test_a_stop_string_is_told_and_cut_from_the_text_only(server: Server) -> None:
    free = await server.generate(sampling={"sampling_seed": 1, "max_new_tokens": 64})
    stop = next(word for word in free["text"].split() if word.isascii() and len(word) > 2)
    answer = await server.generate(sampling={"sampling_seed": 1, "max_new_tokens": 64, "stop": stop})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in answer["text"]
    assert stop in server.engine.tokenizer.decode(answer["output_ids"])
    assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"sampling": {"max_tokens": 3}}, "unknown: max_tokens"),
        ({"sampling": {"n": 2}}, "not supported by the embedded engine: n"),
        ({"sampling": {"json_schema": "{}"}}, "not supported by the embedded engine: json_schema"),
        ({"sampling": {"temperature": -1}}, "sampling_params.temperature: -1 is out of range"),
        ({"sampling": {"top_p": "high"}}, "sampling_params.top_p: 'high' is out of range"),
        ({"ids": [1, 484]}, "484 is out of the vocabulary (484)"),
        ({"ids": [1, -4]}, "input_ids: token ids must lie in"),
        ({"ids": []}, "input_ids: "),
        ({"ids": [[1], [2]]}, "input_ids: one flat list"),
        ({"ids": None}, "input_ids: "),
        ({"stream": True}, "does not stream"),
        ({"ids": [1] * 40_000}, "longer than the model's context length (32768 tokens)"),
        ({"return_logprob": True, "logprob_start_len": 41}, "logprob_start_len: 41"),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_says_what(server: Server, body: Any, told: str) -> None:
    answer = await server.generate(status=400, **body)
    assert told in answer["error"]["message"]
    assert (await server.generate())["meta_info"]["completion_tokens"] == 8


async def test_a_body_that_is_no_json_object_is_a_400(server: Server) -> None:
    for raw in (b"{", b"[]"):
        async with server.http.post("/generate", data=raw) as response:
            assert response.status == 400


async def test_an_abort_by_id_prefix_answers_the_tokens_so_far(server: Server) -> None:
    answers: dict[str, Any] = {}

    async def call(rid: str) -> None:
        limit = {"max_new_tokens": 30_000 if rid.startswith("a") else 64}
        answers[rid] = await server.generate(rid=rid, sampling=limit, return_logprob=True)

    async with anyio.create_task_group() as group:
        for rid in ("a-1", "a-2", "b-1"):
            group.start_soon(call, rid)
        await server.underway(calls=3, tokens=3)
        assert (await server.generate(rid="a-1", status=400))["error"]["message"].startswith("rid: ")
        await server.post("/abort_request", {"rid": "a-"})
    for rid in ("a-1", "a-2"):
        meta = answers[rid]["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert len(meta["output_token_logprobs"]) == len(answers[rid]["output_ids"]) == meta["completion_tokens"] >= 3
    assert answers["b-1"]["meta_info"]["finish_reason"]["type"] == "length"


async def test_an_abort_that_names_nothing_ends_nothing(server: Server) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: server.generate(sampling={"max_new_tokens": 300}))
        await server.underway()
        await server.post("/abort_request", {})
        await server.post("/abort_request", {"rid": "unknown"})
        assert await server.engine.progress()


async def test_a_client_that_hangs_up_frees_its_slot(server: Server) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: server.generate(sampling={"max_new_tokens": 30_000}))
        await server.underway()
        group.cancel_scope.cancel()
    await server.idle()


async def test_a_version_bump_in_mid_request_shows_as_spans(server: Server) -> None:
    answers: list[Any] = []

    async def call() -> None:
        answers.append(await server.generate(sampling={"max_new_tokens": 200}))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await server.underway(tokens=5)
        told = await server.post("/update_weight_version", {"new_version": "step-2", "abort_all_requests": False})
    assert told == {"success": True, "message": "Weight version updated to step-2", "new_version": "step-2"}
    first, second = answers[0]["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("step-1", 0, "step-2", 200)
    assert first["end"] == second["start"] >= 5
    assert (await server.get("/model_info"))["weight_version"] == "step-2"


async def test_a_version_bump_aborts_what_runs_by_default(server: Server) -> None:
    answers: list[Any] = []

    async def call() -> None:
        answers.append(await server.generate(sampling={"max_new_tokens": 30_000}))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await server.underway()
        await server.post("/update_weight_version", {"new_version": "step-2"})
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("mode", "finish", "retractions"), [("abort", "abort", 0), ("retract", "length", 1), ("in_place", "length", 0)]
)
async def test_a_pause_holds_calls_until_continue(server: Server, mode: str, finish: str, retractions: int) -> None:
    answers: list[Any] = []

    async def call() -> None:
        answers.append(await server.generate(sampling={"max_new_tokens": 200}))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await server.underway(tokens=2)
        assert (await server.post("/pause_generation", {"mode": mode}))["status"] == "ok"
        before = await server.engine.progress()
        assert await server.engine.progress() == before
        assert (await server.post("/continue_generation", {}))["status"] == "ok"
    meta = answers[0]["meta_info"]
    assert (meta["finish_reason"]["type"], meta["num_retractions"]) == (finish, retractions)


async def test_an_unknown_pause_mode_is_a_400(server: Server) -> None:
    assert "retract" in (await server.post("/pause_generation", {"mode": "nap"}, 400))["error"]["message"]


async def test_the_routing_key_names_the_session_for_scripts(tiny: Path) -> None:
    seen: list[str] = []
    engine = TransformersEngine(tiny, threads=1, script=lambda session, *_: seen.append(session))
    async with anyio.create_task_group() as group:
        url: str = await group.start(lambda *, task_status: serve(engine, port=0, task_status=task_status))
        async with aiohttp.ClientSession(url) as http:
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}
            await Server(engine, http).post("/generate", body, headers={"X-SMG-Routing-Key": "session-9"})
        group.cancel_scope.cancel()
    assert seen == ["session-9"]


async def test_it_tells_health_model_limits_and_itself_as_the_one_worker(server: Server) -> None:
    assert await server.get("/health") is None
    assert await server.get("/health_generate") is None
    model, limits, workers = [await server.get(path) for path in ("/model_info", "/server_info", "/workers")]
    assert model == await server.get("/get_model_info")
    assert limits == await server.get("/get_server_info")
    assert (model["model_path"], model["is_generation"], model["vocab_size"]) == ("tiny-1", True, 484)
    assert (limits["context_length"], limits["max_req_input_len"]) == (32768, 32767)
    (worker,) = workers["workers"]
    async with server.http.get(worker["url"] + "/health") as response:
        assert response.status == 200
