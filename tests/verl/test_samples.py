"""Rows that verl's worker and trainer take without a fault, out of trajectories. Needs no verl."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar_plugin.config import load_task
from polar_plugin.errors import MergeError
from polar_plugin.records import Attempt, Role, Status, VersionSpan, log_probs
from polar_plugin.verl_samples import Rows, convert
from tests.slime.sessions import trace, trajectory

ATTEMPT = Attempt(
    "s0", load_task({"task_id": "t", "instruction": "x", "agent": {"harness": "shell", "command": "true"}}), 0, 0
)


def rows(traces: Any = 1, reward: float | None = 1.0, max_tokens: int | None = None, **told: Any) -> Rows:
    return convert(trajectory(ATTEMPT, reward, traces, **told), step=9, max_tokens=max_tokens)


def test_a_row_says_all_that_verl_reads() -> None:
    (row,) = rows([trace(2, prompt=2, context=1, start=5)]).rows
    assert (row["prompt_ids"], row["response_ids"], row["response_mask"]) == ([5, 6], [7, 8, 9], [0, 1, 1])
    assert (row["response_logprobs"], row["reward_score"], row["num_turns"]) == ([0.0, -0.5, -0.5], 1.0, 1)
    assert row["metrics"] == {"generate_sequences": 0.0, "tool_calls": 5.0, "compute_score": 2.0}
    fields = row["extra_fields"]
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (7, 7, 7)
    assert (fields["polar"]["session_id"], fields["polar"]["role"], fields["polar"]["status"]) == (
        "s0", "main", "completed",
    )  # fmt: skip


def test_case_48_every_row_carries_the_whole_reward() -> None:
    """Case 48."""
    assert [row["reward_score"] for row in rows(3, 0.75).rows] == [0.75] * 3


def test_the_main_agents_longest_trace_is_last() -> None:
    """verl takes a session's advantage at the first trained token of its last row: without one it would be 0."""
    traces = [trace(4), trace(6), trace(2), trace(9, role=Role.SUB_AGENT), trace(0, context=3)]
    found = rows(traces)
    assert [sum(row["response_mask"]) for row in found.rows] == [4, 2, 9, 6]
    assert found.dropped == {"untrained_traces": 1}
    assert [row["extra_fields"]["polar"]["trace"] for row in found.rows] == [0, 2, 3, 1]


def test_all_rows_have_the_same_keys_whatever_their_traces_lack() -> None:
    """One row without log-probabilities would take them from the whole batch, without a word."""
    first, second = rows([trace(2, versions=()), trace(3)]).rows
    assert set(first) == set(second)
    assert set(first["extra_fields"]) == set(second["extra_fields"])
    assert [row["extra_fields"]["min_global_steps"] for row in (first, second)] == [9, 7]


def test_a_row_that_spans_a_weight_update_tells_both() -> None:
    (row,) = rows([trace(4, versions=(VersionSpan("7-8", 1), VersionSpan("", 1), VersionSpan("10", 2)))]).rows
    assert [row["extra_fields"][f"{end}_global_steps"] for end in ("min", "max")] == [7, 10]


def test_an_over_long_trace_keeps_its_first_tokens() -> None:
    found = rows([trace(9, prompt=3), trace(2, prompt=8)], max_tokens=8)
    assert [(len(row["prompt_ids"]), len(row["response_ids"])) for row in found.rows] == [(3, 5)]
    assert found.dropped == {"over_long_tokens": 6, "over_long_traces": 1}


@pytest.mark.parametrize("status", [Status.INFRA_ERROR, Status.ABORTED])
def test_an_infrastructure_failure_has_no_row_never_one_of_made_up_tokens(status: Status) -> None:
    """Case 58."""
    found = rows(reward=0.0, status=status)
    assert (found.rows, found.excluded) == ([], status.value)


def test_case_54_a_timeout_trains_or_leaves_the_group_by_choice() -> None:
    """Case 54."""
    late = trajectory(ATTEMPT, 0.0, 1, status=Status.TIMED_OUT)
    assert len(convert(late, step=9, max_tokens=None).rows) == 1
    assert convert(late, step=9, max_tokens=None, on_timeout="exclude").excluded == "timed_out"


def test_a_session_with_nothing_to_train_is_excluded() -> None:
    assert rows([trace(0, context=3)]).excluded == "no_traces"
    assert rows(reward=None).excluded == "ungraded"


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    broken = replace(trace(2), response_logprobs=log_probs([-0.5, float("nan")]))
    with pytest.raises(MergeError, match="session s0: a log-probability is not finite"):
        rows([broken])
