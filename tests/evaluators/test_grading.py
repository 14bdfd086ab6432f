"""What the tests decide, and what an agent cannot decide for them."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from polar_plugin.errors import ConfigError, EvaluationError, SandboxError
from polar_plugin.evaluators.session_completed import SessionCompleted
from polar_plugin.evaluators.status_lines import compare, parse
from polar_plugin.evaluators.test_on_output import TestOnOutput
from polar_plugin.records import Status

from .grading import finished, git_repository, graded, write

pytestmark = pytest.mark.anyio

FILES = {
    "code.py": b"def double(x):\n    return x * 3\n",
    "tests/test_code.py": b"from code import double\nassert double(2) == 4\n",
}
FIX = "sed -i 's/x \\* 3/x * 2/' code.py"


@pytest.fixture(params=["git", "no git"])
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "image"
    return git_repository(directory, FILES) if request.param == "git" else write(directory, FILES)


@pytest.mark.parametrize("status", Status)
async def test_session_completed_is_1_for_completed_alone(status: Status, tmp_path: Path) -> None:
    evaluation = await SessionCompleted().evaluate(finished(tmp_path, b"", status=status))
    assert evaluation.outcome_reward == float(status is Status.COMPLETED)


async def test_the_exit_code_decides(image: Path) -> None:
    evaluator = TestOnOutput("PYTHONPATH=. python3 tests/test_code.py")
    solved = await graded(evaluator, image, FIX)
    assert (solved.outcome_reward, solved.report["reason"], solved.report["exit_code"]) == (1.0, "passed", 0)
    failed = await graded(evaluator, image, "echo '#' >> code.py")
    assert (failed.outcome_reward, failed.report["reason"], failed.report["exit_code"]) == (0.0, "failed", 1)
    assert "AssertionError" in failed.report["output"]


async def test_the_agents_own_sandbox_is_not_the_one_graded(image: Path) -> None:
    evaluator = TestOnOutput('test ! -e "$HOME/left" && test ! -e /tmp/left')
    assert (await graded(evaluator, image, f'{FIX}; touch "$HOME/left" /tmp/left')).outcome_reward == 1.0


async def test_the_evaluators_environment_reaches_the_tests(image: Path) -> None:
    assert (await graded(TestOnOutput('test "$FROM_EVALUATOR" = 1'), image, FIX)).outcome_reward == 1.0


async def test_tests_that_take_too_long_are_reward_0_and_their_output_is_kept(image: Path) -> None:
    evaluator = TestOnOutput("echo begun; sleep 1000", test_timeout=1)
    with anyio.fail_after(60):
        evaluation = await graded(evaluator, image, FIX)
    assert (evaluation.outcome_reward, evaluation.report["reason"]) == (0.0, "timeout")
    assert evaluation.report["output"] == "begun\n"


# --- status lines ----------------------------------------------------------------------------------------------------

LINES = (
    "echo 'PASSED tests/t.py::a'; echo 'FAILED tests/t.py::b - assert 1'; echo 'tests/t.py::c PASSED  [100%]'; exit 1"
)


async def test_all_listed_tests_must_come_out_as_expected_whatever_the_exit_code(image: Path) -> None:
    expected = {"tests/t.py::a": "PASSED", "tests/t.py::b": "FAILED", "tests/t.py::c": "passed"}
    evaluation = await graded(TestOnOutput(LINES, expected), image, FIX)
    assert evaluation.outcome_reward == 1.0
    assert evaluation.report["tests"]["tests/t.py::b"] == {"expected": "FAILED", "actual": "FAILED"}


@pytest.mark.parametrize(
    ("expected", "actual"),
    [({"tests/t.py::b": "PASSED"}, "FAILED"), ({"tests/t.py::a": "PASSED", "tests/t.py::d": "PASSED"}, "MISSING")],
)
async def test_one_test_that_differs_or_is_missing_is_reward_0(
    expected: dict[str, str], actual: str, image: Path
) -> None:
    evaluation = await graded(TestOnOutput(LINES, expected), image, FIX)
    assert evaluation.outcome_reward == 0.0
    assert actual in {test["actual"] for test in evaluation.report["tests"].values()}


def test_status_lines_are_read_as_pytest_writes_them() -> None:
    output = """
tests/t.py::test_a \x1b[32mPASSED\x1b[0m\x1b[32m   [ 50%]\x1b[0m
tests/t.py::test_x[a b - c] PASSED [100%]
=== short test summary info ===
\x1b[32mPASSED\x1b[0m tests/t.py::\x1b[1mtest_a\x1b[0m
FAILED ./tests/t.py::K::test_b - AssertionError: 1 - 2
ERROR tests/broken.py - ImportError
XFAIL tests/t.py::test_c - reason
SKIPPED [1] tests/t.py:3: no
"""
    found = parse(output)
    assert found["tests/t.py::test_a"] == "PASSED"
    assert found["tests/t.py::test_x[a b - c]"] == "PASSED"
    assert found["tests/t.py::K::test_b"] == "FAILED"
    assert found["tests/broken.py"] == "ERROR"
    assert found["tests/t.py::test_c"] == "XFAIL"
    assert compare({"K.test_b": "failed", "test_a": "PASSED", "z": "PASSED"}, found) == {
        "K.test_b": ("FAILED", "FAILED"),
        "test_a": ("PASSED", "PASSED"),
        "z": ("PASSED", "MISSING"),
    }


@pytest.mark.parametrize("given", [{}, "/no/such/file", "{not json", "[1]"])
def test_expectations_that_cannot_be_read_are_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected_output_json"):
        TestOnOutput("true", given)  # type: ignore[arg-type]


# --- what the agent must not decide ----------------------------------------------------------------------------------

CHEATS = {
    "edits the test": "echo > tests/test_code.py; echo '#' >> code.py",
    "removes the tests": "rm -r tests; echo '#' >> code.py",
    "puts a link in the way of the test": "ln -sf /dev/null tests/test_code.py; echo '#' >> code.py",
    "puts a link in the way of the directory": "rm -r tests; mkdir m; echo > m/test_code.py; ln -s m tests",
    "puts a file in the way of the directory": "rm -r tests; echo > tests",
    "puts a directory in its way": "cd tests; rm test_code.py; mkdir test_code.py; echo > test_code.py/x; cd ..",
    "locks the directory": "echo > tests/test_code.py; echo '#' >> code.py; chmod 500 tests",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_protected_tests_are_as_they_were(cheat: str, image: Path) -> None:
    evaluator = TestOnOutput("PYTHONPATH=. python3 tests/test_code.py", protect=["tests", "absent"])
    evaluation = await graded(evaluator, image, CHEATS[cheat])
    assert (evaluation.outcome_reward, evaluation.report["reason"]) == (0.0, "failed"), evaluation.report
    assert "assert double(2) == 4" in evaluation.report["output"]
    assert (await graded(evaluator, image, f"{CHEATS[cheat]}\n{FIX}")).outcome_reward == 1.0


@pytest.mark.parametrize("cheat", CHEATS)
async def test_hidden_tests_replace_whatever_is_in_their_way(cheat: str, image: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden.py"
    hidden.write_bytes(FILES["tests/test_code.py"])
    evaluator = TestOnOutput("PYTHONPATH=. python3 tests/test_code.py", files={"tests/test_code.py": str(hidden)})
    evaluation = await graded(evaluator, image, CHEATS[cheat])
    assert evaluation.report["reason"] == "failed", evaluation.report
    assert "assert double(2) == 4" in evaluation.report["output"]
    assert (await graded(evaluator, image, f"{CHEATS[cheat]}\n{FIX}")).outcome_reward == 1.0


async def test_what_the_agent_adds_to_a_protected_directory_is_gone(image: Path) -> None:
    evaluator = TestOnOutput("test ! -e tests/conftest.py && test -f tests/test_code.py", protect=["tests"])
    assert (await graded(evaluator, image, "echo > tests/conftest.py; echo '#' >> code.py")).outcome_reward == 1.0


# --- grading that breaks ---------------------------------------------------------------------------------------------


async def test_a_sandbox_that_breaks_raises_and_is_no_reward(tmp_path: Path) -> None:
    image = git_repository(tmp_path / "image", FILES)
    with pytest.raises(SandboxError):
        await TestOnOutput("true", files={"t.py": str(tmp_path / "missing")}).evaluate(
            finished(image, b"diff --git a/f b/f\nnew file mode 100644\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n")
        )


async def test_a_patch_command_that_fails_raises(image: Path) -> None:
    with pytest.raises(EvaluationError, match="patch_command"):
        await graded(TestOnOutput("true", patch_command="no-such-command"), image, FIX)
