"""What is Apptainer's own: ways to write, the way to the proxy, limits that are looked after, and what dies with whom."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc
import pytest

from polar_plugin import plugins
from polar_plugin.errors import ConfigError, SandboxError
from polar_plugin.records import RuntimeSpec
from polar_plugin.runtimes import apptainer as backend
from polar_plugin.runtimes.apptainer import ApptainerRuntime
from polar_plugin.runtimes.apptainer_sweep import ownerless, sweep
from polar_plugin.runtimes.base import ProxyEndpoint

from . import apptainer
from .boxes import processes_with, sandbox
from .test_isolation import CONNECT, echo_on

pytestmark = pytest.mark.anyio
MODES = [pytest.param(mode, marks=pytest.mark.apptainer) for mode in ("instance", "one_shot")]
real = pytest.mark.apptainer


@pytest.fixture(autouse=True)
def nothing_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_told", set())
    monkeypatch.setattr(backend, "_found", {})


async def gone(marker: str) -> None:
    with anyio.fail_after(20):
        while processes_with(marker):
            await anyio.sleep(0.01)


# --- network ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_the_proxy_is_reached_and_nothing_else(mode: str, tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    proxy = await anyio.create_unix_listener(socket_path)
    service = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = service.extra(anyio.abc.SocketAttribute.local_port)
    with anyio.fail_after(120):
        async with echo_on(proxy) as heard, echo_on(service) as overheard:
            endpoint = ProxyEndpoint(f"http://127.0.0.1:{port}", socket_path)
            async with sandbox(isolation=mode, proxy=endpoint, root=tmp_path / "root") as box:
                host, _, inside = box.proxy_url.removeprefix("http://").partition(":")
                assert (await box.exec(("python3", "-c", CONNECT, host, inside))).stdout == b"got HELLO\n\n"
                refused = (await box.exec(("python3", "-c", CONNECT, "127.0.0.1", str(port)))).stdout
                assert refused.startswith(b"refused")
                for address in ("192.0.2.1", "203.0.113.1", "example.invalid"):  # reserved: nobody's
                    result = await box.exec(("python3", "-c", CONNECT, address, "443"))
                    assert result.stdout.startswith(b"refused"), (address, result)
                assert not (await box.exec("ls /var/run/docker.sock /run/docker.sock")).ok
    assert heard == [b"hello\n"]
    assert overheard == []


@real
async def test_an_agent_that_kills_all_it_can_still_reaches_the_proxy(tmp_path: Path) -> None:
    socket_path = tmp_path / "proxy.sock"
    async with echo_on(await anyio.create_unix_listener(socket_path)):
        async with sandbox(isolation="instance", proxy=ProxyEndpoint("http://x", socket_path), root=tmp_path) as box:
            host, _, port = box.proxy_url.removeprefix("http://").partition(":")
            killed = await box.exec("echo kept > /kept; kill -9 1; kill 1; kill -9 -1; pkill -9 -f python", timeout=30)
            assert killed.exit_code > 128
            assert (await box.exec("cat /kept")).stdout == b"kept\n"
            result = await box.exec(("python3", "-c", CONNECT, host, port))
            assert result.stdout == b"got HELLO\n\n", result.text
            script = f"pkill -f python; exec python3 -c '{CONNECT.replace(chr(39), chr(34))}' {host} {port}"
            assert (await box.exec(script)).stdout == b"got HELLO\n\n"


@pytest.mark.parametrize("mode", MODES)
async def test_no_network_is_no_proxy_and_the_hosts_network_is_the_proxys_own_port(mode: str, tmp_path: Path) -> None:
    service = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = service.extra(anyio.abc.SocketAttribute.local_port)
    endpoint = ProxyEndpoint(f"http://127.0.0.1:{port}", tmp_path / "proxy.sock")
    async with echo_on(service):
        async with sandbox(isolation=mode, proxy=endpoint, network="none", root=tmp_path) as box:
            assert box.proxy_url == ""
            assert (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split() == [b"lo"]
        async with sandbox(isolation=mode, proxy=endpoint, network="host", root=tmp_path) as box:
            assert box.proxy_url == endpoint.url
            assert (await box.exec(("python3", "-c", CONNECT, "127.0.0.1", str(port)))).stdout == b"got HELLO\n\n"


# --- what holds inside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_there_are_no_capabilities_and_nothing_of_the_kernels_settings_is_writable(
    mode: str, tmp_path: Path
) -> None:
    """It is only asked whether a write would be let through: a test that failed by writing would change this machine."""
    async with sandbox(isolation=mode, root=tmp_path) as box:
        assert (await box.exec("grep CapEff /proc/self/status")).stdout.split()[1] == b"0" * 16
        assert (await box.exec("grep NoNewPrivs /proc/self/status")).stdout.split()[1] == b"1"
        for place in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "sysrq-trigger"):
            assert (await box.exec(f"! test -w /proc/{place}")).ok, place
        found = await box.exec(
            "find /proc /sys -maxdepth 5 -writable -type f 2>/dev/null | grep -vE '^/proc/([0-9]+|self|thread-self|pressure)/'"
        )
        assert found.stdout == b""
        assert not (await box.exec(("ls", f"/proc/{os.getpid()}/root"))).ok


@pytest.mark.parametrize("mode", MODES)
async def test_the_image_is_written_to_and_yet_never_changed(mode: str, tmp_path: Path) -> None:
    async with sandbox(isolation=mode, root=tmp_path, workdir="/opt/work") as box:
        assert (
            await box.exec("echo 1 > /usr/made; rm /etc/debian_version; echo 2 > kept; pwd")
        ).stdout == b"/opt/work\n"
        assert (
            await box.exec("cat /usr/made kept; test -e /etc/debian_version || echo gone")
        ).stdout == b"1\n2\ngone\n"
    assert (apptainer.IMAGE / "etc" / "debian_version").exists()
    assert not (apptainer.IMAGE / "usr" / "made").exists()


@real
@pytest.mark.parametrize("writable", ["overlay", "tmpfs", "copy"])
async def test_an_instance_is_writable_in_each_way_that_is_asked_for(writable: str, tmp_path: Path) -> None:
    async with sandbox(isolation="instance", root=tmp_path, kwargs={"writable": writable}) as box:
        await box.exec("echo 1 > /x")
        assert (await box.exec("cat /x")).stdout == b"1\n"


@real
async def test_where_no_overlay_can_be_made_memory_is_taken_and_it_is_said_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in beside the real program refuses overlays, as kernels and file systems do."""
    program = tmp_path / "apptainer"
    refusing = 'for a in "$@"; do [ "$a" = --overlay ] && { echo "FATAL: no overlay here" >&2; exit 255; }; done'
    program.write_text(f'#!/bin/sh\n{refusing}\nexec {apptainer.program()} "$@"\n')
    program.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with sandbox(isolation="instance", root=tmp_path, kwargs={"program": str(program)}) as box:
                assert (await box.exec("echo 1 > /x && cat /x")).stdout == b"1\n"
    told = [record.message for record in caplog.records if "falls back" in record.message]
    assert len(told) == 1
    assert "falls back to tmpfs" in told[0]
    assert "no overlay here" in told[0]


@real
async def test_an_image_that_cannot_be_run_says_what_apptainer_said(tmp_path: Path) -> None:
    (tmp_path / "image.sif").write_text("no image")
    with pytest.raises(SandboxError, match=r"cannot be run\. overlay: .*image format not recognized"):
        async with sandbox(isolation="instance", root=tmp_path / "root", image=str(tmp_path / "image.sif")):
            pass
    assert list((tmp_path / "root").iterdir()) == []


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_processes_that_hold_too_much_memory_together_are_ended_and_it_is_told(mode: str, tmp_path: Path) -> None:
    hungry = 'python3 -c "import time; x = bytes(1) * (100 << 20); time.sleep(100)"'
    async with sandbox(isolation=mode, root=tmp_path, memory_mb=250) as box:
        with anyio.fail_after(60):
            result = await box.exec(f"echo begun; {hungry} & {hungry} & {hungry}")
        assert (result.oom, result.exit_code, result.ended, result.timed_out) == (True, 137, False, False)
        assert result.stdout == b"begun\n"
        assert (await box.exec(hungry.replace("time.sleep(100)", "0"))).ok


@real
async def test_a_fork_bomb_is_stopped_at_its_deadline(tmp_path: Path) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    bomb = "import os, time\nfor _ in range(7):\n    os.fork()\ntime.sleep(100)\n"
    async with sandbox(isolation="instance", root=tmp_path) as box:
        with anyio.fail_after(60):
            result = await box.exec(f"export {marker}; exec python3 -c '{bomb}'", timeout=3)
        assert result.timed_out
        assert processes_with(marker) == []


# --- the end ---------------------------------------------------------------------------------------------------------


@real
async def test_a_supervisor_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    async with sandbox(isolation="instance", root=tmp_path) as box:
        await box.exec(f"export {marker}; setsid sleep 1000 & (setsid setsid sleep 1000 &) ; kill -9 $PPID; sleep 1000")
        assert processes_with(marker) == []
        assert (await box.exec("echo on")).stdout == b"on\n"


@real
async def test_an_instance_that_has_ended_is_told_apart_from_a_command_that_has(tmp_path: Path) -> None:
    with anyio.fail_after(60), pytest.raises(SandboxError, match="instance has ended"):
        async with sandbox(isolation="instance", root=tmp_path, kwargs={"ttl": 3}) as box:
            await box.exec("sleep 1000")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.3, 0.5])
async def test_a_start_that_is_cancelled_leaves_nothing(mode: str, delay: float, tmp_path: Path) -> None:
    with anyio.move_on_after(delay):
        async with sandbox(isolation=mode, root=tmp_path):
            await anyio.sleep(30)
    assert list(tmp_path.iterdir()) == []
    assert processes_named(str(tmp_path)) == []


def processes_named(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if text in line and "pytest" not in line:
            found.append(line)
    return found


PROGRAM = """
    import anyio
    from polar_plugin.records import RuntimeSpec
    from polar_plugin.runtimes.apptainer import ApptainerRuntime
    async def main():
        kwargs = dict(mode={mode!r}, root={root!r}, program={program!r})
        runtime = ApptainerRuntime(RuntimeSpec(image={image!r}, kwargs=kwargs), proxy=None, labels=dict(owner="me"))
        await runtime.start()
        async with anyio.create_task_group() as group:
            group.start_soon(runtime.exec, "export {marker}; setsid sleep 1000 & touch up; sleep 1000")
            while not (await runtime.exec(("test", "-e", "up"))).ok:
                await anyio.sleep(0.02)
            print("up", flush=True)
    anyio.run(main)
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_trainer_takes_its_agents_with_it_and_the_next_one_sweeps(mode: str, tmp_path: Path) -> None:
    marker, root = f"MARK={secrets.token_hex(8)}", str(tmp_path)
    values = {
        "mode": mode,
        "root": root,
        "program": apptainer.program(),
        "image": str(apptainer.IMAGE),
        "marker": marker,
    }
    argv = [sys.executable, "-c", textwrap.dedent(PROGRAM).format(**values)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        assert processes_with(marker)
        (directory,) = tmp_path.iterdir()
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()

    async def after() -> None:
        await gone(marker)
        assert await sweep(tmp_path) == [directory.name]
        assert list(tmp_path.iterdir()) == []

    anyio.run(after)


@real
async def test_a_sweep_ends_an_instance_whose_trainer_and_guard_died_and_leaves_a_living_neighbours(
    tmp_path: Path,
) -> None:
    marker, root = f"MARK={secrets.token_hex(8)}", str(tmp_path)
    values = {"mode": "instance", "root": root, "program": apptainer.program(), "image": str(apptainer.IMAGE)}
    argv = [sys.executable, "-c", textwrap.dedent(PROGRAM).format(**values, marker=marker)]
    async with sandbox(isolation="instance", root=tmp_path) as neighbour:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:  # noqa: ASYNC220
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"up\n"
            guards = [int(pid) for pid in Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()]
            for pid in (trainer.pid, *guards):
                os.kill(pid, signal.SIGKILL)
            trainer.wait()
        assert len(await sweep(tmp_path)) == 1
        await gone(marker)
        assert (await neighbour.exec("echo here")).stdout == b"here\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "swept"),
    [
        ("polar.boot-of-another-time.1.2.3.abc", False),
        ("polar.1.abc", False),
        ("somebody.elses", False),
        ("polar", False),
    ],
)
def test_only_what_tells_of_a_dead_owner_is_swept(name: str, swept: bool) -> None:
    assert ownerless(name) is swept


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (RuntimeSpec(), "runtime.image .* give one"),
        (RuntimeSpec(image="docker://debian"), "apptainer pull image.sif docker://debian"),
        (RuntimeSpec(image="x", network="bridge"), "proxy_only, none, host"),
        (RuntimeSpec(image="x", workdir="relative"), "absolute"),
        (RuntimeSpec(image="x", kwargs={"nonsense": 1}), "ro_binds"),
        (RuntimeSpec(image="x", kwargs={"mode": "both"}), "one_shot"),
        (RuntimeSpec(image="x", kwargs={"writable": "never"}), "overlay"),
        (RuntimeSpec(image="x", kwargs={"mode": "one_shot", "writable": "tmpfs"}), "use copy"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused_with_what_can(spec: RuntimeSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ApptainerRuntime(spec, proxy=None, labels={})


@pytest.fixture
def started(tmp_path: Path) -> Callable[[str], ApptainerRuntime]:
    def make(program: str) -> ApptainerRuntime:
        factory = plugins.resolve("apptainer", plugins.RUNTIMES, "runtime")
        kwargs = {"program": program, "root": str(tmp_path)}
        return factory(RuntimeSpec(image=str(tmp_path / "missing.sif"), kwargs=kwargs), proxy=None, labels={})

    return make


async def test_what_is_missing_is_said_with_what_to_do(started: Callable[[str], ApptainerRuntime]) -> None:
    with pytest.raises(SandboxError, match=r"/no/apptainer is not installed .*runtime\.kwargs\.program"):
        await started("/no/apptainer").start()
    with pytest.raises(SandboxError, match=r"missing\.sif.* is not there: `apptainer pull`"):
        await started("/bin/true").start()
