"""The service behind the hooks: one a process, warm between rollouts, with nothing in flight on return."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from polar_plugin import slime_rollout
from polar_plugin.errors import ConfigError, EngineError
from polar_plugin.records import Attempt, Trajectory
from polar_plugin.slime_args import SlimeArgs
from polar_plugin.slime_types import SampleLike

from .sessions import POLAR, Prompts, ReadyService, trajectory


def rollout(**told: Any) -> Any:
    return slime_rollout.generate(SlimeArgs(**{"polar": POLAR, **told}), 0, Prompts(SampleLike, 1))


def test_the_service_stays_warm_between_rollouts_and_is_closed_once() -> None:
    service = ReadyService(trajectory)
    with slime_rollout.use_service(service):
        rollout()
        rollout()
        assert (service.opened, service.closed) == (1, 0)
        slime_rollout.close()
        slime_rollout.close()
        assert (service.opened, service.closed) == (1, 1)
        rollout()
    assert (service.opened, service.closed) == (2, 2)


def test_no_thread_outlives_the_service() -> None:
    before = threading.active_count()
    with slime_rollout.use_service(ReadyService(trajectory)):
        rollout()
    assert threading.active_count() == before


def test_other_settings_restart_a_service_over_a_served_engine() -> None:
    service = ReadyService(trajectory)
    polar = {"engine": {"kind": "sglang", "url": "http://e:1"}, "task": POLAR["task"]}
    with slime_rollout.use_service(service):
        rollout(polar=polar, rollout_temperature=1.0)
        rollout(polar=polar, rollout_temperature=0.5)
        assert (service.opened, service.closed) == (2, 1)
    assert [config.sampling.temperature for config in service.configs] == [1.0, 0.5]


def test_other_settings_never_restart_an_embedded_engine_since_it_would_lose_its_weights() -> None:
    polar = {"engine": {"kind": "transformers"}, "task": POLAR["task"]}
    with slime_rollout.use_service(ReadyService(trajectory)):
        rollout(polar=polar, rollout_temperature=1.0)
        with pytest.raises(ConfigError, match="the embedded engine 'transformers' runs with other settings"):
            rollout(polar=polar, rollout_temperature=0.5)


@dataclass
class Hanging(ReadyService):
    """Its sessions never end by themselves."""

    begun: Callable[[], object] = lambda: None
    cleaned: list[str] = field(default_factory=list[str])

    async def run(
        self, attempts: Sequence[Attempt], *, on_done: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        self.begun()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                self.cleaned.append("sandbox")
        raise AssertionError("unreachable")


def test_an_interrupt_ends_every_session_before_it_is_passed_on() -> None:
    main = threading.main_thread().ident
    assert main is not None
    service = Hanging(trajectory, begun=lambda: signal.pthread_kill(main, signal.SIGINT))
    with slime_rollout.use_service(service):
        with pytest.raises(KeyboardInterrupt):
            rollout()
        assert service.cleaned == ["sandbox"]


def test_a_service_that_cannot_start_is_an_error_and_leaves_nothing_behind() -> None:
    class Unreachable(ReadyService):
        async def __aenter__(self) -> Any:
            raise EngineError("the engine returns no token ids")

    before = threading.active_count()
    with slime_rollout.use_service(Unreachable(trajectory)), pytest.raises(EngineError, match="no token ids"):
        rollout()
    assert threading.active_count() == before


def test_a_process_that_never_closes_its_service_still_ends() -> None:
    code = (
        "from tests.slime.sessions import *; from polar_plugin import slime_service\n"
        "from polar_plugin.config import load_config\n"
        "class Told(ReadyService):\n"
        "    async def __aexit__(self, *exc): print('closed', flush=True)\n"
        "kept = slime_service.use_service(Told(trajectory)); kept.__enter__()\n"
        "slime_service.run(load_config(POLAR), [], print)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "closed\n"
