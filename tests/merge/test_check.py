"""`check` finds what must never reach a trainer, and says where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from polar_plugin.errors import MergeError
from polar_plugin.merge.builders import PrefixMerging
from polar_plugin.merge.check import check
from polar_plugin.merge.untrained import Policy
from polar_plugin.records import (
    CompletionSession,
    FinishReason,
    Role,
    Trace,
    VersionSpan,
    log_probs,
    mask,
    token_ids,
)

from .build import Ledger


def flip_mask(trace: Trace, at: int) -> Trace:
    changed = trace.loss_mask.copy()
    changed[at] = not changed[at]
    return replace(trace, loss_mask=mask(changed))


def change_token(trace: Trace, at: int) -> Trace:
    changed = trace.response_ids.copy()
    changed[at] += 1
    return replace(trace, response_ids=token_ids(changed))


def change_prompt(trace: Trace, at: int) -> Trace:
    changed = trace.prompt_ids.copy()
    changed[at % len(changed)] += 1
    return replace(trace, prompt_ids=token_ids(changed))


def shift_logprobs(trace: Trace, at: int) -> Trace | None:
    changed = np.roll(trace.response_logprobs, 1 + at % len(trace.response_ids))
    return (
        None
        if np.array_equal(changed, trace.response_logprobs)
        else replace(trace, response_logprobs=log_probs(changed))
    )


def change_logprob(trace: Trace, at: int) -> Trace:
    changed = trace.response_logprobs.copy()
    changed[at] -= 1e-5
    return replace(trace, response_logprobs=log_probs(changed))


def drop_token(trace: Trace, at: int) -> Trace:
    return replace(
        trace,
        response_ids=token_ids(np.delete(trace.response_ids, at)),
        loss_mask=mask(np.delete(trace.loss_mask, at)),
        response_logprobs=log_probs(np.delete(trace.response_logprobs, at)),
    )


def forget_a_completion(trace: Trace, at: int) -> Trace:
    names = list(trace.completion_ids)
    del names[at % len(names)]
    return replace(trace, completion_ids=tuple(names))


def change_versions(trace: Trace, at: int) -> Trace:
    length = len(trace.response_ids)
    return replace(trace, versions=tuple(v for v in (VersionSpan("x", at), VersionSpan("y", length - at)) if v.count))


def change_finish(trace: Trace, at: int) -> Trace:
    return replace(trace, finish_reason=FinishReason.LENGTH)


CORRUPTIONS: Mapping[str, Callable[[Trace, int], Trace | None]] = {
    one.__name__: one
    for one in (
        flip_mask, change_token, change_prompt, shift_logprobs, change_logprob, drop_token, forget_a_completion,
        change_versions, change_finish,
    )
}  # fmt: skip


def two_turns() -> CompletionSession:
    ledger = Ledger()
    a = ledger.say([1], [2, 3], version="7")
    ledger.say([1, 2, 3, 4], [5, 6], after=a, version="8")
    return ledger.sealed()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: replace(t, loss_mask=mask([1, 1, 1, 1, 1])), "loss mask at response token 2 is True, but False"),
        (lambda t: replace(t, loss_mask=mask([1, 1, 0, 1, 0])), "loss mask at response token 4 is False, but True"),
        (lambda t: replace(t, response_logprobs=log_probs(np.roll(t.response_logprobs, 1))), "log-probability at"),
        (lambda t: replace(t, response_ids=token_ids([2, 3, 4, 5, 9])), r"position 5 \(id 9 in the trace, id 6 rec"),
        (lambda t: replace(t, prompt_ids=token_ids([9])), r"position 0 \(id 9 in the trace, id 1 recorded\)"),
        (lambda t: replace(t, prompt_ids=token_ids([1, 2])), "tokens differ at position 2"),
        (lambda t: replace(t, completion_ids=("c1",)), "loss mask"),
        (lambda t: replace(t, completion_ids=("c1", "c0")), "tokens differ at position 3"),
        (lambda t: replace(t, completion_ids=("c0", "c0", "c1")), "c0 after c0"),
        (lambda t: replace(t, completion_ids=("c0", "c9")), "c9, which the session does not have"),
        (lambda t: replace(t, completion_ids=()), "trains nothing"),
        (lambda t: replace(t, versions=(VersionSpan("8", 5),)), "weight versions"),
        (lambda t: replace(t, versions=(VersionSpan("7", 2),)), "are '7'x2, but '7'x2 ''x1 '8'x2 is right"),
        (lambda t: replace(t, versions=()), "are none, but"),
        (lambda t: replace(t, finish_reason=FinishReason.LENGTH), "finish reason is length, but stop is right"),
        (lambda t: replace(t, role=Role.SIDE), "role is side, but main is right"),
        (lambda t: replace(t, loss_mask=2 * t.loss_mask.astype(np.int8)), "loss_mask is int8, but must be bool"),
        (lambda t: replace(t, response_ids=t.response_ids.astype(np.int64)), "response_ids is int64, but must be"),
        (lambda t: replace(t, response_logprobs=t.response_logprobs.astype(np.float64)), "response_logprobs is float"),
    ],
)  # fmt: skip
def test_every_corruption_is_found_with_its_place(change: Callable[[Trace], Trace], message: str) -> None:
    session = two_turns()
    (only,) = PrefixMerging().build(session)
    check((only,), session)
    with pytest.raises(MergeError, match=message):
        check((change(only),), session)


def test_a_prompt_that_swallows_a_trained_output_is_found() -> None:
    session = two_turns()
    (only,) = PrefixMerging().build(session)
    swallowed = replace(
        only, prompt_ids=token_ids([1, 2, 3, 4]), response_ids=only.response_ids[3:], loss_mask=only.loss_mask[3:],
        response_logprobs=only.response_logprobs[3:], versions=(VersionSpan("8", 2),),
    )  # fmt: skip
    with pytest.raises(MergeError, match="completion c0: its output does not lie within the response"):
        check((swallowed,), session)


def test_a_span_trained_twice_and_a_trace_that_is_missing_are_found() -> None:
    session = two_turns()
    (only,) = PrefixMerging().build(session)
    with pytest.raises(MergeError, match=r"completion c0 \(2 tokens\) is trained in 2 traces"):
        check((only, only), session)
    with pytest.raises(MergeError, match=r"completion c0 \(2 tokens\) is in no trace, and nothing says why"):
        check((), session)


def test_what_must_not_be_trained_and_is_is_found() -> None:
    ledger = Ledger()
    ledger.say([1], [2], role=Role.SIDE)
    session = ledger.sealed()
    traces = PrefixMerging(roles={"side": "train"}).build(session)
    check(traces, session, Policy.of(roles={"side": "train"}))
    with pytest.raises(MergeError, match="is trained although it is side"):
        check(traces, session)


def test_a_log_probability_that_is_no_number_is_found_also_where_it_was_recorded() -> None:
    session = two_turns()
    first, second = session.completions
    generation = replace(first.generation, logprobs=log_probs([-1, np.nan]))
    session = replace(session, completions=(replace(first, generation=generation), second))
    with pytest.raises(MergeError, match="log-probability at response token 1 is nan"):
        check(PrefixMerging().build(session), session)


def test_the_message_shows_the_text_on_both_sides() -> None:
    session = two_turns()
    (only,) = PrefixMerging().build(session)
    wrong = replace(only, response_ids=token_ids([2, 3, 9, 5, 6]))
    with pytest.raises(MergeError, match="'b-c-d-j-f-g' is not 'b-c-d-e-f-g'"):
        check((wrong,), session, decode=lambda ids: "-".join(chr(97 + one) for one in ids))
