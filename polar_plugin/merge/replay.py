"""What the engine did besides sampling, along a trace: experts and the choices that top-p left. Pure, linear."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..records import Completion, Experts, Nucleus
from .parents import Parents


def routing_pieces(last: Completion, parents: Parents, rows: int) -> list[Experts] | None:
    """The experts of the first `rows` tokens of the last completion's prompt ‖ output, as views of what was recorded.

    Each completion has the rows of what was new to it, and the rest is its parent's. None where a row is unknown.
    """
    pieces: list[Experts] = []
    completion: Completion | None = last
    while rows > 0:
        if completion is None or completion.generation.routing is None or completion.generation.routing.end < rows:
            return None
        routing = completion.generation.routing
        if routing.start < rows:
            pieces.append(routing.experts[: rows - routing.start])
            rows = routing.start
        completion = parents[completion.id]
    return pieces[::-1]


def routing(last: Completion, parents: Parents, rows: int) -> Experts | None:
    """The same as one array, read-only."""
    pieces = routing_pieces(last, parents, rows)
    if not pieces:
        return None
    joined = np.concatenate(pieces)
    joined.flags.writeable = False
    return joined


def nucleus(trained: Sequence[Completion], start: int, length: int) -> Nucleus | None:
    """The choices over the `length` response tokens from token `start` of the trace on; none outside the trained.

    None where one of the trained has none.
    """
    known = [completion.generation.nucleus for completion in trained]
    chosen = [one for one in known if one is not None]
    if len(chosen) < len(trained):
        return None
    counts = np.zeros(length + 1, np.int32)
    ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for completion, one in zip(trained, chosen, strict=True):
        begin = len(completion.prompt_ids) - start
        tokens = min(len(completion.generation.output_ids), length - begin)
        counts[begin + 1 : begin + tokens + 1] = np.diff(one.offsets[: tokens + 1])
        ids.append(one.ids[: one.offsets[tokens]])
    joined, offsets = np.concatenate(ids), counts.cumsum(dtype=np.int32)
    joined.flags.writeable = offsets.flags.writeable = False
    return Nucleus(joined, offsets)
