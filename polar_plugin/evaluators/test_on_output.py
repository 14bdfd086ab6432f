"""Runs tests over the agent's changes in a fresh workspace: 1.0 where they come out as expected, else 0.0."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast
from weakref import WeakKeyDictionary

from ..errors import ConfigError, EvaluationError, SandboxError
from ..records import Evaluation
from ..runtimes.base import ExecResult, Runtime
from .base import Finished
from .patch import (
    ALWAYS_EXCLUDED,
    REFUSED,
    TREE,
    Applied,
    apply_patch,
    apply_tree,
    head,
    take_diff,
    take_output,
    take_tree,
    without,
)
from .status_lines import compare, parse

_OUTPUT_CHARACTERS = 4000


class TestOnOutput:
    """Reward 1.0 or 0.0, with `report["reason"]`: passed, failed, timeout, empty_patch, apply_failed, apply_timeout,
    artifact_too_large, repo_dir_missing. A sandbox or an evaluator that breaks raises instead.
    """

    __test__ = False  # its name does not make it a test
    prewarm = True
    """It grades in a fresh sandbox, which may be made ready before it asks for it."""

    def __init__(
        self,
        test_command: str,
        expected_output_json: Mapping[str, str] | str | None = None,
        repo_dir: str | None = None,
        patch_command: str | None = None,
        base_commit: str | None = None,
        apply_timeout: float = 60.0,
        test_timeout: float = 1200.0,
        exclude_patterns: Sequence[str] = (),
        protect: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        max_artifact_bytes: int = 64 << 20,
    ) -> None:
        """
        * `expected_output_json`: {node id: status}, its JSON text, or a file with it; all of the listed tests must come
          out so. Without it the exit code 0 counts.
        * `repo_dir`: where the work is; default: the sandbox's working directory.
        * `patch_command`: prints the patch; default: a binary-safe git diff against what `before` saw or `base_commit`,
          and where neither is known, or there is no git, a copy of the whole tree.
        * `exclude_patterns`: globs on paths, or parts of them, that are not carried over.
        * `protect`: files and directories whose original content is put back before the tests run.
        * `files`: {path inside: path on this machine} that appear only for the tests. Relative ones lie in `repo_dir`.
        """
        self._test_command, self._test_timeout = test_command, test_timeout
        self._expected = None if expected_output_json is None else _expected(expected_output_json)
        self._repo_dir, self._patch_command, self._base_commit = repo_dir, patch_command, base_commit
        self._apply_timeout, self._limit = apply_timeout, max_artifact_bytes
        self._exclude = (*ALWAYS_EXCLUDED, *exclude_patterns)
        self._protect, self._files = tuple(protect), dict(files or {})
        self._bases: WeakKeyDictionary[Runtime, str] = WeakKeyDictionary()

    async def before(self, runtime: Runtime) -> None:
        """Note the commit the agent starts from. Without this call the whole tree is carried over."""
        if base := await head(runtime, self._repo(runtime)):
            self._bases[runtime] = base

    async def extract(self, runtime: Runtime) -> bytes:
        repo = self._repo(runtime)
        if not (await runtime.exec(("test", "-d", repo))).ok:
            return REFUSED + b"repo_dir_missing"
        if self._patch_command:
            return self._cleaned(await take_output(runtime, repo, self._patch_command, limit=self._limit))
        base = self._bases.get(runtime) or self._base_commit
        if base and (patch := await take_diff(runtime, repo, base, limit=self._limit)) is not None:
            return self._cleaned(patch)
        return await self._tree(runtime)

    async def evaluate(self, finished: Finished) -> Evaluation:
        artifact = finished.artifact
        if artifact.startswith(REFUSED):
            return _zero(artifact.removeprefix(REFUSED).decode())
        if not artifact.strip():
            return _zero("empty_patch")
        async with finished.fresh_runtime() as runtime:
            kept = await self._kept(runtime)
            applied = await self._applied(runtime, artifact)
            if isinstance(applied, Evaluation):
                return applied
            await self._restore(runtime, kept)
            return await self._tested(runtime, applied, finished.env)

    # --- the changes --------------------------------------------------------------------------------------------------

    def _repo(self, runtime: Runtime) -> str:
        return self._repo_dir or runtime.workdir

    def _cleaned(self, patch: bytes) -> bytes:
        return patch if patch.startswith(REFUSED) else without(patch, self._exclude)

    async def _tree(self, runtime: Runtime) -> bytes:
        return await take_tree(runtime, self._repo(runtime), exclude=self._exclude, limit=self._limit)

    async def _applied(self, runtime: Runtime, artifact: bytes) -> Applied | Evaluation:
        repo = self._repo(runtime)
        if artifact.startswith(TREE):
            fresh = await self._tree(runtime)
            if fresh == artifact:
                return _zero("empty_patch")
            applied = await apply_tree(runtime, repo, artifact, fresh, timeout=self._apply_timeout)
        else:
            applied = await apply_patch(runtime, repo, artifact, timeout=self._apply_timeout)
        if applied.method is None:
            return _zero("apply_timeout" if applied.timed_out else "apply_failed", output=applied.log)
        return applied

    # --- what the agent must not decide -------------------------------------------------------------------------------

    async def _kept(self, runtime: Runtime) -> str:
        """Archive the protected paths as they were; where the archive lies."""
        if not self._protect:
            return ""
        names = shlex.join(self._protect)
        script = (
            'kept=$(mktemp -d) && echo "$kept" && touch "$kept/names"\n'
            f'for name in {names}; do if [ -e "$name" ] || [ -L "$name" ]; then printf "%s\\0" "$name"; fi; done '
            '>"$kept/names"\ntar --null --verbatim-files-from -T "$kept/names" -cpf "$kept/tar"\n'
        )
        return (await self._must(runtime, script, "keep the protected files")).stdout.decode().strip()

    async def _restore(self, runtime: Runtime, kept: str) -> None:
        """Put back what is protected, and lay out the tests' own files, whatever stands in their way."""
        repo = PurePosixPath(self._repo(runtime))
        targets = [str(repo / path) for path in (*self._protect, *self._files)]
        if targets:
            await self._must(runtime, _clear(repo, targets), "clear the way for the tests' files")
        if kept:
            await self._must(runtime, f"tar -xpf {shlex.quote(kept)}/tar", "restore the protected files")
        for path, source in self._files.items():
            await runtime.upload(Path(source), str(repo / path))

    async def _must(self, runtime: Runtime, script: str, what: str) -> ExecResult:
        result = await runtime.exec(script, cwd=self._repo(runtime), timeout=self._apply_timeout)
        if not result.ok:
            raise EvaluationError(f"cannot {what}: {result.text[-2000:].strip()}")
        return result

    # --- the tests ----------------------------------------------------------------------------------------------------

    async def _tested(self, runtime: Runtime, applied: Applied, env: Mapping[str, str]) -> Evaluation:
        script = f"exec 2>&1\n{self._test_command}\n"
        result = await runtime.exec(script, cwd=self._repo(runtime), env=env, timeout=self._test_timeout)
        if result.oom:
            raise SandboxError("the tests ran out of memory: raise runtime.memory_mb")
        report: dict[str, Any] = {
            "exit_code": result.exit_code,
            "applied_with": applied.method,
            "seconds": round(result.seconds, 3),
            "output": result.text[-_OUTPUT_CHARACTERS:],
            "output_truncated": result.truncated,
        }
        passed = result.exit_code == 0
        if self._expected is not None:
            tests = compare(self._expected, parse(result.text))
            passed = all(wanted == came for wanted, came in tests.values())
            report["tests"] = {name: {"expected": wanted, "actual": came} for name, (wanted, came) in tests.items()}
        if result.timed_out:
            return _zero("timeout", **report)
        return Evaluation(float(passed), report={"reason": "passed" if passed else "failed", **report})


def _zero(reason: str, **report: Any) -> Evaluation:
    return Evaluation(0.0, report={"reason": reason, **report})


def _clear(repo: PurePosixPath, targets: Sequence[str]) -> str:
    """Remove the targets, and whatever the agent has put where their directories must be."""
    above = {parent for target in targets for parent in PurePosixPath(target).parents if repo in parent.parents}
    script = ""
    for parent in sorted(above):
        name = shlex.quote(str(parent))
        script += f"if [ -L {name} ] || [ ! -d {name} ]; then rm -f -- {name}; else chmod u+rwx {name}; fi\n"
    names = shlex.join(targets)
    return f"set -e\n{script}chmod -R u+rwX -- {names} 2>/dev/null || true\nrm -rf -- {names}\n"


def _expected(given: Mapping[str, str] | str) -> dict[str, str]:
    """Raises ConfigError where it is not {node id: status} with at least one test."""
    try:
        value: Any = given
        if isinstance(given, str):
            value = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"evaluator.config.expected_output_json: cannot read {given}: {error}") from error
    if not isinstance(value, Mapping) or not value:
        raise ConfigError("evaluator.config.expected_output_json must map node ids to statuses, at least one")
    return {str(name): str(status) for name, status in cast("Mapping[str, str]", value).items()}
