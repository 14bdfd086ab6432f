"""Sandboxes on this machine: what commands do in them, and what they cannot reach."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from aiohttp import web

from polar_plugin.errors import ConfigError, SandboxError
from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes.base import ProxyEndpoint
from polar_plugin.runtimes.local import LocalRuntime
from polar_plugin.runtimes.process import OUTPUT_LIMIT, Tail

pytestmark = pytest.mark.anyio
BOTH = pytest.mark.parametrize("isolation", ["bubblewrap", "none"])


@asynccontextmanager
async def opened(
    isolation: str = "bubblewrap", proxy: ProxyEndpoint | None = None, **spec: object
) -> AsyncGenerator[LocalRuntime]:
    runtime = LocalRuntime(RuntimeSpec(**{"network": "none", **spec}), proxy=proxy, labels={}, isolation=isolation)
    with anyio.fail_after(60):
        await runtime.start()
        try:
            yield runtime
        finally:
            await runtime.stop()
            await runtime.stop()


def marked_processes(mark: str) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in line and "pytest" not in line:
                found.append(line)
    return found


@BOTH
async def test_a_script_or_an_argument_vector_runs_in_the_workspace(isolation: str) -> None:
    async with opened(isolation) as runtime:
        script = await runtime.exec("echo $A > f; pwd; cat f; exit 3", env={"A": "b c"})
        assert (script.exit_code, script.stdout.decode().split("\n")[1]) == (3, "b c")
        vector = await runtime.exec(["cat", "f"])
        assert (vector.ok, vector.stdout) == (True, b"b c\n")


@BOTH
async def test_stdin_is_given_and_then_ends(isolation: str) -> None:
    async with opened(isolation) as runtime:
        assert (await runtime.exec(["cat"], stdin=b"\0\xff" * 100_000)).stdout == b"\0\xff" * 100_000
        assert (await runtime.exec(["cat"])).stdout == b""
        assert (await runtime.exec(["true"], stdin=b"x" * 1_000_000)).ok


@BOTH
async def test_a_signal_shows_in_the_exit_code(isolation: str) -> None:
    async with opened(isolation) as runtime:
        assert (await runtime.exec("kill -TERM $$")).exit_code == 143
        assert (await runtime.exec(["no-such-program"])).exit_code in (1, 127) if isolation != "none" else True


async def test_a_program_that_does_not_exist_cannot_be_started() -> None:
    async with opened("none") as runtime:
        with pytest.raises(SandboxError, match="cannot start"):
            await runtime.exec(["no-such-program"])


@BOTH
async def test_huge_output_is_bounded_and_its_tail_kept(isolation: str) -> None:
    async with opened(isolation) as runtime:
        result = await runtime.exec("head -c 50000000 /dev/zero; printf end", timeout=50)
        assert result.ok
        assert result.truncated
        assert len(result.stdout) == OUTPUT_LIMIT
        assert result.stdout.endswith(b"\0end")


def test_a_tail_keeps_what_fits() -> None:
    tail = Tail(limit=4)
    for chunk in (b"ab", b"c", b"def"):
        tail.add(chunk)
    assert (tail.bytes(), tail.truncated) == (b"cdef", True)


@BOTH
async def test_case_118_a_deadline_kills_whatever_was_started_and_keeps_the_output(isolation: str) -> None:
    mark = f"98765{os.getpid()}"
    script = f"""
        trap '' TERM
        setsid sleep {mark} & (trap '' TERM; exec sleep {mark}) & setsid bash -c 'trap "" TERM; sleep {mark}' &
        echo before; sleep {mark}"""
    async with opened(isolation) as runtime:
        result = await runtime.exec(script, timeout=1.0)
        assert result.timed_out
        assert result.exit_code == 137
        assert result.stdout == b"before\n"
        with anyio.fail_after(5):
            while marked_processes(mark):
                await anyio.sleep(0.02)


@BOTH
async def test_cancelling_kills_too(isolation: str) -> None:
    mark = f"87654{os.getpid()}"
    async with opened(isolation) as runtime:
        async with anyio.create_task_group() as group:
            group.start_soon(runtime.exec, f"setsid sleep {mark} & sleep {mark}")
            with anyio.fail_after(10):
                while len(marked_processes(mark)) < 2:
                    await anyio.sleep(0.02)
            group.cancel_scope.cancel()
        with anyio.fail_after(5):
            while marked_processes(mark):
                await anyio.sleep(0.02)


@BOTH
async def test_commands_run_side_by_side(isolation: str) -> None:
    """Each waits for the other, so they end only if both run."""
    async with opened(isolation) as runtime, anyio.create_task_group() as group:
        group.start_soon(runtime.exec, "until [ -e b ]; do sleep .02; done; touch a")
        group.start_soon(runtime.exec, "touch b; until [ -e a ]; do sleep .02; done")


@BOTH
async def test_trees_are_copied_with_modes_and_links(isolation: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "d").mkdir(parents=True)
    (source / "d" / "x.sh").write_text("echo hi")
    (source / "d" / "x.sh").chmod(0o755)
    (source / "link").symlink_to("d/x.sh")
    async with opened(isolation) as runtime:
        base = runtime.workdir
        await runtime.upload(source, f"{base}/tree")
        await runtime.upload(b"\0bytes", f"{base}/new/file.bin")
        assert (
            await runtime.exec("tree/d/x.sh && readlink tree/link && wc -c < new/file.bin")
        ).stdout == b"hi\nd/x.sh\n6\n"
        await runtime.download(f"{base}/tree", tmp_path / "out")
    assert (tmp_path / "out" / "d" / "x.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "link").readlink() == Path("d/x.sh")


async def test_the_image_is_a_directory_that_the_workspace_starts_with(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)")
    async with opened(image=str(tmp_path)) as runtime:
        assert (await runtime.exec(["cat", "a.py"])).stdout == b"print(1)"
        await runtime.exec("echo changed > a.py")
    assert (tmp_path / "a.py").read_text() == "print(1)"


async def test_the_sandbox_has_this_python_but_not_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    async with opened() as runtime:
        assert (await runtime.exec(["python3", "-c", "import json, ssl, sqlite3; print(1)"])).stdout == b"1\n"
        for command in (
            "touch /usr/x", f"cat {secret}", "mount -o remount,rw,bind /usr", f"ls {Path.home()}/.ssh",
            "cat /etc/shadow",
        ):  # fmt: skip
            assert not (await runtime.exec(command)).ok, command
        assert (await runtime.exec("id -u; ls /proc | grep -c '^[0-9]'")).stdout.split()[0] == b"1000"


async def test_two_sandboxes_do_not_see_each_other() -> None:
    async with opened() as one, opened() as other:
        await one.exec("echo mine > /tmp/x; echo mine > ~/x; echo mine > x")
        assert (await other.exec("ls -A /tmp ~ . | grep x")).exit_code == 1


async def test_the_environment_of_the_trainer_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "x")
    async with opened(env={"OWN": "1"}) as runtime:
        told = (await runtime.exec(["env"])).stdout
        assert b"TRAINER_SECRET" not in told
        assert b"OWN=1" in told


@pytest.fixture
def host_port() -> Iterator[int]:
    """A service of the host on 127.0.0.1, such as an engine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close(), daemon=True)
        thread.start()
        yield server.getsockname()[1]
        socket.create_connection(server.getsockname()).close()
        thread.join()


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"


async def test_proxy_only_reaches_the_proxy_and_nothing_else(tmp_path: Path, host_port: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"hello {await request.text()}")

    app = web.Application()
    app.router.add_post("/v1/x", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    path = tmp_path / "p.sock"
    await web.UnixSite(runner, str(path)).start()
    path.chmod(0o666)
    try:
        endpoint = ProxyEndpoint("http://127.0.0.1:1", path)
        async with opened(proxy=endpoint, network="proxy_only") as runtime:
            post = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], b'me', timeout=5).read().decode())"
            result = await runtime.exec(["python3", "-c", post, runtime.proxy_url + "/v1/x"])
            assert result.stdout == b"hello me\n", result.text
            for host, port in (("127.0.0.1", host_port), ("10.0.0.1", 80), ("192.0.2.1", 443)):
                assert not (await runtime.exec(["python3", "-c", CONNECT, host, str(port)])).ok
            lookup = "import socket; socket.getaddrinfo('example.org', 443)"
            assert not (await runtime.exec(["python3", "-c", lookup])).ok
            assert (await runtime.exec("exit 7")).exit_code == 7
            assert (await runtime.exec("kill -TERM $$")).exit_code == 143
            killed = await runtime.exec("sleep 1000", timeout=0.5)
            assert killed.timed_out
    finally:
        await runner.cleanup()


async def test_a_link_that_an_agent_left_leads_nobody_to_the_host(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    async with opened() as runtime:
        await runtime.exec(f"ln -s {outside} d; ln -s {outside}/secret f; ln -s {outside} whole")
        with pytest.raises(SandboxError, match="leads out"):
            await runtime.upload(b"x", "/workspace/d/new")
        await runtime.upload(b"x", "/workspace/f")
        await runtime.download("/workspace/whole", tmp_path / "got")
    assert (outside / "secret").read_text() == "s"
    assert not (outside / "new").exists()
    assert (tmp_path / "got").is_symlink()


async def test_stop_removes_everything_also_what_the_agent_locked() -> None:
    async with opened() as runtime:
        await runtime.exec("mkdir -p a/b; touch a/b/c; chmod 000 a/b a")
        directory = runtime._root
    assert not directory.exists()
    with pytest.raises(SandboxError, match="not running"):
        await runtime.exec("true")


async def test_memory_is_limited() -> None:
    async with opened(memory_mb=300) as runtime:
        hungry = await runtime.exec([sys.executable.split("/")[-1], "-c", "x = bytearray(600 << 20)"])
        assert b"MemoryError" in hungry.stderr


@pytest.mark.parametrize(
    ("spec", "kwargs", "message"),
    [
        ({"network": "bridge"}, {}, "runtime.network"),
        ({"gpus": 1}, {}, "runtime.gpus"),
        ({}, {"isolation": "docker"}, "runtime.kwargs.isolation"),
    ],
)
async def test_what_the_backend_cannot_do_is_refused(
    spec: dict[str, object], kwargs: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalRuntime(RuntimeSpec(**spec), proxy=None, labels={}, **kwargs)


async def test_a_missing_image_is_infrastructure() -> None:
    with pytest.raises(SandboxError, match="image"):
        async with opened(image="/no/such/directory"):
            pass
