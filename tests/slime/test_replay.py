"""What slime's trainer replays reaches its samples in slime's shapes, or the trace is left out and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polar_plugin.errors import MergeError
from polar_plugin.records import Nucleus, Status, Trace, token_ids
from polar_plugin.slime_samples import Conversion, SessionSamples, convert, validate
from polar_plugin.slime_types import SampleLike
from tests.stages.doubles import attempt

from .sessions import trace, trajectory

LAYERS, CHOSEN = 3, 2
EXPERTS = np.arange(7 * LAYERS * CHOSEN, dtype=np.int16).reshape(7, -1)
CHOICES = Nucleus(token_ids(range(8)), token_ids([0, 0, 2, 4, 6, 8]))
HOW = Conversion(experts=(LAYERS, CHOSEN), top_p=True)


def replayable() -> Trace:
    """3 prompt tokens, 1 of context, 4 trained."""
    plain = trace(4, context=1)
    return replace(plain, routing=EXPERTS, nucleus=CHOICES)


def samples(*traces: Trace, how: Conversion = HOW, status: Status = Status.COMPLETED) -> SessionSamples:
    return convert(trajectory(attempt(), 1.0, traces, status), SampleLike(prompt="p"), 0, how)


def fits(sample: Any) -> bool:
    """What slime asserts of a sample (`slime/ray/rollout.py`, `rollout_data_utils.py`)."""
    experts, offsets = np.asarray(sample.rollout_routed_experts), sample.rollout_top_p_token_offsets
    return (
        experts.shape == (len(sample.tokens) - 1, LAYERS, CHOSEN)
        and bool(experts.any(axis=(0, 2)).all())
        and len(offsets) == sample.response_length + 1
        and offsets[-1] == len(sample.rollout_top_p_token_ids)
    )


def test_a_sample_has_experts_and_choices_in_slimes_shapes() -> None:
    (only,) = samples(replayable()).samples
    assert fits(only)
    assert only.rollout_routed_experts.dtype == np.int32
    assert only.rollout_routed_experts[2].tolist() == [[12, 13], [14, 15], [16, 17]]
    assert only.rollout_top_p_token_ids == list(range(8))


def test_a_trace_that_is_cut_to_the_trainers_length_is_cut_in_all_of_it() -> None:
    (only,) = samples(replayable(), how=replace(HOW, max_tokens=6)).samples
    assert (len(only.tokens), only.rollout_top_p_token_offsets) == (6, [0, 0, 2, 4])
    assert fits(only)


def test_a_placeholder_passes_the_same_checks() -> None:
    (hole,) = samples(status=Status.INFRA_ERROR).samples
    assert (hole.loss_mask, hole.remove_sample) == ([0], True)
    assert fits(hole)


def test_a_trace_without_what_is_replayed_is_left_out_and_counted() -> None:
    told = samples(replace(replayable(), routing=None), replace(replayable(), nucleus=None), replayable())
    assert len(told.samples) == 1
    assert told.dropped == {"unroutable_traces": 1, "choiceless_traces": 1, "unreplayable_tokens": 8}


def test_nothing_is_said_of_it_where_nothing_is_replayed() -> None:
    (only,) = samples(replayable(), how=Conversion()).samples
    assert not hasattr(only, "rollout_routed_experts") or only.rollout_routed_experts is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing": EXPERTS[:-1]}, "trace 0: 6 rows of experts, but 8 tokens need 7"),
        ({"nucleus": CHOICES.first(4)}, "trace 0: the choices are of 4 tokens, but the response has 5"),
    ],
)
def test_replay_data_of_another_length_are_refused_before_they_reach_the_trainer(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(MergeError, match=message):
        validate([[samples(replace(replayable(), **change))]])


def test_experts_of_another_model_are_refused() -> None:
    with pytest.raises(MergeError, match=r"6 experts a token, but --num-layers 3 x --moe-router-topk 4 are 12"):
        samples(replayable(), how=replace(HOW, experts=(3, 4)))
