"""What every runtime does, in one body: run for each way of isolation there is."""

from __future__ import annotations

import os
import resource
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from polar_plugin.errors import SandboxError
from polar_plugin.runtimes.base import Runtime
from polar_plugin.runtimes.local import LocalRuntime

from .boxes import ISOLATIONS, processes_with, remains, sandbox

pytestmark = pytest.mark.anyio

STUBBORN = """
trap '' TERM INT HUP
setsid sleep 1000 &
(trap '' TERM; setsid bash -c 'trap "" TERM; sleep 1000 & sleep 1000; sleep 1000') &
(setsid setsid nohup sleep 1000 >/dev/null 2>&1 </dev/null &)
echo started
"""


@pytest.fixture(params=ISOLATIONS)
async def box(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Runtime]:
    async with sandbox(isolation=request.param, root=tmp_path / "root") as runtime:
        yield runtime


# --- exec ------------------------------------------------------------------------------------------------------------


async def test_a_script_and_an_argument_vector_both_run(box: Runtime) -> None:
    assert (await box.exec("echo a b | tr a-z A-Z")).stdout == b"A B\n"
    assert (await box.exec(("printf", "%s|", "a b", "$HOME", "*"))).stdout == b"a b|$HOME|*|"


async def test_both_streams_and_the_exit_code_come_back(box: Runtime) -> None:
    result = await box.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not result.ok


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
async def test_a_signal_is_128_and_its_number(box: Runtime, name: str, code: int) -> None:
    assert (await box.exec(f"kill -{name} $$")).exit_code == code


async def test_a_program_that_is_missing_or_no_program_is_127_or_126(box: Runtime) -> None:
    missing = await box.exec(("no-such-program",))
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr
    assert (await box.exec(("/etc/passwd",))).exit_code == 126


async def test_a_working_directory_that_is_missing_is_126(box: Runtime) -> None:
    result = await box.exec("true", cwd="/no/such/place")
    assert result.exit_code == 126
    assert b"/no/such/place" in result.stderr


async def test_commands_start_in_the_workspace_and_relative_directories_lie_in_it(box: Runtime) -> None:
    await box.exec("mkdir -p deep/er")
    assert (await box.exec("pwd")).stdout.decode().strip() == box.workdir
    assert (await box.exec("pwd", cwd="deep/er")).stdout.decode().strip() == f"{box.workdir}/deep/er"


async def test_the_environment_is_what_was_given_and_nothing_of_ours(
    box: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "1")
    told = (await box.exec("env -0", env={"GIVEN": "a=b c\n'd' é", "EMPTY": ""})).stdout.decode()
    variables = dict(line.partition("=")[::2] for line in told.split("\0"))
    assert variables["GIVEN"] == "a=b c\n'd' é"
    assert variables["EMPTY"] == ""
    assert variables["HOME"] == box.home
    assert "SECRET_OF_THE_TRAINER" not in told


async def test_large_environments_and_scripts_get_through(box: Runtime) -> None:
    big = "x" * 100_000
    assert (await box.exec("printf %s ${#BIG}", env={"BIG": big})).stdout == b"100000"
    assert (await box.exec(f": {'y' * 300_000}\necho end")).stdout == b"end\n"


async def test_neither_script_nor_environment_is_on_a_command_line(box: Runtime) -> None:
    secret = secrets.token_hex(8)
    told = await box.exec(f"cat /proc/*/cmdline; : {secret}", env={"KEY": secret})
    assert told.ok
    assert secret not in told.text
    seen: list[bytes] = []

    async def look() -> None:
        while not processes_with(secret):
            await anyio.sleep(0.01)
        seen.extend(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(
                box.exec,
                f"read -r line; : {secret}; sleep 0.5",
            )
            group.start_soon(lambda: box.exec("sleep 0.5", env={"KEY": secret}))
            await look()
    assert seen
    assert not [line for line in seen if secret.encode() in line]


async def test_stdin_is_what_was_given_and_then_ends(box: Runtime) -> None:
    with anyio.fail_after(20):
        assert (await box.exec("cat; echo end")).stdout == b"end\n"
        assert (await box.exec("wc -c", stdin=bytes(5_000_000))).stdout.strip() == b"5000000"
        assert (await box.exec("true", stdin=bytes(5_000_000))).ok


async def test_output_is_bytes_whatever_they_are(box: Runtime) -> None:
    every = bytes(range(256))
    assert (await box.exec("cat", stdin=every)).stdout == every
    result = await box.exec(r"printf '\377\376ok'")
    assert result.stdout == b"\xff\xfeok"
    assert result.text.endswith("ok")


async def test_a_flood_of_output_costs_linear_time_and_bounded_memory(box: Runtime) -> None:
    await box.exec("true")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    result = await box.exec("head -c 50000000 /dev/zero; echo; echo the end")
    assert result.stdout.endswith(b"the end\n")
    assert result.truncated
    assert len(result.stdout) == 8 << 20
    assert time.monotonic() - started < 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 * 1024, f"grew by {grown} KiB"


async def test_short_output_is_whole(box: Runtime) -> None:
    result = await box.exec("seq 100000")
    assert not result.truncated
    assert result.stdout.count(b"\n") == 100_000


async def test_commands_run_side_by_side(box: Runtime) -> None:
    """Each waits for a file that the other writes."""
    results: list[bytes] = []

    async def one(mine: str, other: str) -> None:
        script = f"echo > {mine}; until [ -e {other} ]; do sleep 0.02; done; echo {mine}"
        results.append((await box.exec(script)).stdout)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(one, "a", "b")
            group.start_soon(one, "b", "a")
    assert sorted(results) == [b"a\n", b"b\n"]


async def test_a_command_runs_once(box: Runtime) -> None:
    for _ in range(3):
        await box.exec("echo ran >> log; exit 1")
    assert (await box.exec("cat log")).stdout == b"ran\n" * 3


# --- the end of processes --------------------------------------------------------------------------------------------


async def test_at_the_deadline_every_process_dies_and_the_output_is_kept(box: Runtime) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    result = await box.exec(f"export {marker}\n{STUBBORN}\nsleep 1000", timeout=1.5)
    assert result.timed_out
    assert result.exit_code == 137
    assert result.stdout == b"started\n"
    assert result.seconds < 6
    assert processes_with(marker) == []


async def test_what_a_command_leaves_behind_dies_with_it(box: Runtime) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    with anyio.fail_after(20):
        result = await box.exec(f"export {marker}\n{STUBBORN}")
    assert result.exit_code == 0
    assert result.stdout == b"started\n"
    assert processes_with(marker) == []


async def test_cancelling_kills_every_process(box: Runtime) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(box.exec, f"export {marker}\n{STUBBORN}\ntouch up; sleep 1000")
            while not (await box.exec(("test", "-e", "up"))).ok:
                await anyio.sleep(0.02)
            assert processes_with(marker)
            group.cancel_scope.cancel()
    assert processes_with(marker) == []


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.1])
async def test_cancelling_early_leaves_no_process(box: Runtime, delay: float) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    with anyio.move_on_after(delay):
        await box.exec("sleep 1000", env=dict([marker.split("=")]))
    assert processes_with(marker) == []


async def test_stopping_ends_what_runs_and_says_so(box: Runtime) -> None:
    marker = f"MARK={secrets.token_hex(8)}"

    async def running() -> None:
        with pytest.raises(SandboxError, match="stopped"):
            await box.exec(f"export {marker}; touch up; sleep 1000")

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(running)
            while not (await box.exec(("test", "-e", "up"))).ok:
                await anyio.sleep(0.02)
            await box.stop()
    assert processes_with(marker) == []


# --- life ------------------------------------------------------------------------------------------------------------


async def test_files_persist_over_commands(box: Runtime) -> None:
    await box.exec('echo 1 > w; echo 2 > "$HOME/h"; echo 3 > "$TMPDIR/t"')
    assert (await box.exec('cat w "$HOME/h" "$TMPDIR/t"')).stdout == b"1\n2\n3\n"


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
async def test_an_image_is_copied_and_never_written(isolation: str, tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "sub").mkdir(parents=True)
    (image / "sub" / "run.sh").write_text("echo hello\n")
    (image / "sub" / "run.sh").chmod(0o755)
    (image / "link").symlink_to("sub/run.sh")
    async with sandbox(isolation=isolation, image=str(image)) as box:
        assert (await box.exec("sub/run.sh && test -L link && echo x > sub/run.sh && rm link")).stdout == b"hello\n"
    assert (image / "sub" / "run.sh").read_text() == "echo hello\n"
    assert (image / "link").is_symlink()


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_stop_removes_everything_twice_is_fine_and_then_nothing_runs(isolation: str, tmp_path: Path) -> None:
    async with sandbox(isolation=isolation, root=tmp_path) as box:
        await box.exec("mkdir -p locked/in && touch locked/in/f && chmod 000 locked/in locked")
        assert len(remains(isolation, tmp_path)) == 1
        await box.stop()
        assert remains(isolation, tmp_path) == []
        await box.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await box.exec("true")


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.3])
async def test_cancelling_a_start_leaves_nothing(isolation: str, delay: float, tmp_path: Path) -> None:
    with anyio.move_on_after(delay):
        async with sandbox(isolation=isolation, root=tmp_path):
            await anyio.sleep_forever()
    assert remains(isolation, tmp_path) == []


async def test_stop_before_start_is_fine_and_no_command_runs_before_start() -> None:
    from polar_plugin.records import RuntimeSpec

    runtime = LocalRuntime(RuntimeSpec(), proxy=None, labels={})
    with pytest.raises(SandboxError, match="not started"):
        await runtime.exec("true")
    await runtime.stop()


# --- files -----------------------------------------------------------------------------------------------------------


async def test_bytes_and_files_are_uploaded_with_their_parents_and_modes(box: Runtime, tmp_path: Path) -> None:
    script = tmp_path / "s.sh"
    script.write_bytes(b"#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    await box.upload(b"\x00\xff", f"{box.home}/a/b/blob")
    await box.upload(script, "bin/run me.sh")
    assert (await box.exec('od -An -tx1 "$HOME/a/b/blob"')).stdout.split() == [b"00", b"ff"]
    assert (await box.exec(("./bin/run me.sh",))).stdout == b"ran\n"


async def test_an_upload_replaces_a_file_and_fills_a_directory(box: Runtime, tmp_path: Path) -> None:
    await box.exec("mkdir d; echo old > d/f; echo kept > d/g; chmod 400 d/f")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("new\n")
    await box.upload(tmp_path / "d", "d")
    assert (await box.exec("cat d/f d/g")).stdout == b"new\nkept\n"


async def test_a_tree_goes_in_and_comes_out_the_same(box: Runtime, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "empty").mkdir(parents=True)
    (tree / "exec").write_bytes(b"x")
    (tree / "exec").chmod(0o750)
    (tree / "na me\n'\"é").write_bytes(bytes(range(256)))
    (tree / "to").symlink_to("exec")
    (tree / "dangling").symlink_to("/no/where")
    await box.upload(tree, "tree")
    await box.download("tree", tmp_path / "back" / "tree")
    back = tmp_path / "back" / "tree"
    assert sorted(path.name for path in back.iterdir()) == sorted(path.name for path in tree.iterdir())
    assert back.joinpath("exec").stat().st_mode & 0o777 == 0o750
    assert back.joinpath("na me\n'\"é").read_bytes() == bytes(range(256))
    assert back.joinpath("dangling").readlink() == Path("/no/where")
    assert back.joinpath("to").readlink() == Path("exec")


async def test_large_files_go_both_ways(box: Runtime, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 100
    await box.upload(content, "large")
    await box.download("large", tmp_path / "large")
    assert (tmp_path / "large").read_bytes() == content


async def test_what_cannot_be_copied_says_which(box: Runtime, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no-such"):
        await box.upload(tmp_path / "no-such", "x")
    with pytest.raises(SandboxError, match="nothing-here"):
        await box.download("nothing-here", tmp_path / "x")


async def test_set_uid_bits_do_not_come_out(box: Runtime, tmp_path: Path) -> None:
    await box.exec("mkdir d && cp /bin/true d/su && chmod 6755 d/su")
    await box.download("d", tmp_path / "d")
    assert (tmp_path / "d" / "su").stat().st_mode & 0o7777 == 0o755
