"""A training rollout: draw prompts, run their groups, filter, draw more in the place of what is dropped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tqdm import tqdm

from . import slime_service
from .records import Attempt, Trajectory
from .slime_hooks import dynamic_filter, hook
from .slime_metrics import session_metrics
from .slime_samples import SessionSamples, validate
from .slime_service import Flights
from .slime_sessions import Call, check_complete, nothing_to_train, numbered, slots_of, trains
from .slime_types import output_class

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Group:
    """A prompt's samples, and the attempts at them."""

    slots: list[Any]
    attempts: list[Attempt]
    rollout_id: int
    """The rollout in which it was drawn."""
    sessions: list[SessionSamples] = field(default_factory=list[SessionSamples])
    """When all have ended."""

    @property
    def order(self) -> int:
        return self.attempts[0].index if self.slots[0].index is None else self.slots[0].index

    @property
    def samples(self) -> list[list[Any]]:
        """Session x trace."""
        return [session.samples for session in self.sessions]


@dataclass
class Collected:
    """What a rollout came to. Groups are in the order in which their prompts were drawn."""

    call: Call
    kept: list[Group] = field(default_factory=list[Group])
    ended: list[Group] = field(default_factory=list[Group])
    """Those that were kept, and those that were dropped."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Groups, by the filter's reason."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Groups: `drawn`, `returned` to the data source."""
    drawn: int = 0
    """Samples drawn so far, for those that have no index."""

    @property
    def wanted(self) -> int:
        return self.call.told.rollout_batch_size

    def judge(self, group: Group, remaining: int) -> None:
        """Keep an ended group or drop it; `remaining` groups are kept, under way, or this one."""
        from .wiring import group_policy  # heavy, and loaded by now

        self.ended.append(group)
        if not group_policy(self.call.config).trains([session.trajectory for session in group.sessions]):
            self.dropped["incomplete_group"] += 1
            return
        told = dynamic_filter(self.call.told, self.call.args, group.samples)
        if told.keep or (told.keep_when_insufficient and remaining <= self.wanted):
            self.kept.append(group)
        else:
            self.dropped[told.reason or "unnamed"] += 1


def collect(call: Call, flights: Flights[Group], source: Any) -> Collected:
    """Run groups until `rollout_batch_size` of them are kept; what is still under way then goes back to `source`.

    Raises ConfigError where the source gives other than was asked for, PolarError where nothing can be trained.
    """
    told = Collected(call)
    size = call.told.n_samples_per_prompt
    with tqdm(total=told.wanted * size, desc=f"rollout {call.rollout_id}", unit="session", disable=None) as bar:
        while len(told.kept) < told.wanted:
            while len(told.kept) + len(flights.keys) < told.wanted:
                submit(told, flights, draw(told, source), bar)
            remaining = len(told.kept) + len(flights.keys)
            told.judge(landed(call, flights), remaining)
            check_hopeful(told)
    returned(told, flights.keys, source)
    flights.end()
    told.kept.sort(key=lambda group: group.order)
    told.ended.sort(key=lambda group: group.order)
    return told


def draw(told: Collected, source: Any) -> list[list[Any]]:
    args = told.call.told
    wanted = args.over_sampling_batch_size or args.rollout_batch_size
    return slots_of(source.get_samples(wanted), args.n_samples_per_prompt, wanted)


def submit(told: Collected, flights: Flights[Group], drawn: Sequence[list[Any]], bar: Any) -> None:
    for slots in drawn:
        attempts = told.call.attempts(slots, told.counts["drawn"], told.drawn)
        flights.submit(Group(slots, attempts, told.call.rollout_id), attempts, lambda _: cast("None", bar.update()))
        told.counts["drawn"] += 1
        told.drawn += len(slots)


def landed(call: Call, flights: Flights[Group]) -> Group:
    """The next group that ends, converted."""
    group, trajectories = flights.next()
    return convert_group(call, group, trajectories)


def convert_group(call: Call, group: Group, trajectories: Sequence[Trajectory]) -> Group:
    check_complete(group.attempts, trajectories)
    group.sessions = call.converted(group.slots, trajectories)
    return group


def check_hopeful(told: Collected) -> None:
    """A step without one trained token would pass for training, and drawing on would never end."""
    last = told.ended[-told.wanted :]
    if len(last) == told.wanted and not any(trains(group.sessions) for group in last):
        raise nothing_to_train([group.sessions for group in last], told.call.rollout_id)


def returned(told: Collected, groups: Sequence[Group], source: Any) -> None:
    """Give prompts back whose groups will not be used."""
    if groups:
        told.counts["returned" if give_back(groups, source) else "lost"] += len(groups)


def give_back(groups: Sequence[Group], source: Any) -> bool:
    """Samples as they were drawn, so that the source's buffer takes them; False: it takes none."""
    slots = [group.slots for group in sorted(groups, key=lambda group: group.order)]
    try:
        source.add_samples(slots)
    except (AttributeError, RuntimeError) as error:  # slime's source without a buffer raises the latter
        logger.warning("%d prompts are lost: the data source takes none back (%s)", len(groups), error)
        return False
    return True


def tell_trained(source: Any, told: Collected) -> None:
    """To a data source that keeps account of it (`PolarDataSource`)."""
    if tell := getattr(source, "trained", None):
        tell(told.call.rollout_id, [group.attempts[0].group_index for group in told.ended])


def trained(told: Collected, source: Any) -> Any:
    """slime's RolloutFnTrainOutput, after slime's last hooks have seen the samples."""
    args, groups = told.call.told, [group.sessions for group in told.kept]
    numbered(groups)
    validate(groups)
    if args.rollout_sample_filter_path:
        hook(args.rollout_sample_filter_path)(told.call.args, [group.samples for group in told.kept])
    if args.rollout_all_samples_process_path:
        every = [group.samples for group in told.ended]
        hook(args.rollout_all_samples_process_path)(told.call.args, every, source.get_samples)
    tell_trained(source, told)
    totals = {f"rollout/service/{name}": float(count) for name, count in slime_service.totals().items()}
    return output_class("RolloutFnTrainOutput", told.kept[0].slots[0])(
        samples=[group.samples for group in told.kept],
        metrics={
            **session_metrics(groups, "rollout/session/"),
            **{f"rollout/dynamic_filter/drop_{why}": float(count) for why, count in told.dropped.items()},
            **{f"rollout/groups/{name}": float(count) for name, count in told.counts.items()},
            **totals,
        },
    )
