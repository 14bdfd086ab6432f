"""Whatever an agent does to its workspace is there, byte for byte, when the tests run."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from polar_plugin.evaluators.patch import TREE, normalised, sections, without
from polar_plugin.evaluators.test_on_output import TestOnOutput

from ..runtimes.boxes import sandbox
from .grading import finished, git_repository, graded, worked, write

pytestmark = pytest.mark.anyio

BASE = {
    "code.py": b"one\ntwo\nthree\n",
    "windows.txt": b"a\r\nb\r\nc\r\n",
    "no newline": b"text without end",
    "blob.bin": bytes(range(256)) * 8,
    "run.sh": b"#!/bin/sh\necho ran\n",
    "gone.py": b"gone\n",
    "dir/in.txt": b"in\n",
}
IDENTITY = "git -c user.name=a -c user.email=a@x"
ZOO = {
    "an edit": ("sed -i s/two/2/ code.py", "grep -qx 2 code.py"),
    "a new file": ("mkdir -p new/er && echo x > new/er/f", "test -f new/er/f"),
    "an empty new file": ("touch empty", "test -f empty"),
    "a deleted file": ("rm gone.py", "test ! -e gone.py"),
    "a renamed file": ("mv gone.py 'new name.py'", "test ! -e gone.py && grep -q gone 'new name.py'"),
    "a binary edit": (
        r"printf '\000\377' | dd of=blob.bin bs=1 seek=5 conv=notrunc", "test $(od -An -tx1 -j6 -N1 blob.bin) = ff"
    ),
    "a new binary": (r"printf '\000\001\377\r\n' > new.bin", r"printf '\000\001\377\r\n' | cmp - new.bin"),
    "invalid UTF-8": (r"printf 'caf\351\n' >> code.py", r"tail -n1 code.py | cmp - <(printf 'caf\351\n')"),
    "no newline at the end": ("printf more >> 'no newline'", "printf 'text without endmore' | cmp - 'no newline'"),
    "CRLF lines": (r"sed -i 's/b/B/' windows.txt", r"printf 'a\r\nB\r\nc\r\n' | cmp - windows.txt"),
    "a new CRLF file": (r"printf 'x\r\ny\r\n' > crlf", r"printf 'x\r\ny\r\n' | cmp - crlf"),
    "a mode change": ("chmod +x run.sh", "./run.sh"),
    "a link": ("ln -s code.py link", "test -L link && grep -q two link"),
    "a dangling link": ("ln -s /no/where link", "test $(readlink link) = /no/where"),
    "a file that becomes a link": ("rm run.sh && ln -s code.py run.sh", "test -L run.sh"),
    "a file that becomes a directory": ("rm gone.py && mkdir gone.py && echo x > gone.py/f", "test -f gone.py/f"),
    "a directory that becomes a file": ("rm -r dir && echo x > dir", "test -f dir"),
    "names with blanks and quotes": (
        "mkdir -p 'a dir' && echo 1 > \"a dir/it's \\\"q\\\" \\$x.py\"", "grep -q 1 \"a dir/it's \\\"q\\\" \\$x.py\""
    ),
    "a name with a tab and an accent": (r"echo 1 > $'t\té'", r"grep -q 1 $'t\té'"),
    "a name that looks like an option": ("echo 1 > -rf", "grep -q 1 ./-rf"),
    "an unreadable file": ("echo x > secret && chmod 000 secret", "grep -q x secret"),
    "text that looks like a patch": (
        r"printf 'diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n' > p", "test $(wc -l < p) = 4"
    ),
}  # fmt: skip
GIT_ZOO = {
    "a commit": (f"sed -i s/two/2/ code.py && {IDENTITY} commit -qam fix", "grep -qx 2 code.py"),
    "a commit and then an edit": (
        f"sed -i s/two/2/ code.py && {IDENTITY} commit -qam fix && echo x > f", "grep -qx 2 code.py && test -f f"
    ),
    "a branch switched to": (
        f"git checkout -qb other && echo 1 > f && git add f && {IDENTITY} commit -qm f", "test -f f"
    ),
    "staged only": ("echo 1 > f && git add f && rm f && git checkout -q f", "test -f f"),
    "an index left locked": ("touch .git/index.lock && sed -i s/two/2/ code.py", "grep -qx 2 code.py"),
    "a configuration that hides": (
        """git config diff.noprefix true && git config core.fileMode false && git config diff.external false
        echo '*.py -diff' > .gitattributes && chmod +x run.sh && sed -i s/two/2/ code.py""",
        "./run.sh && grep -qx 2 code.py",
    ),
    "the repository removed": ("rm -rf .git && sed -i s/two/2/ code.py", "grep -qx 2 code.py"),
    "history rewritten": (
        f"sed -i s/two/2/ code.py && {IDENTITY} commit -qa --amend -m other && git reflog expire --expire=now --all",
        "grep -qx 2 code.py",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return git_repository(tmp_path_factory.mktemp("repository"), BASE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("directory"), BASE)


@pytest.mark.parametrize("name", ZOO | GIT_ZOO)
async def test_a_git_patch_carries(name: str, repository: Path) -> None:
    agent, check = (ZOO | GIT_ZOO)[name]
    evaluation = await graded(TestOnOutput(check), repository, agent)
    assert evaluation.outcome_reward == 1.0, evaluation.report


async def test_none_of_these_checks_holds_without_the_change(repository: Path) -> None:
    async with sandbox(image=str(repository)) as runtime:
        for name, (_, check) in (ZOO | GIT_ZOO).items():
            assert not (await runtime.exec(check)).ok, name


@pytest.mark.parametrize("name", ZOO)
async def test_a_copy_of_the_tree_carries(name: str, directory: Path) -> None:
    agent, check = ZOO[name]
    evaluation = await graded(TestOnOutput(check), directory, agent)
    assert evaluation.outcome_reward == 1.0, evaluation.report


@pytest.mark.parametrize("name", GIT_ZOO)
async def test_without_a_noted_commit_nothing_is_lost_either(name: str, repository: Path) -> None:
    agent, check = GIT_ZOO[name]
    evaluator = TestOnOutput(check)
    artifact = await worked(evaluator, repository, agent, noted=False)
    assert artifact.startswith(TREE)
    assert (await evaluator.evaluate(finished(repository, artifact))).outcome_reward == 1.0


async def test_the_patch_is_one_that_git_and_people_can_read(repository: Path) -> None:
    patch = await worked(TestOnOutput("true"), repository, "sed -i s/two/2/ code.py")
    assert patch.startswith(b"diff --git a/code.py b/code.py\nindex ")
    assert patch.endswith(b"@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n")


@pytest.mark.parametrize("kind", ["repository", "directory"])
async def test_no_change_is_an_empty_patch(kind: str, request: pytest.FixtureRequest) -> None:
    image = request.getfixturevalue(kind)
    for agent in ("true", "touch code.py; mkdir __pycache__; echo > __pycache__/x.pyc"):
        evaluation = await graded(TestOnOutput("true"), image, agent)
        assert (evaluation.outcome_reward, evaluation.report["reason"]) == (0.0, "empty_patch"), agent


@pytest.mark.parametrize("kind", ["repository", "directory"])
async def test_excluded_files_are_not_carried_over(kind: str, request: pytest.FixtureRequest) -> None:
    evaluator = TestOnOutput("test ! -e x.log && test ! -e logs && test -f kept", exclude_patterns=["*.log", "logs"])
    agent = "echo 1 > x.log; mkdir logs; echo 1 > logs/a; echo 1 > kept"
    evaluation = await graded(evaluator, request.getfixturevalue(kind), agent)
    assert evaluation.outcome_reward == 1.0, evaluation.report


@pytest.mark.parametrize("kind", ["repository", "directory"])
async def test_excluded_files_that_were_there_stay(kind: str, request: pytest.FixtureRequest) -> None:
    evaluator = TestOnOutput("grep -q gone gone.py", exclude_patterns=["gone.py"])
    assert (await graded(evaluator, request.getfixturevalue(kind), "rm gone.py; echo 1 > f")).outcome_reward == 1.0


@pytest.mark.parametrize("kind", ["repository", "directory"])
async def test_a_workspace_too_large_is_refused_without_being_read(kind: str, request: pytest.FixtureRequest) -> None:
    evaluator = TestOnOutput("true", max_artifact_bytes=1 << 20)
    with anyio.fail_after(60):
        evaluation = await graded(evaluator, request.getfixturevalue(kind), "head -c 9000000 /dev/urandom > big")
    assert (evaluation.outcome_reward, evaluation.report["reason"]) == (0.0, "artifact_too_large")


async def test_a_huge_sparse_file_costs_nothing(directory: Path) -> None:
    with anyio.fail_after(60):
        evaluation = await graded(TestOnOutput("true"), directory, "truncate -s 1T big")
    assert evaluation.report["reason"] == "artifact_too_large"


async def test_a_repository_directory_that_the_agent_removed_is_its_own_doing(tmp_path: Path) -> None:
    image = write(tmp_path, {"repo/f": b"x"})
    evaluation = await graded(TestOnOutput("true", repo_dir="/workspace/repo"), image, "rm -rf repo")
    assert (evaluation.outcome_reward, evaluation.report["reason"]) == (0.0, "repo_dir_missing")


async def test_a_patch_command_of_ones_own_decides_what_is_graded(repository: Path) -> None:
    evaluator = TestOnOutput("grep -qx 2 code.py && test ! -e f", patch_command="git diff -- code.py")
    assert (await graded(evaluator, repository, "sed -i s/two/2/ code.py; echo > f")).outcome_reward == 1.0


# --- patches as others write them ------------------------------------------------------------------------------------

GOOD = b"diff --git a/code.py b/code.py\n--- a/code.py\n+++ b/code.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(GOOD, id="as git writes it"),
        pytest.param(GOOD[:-1], id="no newline at its end"),
        pytest.param(GOOD.replace(b"\n", b"\r\n"), id="CRLF all over"),
        pytest.param(GOOD.replace(b"@@ -1,3 +1,3 @@", b"@@ -1,9 +1,7 @@"), id="wrong counts"),
        pytest.param(GOOD.replace(b"@@ -1,3 +1,3 @@", b"@@ -40,3 +40,3 @@"), id="wrong place"),
        pytest.param(GOOD.replace(b" one\n", b" uno\n"), id="context that is a little off"),
        pytest.param(GOOD.partition(b"\n")[2], id="without git's header"),
    ],
)
async def test_a_patch_that_is_nearly_right_applies(patch: bytes, repository: Path) -> None:
    evaluation = await TestOnOutput("grep -qx 2 code.py").evaluate(finished(repository, patch))
    assert evaluation.outcome_reward == 1.0, evaluation.report
    assert evaluation.report["applied_with"]


@pytest.mark.parametrize("patch", [GOOD.replace(b"-two\n", b"-zwei\n"), b"I have fixed the bug.\n", b"\x00\xff" * 100])
async def test_what_does_not_apply_is_reward_0_with_the_reason(patch: bytes, repository: Path) -> None:
    evaluation = await TestOnOutput("true").evaluate(finished(repository, patch))
    assert (evaluation.outcome_reward, evaluation.report["reason"]) == (0.0, "apply_failed")
    assert evaluation.report["output"]


async def test_a_patch_cannot_leave_the_workspace(repository: Path) -> None:
    names = b"diff --git a/../../tmp/x b/../../tmp/x\nnew file mode 100644\n--- /dev/null\n+++ b/../../tmp/x\n"
    patch = names + b"@@ -0,0 +1 @@\n+x\n"
    evaluation = await TestOnOutput("true").evaluate(finished(repository, patch))
    assert evaluation.report["reason"] == "apply_failed"


def test_sections_know_their_paths() -> None:
    patch = (
        b"diff --git a/a b c b/a b c\nold mode 100644\nnew mode 100755\n"
        b'diff --git "a/t\\t\\303\\251 \\"q" "b/t\\t\\303\\251 \\"q"\nnew file mode 100644\nindex 0..1\n'
        b'--- /dev/null\n+++ "b/t\\t\\303\\251 \\"q"\n@@ -0,0 +1 @@\n+diff --git a/x b/x\n'
        b"diff --git a/gone b/gone\ndeleted file mode 100644\nindex 1..0\n"
        b"--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n---- a/y\n"
        b"diff --git a/old b/new\nsimilarity index 100%\nrename from old\nrename to new\n"
        b'diff --git "a/\\303\\251" "b/\\303\\251"\nold mode 100644\nnew mode 100755\n'
    )
    assert [path for path, _ in sections(patch)] == ["a b c", 't\té "q', "gone", "new", "é"]
    assert b"".join(section for _, section in sections(patch)) == patch


def test_leaving_out_files_leaves_the_others_as_they_were() -> None:
    other = GOOD.replace(b"code.py", b"build/x.pyc")
    assert without(other + GOOD + other, ["*.pyc"]) == GOOD
    assert without(other + GOOD, ["build"]) == GOOD
    assert without(GOOD, ["*.pyc"]) == GOOD


def test_only_what_is_wrong_is_normalised() -> None:
    content = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\r\n+b\r\n"
    assert normalised(content) == content
    assert normalised(b"--- a/f\r\n+++ b/f\r\n@@ -1 +1 @@\r\n-a\r\n+b") == b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"
