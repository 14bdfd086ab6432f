"""One generation out of several upstream calls: what an engine aborted is asked for again from where it stopped."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio
import numpy as np

from ..errors import EngineBusy, EngineError
from ..records import FinishReason, Generation, LogProbs, Nucleus, TokenIds, VersionSpan, log_probs, token_ids
from .replay import joined_nucleus

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What one upstream call sampled."""

    output_ids: TokenIds
    logprobs: LogProbs
    versions: tuple[VersionSpan, ...]
    finish: FinishReason | None
    """None: the engine aborted the call, and the rest is still to be sampled."""
    stop: str | None = None
    nucleus: Nucleus | None = None


Call = Callable[[TokenIds, int, int], Awaitable[Segment]]
"""(prompt so far, tokens left, number of the call from 0) -> what it sampled."""


def segment(
    output_ids: Sequence[int],
    scored: Sequence[tuple[float, int]],
    versions: tuple[VersionSpan, ...],
    finish: FinishReason | None,
    stop: str | None = None,
) -> Segment:
    """A checked Segment out of the engine's two lists: the ids it sampled, and (log-probability, id) of each.

    Raises EngineError where they do not belong together: a trace built from lists that are off by one trains every
    token on its neighbour's probability, and nothing shows.
    """
    if len(output_ids) != len(scored):
        raise EngineError(
            f"the engine returned {len(output_ids)} output ids but {len(scored)} log-probabilities:"
            " one side lost or trimmed a token, so neither can be trusted"
        )
    for position, (sampled, (_, own)) in enumerate(zip(output_ids, scored, strict=True)):
        if sampled != own:
            raise EngineError(f"the engine's ids and log-probabilities disagree at {position}: {sampled} against {own}")
    ids, probabilities = _arrays(output_ids, [logprob for logprob, _ in scored])
    told = sum(span.count for span in versions)
    if versions and told != len(ids):
        raise EngineError(f"the engine's weight-version spans cover {told} tokens of {len(ids)}")
    return Segment(ids, probabilities, versions, finish, stop)


def _arrays(output_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenIds, LogProbs]:
    try:
        ids, probabilities = token_ids(np.array(output_ids or (), np.int64)), log_probs(logprobs)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the engine returned ids or log-probabilities that are no numbers: {error}") from error
    if not np.isfinite(probabilities).all():
        position = int(np.flatnonzero(~np.isfinite(probabilities))[0])
        raise EngineError(f"the engine returned no finite log-probability for output token {position}")
    return ids, probabilities


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one generation is pursued; beyond it, EngineBusy."""

    seconds: float
    """Of all its calls and pauses together."""
    reissues: int
    """Calls in a row that were aborted before they sampled anything; progress resets the count."""


async def sample_to_end(
    call: Call, prompt_ids: TokenIds, max_tokens: int, stop_ids: Sequence[int], patience: Patience
) -> Generation:
    """Call until the engine finishes of itself, and join what it sampled into one Generation.

    Raises EngineBusy where patience ends, and whatever `call` raises.

    An engine looks for stop strings in one call's output, so one that begins before an abort and ends after it does not
    stop the sampling. The ids and log-probabilities are exact all the same.
    """
    try:
        with anyio.fail_after(patience.seconds):
            return await _sample(call, prompt_ids, max_tokens, stop_ids, patience.reissues)
    except TimeoutError as error:
        raise EngineBusy(f"the engine gave no whole answer in {patience.seconds:g} s") from error


async def _sample(
    call: Call, prompt_ids: TokenIds, max_tokens: int, stop_ids: Sequence[int], reissues: int
) -> Generation:
    done: list[Segment] = []
    sampled, fruitless, pauses = 0, 0, _pauses()
    while True:
        done.append(await call(prompt_ids, max_tokens - sampled, len(done)))
        fresh = done[-1].output_ids
        sampled += len(fresh)
        finish = done[-1].finish or _end_of_aborted(fresh, max_tokens - sampled, stop_ids)
        if finish is not None:
            return _joined(done, finish)
        if len(fresh):
            fruitless, pauses = 0, _pauses()
            prompt_ids = np.concatenate((prompt_ids, fresh))
        fruitless += 1
        if fruitless > reissues:
            raise EngineBusy(f"the engine aborted this call {fruitless} times in a row without sampling a token")
        await anyio.sleep(next(pauses))


def _end_of_aborted(fresh: TokenIds, left: int, stop_ids: Sequence[int]) -> FinishReason | None:
    """An abort may land just after the last token: nothing is sampled beyond an end that was reached."""
    if len(fresh) and int(fresh[-1]) in stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if left <= 0 else None


def _pauses() -> Iterator[float]:
    """Short at first (most aborts make room for a weight update of moments), then patient."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


def _joined(done: Sequence[Segment], finish: FinishReason) -> Generation:
    choices = [part.nucleus for part in done if part.nucleus is not None]
    return Generation(
        output_ids=token_ids(np.concatenate([part.output_ids for part in done])),
        logprobs=log_probs(np.concatenate([part.logprobs for part in done])),
        finish_reason=finish,
        versions=_runs(done),
        stop=done[-1].stop,
        nucleus=joined_nucleus(choices) if choices else None,
    )


def _runs(done: Sequence[Segment]) -> tuple[VersionSpan, ...]:
    """Neighbouring spans of one version become one; empty where any part has no versions."""
    if any(len(part.output_ids) and not part.versions for part in done):
        return ()
    spans = [span for part in done for span in part.versions if span.count]
    runs = itertools.groupby(spans, key=lambda span: span.version)
    return tuple(VersionSpan(version, sum(span.count for span in group)) for version, group in runs)
