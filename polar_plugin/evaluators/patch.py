"""An agent's changes as bytes: how they are taken from one workspace, read, cleaned and laid over another.

Two forms. Where the commit that the agent started from is known, a git patch against it, so that commits, new and
binary files, modes and links count. Otherwise the whole tree as a tar archive, marked `TREE`; deletions are what is
missing. Nothing is ever decoded.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import anyio

from ..errors import EvaluationError
from ..runtimes.base import ExecResult, Runtime

TREE = b"polar-tree\0"
REFUSED = b"polar-refused\0"
"""Begins an artifact that is only a reason why there is none."""
ALWAYS_EXCLUDED = ("__pycache__", "*.pyc", ".pytest_cache")

_GIT_ENV: Mapping[str, str] = {
    "GIT_CONFIG_COUNT": "3",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "core.fileMode",
    "GIT_CONFIG_VALUE_1": "true",
    "GIT_CONFIG_KEY_2": "diff.relative",
    "GIT_CONFIG_VALUE_2": "false",
}
_DIFF = """
index=$(mktemp)
cp "$(git rev-parse --git-path index)" "$index" 2>/dev/null || rm -f "$index"
export GIT_INDEX_FILE="$index"
git rev-parse --quiet --verify "$BASE^{commit}" >/dev/null || exit 3
git add --all --ignore-errors -- :/ >&2 || true
git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \\
  --src-prefix=a/ --dst-prefix=b/ "$BASE"
"""
_APPLY = """
cd "$(git rev-parse --show-toplevel 2>/dev/null || pwd)"
three_way() {
  index=$(mktemp) && cp "$(git rev-parse --git-path index)" "$index" || return 1
  GIT_INDEX_FILE="$index" git apply --cached --3way "$1" && git apply --3way "$1"
}
batch() { patch --batch --forward --fuzz=5 -p1 "$@"; }
git apply --verbose --whitespace=nowarn "$RAW" && echo "git apply" && exit 0
three_way "$RAW" && echo "git apply --3way" && exit 0
git apply --verbose --whitespace=nowarn "$FIXED" && echo "git apply, normalised" && exit 0
git apply --verbose --whitespace=nowarn --recount "$FIXED" && echo "git apply --recount" && exit 0
three_way "$FIXED" && echo "git apply --3way, normalised" && exit 0
batch --dry-run -i "$FIXED" >&2 && batch -i "$FIXED" >&2 && echo "patch --fuzz" && exit 0
git apply --check --reverse "$FIXED" && echo "applied already" && exit 0
exit 1
"""


@dataclass(frozen=True, slots=True)
class Applied:
    """How a patch was applied: the program's name, or what they all said."""

    method: str | None
    log: str
    timed_out: bool = False


# --- taking ----------------------------------------------------------------------------------------------------------


async def head(runtime: Runtime, repo: str) -> str | None:
    """The commit that is checked out, or None where there is no git repository with a commit."""
    result = await runtime.exec(("git", "rev-parse", "--verify", "--quiet", "HEAD^{commit}"), cwd=repo, env=_GIT_ENV)
    return result.stdout.decode().strip() if result.ok else None


async def take_diff(runtime: Runtime, repo: str, base: str, *, limit: int) -> bytes | None:
    """A binary-safe patch of everything against `base`; None where that commit, or git, is gone."""
    result, content = await _captured(runtime, _DIFF, repo, {**_GIT_ENV, "BASE": base}, limit)
    return content if result.ok or content.startswith(REFUSED) else None


async def take_output(runtime: Runtime, repo: str, command: str, *, limit: int) -> bytes:
    """The patch that a command prints. Raises EvaluationError where it fails."""
    result, content = await _captured(runtime, command, repo, _GIT_ENV, limit)
    if not result.ok and not content.startswith(REFUSED):
        raise EvaluationError(f"patch_command ended with {result.exit_code}: {result.text[-2000:].strip()}")
    return content


async def take_tree(runtime: Runtime, repo: str, *, exclude: Sequence[str], limit: int) -> bytes:
    """The whole tree but .git, equal bytes for equal trees. Raises EvaluationError where it cannot be read."""
    options = shlex.join(f"--exclude={pattern}" for pattern in ("./.git", *exclude))
    script = f"tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner {options} -cf - ."
    result, content = await _captured(runtime, script, repo, {}, limit)
    if content.startswith(REFUSED):
        return content
    if not result.ok:
        raise EvaluationError(f"cannot archive {repo}: {result.text[-2000:].strip()}")
    return TREE + content


async def _captured(
    runtime: Runtime, script: str, cwd: str, env: Mapping[str, str], limit: int
) -> tuple[ExecResult, bytes]:
    """What a script prints, whole: through a file, since output of a command is kept only in part."""
    readable = "chmod -R u+rX . 2>/dev/null || true"
    whole = f'set -o pipefail\n{readable}\nout=$(mktemp)\necho "$out"\n(\n{script}\n) | head -c {limit + 1} >"$out"\n'
    result = await runtime.exec(whole, cwd=cwd, env=env)
    path = result.stdout.decode(errors="surrogateescape").partition("\n")[0]
    if not path:
        return result, b""
    with tempfile.TemporaryDirectory(prefix="polar-artifact-") as directory:
        target = anyio.Path(directory, "content")
        await runtime.download(path, Path(target))
        content = await target.read_bytes()
    if len(content) > limit:
        return result, REFUSED + b"artifact_too_large"
    return result, content


# --- reading ---------------------------------------------------------------------------------------------------------


def sections(patch: bytes) -> Iterator[tuple[str, bytes]]:
    """(path, section) of each file of a git patch; what stands before the first one has the path ""."""
    for section in re.split(rb"(?m)^(?=diff --git )", patch):
        if section:
            yield (_path_of(section) if section.startswith(b"diff --git ") else ""), section


def without(patch: bytes, patterns: Sequence[str]) -> bytes:
    """The patch less the files of which the path, or a part of it, matches a glob."""
    return b"".join(section for path, section in sections(patch) if not excluded(path, patterns))


def excluded(path: str, patterns: Sequence[str]) -> bool:
    names = (path, *PurePosixPath(path).parts)
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def normalised(patch: bytes) -> bytes:
    """As models write patches, so as git takes them: a newline at the end, and none of CRLF where headers have it."""
    if re.search(rb"(?m)^(--- |\+\+\+ |@@ ).*\r$", patch):
        patch = patch.replace(b"\r\n", b"\n")
    return patch if patch.endswith(b"\n") else patch + b"\n"


def _path_of(section: bytes) -> str:
    header = re.split(rb"(?m)^(?:@@ |GIT binary patch|Binary files )", section, maxsplit=1)[0]
    for line in reversed(header.splitlines()):
        if line.startswith((b"+++ ", b"--- ")) and not line.endswith(b"/dev/null"):
            return _unquoted(line[4:].rstrip(b"\t\r"))
        if line.startswith((b"rename to ", b"copy to ")):
            return _unquoted(b"b/" + line.partition(b" to ")[2])
    names = header.splitlines()[0].removeprefix(b"diff --git ")
    if names.endswith(b'"'):
        return _unquoted(
            names[names.index(b' "', 1) + 1 :] if names.startswith(b'"') else names[names.index(b' "') + 1 :]
        )
    return _unquoted(names[len(names) // 2 + 1 :])


def _unquoted(name: bytes) -> str:
    r"""A path without its a/ or b/, out of git's C-style quoting ("a/\303\244.txt")."""
    if name.startswith(b'"'):
        named = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}

        def plain(match: re.Match[bytes]) -> bytes:
            code = match[1]
            return bytes([int(code, 8) & 255]) if len(code) == 3 else named.get(code, code)

        name = re.sub(rb"\\([0-7]{3}|.)", plain, name[1:-1])
    return name.partition(b"/")[2].decode(errors="surrogateescape")


# --- laying over -----------------------------------------------------------------------------------------------------


async def apply_patch(runtime: Runtime, repo: str, patch: bytes, *, timeout: float) -> Applied:
    """Apply as it stands, else by ever more forgiving means; nothing is left half applied but by the last."""
    directory = await _scratch(runtime)
    await runtime.upload(patch, f"{directory}/raw")
    await runtime.upload(normalised(patch), f"{directory}/fixed")
    env = {**_GIT_ENV, "RAW": f"{directory}/raw", "FIXED": f"{directory}/fixed"}
    result = await runtime.exec(_APPLY, cwd=repo, env=env, timeout=timeout)
    lines = result.stdout.decode(errors="replace").strip().splitlines()
    return Applied(lines[-1] if result.ok and lines else None, result.text[-4000:].strip(), result.timed_out)


async def apply_tree(runtime: Runtime, repo: str, tree: bytes, fresh: bytes, *, timeout: float) -> Applied:
    """Make the tree at `repo`, now `fresh`, equal to `tree` (both as `take_tree` gives them)."""
    wanted, there = _entries(tree), _entries(fresh)
    gone = [name for name, kind in there.items() if wanted.get(name) != kind]
    directory = await _scratch(runtime)
    await runtime.upload(tree.removeprefix(TREE), f"{directory}/tree")
    await runtime.upload(b"".join(name + b"\0" for name in gone), f"{directory}/gone")
    script = 'xargs -0 -r rm -rf -- <"$SCRATCH/gone" && tar -xpf "$SCRATCH/tree"'
    result = await runtime.exec(script, cwd=repo, env={"SCRATCH": directory}, timeout=timeout)
    return Applied("tree" if result.ok else None, result.text[-4000:].strip(), result.timed_out)


def _entries(tree: bytes) -> dict[bytes, bytes]:
    """Path -> kind of each member. Raises EvaluationError where it is no archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(tree.removeprefix(TREE)), errors="surrogateescape") as archive:
            return {
                member.name.encode(errors="surrogateescape"): member.type for member in archive if member.name != "."
            }
    except tarfile.TarError as error:
        raise EvaluationError(f"the archive of the workspace cannot be read: {error}") from error


async def _scratch(runtime: Runtime) -> str:
    result = await runtime.exec(("mktemp", "-d"))
    if not result.ok:
        raise EvaluationError(f"cannot make a temporary directory in the sandbox: {result.text.strip()}")
    return result.stdout.decode().strip()
