"""1.0 for an attempt whose agent ended by itself, and well; 0.0 for any other."""

from __future__ import annotations

from ..records import Evaluation, Status
from ..runtimes.base import Runtime
from .base import Finished


class SessionCompleted:
    """Grades without looking at the work: for tasks that only need to be finished."""

    async def extract(self, runtime: Runtime) -> bytes:
        return b""

    async def evaluate(self, finished: Finished) -> Evaluation:
        done = finished.status is Status.COMPLETED
        return Evaluation(float(done), report={"status": finished.status.value})
