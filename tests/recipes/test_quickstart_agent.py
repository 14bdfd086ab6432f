"""The quickstart's agent and tasks, in the sandbox, against a scripted model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from polar_plugin.evaluators.test_on_output import TestOnOutput
from polar_plugin.harnesses.base import LaunchContext
from polar_plugin.harnesses.shell import Shell
from polar_plugin.records import AgentSpec, Evaluation
from polar_plugin.runtimes.base import ExecResult

from ..evaluators.grading import finished
from ..model_api import ModelAPI, bash, model_api, says
from ..runtimes.boxes import sandbox

pytestmark = pytest.mark.anyio

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
SCRIPT: dict[str, list[list[str]]] = json.loads((RECIPE / "script.json").read_text())
TASKS = sorted(SCRIPT)
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Run:
    result: ExecResult
    api: ModelAPI
    evaluation: Evaluation

    @property
    def tool_results(self) -> list[str]:
        return [message["content"] for message in self.api.requests[-1]["messages"] if message["role"] == "tool"]


def task(name: str) -> dict[str, Any]:
    text = (RECIPE / "tasks" / name / "task.yaml").read_text()
    return yaml.safe_load(text.replace("{task_dir}", str(RECIPE / "tasks" / name)))


async def run(tmp_path: Path, *replies: dict[str, Any], name: str = TASKS[0], **env: str) -> Run:
    """The whole way of one attempt: sandbox, agent, patch, tests."""
    payload = task(name)
    agent = AgentSpec(**{**payload["agent"], "env": env})
    image = Path(payload["runtime"]["image"])
    evaluator = TestOnOutput(**payload["evaluator"]["config"])
    with anyio.fail_after(120):
        async with model_api(tmp_path, *replies) as api, sandbox(proxy=api.endpoint, image=str(image)) as box:
            context = LaunchContext(
                agent, payload["instruction"], box.proxy_url, "key-1", 8192, 512, box.workdir, box.home
            )
            launch = Shell().launch(context)
            for path, content in launch.files.items():
                await box.upload(content, path)
            result = await box.exec(launch.command, env=launch.env, stdin=launch.stdin, timeout=60)
            artifact = await evaluator.extract(box)
        return Run(result, api, await evaluator.evaluate(finished(image, artifact)))


def as_sent(text: str) -> dict[str, Any]:
    """A scripted reply as a proxy would send it: text apart, calls apart."""
    calls = [json.loads(found) for found in TOOL_CALL.findall(text)]
    return says(TOOL_CALL.sub("", text).strip() or None, *((c["name"], json.dumps(c["arguments"])) for c in calls))


@pytest.mark.parametrize("stream", ["0", "1"])
@pytest.mark.parametrize(("variant", "reward"), [(0, 1.0), (1, 0.0)])
@pytest.mark.parametrize("name", TASKS)
async def test_the_scripts_earn_what_they_deserve(
    name: str, variant: int, reward: float, stream: str, tmp_path: Path
) -> None:
    replies = [as_sent(text) for text in SCRIPT[name][variant]]
    done = await run(tmp_path, *replies, name=name, AGENT_STREAM=stream)
    assert done.result.exit_code == 0, done.result.text
    assert len(done.api.requests) == len(replies)
    assert done.evaluation.outcome_reward == reward, done.evaluation.report


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_is_unsolved_as_it_stands(name: str, tmp_path: Path) -> None:
    done = await run(tmp_path, says("Done.", bash("echo '#' > note")), says("Done."), name=name)
    assert (done.evaluation.outcome_reward, done.evaluation.report["reason"]) == (0.0, "failed")
    assert "hidden" not in json.dumps(done.api.requests)


async def test_an_answer_without_a_call_ends_it(tmp_path: Path) -> None:
    done = await run(tmp_path, says("I do not know."))
    assert (done.result.exit_code, done.result.stdout) == (0, b"I do not know.\n")
    assert done.evaluation.report["reason"] == "empty_patch"


async def test_it_sends_the_task_its_key_and_one_tool(tmp_path: Path) -> None:
    done = await run(tmp_path, says(None))
    (request,) = done.api.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["messages"][1]["content"] == task(TASKS[0])["instruction"]
    assert [tool["function"]["name"] for tool in request["tools"]] == ["bash"]
    assert done.api.keys == ["Bearer key-1"]


@pytest.mark.parametrize("stream", ["0", "1"])
async def test_the_history_it_sends_only_grows_and_echoes_the_model_as_it_was(stream: str, tmp_path: Path) -> None:
    odd = says("Two at once: é", bash("echo 1; exit 4"), ("bash", '{ "command" :"echo \\u00e9"}'))
    done = await run(tmp_path, odd, says("so", bash("pwd")), says("Done."), AGENT_STREAM=stream)
    first, second, third = (request["messages"] for request in done.api.requests)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert second[2] == odd
    assert done.tool_results == ["1\n\n(exit code 4)", "é\n\n(exit code 0)", "/workspace\n\n(exit code 0)"]


@pytest.mark.parametrize(
    "call", [("bash", "{not json"), ("bash", "{}"), ("bash", "[]"), ("bash", ""), ("python", "{}"), ("bash", '"x"')]
)
async def test_a_call_that_makes_no_sense_is_answered_and_it_goes_on(call: tuple[str, str], tmp_path: Path) -> None:
    done = await run(tmp_path, says(None, call), says("Done."))
    assert done.result.exit_code == 0
    assert done.tool_results[0].startswith("error:")


async def test_long_output_is_cut_in_the_middle(tmp_path: Path) -> None:
    done = await run(tmp_path, says(None, bash("seq 100000")), says("Done."))
    (told,) = done.tool_results
    assert len(told) < 4200
    assert told.startswith("1\n2\n")
    assert "99999\n100000\n" in told


async def test_commands_get_no_input_and_their_background_does_not_hold_it_up(tmp_path: Path) -> None:
    done = await run(tmp_path, says(None, bash("cat; sleep 300 >/dev/null 2>&1 & echo on")), says("Done."))
    assert done.tool_results == ["on\n\n(exit code 0)"]


async def test_it_stops_after_its_turns(tmp_path: Path) -> None:
    done = await run(tmp_path, *[says(None, bash("true"))] * 5, AGENT_MAX_TURNS="3")
    assert len(done.api.requests) == 3
    assert b"no turns left" in done.result.stderr


async def test_an_error_of_the_model_api_is_an_exit_code_with_its_words(tmp_path: Path) -> None:
    done = await run(tmp_path)
    assert done.result.exit_code == 1
    assert b"the script is over" in done.result.stderr


def test_it_is_small_and_needs_nothing_but_python() -> None:
    source = (RECIPE / "agent.py").read_text()
    assert len(source.splitlines()) <= 120
    assert not {"polar", "token", "logprob", "reward"} & set(re.findall(r"[a-z]+", source.lower()))
