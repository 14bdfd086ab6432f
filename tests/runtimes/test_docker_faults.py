"""An engine that is slow, cut off or overloaded: nothing runs twice, and nothing is left."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import secrets
import tarfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

from polar_plugin.errors import SandboxError
from polar_plugin.runtimes.base import Runtime

from .boxes import processes_with, sandbox
from .engines import containers, docker

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ENGINE = "/var/run/docker.sock"


@dataclass
class Between:
    """A way to the engine that holds requests back, or breaks off, where it is told to."""

    url: str
    hold: bytes | None = None
    """Requests whose first line has this wait until `go`, and then reach the engine though nobody may wait for them."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    ends: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])

    def cut(self) -> None:
        """All connections of now break off."""
        for end in self.ends:
            end.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_unix_connection(ENGINE)
        self.ends += [writer, forth]
        async with anyio.create_task_group() as group:
            group.start_soon(copy, back, writer)
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    if self.hold and self.hold in piece.split(b"\r\n", 1)[0]:
                        self.held.set()
                        await self.go.wait()
                    forth.write(piece)
                    await forth.drain()
                forth.write_eof()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To the end of the one, though the other may have ended before."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
    writer.close()


@asynccontextmanager
async def between(tmp_path: Path) -> AsyncGenerator[Between]:
    path = tmp_path / "engine.sock"
    made = Between(f"unix://{path}")
    server = await asyncio.start_unix_server(made.serve, path)
    try:
        yield made
    finally:
        server.close()
        made.cut()


async def test_case_118_a_deadline_leaves_no_process_that_could_spoil_what_comes_next() -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    async with sandbox(isolation="docker", kwargs={"output_bytes": 1 << 16}) as box:
        result = await box.exec(f"export {marker}; sleep 999 & (setsid yes > f) & yes", timeout=2)
        assert (result.timed_out, result.exit_code, result.truncated) == (True, 137, True)
        assert processes_with(marker) == []
        size = (await box.exec("stat -c %s f")).stdout
        assert (await box.exec("stat -c %s f")).stdout == size


async def test_case_118_cancelling_while_a_container_is_made_leaves_none(tmp_path: Path) -> None:
    async with between(tmp_path) as way:
        way.hold = b"/containers/create"

        async def opened() -> None:
            async with sandbox(isolation="docker", root=tmp_path, kwargs={"url": way.url}):
                raise AssertionError("it was cancelled")

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(opened)
                await way.held.wait()
                group.cancel_scope.cancel()
                way.go.set()
    assert containers(f"polar.session={tmp_path}") == []


async def test_case_129_a_container_that_comes_up_after_its_deadline_is_removed_and_never_ran(tmp_path: Path) -> None:
    async with between(tmp_path) as way, anyio.create_task_group() as group:
        way.hold = b"/containers/create"

        async def late() -> None:
            await way.held.wait()
            await anyio.sleep(3)  # what is shown is that a deadline of one second has passed by then
            way.go.set()

        group.start_soon(late)
        with anyio.fail_after(60), pytest.raises(SandboxError, match="within 1 s"):
            async with sandbox(isolation="docker", root=tmp_path, kwargs={"url": way.url, "start_seconds": 1.0}):
                pass
        assert way.go.is_set(), "it was waited for"
    assert containers(f"polar.session={tmp_path}") == []


async def test_case_126_a_command_whose_connection_breaks_is_ended_and_not_run_again(tmp_path: Path) -> None:
    marker = f"MARK={secrets.token_hex(8)}"
    async with between(tmp_path) as way:
        kwargs = {"url": way.url, "volumes": [f"{tmp_path}:/out"]}
        async with sandbox(isolation="docker", kwargs=kwargs) as box:
            await broken_off(way, box, marker)
    assert (tmp_path / "log").read_text() == "ran\n"


async def broken_off(way: Between, box: Runtime, marker: str) -> None:
    async def break_off() -> None:
        while not processes_with(marker):
            await anyio.sleep(0.02)
        way.cut()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(break_off)
            with pytest.raises(SandboxError, match="connection"):
                await box.exec(f"export {marker}; echo ran >> /out/log; sleep 1000")
    assert processes_with(marker) == []
    with pytest.raises(SandboxError, match="connection"):
        await box.exec("true")


async def test_case_120_fifty_commands_at_once_all_come_back() -> None:
    async with sandbox(isolation="docker") as box:
        results: list[bytes] = []

        async def one(number: int) -> None:
            results.append((await box.exec(f"echo {number} >> log; echo {number}")).stdout)

        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                for number in range(50):
                    group.start_soon(one, number)
        assert sorted(results) == sorted(f"{number}\n".encode() for number in range(50))
        assert (await box.exec("wc -l < log")).stdout.strip() == b"50"


async def test_case_121_without_a_deadline_a_slow_command_is_waited_for_and_a_hung_one_is_bounded() -> None:
    async with sandbox(isolation="docker", kwargs={"start_seconds": 2.0}) as box:
        slow = await box.exec("sleep 5; echo applied")
        assert (slow.stdout, slow.timed_out) == (b"applied\n", False)
        began = time.monotonic()
        assert (await box.exec("trap '' TERM HUP INT; while :; do sleep 1; done", timeout=1)).timed_out
        assert time.monotonic() - began < 8


# --- pulls -----------------------------------------------------------------------------------------------------------


class Registry:
    """One image, for whoever has the password, after `refusals` refusals to who asks too often."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.asked = 0
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            info = tarfile.TarInfo(secrets.token_hex(8))  # a new image each time
            tar.addfile(info)
        config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
        config["rootfs"] = {"type": "layers", "diff_ids": [self._digest(layer.getvalue())]}
        kinds = ("container.image.v1+json", "image.rootfs.diff.tar")
        self.blobs = {self._digest(blob): blob for blob in (json.dumps(config).encode(), layer.getvalue())}
        described = [
            {"mediaType": f"application/vnd.docker.{kind}", "digest": digest, "size": len(blob)}
            for kind, (digest, blob) in zip(kinds, self.blobs.items(), strict=True)
        ]
        self.kind = "application/vnd.docker.distribution.manifest.v2+json"
        told: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": self.kind,
            "config": described[0],
            "layers": described[1:],
        }
        self.manifest = json.dumps(told).encode()

    @staticmethod
    def _digest(blob: bytes) -> str:
        return f"sha256:{hashlib.sha256(blob).hexdigest()}"

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Basic {base64.b64encode(b'me:secret').decode()}":
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="test"'})
        if "/manifests/" in request.path:
            self.asked += 1
            if self.asked <= self.refusals:
                return web.json_response({"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}, status=429)
            digest = self._digest(self.manifest)
            return web.Response(body=self.manifest, content_type=self.kind, headers={"Docker-Content-Digest": digest})
        return web.Response(body=self.blobs.get(request.path.rpartition("/")[2], b"{}"))


@asynccontextmanager
async def registry(refusals: int) -> AsyncGenerator[tuple[Registry, str]]:
    made = Registry(refusals)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    image = f"127.0.0.1:{runner.addresses[0][1]}/tests/empty:{secrets.token_hex(4)}"
    try:
        yield made, image
    finally:
        await runner.cleanup()
        docker("image", "prune", "--force")


async def test_case_122_a_registry_that_is_asked_too_often_is_asked_again_later_once_for_all() -> None:
    async with registry(refusals=2) as (made, image):
        kwargs = {"auth": {"username": "me", "password": "secret"}}

        async def one() -> None:
            async with sandbox(isolation="docker", image=image, kwargs=kwargs) as box:
                assert (await box.exec("true")).exit_code == 127, "there is nothing in it"

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(one)
        assert made.asked >= 3
        docker("rmi", image)


async def test_a_wrong_password_is_told_at_once() -> None:
    async with registry(refusals=0) as (made, image):
        with anyio.fail_after(20), pytest.raises(SandboxError, match="log in"):
            async with sandbox(isolation="docker", image=image, kwargs={"auth": {"username": "me", "password": "no"}}):
                pass
        assert made.asked == 0
