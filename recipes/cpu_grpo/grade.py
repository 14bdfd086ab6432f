"""Whether the file `answer` holds the right number: an evaluator of this recipe's own, named in polar.yaml."""

from __future__ import annotations

from polar_plugin.evaluators.base import Finished
from polar_plugin.records import Evaluation
from polar_plugin.runtimes.base import Runtime


class AnswerFile:
    """1.0 or 0.0. One command in the agent's own sandbox: a fresh one would triple what a session costs."""

    def __init__(self, expected: str) -> None:
        self._expected = expected

    async def extract(self, runtime: Runtime) -> bytes:
        return (await runtime.exec(("head", "-c", "64", "answer"), timeout=30)).stdout

    async def evaluate(self, finished: Finished) -> Evaluation:
        written = finished.artifact.decode(errors="replace").strip()
        return Evaluation(float(written == self._expected), report={"written": written})
