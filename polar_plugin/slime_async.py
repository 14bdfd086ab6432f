"""Rollouts for a trainer that does not wait: groups stay under way from one call to the next.

At each call the worker draws as many prompts ahead as bounded staleness lets be useful, so that agents run on while
weights are updated. Whatever interrupts a model call in between, the engine's client sends it again with the tokens so
far (`engine.segments`); the harness sees one answer, the trace more than one version.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import slime_service
from .records import Failure, Status, Trace, Trajectory, log_probs, mask
from .slime_collect import Collected, Group, check_hopeful, convert_group, give_back, returned
from .slime_service import Flights
from .slime_sessions import Call, slots_of
from .slime_stored import Store

REQUEUES = 3
"""How often a prompt is run again because it got too old; a session that always does then leaves its group."""
STALE = Failure("rollout", "stale", "its tokens are older than asynchronous.max_staleness, after every requeue")


@dataclass(eq=False)
class Worker:
    """What is under way or has ended unused, between calls. Used by the trainer's thread."""

    flights: Flights[Group]
    source: Any
    waiting: list[tuple[Group, Sequence[Trajectory]]] = field(default_factory=list[tuple[Group, Sequence[Trajectory]]])
    requeues: Counter[int] = field(default_factory=Counter[int])
    drawn: int = 0
    """Samples, for those that have no index."""
    groups: int = 0
    rollout_id: int = 0
    restored: set[str] = field(default_factory=set[str])
    """Sessions of a process before this one."""
    newest: int | None = None
    """The newest weight version told so far."""

    @property
    def ahead(self) -> int:
        """Groups under way or unused."""
        return len(self.flights.keys) + len(self.waiting)

    def collect(self, call: Call) -> Collected:
        """Groups for one rollout, the oldest first; leaves those under way that the next ones can use."""
        told = Collected(call)
        self.rollout_id = call.rollout_id
        self._learn(call)
        useful = told.wanted * (1 + call.config.asynchronous.max_staleness)
        while len(told.kept) < told.wanted:
            self._draw(told, useful - len(told.kept) - self.ahead)
            remaining = len(told.kept) + self.ahead
            group, trajectories = self.waiting.pop(0) if self.waiting else self.flights.next()
            if fresh := self._fresh(told, group, trajectories):
                told.judge(convert_group(call, group, fresh), remaining)
                check_hopeful(told)
        self._draw(told, useful - told.wanted - self.ahead)
        self._forget(told)
        for groups in (told.kept, told.ended):
            groups.sort(key=lambda group: group.order)
        return told

    def ended(self) -> None:
        """End all that is under way; its prompts, and those of what was not used, go back to the source."""
        groups = [*self.flights.keys, *(group for group, _ in self.waiting)]
        self.flights.end()
        give_back(groups, self.source)

    def _learn(self, call: Call) -> None:
        told = slime_service.call(call.config, _weight_version)
        if told.isdigit():
            self.newest = max(int(told), self.newest or 0)

    def _draw(self, told: Collected, wanted: int) -> None:
        """Draw `wanted` prompts; those whose groups a store has are not run again."""
        if wanted < 1:
            return
        size = told.call.told.n_samples_per_prompt
        for slots in slots_of(self.source.get_samples(wanted), size, wanted):
            group = Group(slots, told.call.attempts(slots, self.groups, self.drawn), told.call.rollout_id)
            self.groups, self.drawn = self.groups + 1, self.drawn + len(slots)
            told.counts["drawn"] += 1
            store = _store(told.call)
            stored = store.take(_number(group), size, told.call.rollout_id) if store else None
            if stored is None:
                self.flights.submit(group, group.attempts, _Ending(self, store, group))
                continue
            group.attempts = [trajectory.attempt for trajectory in stored]
            self.restored.update(attempt.session_id for attempt in group.attempts)
            self.waiting.append((group, stored))
            told.counts["restored"] += 1

    def _fresh(self, told: Collected, group: Group, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory] | None:
        """What of a group may be trained, by the config's policy; None: its prompt was requeued."""
        how = told.call.config.asynchronous
        old = [stale_tokens(trajectory, self._ages(trajectory), how.max_staleness) for trajectory in trajectories]
        if not any(old) or how.policy == "keep":
            told.counts["stale_tokens"] += sum(old)
            return trajectories
        if how.policy == "mask":
            told.counts["masked_tokens"] += sum(old)
            return [_masked(each, self._ages(each), how.max_staleness) for each in trajectories]
        if self.requeues[_number(group)] < REQUEUES:
            self.requeues[_number(group)] += 1
            told.counts["stale"] += 1
            if store := _store(told.call):
                store.forget(_number(group))
            returned(told, [group], self.source)
            return None
        told.counts["stale_sessions"] += sum(map(bool, old))
        return [
            replace(each, status=Status.ABORTED, traces=(), evaluation=None, failure=STALE) if stale else each
            for each, stale in zip(trajectories, old, strict=True)
        ]

    def _ages(self, trajectory: Trajectory) -> list[NDArray[np.int64]]:
        """By trace, int64 [response]: how many weight updates old each token is.

        By rollouts where versions are none, or of a process before this one, whose versions were counted otherwise.
        """
        by_rollout = self.rollout_id - trajectory.attempt.rollout_id
        if trajectory.attempt.session_id in self.restored:
            return [_trace_ages(trace, None, by_rollout) for trace in trajectory.traces]
        for version in (span.version for trace in trajectory.traces for span in trace.versions):
            if version.isdigit():
                self.newest = max(int(version), self.newest or 0)
        return [_trace_ages(trace, self.newest, by_rollout) for trace in trajectory.traces]

    def _forget(self, told: Collected) -> None:
        for group in told.ended:
            self.requeues.pop(_number(group), None)
            if store := _store(told.call):
                store.forget(_number(group))


class _Ending:
    """Stores a group when the last of its sessions has ended, in the service's thread."""

    def __init__(self, worker: Worker, store: Store | None, group: Group) -> None:
        self._worker, self._store, self._group = worker, store, group
        self._ended: dict[str, Trajectory] = {}

    def __call__(self, trajectory: Trajectory) -> None:
        self._ended[trajectory.attempt.session_id] = trajectory
        if self._store and len(self._ended) == len(self._group.attempts):
            ordered = [self._ended[attempt.session_id] for attempt in self._group.attempts]
            self._store.put(_number(self._group), self._worker.rollout_id, ordered)


_lock = threading.Lock()
_worker: Worker | None = None


def collect_ahead(call: Call, source: Any) -> Collected:
    """One rollout of the process's worker."""
    global _worker
    with _lock:
        if _worker and (_worker.source is not source or _worker.flights.stopped(call.config)):
            _worker.ended()
            _worker = None
        _worker = _worker or Worker(Flights(call.config), source)
        return _worker.collect(call)


def stale_tokens(trajectory: Trajectory, ages: Sequence[NDArray[np.int64]], limit: int) -> int:
    """How many trained tokens are more than `limit` updates old."""
    return sum(int((trace.loss_mask & (age > limit)).sum()) for trace, age in zip(trajectory.traces, ages, strict=True))


def _trace_ages(trace: Trace, newest: int | None, by_rollout: int) -> NDArray[np.int64]:
    ages = np.zeros(len(trace.response_ids), np.int64)
    told = [
        newest - int(span.version) if newest is not None and span.version.isdigit() else by_rollout
        for span in trace.versions
    ]
    spans = np.repeat(told, [span.count for span in trace.versions]) if told else np.full(len(ages), by_rollout)
    ages[: len(spans)] = spans
    return ages


def _masked(trajectory: Trajectory, ages: Sequence[NDArray[np.int64]], limit: int) -> Trajectory:
    traces = [
        replace(
            trace,
            loss_mask=mask(trace.loss_mask & (age <= limit)),
            response_logprobs=log_probs(np.where(age <= limit, trace.response_logprobs, 0.0)),
        )
        for trace, age in zip(trajectory.traces, ages, strict=True)
    ]
    return replace(trajectory, traces=tuple(traces))


async def _weight_version(service: Any) -> str:
    from .service import RolloutService  # heavy, and loaded by now

    if not isinstance(service, RolloutService):
        return str(getattr(service, "weight_version", ""))
    return (await service.engine.probe()).weight_version


def _number(group: Group) -> int:
    return group.attempts[0].group_index


def _store(call: Call) -> Store | None:
    directory = call.config.asynchronous.store
    return None if directory is None else Store(directory)
