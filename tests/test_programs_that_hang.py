"""Agent programs that do not start, or do not end, in real sandboxes: what becomes of their attempts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_plugin.engine.models import resolve_model
from polar_plugin.engine.scripted import Reply
from polar_plugin.harnesses.base import Launch, LaunchContext
from polar_plugin.harnesses.shell import environment
from polar_plugin.records import Status

from .test_service import attempt, service_over

pytestmark = pytest.mark.anyio

_ASK = """\
ask() {
  local host=${1#http://} body='{"model":"m","max_tokens":50,"messages":[{"role":"user","content":"'"$3"'"}]}'
  exec 3<>"/dev/tcp/${host%%:*}/${host##*:}"
  printf 'POST %s HTTP/1.0\\r\\nx-api-key: %s\\r\\nContent-Length: %d\\r\\n\\r\\n%s' "$2" "$KEY" ${#body} "$body" >&3
  cat <&3 >&2
  exec 3>&-
}
"""
GRADED: dict[str, Any] = {
    "evaluator": {"strategy": "test_on_output", "config": {"test_command": "grep -q mended result"}}
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


def program(directory: Path, name: str, script: str) -> dict[str, Any]:
    """A preset's agent and its sandbox, in which `name` is this bash script."""
    path = directory / "bin" / name
    path.parent.mkdir()
    version = """if [ "$1" = --version ]; then echo 1.0.0; exit; fi"""
    path.write_text(f"#!/bin/bash\n{version}\n{_ASK}{script}")
    path.chmod(0o755)
    return {"runtime": {"kwargs": {"ro_binds": [str(directory)]}}, **GRADED}


async def test_case_85_claude_code_that_printed_its_result_and_does_not_exit_has_completed(
    tiny: Path, tmp_path: Path
) -> None:
    script = """\
KEY=$ANTHROPIC_API_KEY
ask "$ANTHROPIC_BASE_URL" /v1/messages "fix it"
echo mended > result
printf '{"duration_api_ms":9,"total_cost_usd":0.1,"result":"Done.","type":"result","is_error":false}\\n'
sleep 5000 &
wait
"""
    task = program(tmp_path, "claude", script)
    agent = {"harness": "claude_code", "model_name": "m", "settings": {"root": str(tmp_path)}}
    async with service_over(tiny, ["Done."], {"budgets": {"linger": 0.5}}) as (service, _):
        (trajectory,) = await service.run([attempt(agent, **task)])
    assert (trajectory.status, trajectory.reward, trajectory.exit_code) == (Status.COMPLETED, 1.0, None)
    assert trajectory.counts["ended_lingered"] == 1
    assert len(trajectory.traces) == 1
    assert trajectory.timings["agent"] < 60


async def test_case_111_opencode_that_does_not_exit_after_a_fatal_error_is_ended_and_graded(
    tiny: Path, tmp_path: Path
) -> None:
    script = """\
KEY=$POLAR_SESSION_KEY
url=$(sed -n 's/.*"baseURL": *"\\([^"]*\\)\\/v1".*/\\1/p' "$XDG_CONFIG_HOME/opencode/opencode.json")
echo mended > result
ask "$url" /v1/chat/completions hi
ask "$url" /v1/chat/completions "$(head -c 20000 /dev/zero | tr '\\0' x)"
echo "Error: maximum context length" >&2
sleep 5000
"""
    task = program(tmp_path, "opencode", script)
    agent = {"harness": "opencode", "model_name": "m", "settings": {"root": str(tmp_path)}}
    async with service_over(tiny, ["Hello."], {"budgets": {"idle": 0.5, "linger": 0.5}}) as (service, engine):
        (trajectory,) = await service.run([attempt(agent, **task)])
    assert trajectory.failure is not None
    assert (trajectory.status, trajectory.failure.kind) == (Status.FAILED, "hung"), trajectory.failure
    assert "prompt is too long" in trajectory.failure.message
    assert (trajectory.reward, len(engine.calls)) == (1.0, 1)
    assert trajectory.counts["ended_hung"] == 1
    assert "retries" not in trajectory.counts


class LateStarter:
    """A harness whose program hangs before its first call, as often as `hangs` says; then it works."""

    name = "late_starter"
    hangs: Iterator[bool] = iter(())

    def launch(self, context: LaunchContext) -> Launch:
        work = f"{_ASK}KEY={context.session_key}\nask {context.base_url} /v1/messages hi\necho mended > result\n"
        hangs = "echo starting; sleep 5000\n" if next(LateStarter.hangs) else ""
        return Launch(("bash", "-c", hangs + work), env=environment(context))


@pytest.mark.parametrize("case", [87, 110])
async def test_cases_87_and_110_a_program_without_a_first_call_is_started_again_elsewhere(
    tiny: Path, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateStarter, "hangs", iter([True, False]))
    agent = {"import_path": f"{__name__}:LateStarter", "model_name": "m"}
    async with service_over(tiny, lambda _: Reply("Done."), {"budgets": {"first_call": 3}}) as (service, engine):
        (trajectory,) = await service.run([attempt(agent, **GRADED)])
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), trajectory.failure
    assert trajectory.counts["retries"] == 1
    assert len(engine.calls) == 1


async def test_a_program_that_never_calls_in_time_is_an_infrastructure_error_and_no_reward_of_0(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateStarter, "hangs", iter([True, True]))
    agent = {"import_path": f"{__name__}:LateStarter", "model_name": "m"}
    told = {"budgets": {"first_call": 0.5}, "groups": {"refills": 0}}
    async with service_over(tiny, [], told) as (service, _):
        (trajectory,) = await service.run([attempt(agent, **GRADED)])
    assert trajectory.failure is not None
    assert (trajectory.status, trajectory.failure.kind) == (Status.INFRA_ERROR, "no_first_call")
    assert (trajectory.reward, trajectory.evaluation) == (None, None)
    assert trajectory.counts["retries"] == 1
