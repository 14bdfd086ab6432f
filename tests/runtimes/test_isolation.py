"""What an agent in the local sandbox cannot do, and the one peer it can reach."""

# ruff: noqa: SIM117 - a test waits for other processes by looking, and may block

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest

from polar_plugin.errors import ConfigError, SandboxError
from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes.base import ProxyEndpoint
from polar_plugin.runtimes.local import LocalRuntime

from .boxes import processes_with, sandbox

pytestmark = pytest.mark.anyio

CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3) as s:
        s.sendall(b"hello\\n"); s.shutdown(socket.SHUT_WR)
        print("got", b"".join(iter(lambda: s.recv(100), b"")).decode())
except OSError as error:
    print("refused", error)
"""


@asynccontextmanager
async def echo_on(listener: anyio.abc.Listener[anyio.abc.SocketStream]) -> AsyncGenerator[list[bytes]]:
    """Answers whatever comes in, in capitals, once the client has ended; the list is what came in."""
    heard: list[bytes] = []

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            content = b""
            async for chunk in stream:
                content += chunk
            heard.append(content)
            await stream.send(content.upper())

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, answer)
        yield heard
        group.cancel_scope.cancel()


# --- files -----------------------------------------------------------------------------------------------------------


async def test_the_system_is_read_only_even_to_a_remount() -> None:
    async with sandbox() as box:
        for place in ("/usr/x", "/etc/x", "/x", "/run/x", "/bin/x", "/run/polar/forward.py", f"{sys.base_prefix}/x"):
            result = await box.exec(f"echo > {place}")
            assert not result.ok, place
        assert not (await box.exec("mount -o remount,rw,bind /usr && touch /usr/x")).ok
    assert not Path("/usr/x").exists()


async def test_nothing_of_the_kernels_settings_is_writable() -> None:
    """Where root runs the sandbox, root's files of /proc are the agent's to write, but for the mounts.

    It is only asked whether a write would be let through: a test that failed by writing would change this machine.
    """
    async with sandbox() as box:
        for place in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger", "self/oom_score_adj"):
            assert (await box.exec(f"! test -w /proc/{place}")).ok, place
        assert (await box.exec("find /proc /sys -maxdepth 5 -writable -type f 2>/dev/null")).stdout == b""


async def test_no_namespace_with_rights_of_its_own_can_be_made() -> None:
    async with sandbox() as box:
        for flags in ("-U", "-Ur", "-Um", "-m", "-n", "-p"):
            assert not (await box.exec(f"unshare {flags} true")).ok, flags


async def test_there_are_no_capabilities_and_none_can_be_won() -> None:
    async with sandbox() as box:
        assert (await box.exec("grep CapEff /proc/self/status")).stdout.split()[1] == b"0" * 16
        assert (await box.exec("grep NoNewPrivs /proc/self/status")).stdout.split()[1] == b"1"
        assert (await box.exec("id -u; id -g")).stdout == b"1000\n1000\n"


async def test_the_hosts_homes_and_temporary_files_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    async with sandbox() as box:
        assert not (await box.exec(("cat", str(secret)))).ok
        assert not (await box.exec(("cat", str(Path(__file__).resolve())))).ok
        assert not (await box.exec(("ls", f"/proc/{os.getpid()}/root"))).ok
        assert not (await box.exec("cat /etc/shadow /etc/hostname")).ok
        homes = (await box.exec("ls -A /home; ls -A /root | grep -v '^[.]pyenv$'; ls -A /tmp")).stdout
        assert homes == b"agent\n"


async def test_attempts_do_not_see_each_other(tmp_path: Path) -> None:
    async with sandbox(root=tmp_path) as one, sandbox(root=tmp_path) as other:
        await one.exec('echo secret | tee w "$HOME/h" /tmp/t')
        found = await other.exec(f"cat w $HOME/h /tmp/t; ls {tmp_path}; grep -rs secret /workspace /home /tmp")
        assert found.stdout == b""


async def test_the_uploads_and_downloads_follow_no_planted_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    async with sandbox(root=tmp_path / "root") as box:
        await box.exec(f"ln -s {victim} dir; ln -s {victim}/file file; ln -s /etc/passwd passwd")
        with pytest.raises(SandboxError):
            await box.upload(b"written", "dir/file")
        await box.upload(b"written", "file")
        assert (victim / "file").read_text() == "untouched"
        await box.download("passwd", tmp_path / "passwd")
        assert (tmp_path / "passwd").is_symlink()
        await box.exec("rm -rf dir; mkdir dir; echo evil > dir/file")
        (tmp_path / "dir").mkdir()
        (tmp_path / "dir" / "file").symlink_to(victim / "file")
        await box.download("dir", tmp_path / "dir")
    assert (victim / "file").read_text() == "untouched"
    assert (tmp_path / "dir" / "file").read_text() == "evil\n"


async def test_extra_binds_are_there_and_read_only(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tool").write_text("#!/bin/sh\necho tool\n")
    (tools / "tool").chmod(0o755)
    async with sandbox(kwargs={"ro_binds": [f"{tools}:/opt/tools"]}) as box:
        assert (await box.exec("/opt/tools/tool")).stdout == b"tool\n"
        assert not (await box.exec("echo > /opt/tools/x")).ok


async def test_a_process_that_wants_more_memory_than_allowed_does_not_get_it() -> None:
    async with sandbox(memory_mb=256) as box:
        hungry = "python3 -c 'x = bytearray(1 << 30)'"
        assert b"MemoryError" in (await box.exec(hungry)).stderr
        assert (await box.exec("python3 -c 'x = bytearray(1 << 26)'")).ok


# --- network ---------------------------------------------------------------------------------------------------------


async def test_the_proxy_is_reached_and_nothing_else(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    proxy = await anyio.create_unix_listener(socket_path)
    service = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = service.extra(anyio.abc.SocketAttribute.local_port)
    with anyio.fail_after(60):
        async with echo_on(proxy) as heard, echo_on(service) as overheard:
            endpoint = ProxyEndpoint(f"http://127.0.0.1:{port}", socket_path)
            async with sandbox(proxy=endpoint) as box:
                host, _, inside = box.proxy_url.removeprefix("http://").partition(":")
                assert (await box.exec(("python3", "-c", CONNECT, host, inside))).stdout == b"got HELLO\n\n"
                refused = (await box.exec(("python3", "-c", CONNECT, "127.0.0.1", str(port)))).stdout
                assert refused.startswith(b"refused")
                for address in ("192.0.2.1", "198.51.100.1", "203.0.113.1", "example.invalid"):  # reserved: nobody's
                    result = await box.exec(("python3", "-c", CONNECT, address, "443"))
                    assert result.stdout.startswith(b"refused"), (address, result)
                assert not (await box.exec("ls /var/run/docker.sock /run/docker.sock")).ok
    assert heard == [b"hello\n"]
    assert overheard == []


async def test_many_connections_and_large_bodies_pass_the_forwarder(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    script = """
import socket, sys, threading
def one(n):
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as s:
        body = bytes([97 + n]) * 1_000_000
        threading.Thread(target=lambda: (s.sendall(body), s.shutdown(socket.SHUT_WR))).start()
        got = b"".join(iter(lambda: s.recv(65536), b""))
        assert got == body.upper(), len(got)
threads = [threading.Thread(target=one, args=(n,)) for n in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    with anyio.fail_after(60):
        async with echo_on(await anyio.create_unix_listener(socket_path)) as heard:
            async with sandbox(proxy=ProxyEndpoint("http://x", socket_path)) as box:
                host, _, port = box.proxy_url.removeprefix("http://").partition(":")
                result = await box.exec(("python3", "-c", script, host, port))
                assert (result.ok, result.stderr) == (True, b"")
    assert len(heard) == 16


async def test_the_proxy_learns_at_once_that_a_client_was_killed(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    connected, hung_up = anyio.Event(), anyio.Event()

    async def wait_for_end(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            connected.set()
            async for _ in stream:
                pass
            hung_up.set()

    listener = await anyio.create_unix_listener(socket_path)
    endpoint = ProxyEndpoint("http://x", socket_path)
    async with listener, anyio.create_task_group() as group, sandbox(proxy=endpoint) as box:
        group.start_soon(listener.serve, wait_for_end)
        host, _, port = box.proxy_url.removeprefix("http://").partition(":")
        script = f"exec 3<>/dev/tcp/{host}/{port}; sleep 1000"
        group.start_soon(
            box.exec, f"bash -c '{script}' & until [ -e done ]; do sleep 0.02; done; kill -9 $!; sleep 1000"
        )
        with anyio.fail_after(20):
            await connected.wait()
            await box.exec("touch done")
            await hung_up.wait()
        group.cancel_scope.cancel()


async def test_an_agent_cannot_cut_itself_off_by_killing_all_it_can(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    async with echo_on(await anyio.create_unix_listener(socket_path)):
        async with sandbox(proxy=ProxyEndpoint("http://x", socket_path)) as box:
            host, _, port = box.proxy_url.removeprefix("http://").partition(":")
            script = f"""
python3 -c 'import time; time.sleep(100)' &
kill -9 1; kill 1; kill -INT 1; pkill -9 -f python; wait $!
exec python3 -c '{CONNECT.replace("'", '"')}' {host} {port}
"""
            result = await box.exec(script)
            assert result.stdout == b"got HELLO\n\n", result.text


async def test_no_network_is_no_proxy(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    async with echo_on(await anyio.create_unix_listener(socket_path)):
        async with sandbox(proxy=ProxyEndpoint("http://x", socket_path), network="none") as box:
            assert box.proxy_url == ""
            assert not (await box.exec("ls /run/polar/proxy.sock")).ok
            assert (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split() == [b"lo"]


@pytest.mark.parametrize("how", [{"network": "host"}, {"isolation": "none"}])
async def test_sharing_the_network_is_said_and_leads_to_the_proxys_own_port(
    how: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    service = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = service.extra(anyio.abc.SocketAttribute.local_port)
    with caplog.at_level(logging.WARNING):
        async with echo_on(service), sandbox(proxy=ProxyEndpoint(f"http://127.0.0.1:{port}"), **how) as box:
            assert box.proxy_url == f"http://127.0.0.1:{port}"
            assert (await box.exec(("python3", "-c", CONNECT, "127.0.0.1", str(port)))).stdout == b"got HELLO\n\n"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (RuntimeSpec(network="bridge"), "proxy_only, none, host"),
        (RuntimeSpec(gpus=1), "gpus"),
        (RuntimeSpec(workdir="relative"), "absolute"),
        (RuntimeSpec(image="/no/such/image"), "/no/such/image"),
        (RuntimeSpec(kwargs={"isolation": "docker"}), "isolation"),
        (RuntimeSpec(kwargs={"nonsense": 1}), "ro_binds"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused_with_what_can(spec: RuntimeSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LocalRuntime(spec, proxy=None, labels={})


def test_a_proxy_without_a_socket_is_refused_where_only_a_socket_leads_out() -> None:
    with pytest.raises(ConfigError, match="Unix socket"):
        LocalRuntime(RuntimeSpec(), proxy=ProxyEndpoint("http://127.0.0.1:1"), labels={})


async def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*isolation: none"):
        async with sandbox():
            pass


async def test_a_sandbox_that_cannot_be_built_fails_as_infrastructure(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"did not start its command.*no-such-directory"):
        async with sandbox(root=tmp_path, kwargs={"ro_binds": ["/no-such-directory"]}):
            pass
    assert list(tmp_path.iterdir()) == []


# --- when the trainer dies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
def test_a_killed_trainer_takes_its_agents_with_it(isolation: str, tmp_path: Path) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    program = textwrap.dedent(f"""
        import anyio
        from polar_plugin.records import RuntimeSpec
        from polar_plugin.runtimes.local import LocalRuntime
        async def main():
            kwargs = dict(isolation={isolation!r}, root={str(tmp_path)!r})
            runtime = LocalRuntime(RuntimeSpec(kwargs=kwargs), proxy=None, labels=dict(owner="me"))
            await runtime.start()
            async with anyio.create_task_group() as group:
                group.start_soon(runtime.exec, "export {marker}; setsid sleep 1000 & touch up; sleep 1000")
                while not (await runtime.exec(("test", "-e", "up"))).ok:
                    await anyio.sleep(0.02)
                print("up", flush=True)
        anyio.run(main)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        assert processes_with(marker)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()

    async def gone() -> None:
        with anyio.fail_after(10):
            while processes_with(marker):
                await anyio.sleep(0.01)

    anyio.run(gone)
    labels = [json.loads(path.read_text()) for path in tmp_path.glob("*/labels.json")]
    assert labels == [{"owner": "me"}]
