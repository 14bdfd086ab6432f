"""The embedded engine is exact against a full forward pass, however calls share a batch, a cache or weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, LlamaConfig, MistralConfig, PreTrainedModel

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.transformers import TransformersEngine
from polar_plugin.errors import EngineError
from polar_plugin.records import FinishReason, Generation, SamplingParams, TokenIds, VersionSpan, token_ids

pytestmark = pytest.mark.anyio
EXACT = 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture
async def engine(tiny: Path) -> AsyncIterator[TransformersEngine]:
    async with TransformersEngine(tiny, threads=1, prefill_chunk=32) as engine:
        yield engine


def prompt(length: int, seed: int = 0) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(0, 470, length))


async def generate(
    engine: TransformersEngine,
    ids: TokenIds,
    *,
    request: str = "r",
    session: str = "s",
    stop_ids: Sequence[int] = (),
    **sampling: Any,
) -> Generation:
    params = SamplingParams(**{"max_tokens": 16, **sampling})
    with anyio.fail_after(60):
        return await engine.generate(ids, params, request_id=request, session_id=session, stop_ids=stop_ids)


async def off(engine: TransformersEngine, ids: TokenIds, generation: Generation, temperature: float = 1.0) -> float:
    """How far the recorded log-probabilities are from those of a full forward pass."""
    scored = await engine.score(np.concatenate([ids, generation.output_ids]), temperature)
    return float(np.abs(scored[len(ids) - 1 :] - generation.logprobs).max())


async def underway(engine: TransformersEngine, *, calls: int, tokens: int) -> None:
    """Until so many calls run with so many tokens each. Every look is a round trip to the worker, between tokens."""
    with anyio.fail_after(30):
        while len(progress := await engine.progress()) < calls or min(progress.values()) < tokens:
            await anyio.lowlevel.checkpoint()


async def many(engine: TransformersEngine, prompts: Sequence[TokenIds], **sampling: Any) -> list[Generation]:
    """All at once, each its own session."""
    results: dict[int, Generation] = {}

    async def one(index: int) -> None:
        results[index] = await generate(
            engine, prompts[index], request=f"r{index}", session=f"s{index}", seed=index, **sampling
        )

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return [results[index] for index in range(len(prompts))]


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_recorded_logprobs_are_those_of_a_full_forward_pass_at_the_temperature(
    engine: TransformersEngine, temperature: float
) -> None:
    ids = prompt(50)
    generation = await generate(engine, ids, temperature=temperature, max_tokens=64)
    assert len(generation.output_ids) == 64
    assert await off(engine, ids, generation, temperature) <= EXACT
    assert await off(engine, ids, generation, temperature + 0.3) > 0.01


async def test_score_agrees_with_the_stock_model_outside_the_engine(engine: TransformersEngine, tiny: Path) -> None:
    ids = prompt(600)
    scored = await engine.score(ids)
    model: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    with torch.inference_mode():
        logits = model(torch.tensor([ids.tolist()])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:].tolist())[:, None])[:, 0].numpy()
    assert np.abs(scored - expected).max() <= 1e-5


async def test_scoring_makes_logits_of_a_few_rows_at_a_time_and_keeps_what_the_model_does_to_them() -> None:
    config = GraniteConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, logits_scaling=3.0,
    )  # fmt: skip
    model, ids, rows = random_model(config), prompt(200) % 300, list[int]()
    with torch.inference_mode():
        wanted = torch.log_softmax(model(input_ids=torch.tensor([ids.tolist()])).logits[0].double(), dim=-1)
    async with TransformersEngine(model, threads=1) as engine:
        head: Any = model.get_output_embeddings()
        head.register_forward_hook(lambda _module, _inputs, logits: rows.append(logits.shape[1]))
        scored = await engine.score(ids)
        assert (max(rows), sum(rows)) == (64, 199)
        rows.clear()
        assert len(await engine.score(ids[:1])) == 0
    assert rows == []
    assert np.abs(scored - wanted[range(199), ids[1:].tolist()].numpy()).max() <= 1e-5


async def test_calls_of_different_lengths_in_one_batch_are_each_exact(engine: TransformersEngine) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 2, 31, 32, 33, 64, 150, 400)]
    for ids, generation in zip(prompts, await many(engine, prompts, max_tokens=24), strict=True):
        assert len(generation.output_ids) == 24
        assert await off(engine, ids, generation) <= EXACT


async def test_a_call_gives_the_same_tokens_alone_and_among_others(engine: TransformersEngine) -> None:
    prompts = [prompt(40, seed=seed) for seed in range(12)]
    together = await many(engine, prompts)
    for index, ids in enumerate(prompts):
        alone = await generate(engine, ids, session=f"alone-{index}", seed=index)
        assert alone.output_ids.tolist() == together[index].output_ids.tolist()


async def test_a_conversation_of_many_turns_reuses_its_cache_and_stays_exact(engine: TransformersEngine) -> None:
    ids = prompt(80)
    for turn in range(6):
        sampled = await engine.sample(ids, SamplingParams(max_tokens=12), request_id=f"turn-{turn}", session_id="s")
        assert sampled.cached_tokens == (0 if turn == 0 else len(ids) - 10)
        assert await off(engine, ids, sampled.generation) <= EXACT
        ids = token_ids(np.concatenate([ids, sampled.generation.output_ids, prompt(9, seed=turn)]))


async def test_forks_of_one_prefix_do_not_disturb_each_other(engine: TransformersEngine) -> None:
    trunk = prompt(100)
    branches = [token_ids(np.concatenate([trunk[:cut], prompt(7, seed=cut)])) for cut in (100, 60, 20, 99)]
    await generate(engine, trunk)
    for _ in range(2):
        for ids, generation in zip(branches, await many(engine, branches), strict=True):
            assert await off(engine, ids, generation) <= EXACT
    again = await engine.sample(trunk, SamplingParams(max_tokens=1), request_id="again", session_id="s")
    assert again.cached_tokens == len(trunk) - 1


async def test_equal_prompts_that_arrive_together_are_computed_once(engine: TransformersEngine) -> None:
    ids = prompt(200)
    cached: list[int] = []

    async def one(index: int) -> None:
        sampled = await engine.sample(ids, SamplingParams(max_tokens=8), request_id=f"r{index}", session_id=f"s{index}")
        assert await off(engine, ids, sampled.generation) <= EXACT
        cached.append(sampled.cached_tokens)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(one, index)
    assert sorted(cached) == [0, 199, 199, 199]


async def test_a_cache_without_room_costs_time_and_not_exactness(tiny: Path) -> None:
    async with TransformersEngine(tiny, threads=1, cache_tokens=0) as engine:
        ids = prompt(90)
        first = await generate(engine, ids)
        longer = token_ids(np.concatenate([ids, first.output_ids]))
        sampled = await engine.sample(longer, SamplingParams(max_tokens=4), request_id="r", session_id="s")
        assert sampled.cached_tokens == 0
        assert await off(engine, longer, sampled.generation) <= EXACT


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(num_key_value_heads=4),
        MistralConfig(num_key_value_heads=2, sliding_window=20),
    ],
    ids=["llama", "mistral-sliding-window"],
)
async def test_other_architectures_are_exact_too(config: Any) -> None:
    config.update(
        {
            "vocab_size": 480,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
            "initializer_range": 0.3,
            "max_position_embeddings": 512,
        }
    )
    async with TransformersEngine(random_model(config), threads=1, prefill_chunk=16) as engine:
        await engine.probe()
        ids = prompt(100)
        assert await off(engine, ids, await generate(engine, ids, max_tokens=40)) <= EXACT


def random_model(config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


async def test_a_model_that_it_cannot_run_exactly_is_refused_when_opened() -> None:
    from transformers import MambaConfig

    model = random_model(MambaConfig(vocab_size=480, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(EngineError, match="serve it with SGLang or vLLM"):
        async with TransformersEngine(model):
            pytest.fail("it was opened")


# --- sampling --------------------------------------------------------------------------------------------------------


async def test_a_seed_reproduces_and_another_seed_differs(engine: TransformersEngine) -> None:
    ids = prompt(30)
    first, second, other = [
        await generate(engine, ids, request=f"r{i}", seed=seed, max_tokens=32) for i, seed in enumerate((7, 7, 8))
    ]
    assert first.output_ids.tolist() == second.output_ids.tolist() != other.output_ids.tolist()


async def test_without_a_seed_calls_differ_and_a_run_with_the_same_ids_repeats(tiny: Path) -> None:
    runs: list[list[list[int]]] = []
    for seed in (0, 0, 1):
        async with TransformersEngine(tiny, threads=1, seed=seed) as engine:
            pair = [await generate(engine, prompt(30), request=f"r{i}", max_tokens=32) for i in range(2)]
        runs.append([generation.output_ids.tolist() for generation in pair])
    assert runs[0][0] != runs[0][1]
    assert runs[0] == runs[1] != runs[2]


async def test_temperature_zero_takes_the_likeliest_token_and_records_it_at_temperature_one(
    engine: TransformersEngine, tiny: Path
) -> None:
    ids = prompt(30)
    generation = await generate(engine, ids, temperature=0.0)
    assert await off(engine, ids, generation, temperature=1.0) <= EXACT
    model: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids.tolist(), *generation.output_ids.tolist()]])).logits[0]
    assert generation.output_ids.tolist() == logits[len(ids) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.4}, {"top_k": 5, "top_p": 0.6}])
async def test_truncated_sampling_stays_in_the_head_and_records_the_full_distribution(
    engine: TransformersEngine, tiny: Path, truncation: dict[str, Any]
) -> None:
    ids = prompt(30)
    generation = await generate(engine, ids, max_tokens=64, **truncation)
    assert await off(engine, ids, generation) <= EXACT
    model: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids.tolist(), *generation.output_ids.tolist()]])).logits[0]
    probs, order = logits[len(ids) - 1 : -1].softmax(-1).sort(descending=True)
    rank = (order == torch.tensor(generation.output_ids.tolist())[:, None]).int().argmax(-1)
    above = (probs.cumsum(-1) - probs).gather(1, rank[:, None])[:, 0]
    assert int(rank.max()) < truncation.get("top_k", 480)
    assert float(above.max()) < truncation.get("top_p", 1.0) + 1e-5
    assert int(rank.max()) > 0


async def test_a_stop_id_ends_the_output_and_is_part_of_it(engine: TransformersEngine) -> None:
    ids = prompt(30)
    free = (await generate(engine, ids, seed=1, max_tokens=32)).output_ids.tolist()
    stop = free[9]
    generation = await generate(engine, ids, seed=1, max_tokens=32, stop_ids=[stop])
    assert generation.output_ids.tolist() == free[: free.index(stop) + 1]
    assert (generation.finish_reason, generation.stop) == (FinishReason.STOP, None)


async def test_a_stop_string_over_several_tokens_ends_the_output_and_its_tokens_stay(
    engine: TransformersEngine,
) -> None:
    ids = prompt(30)
    free = await generate(engine, ids, seed=1, max_tokens=64)
    texts = [engine.tokenizer.decode(free.output_ids[: n + 1].tolist()) for n in range(64)]
    start = next(
        n
        for n in range(8, 60)
        if all(t.isascii() and t for t in engine.tokenizer.batch_decode(free.output_ids[n : n + 3].tolist()))
    )
    stop = engine.tokenizer.decode(free.output_ids[start : start + 3].tolist())
    generation = await generate(engine, ids, seed=1, max_tokens=64, stop=("never in it", stop))
    first = next(n for n, text in enumerate(texts) if stop in text)
    assert (generation.finish_reason, generation.stop) == (FinishReason.STOP, stop)
    assert generation.output_ids.tolist() == free.output_ids[: first + 1].tolist()


async def test_the_context_bounds_what_is_sampled(tiny: Path) -> None:
    async with TransformersEngine(tiny, threads=1, context_length=40) as engine:
        generation = await generate(engine, prompt(30), max_tokens=100)
        assert (len(generation.output_ids), generation.finish_reason) == (10, FinishReason.LENGTH)
        with pytest.raises(EngineError, match="leaves no token to sample"):
            await generate(engine, prompt(40))


@pytest.mark.parametrize("bad", [[484], [3, -1, 2], []], ids=["too-high", "negative", "empty"])
async def test_ids_outside_the_vocabulary_are_refused_and_the_engine_lives_on(
    engine: TransformersEngine, bad: list[int]
) -> None:
    with pytest.raises(EngineError, match=r"vocabulary has 484|no token ids"):
        await generate(engine, np.array(bad, np.int32))
    assert len((await generate(engine, prompt(5))).output_ids) == 16


async def test_an_engine_that_is_not_open_says_so(tiny: Path) -> None:
    engine = TransformersEngine(tiny)
    with pytest.raises(EngineError, match="async with"):
        await generate(engine, prompt(5))
    async with engine:
        pass
    with pytest.raises(EngineError, match="async with"):
        await generate(engine, prompt(5))


async def test_a_directory_without_a_model_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot load"):
        async with TransformersEngine(tmp_path / "nothing"):
            pytest.fail("it was opened")


# --- cancelling, pausing, new weights --------------------------------------------------------------------------------


async def test_cancelling_a_call_frees_its_slot_for_the_next(tiny: Path) -> None:
    async with TransformersEngine(tiny, threads=1, max_batch=1) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(generate, engine, prompt(10), max_tokens=30_000))
            await underway(engine, calls=1, tokens=3)
            group.cancel_scope.cancel()
        assert len((await generate(engine, prompt(11))).output_ids) == 16


async def test_closing_the_engine_ends_calls_with_an_error(tiny: Path) -> None:
    outcome: list[BaseException] = []

    async def call(engine: TransformersEngine) -> None:
        try:
            await generate(engine, prompt(10), max_tokens=30_000)
        except EngineError as error:
            outcome.append(error)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group, TransformersEngine(tiny, threads=1) as engine:
            group.start_soon(call, engine)
            await underway(engine, calls=1, tokens=1)
    assert "closed" in str(outcome[0])


def perturbed(tiny: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    generator = torch.Generator().manual_seed(3)
    return {
        name: w + 0.05 * torch.randn(w.shape, generator=generator)
        for name, w in model.state_dict().items()
        if name != "lm_head.weight"
    }


async def test_new_weights_in_mid_generation_are_told_token_by_token_and_each_part_is_exact(
    engine: TransformersEngine, tiny: Path
) -> None:
    ids, state = prompt(60), await anyio.to_thread.run_sync(perturbed, tiny)
    generations: list[Generation] = []

    async def call(seed: int) -> None:
        generations.append(
            await generate(engine, ids, request=f"r{seed}", session=f"s{seed}", seed=seed, max_tokens=300)
        )

    scored: dict[str, Any] = {}
    async with anyio.create_task_group() as group:
        for seed in range(3):
            group.start_soon(call, seed)
        await underway(engine, calls=3, tokens=20)
        await engine.load_weights(state, "1")
    for generation in generations:
        assert [span.version for span in generation.versions] == ["0", "1"]
        full = np.concatenate([ids, generation.output_ids])
        scored[str(id(generation))] = (full, await engine.score(full))
    original: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    await engine.load_weights(original.state_dict(), "2")
    for generation in generations:
        full, new = scored[str(id(generation))]
        old = await engine.score(full)
        switch = generation.versions[0].count
        new, old = new[len(ids) - 1 :], old[len(ids) - 1 :]
        assert np.abs(generation.logprobs[:switch] - old[:switch]).max() <= EXACT
        assert np.abs(generation.logprobs[switch:] - new[switch:]).max() <= EXACT
        assert np.abs(old - new).min() > 0


async def test_weights_that_do_not_fit_are_refused_and_nothing_changes(engine: TransformersEngine, tiny: Path) -> None:
    state = await anyio.to_thread.run_sync(perturbed, tiny)
    before = await engine.score(prompt(20))
    name = "model.layers.0.mlp.up_proj.weight"
    without = {key: value for key, value in state.items() if key != name}
    for bad, words in (
        ({**state, "extra": torch.zeros(1)}, "1 unknown weights, the first 'extra'"),
        (without, f"1 missing weights, the first '{name}'"),
        ({**state, name: torch.zeros(2, 2)}, f"1 wrongly shaped weights, the first '{name}'"),
    ):
        with pytest.raises(EngineError, match=words):
            await engine.load_weights(bad, "1")
    assert (await engine.score(prompt(20))).tolist() == before.tolist()
    assert engine.info.weight_version == "0"


async def test_an_aborted_call_is_carried_on_and_not_shown(engine: TransformersEngine) -> None:
    ids = prompt(20)
    outcome: list[Generation] = []

    async def call() -> None:
        outcome.append(await generate(engine, ids, max_tokens=200))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        with anyio.fail_after(30):
            await underway(engine, calls=1, tokens=5)
            assert await engine.abort("r") == 1
            await engine.set_version("1")
    assert len(outcome[0].output_ids) == 200
    assert sum(span.count for span in outcome[0].versions) == 200
    assert await off(engine, ids, outcome[0]) <= EXACT


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_paused_engine_samples_nothing_and_goes_on_exactly(engine: TransformersEngine, mode: Any) -> None:
    ids = prompt(20)
    outcome: list[Generation] = []

    async def call() -> None:
        outcome.append(await generate(engine, ids, max_tokens=64))

    async with anyio.create_task_group() as group:
        await engine.pause(mode)
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await engine.set_version("1")
        assert not outcome
        await engine.resume()
    assert outcome[0].versions == (VersionSpan("1", 64),)
    assert await off(engine, ids, outcome[0]) <= EXACT


# --- scripts ---------------------------------------------------------------------------------------------------------


async def test_a_scripted_turn_records_the_models_logprobs_of_its_tokens_and_a_stop_id(tiny: Path) -> None:
    seen: list[tuple[str, int, str]] = []

    def script(session_id: str, turn: int, prompt: str) -> str | None:
        seen.append((session_id, turn, prompt))
        return 'ls <tool_call>\n{"name": "bash"}\n</tool_call>' if turn == 0 else None

    async with TransformersEngine(tiny, threads=1, script=script) as engine:
        ids = token_ids(engine.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n"))
        (end,) = engine.eos_ids
        scripted = await generate(engine, ids, max_tokens=200, stop_ids=[end])
        sampled = await generate(engine, ids, max_tokens=20)
        assert engine.tokenizer.decode(scripted.output_ids.tolist()) == script("", 0, "") + "<|im_end|>"
        assert scripted.finish_reason is FinishReason.STOP
        assert await off(engine, ids, scripted) <= EXACT
        assert len(sampled.output_ids) == 20
    assert seen[:2] == [("s", 0, "<|im_start|>user\nhi<|im_end|>\n"), ("s", 1, "<|im_start|>user\nhi<|im_end|>\n")]


async def test_a_scripted_turn_is_cut_by_max_tokens_like_a_sampled_one(tiny: Path) -> None:
    async with TransformersEngine(tiny, threads=1, script=lambda *_: "word " * 50) as engine:
        generation = await generate(engine, prompt(10), max_tokens=7)
        assert (len(generation.output_ids), generation.finish_reason) == (7, FinishReason.LENGTH)


async def test_a_scripted_turn_goes_through_the_model_in_pieces_and_is_exact_up_to_its_stop(tiny: Path) -> None:
    model: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    rows: list[int] = []
    tokenizer, script = AutoTokenizer.from_pretrained(str(tiny)), "one two, " * 30 + "now stop here"
    async with TransformersEngine(model, tokenizer=tokenizer, threads=1, script=lambda *_: script) as engine:
        model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, out: rows.append(out.shape[1]))
        whole = await generate(engine, prompt(40), max_tokens=400)
        assert len(rows) == -(-len(whole.output_ids) // 64)
        assert max(rows) == 64
        stopped = await generate(engine, prompt(40), max_tokens=400, stop=["now st"])
        assert "now st" in tokenizer.decode(stopped.output_ids.tolist())
        assert len(stopped.output_ids) < len(whole.output_ids)
        after = token_ids(np.concatenate([prompt(40), stopped.output_ids, prompt(9, seed=1)]))
        for ids, generation in ((prompt(40), whole), (prompt(40), stopped), (after, await generate(engine, after))):
            assert await off(engine, ids, generation) <= EXACT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_broken_weights_end_calls_with_an_error_and_not_the_engine(
    engine: TransformersEngine, tiny: Path, temperature: float
) -> None:
    model: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    good = model.state_dict()
    await engine.load_weights({name: torch.full_like(w, float("nan")) for name, w in good.items()}, "broken")
    with pytest.raises(EngineError, match="version 'broken' are broken"):
        await generate(engine, prompt(5), temperature=temperature)
    await engine.load_weights(good, "mended")
    assert len((await generate(engine, prompt(5))).output_ids) == 16


async def test_an_engine_can_be_opened_again_and_a_model_is_given_back_as_it_was(tiny: Path) -> None:
    model: Any = await anyio.to_thread.run_sync(AutoModelForCausalLM.from_pretrained, tiny)
    engine = TransformersEngine(model, threads=1)
    outputs: list[list[int]] = []
    for _ in range(2):
        async with engine:
            outputs.append((await generate(engine, prompt(9), seed=1)).output_ids.tolist())
        with torch.inference_mode():
            assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 484)
    assert outputs[0] == outputs[1]
