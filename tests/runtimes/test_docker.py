"""What is a Docker engine's own: its limits, its images, its way to the proxy, and its faults."""

# ruff: noqa: SIM117 - what opens is closed in the order that is shown

from __future__ import annotations

import json
import secrets
import tarfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from polar_plugin.errors import ConfigError, SandboxError
from polar_plugin.proxy.server import Proxy, ProxyConfig
from polar_plugin.records import ChatRequest, Completion, RuntimeSpec
from polar_plugin.runtimes.base import ProxyEndpoint
from polar_plugin.runtimes.docker import DockerRuntime

from .boxes import sandbox
from .engines import IMAGE, containers, docker
from .test_isolation import CONNECT

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ASK = """
import sys, urllib.error, urllib.request as u
request = u.Request(sys.argv[1] + "/v1/models", headers={"Authorization": "Bearer " + sys.argv[2]})
try:
    print(u.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""
BOMB = "bomb() { bomb | bomb & }; while :; do bomb; done"


@asynccontextmanager
async def container(**spec: Any) -> AsyncGenerator[DockerRuntime]:
    async with sandbox(isolation="docker", **spec) as box:
        assert isinstance(box, DockerRuntime)
        yield box


def inspected(session: str) -> dict[str, Any]:
    (name,) = containers(f"polar.session={session}")
    return json.loads(docker("inspect", name))[0]


@pytest.fixture(scope="module")
def derived() -> Generator[str]:
    """An image whose user is not root and whose workspace is that user's."""
    changes = ("USER 1000:1000", "WORKDIR /project", "ENV FROM_IMAGE=1 LD_PRELOAD=/no/such.so")
    name = f"polar-test-{secrets.token_hex(4)}"
    made = docker(
        "run", "--detach", IMAGE, "sh", "-c", "mkdir /project && echo x > /project/f && chown -R 1000 /project"
    )
    docker("wait", made)
    docker("commit", *(part for change in changes for part in ("--change", change)), made, name)
    docker("rm", made)
    yield name
    docker("rmi", name)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """An image of nothing: no shell, no C library."""
    name, path = f"polar-test-{secrets.token_hex(4)}", tmp_path_factory.mktemp("empty") / "image.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("proc")
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    docker("import", str(path), name)
    yield name
    docker("rmi", name)


# --- limits ----------------------------------------------------------------------------------------------------------


async def test_the_engine_is_told_every_limit(tmp_path: Path) -> None:
    kwargs = {"pids": 77, "ulimits": {"nofile": 999}, "shm_mb": 32, "user": "1234:1234", "ttl_seconds": 600}
    async with container(root=tmp_path, memory_mb=200, cpus=0.5, kwargs=kwargs) as box:
        found = inspected(str(tmp_path))
        host = found["HostConfig"]
        assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (200 << 20, 200 << 20, 500_000_000)
        assert (host["PidsLimit"], host["ShmSize"]) == (77, 32 << 20)
        assert (host["CapDrop"], host["SecurityOpt"], host["NetworkMode"]) == (["ALL"], ["no-new-privileges"], "none")
        assert (await box.exec("ulimit -n; id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status")).stdout.split() == [
            b"999", b"1234", b"CapEff:", b"0" * 16, b"NoNewPrivs:", b"1",
        ]  # fmt: skip
        assert (await box.exec("echo x > f && cat f && touch $HOME/h")).stdout == b"x\n", (
            "workspace and home are its own"
        )
        labels = found["Config"]["Labels"]
        assert labels["polar.session"] == str(tmp_path)
        assert labels["polar.owner"].count(":") == 3


async def test_a_command_for_which_memory_runs_out_says_so_and_the_sandbox_goes_on() -> None:
    async with container(memory_mb=128) as box:
        hungry = await box.exec(("python3", "-c", "x = bytearray(1 << 30)"))
        assert (hungry.exit_code, hungry.oom, hungry.timed_out) == (137, True, False)
        killed = await box.exec("kill -9 $$")
        assert (killed.exit_code, killed.oom) == (137, False)
        assert (await box.exec("echo on")).stdout == b"on\n"


async def test_case_120_a_container_that_memory_has_ended_is_of_no_more_use(tmp_path: Path) -> None:
    async with container(root=tmp_path) as box:
        docker("kill", containers(f"polar.session={tmp_path}")[0])
        for _ in range(2):
            with pytest.raises(SandboxError, match=r"not running|has ended"):
                await box.exec("true")


async def test_a_fork_bomb_stays_within_the_limit_and_is_killed_whole() -> None:
    async with container(kwargs={"pids": 100}) as box:
        with anyio.fail_after(60):
            result = await box.exec(f"echo before; {BOMB}", timeout=2)
        assert result.timed_out
        assert result.stdout == b"before\n"
        assert (await box.exec("ps -e --no-headers | wc -l")).stdout.strip() in (b"4", b"5")


async def test_a_container_ends_by_itself_after_its_time(tmp_path: Path) -> None:
    async with container(root=tmp_path, kwargs={"ttl_seconds": 3}):
        with anyio.fail_after(20):
            while inspected(str(tmp_path))["State"]["Running"]:
                await anyio.sleep(0.1)


async def test_the_first_process_reaps_what_the_agent_orphans() -> None:
    async with container() as box:
        await box.exec("for i in 1 2 3 4 5; do (setsid true &) ; done; kill -9 $PPID; sleep 1000")
        assert b"Z" not in (await box.exec("ps -eo stat --no-headers")).stdout


async def test_an_agent_that_kills_its_supervisor_ends_its_command_and_nothing_survives() -> None:
    async with container() as box:
        for fatal in ("kill -9 $PPID", "kill -9 -1", "kill -9 1; kill 1; kill -INT 1; kill -9 $PPID"):
            result = await box.exec(f"(setsid sleep 1000 &); echo said; {fatal}; sleep 1000")
            assert (result.exit_code, result.stdout) == (137, b"said\n")
            assert b"sleep" not in (await box.exec("ps -eo args")).stdout


async def test_programs_that_kill_what_is_called_python_do_not_end_their_own_command() -> None:
    async with container() as box:
        assert (await box.exec("sleep 0 & pkill -9 python; pkill -9 -f bin/python; echo on")).stdout == b"on\n"


# --- images ----------------------------------------------------------------------------------------------------------


async def test_an_image_with_a_user_and_a_workspace_of_its_own_is_run_as_it_says(derived: str) -> None:
    async with container(image=derived) as box:
        assert box.workdir == "/project"
        result = await box.exec("cat f; id -u; echo $FROM_IMAGE; touch new ~/new && ls ~")
        assert (result.stdout, result.stderr.count(b"LD_PRELOAD") > 0) == (b"x\n1000\n1\nnew\n", True)
        await box.upload(b"given", "deep/given")
        assert (await box.exec("stat -c %u deep/given")).stdout == b"1000\n"


async def test_a_read_only_image_can_be_written_to_where_work_is_done(derived: str) -> None:
    for image in (IMAGE, derived):
        async with container(image=image, kwargs={"read_only": True}) as box:
            for place in ("/x", "/usr/x", "/etc/x", "/var/x", "/run/polar/x"):
                assert not (await box.exec(f"echo > {place}")).ok, place
            assert (
                await box.exec('echo 1 > w && echo 2 > "$HOME/h" && echo 3 > /tmp/t; cat w ~/h /tmp/t')
            ).stdout == b"1\n2\n3\n"
            await box.upload(b"given", "/tmp/deep/given")
            assert (await box.exec("cat /tmp/deep/given")).stdout == b"given"


async def test_an_image_needs_no_interpreter_and_no_c_library(empty: str, tmp_path: Path) -> None:
    tool = tmp_path / "harness" / "bin" / "tool"
    tool.parent.mkdir(parents=True)
    async with container(image=empty) as box:
        missing = await box.exec("true")
        assert (missing.exit_code, b"no shell" in missing.stderr) == (127, True)
        await box.upload(b"content", "file")
        await box.download("file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"content"


async def test_a_harness_root_is_read_only_at_the_same_place(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    async with container(harness_root=str(tmp_path), kwargs={"ro_binds": [f"{tmp_path}:/other"]}) as box:
        assert (await box.exec(f"{tmp_path}/bin/tool; /other/bin/tool")).stdout == b"tool\ntool\n"
        assert not (await box.exec(f"echo > {tmp_path}/x || echo > /other/x")).ok


async def test_case_122_a_missing_image_is_the_infrastructures_fault_and_says_what_to_do() -> None:
    for kwargs in ({"pull": "never"}, {}):
        with pytest.raises(SandboxError, match=r"no image '127.0.0.1:9/none:1'.*(build|log in)"):
            async with container(image="127.0.0.1:9/none:1", kwargs=kwargs):
                pass


async def test_case_122_a_full_disk_is_told_as_such() -> None:
    async with container(kwargs={"tmpfs": {"/small": "size=1m,mode=1777"}}) as box:
        with pytest.raises(SandboxError, match="No space left"):
            await box.upload(bytes(2 << 20), "/small/file")


# --- network ---------------------------------------------------------------------------------------------------------


class _NoReply:
    async def __call__(self, request: ChatRequest) -> Completion:
        raise SandboxError("nobody samples here")

    async def count(self, request: ChatRequest) -> int:
        raise SandboxError("nobody counts here")


async def test_the_proxy_is_reached_with_ones_own_key_and_nothing_else_is(tmp_path: Path) -> None:
    """The engine and the admin port are TCP ports of this machine; two that do answer stand for them."""
    config = ProxyConfig(host="0.0.0.0", unix_socket=tmp_path / "proxy.sock")
    listener = await anyio.create_tcp_listener(local_host="0.0.0.0")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    gateway = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    proxy = Proxy(config)
    async with (
        listener,
        proxy.serving(),
        proxy.session("a", _NoReply()) as own,
        proxy.session("b", _NoReply()) as other,
    ):
        async with (
            container(proxy=proxy.endpoint, kwargs={"user": "1000"}) as box,
            container(proxy=proxy.endpoint) as neighbour,
        ):
            await neighbour.exec("echo $KEY > key", env={"KEY": other.key})
            answers = [
                await box.exec(("python3", "-c", ASK, box.proxy_url, key)) for key in (own.key, "b", "polar-guess")
            ]
            assert [answer.stdout.strip() for answer in answers] == [b"200", b"401", b"401"]
            found = await box.exec(
                f"grep -rs {other.key[:-1]}[{other.key[-1]}] /proc/*/environ /workspace /tmp /home /run"
            )
            assert found.stdout == b""
            own_port = proxy.url.rpartition(":")[2]
            for host in ("127.0.0.1", gateway, "host.docker.internal", "192.0.2.1", "1.1.1.1", "deb.debian.org"):
                for number in (str(port), own_port, "443", "53"):
                    told = (await box.exec(("python3", "-c", CONNECT, host, number))).stdout
                    assert told.startswith(b"refused"), (host, number, told)
            assert not (await box.exec("getent hosts deb.debian.org || getent hosts localhost.localdomain.")).ok
            assert not (await box.exec("ls /var/run/docker.sock /run/docker.sock")).ok
            assert (await box.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split() == [b"lo"]


async def test_case_126_a_proxy_bound_to_loopback_is_reached_from_every_network(tmp_path: Path) -> None:
    proxy = Proxy(ProxyConfig(host="127.0.0.1", unix_socket=tmp_path / "proxy.sock"))
    async with proxy.serving(), proxy.session("a", _NoReply()) as session:
        for network in ("proxy_only", "bridge", "host"):
            async with container(proxy=proxy.endpoint, network=network) as box:
                assert (await box.exec(("python3", "-c", ASK, box.proxy_url, session.key))).stdout == b"200\n", network
        async with container(proxy=proxy.endpoint, network="none") as box:
            assert box.proxy_url == ""
            assert not (await box.exec("ls /run/polar/proxy.sock")).ok


# --- what is refused, and what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (RuntimeSpec(), "image"),
        (RuntimeSpec(image="x", network="internal"), "proxy_only, none, bridge, host"),
        (RuntimeSpec(image="x", workdir="relative"), "absolute"),
        (RuntimeSpec(image="x", kwargs={"nonsense": 1}), "read_only"),
        (RuntimeSpec(image="x", kwargs={"pull": "sometimes"}), "never"),
        (RuntimeSpec(image="x", harness_root="/no/such"), "/no/such"),
    ],
)
def test_a_spec_that_cannot_be_honoured_is_refused_with_what_can(spec: RuntimeSpec, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DockerRuntime(spec, proxy=None, labels={})


def test_a_proxy_without_a_socket_is_refused_where_only_a_socket_leads_out() -> None:
    with pytest.raises(ConfigError, match="Unix socket"):
        DockerRuntime(RuntimeSpec(image="x"), proxy=ProxyEndpoint("http://127.0.0.1:1"), labels={})


async def test_an_engine_that_does_not_answer_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="is the engine running"):
        async with container(kwargs={"url": f"unix://{tmp_path}/none.sock"}):
            pass


async def test_a_download_may_bring_out_no_more_than_allowed(tmp_path: Path) -> None:
    async with container(kwargs={"download_bytes": 1 << 20}) as box:
        await box.exec("truncate -s 1T sparse")
        with anyio.fail_after(30), pytest.raises(SandboxError, match="larger than allowed"):
            await box.download("sparse", tmp_path / "sparse")
        assert list(tmp_path.iterdir()) == []
        assert (await box.exec("echo on")).stdout == b"on\n"
