"""Containers of a Docker engine, or of whatever speaks its API: rootless Podman's socket, say.

A container has no network but a loopback on which its first process relays to the proxy's Unix socket (`proxy_only`),
no capabilities, no way to new privileges, and bounds on memory, processors and processes. What of ours runs inside
comes in a kit (`kit`), so an image needs neither Python nor an init. What the agent starts dies with its command; a
container nobody remembers ends after its TTL, and the sweep removes what a dead owner left.

The agent is root in its container where the image says so, but root without capabilities: files of other users are
closed to it. Disk space is the engine's to bound. Files go in and out with the rights of the user that commands have.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from ..errors import ConfigError, SandboxError
from ..records import RuntimeSpec
from . import archive, inside, kit
from .base import ExecResult, ProxyEndpoint, Watch
from .docker_container import DEFAULT_HOME, DEFAULT_WORKDIR, KIT, PROXY_PORT, Plan, check, options
from .docker_engine import EXECS, STARTS, Engine, Missing
from .docker_exec import Conversation
from .docker_sweep import living, sweep_once
from .owner import LABEL, mine
from .process import KILL_GRACE
from .staging import staged
from .streams import Reader, pieces, streamed

T = TypeVar("T")

_KILLED, _ENGINES_OWN = 137, 126
"""Exit codes: of what was killed; and what an engine says of a command that it did not start, or has lost sight of."""
_LATE_GRACE = 10.0
"""Seconds in which a container may still appear whose making was given up."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, eq=False)
class _Execution:
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)


class DockerRuntime:
    """One attempt's container. `spec.kwargs` are `DockerOptions`."""

    def __init__(
        self, spec: RuntimeSpec, *, proxy: ProxyEndpoint | None, labels: Mapping[str, str], **given: Any
    ) -> None:
        """`given` go before `spec.kwargs`. Raises ConfigError."""
        self._options = options({**spec.kwargs, **given})
        check(spec, proxy)
        self._spec, self._proxy = spec, proxy
        self._labels = {LABEL: mine(), **{f"polar.{name}": value for name, value in labels.items()}}
        self._name = f"polar-{secrets.token_hex(10)}"
        self._engine: Engine | None = None
        self._kit: kit.Kit | None = None
        self._image_env: dict[str, str] = {}
        self._asked = self._made = self._started = self._stopped = False
        self._broken = ""
        self._running: set[_Execution] = set()
        self.workdir = spec.workdir or DEFAULT_WORKDIR
        self.home = self._options.home or DEFAULT_HOME
        self.proxy_url = ""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Pull the image where it is missing, make and start a container, and prove that a command runs.

        Raises SandboxError. A container that comes up after that was given up is removed by `stop`, or by the sweep.
        """
        if self._engine is not None or self._stopped:
            raise SandboxError("a sandbox is started once")
        self._engine = engine = Engine(self._options.url, seconds=self._options.start_seconds)
        if not engine.local:
            raise ConfigError("runtime.kwargs.url: only an engine behind a Unix socket can mount what this machine has")
        await sweep_once(self._options.url)
        self._kit = await anyio.to_thread.run_sync(kit.installed)
        image = await engine.image(str(self._spec.image), pull=self._options.pull, auth=self._options.auth)
        self._take(image.get("Config") or {})
        async with engine.slot("start", STARTS):
            await self._make(engine)
            await engine.start(self._name)
        self._started = True
        await self._settle(engine)

    async def stop(self) -> None:
        """Remove the container, and all that runs in it. Twice is fine, and so is after a failed start."""
        self._stopped = True
        engine = self._engine
        if engine is None:
            return
        try:
            if self._asked:
                await self._remove(engine)
                self._asked = False
                living.discard((self._options.url, self._name))
        finally:
            for execution in tuple(self._running):
                execution.scope.cancel()
                await execution.ended.wait()
            await engine.close()
            self._engine = Engine(self._options.url) if self._asked else None  # it failed, and may be tried again

    def _take(self, config: Mapping[str, Any]) -> None:
        """What the image says where the task says nothing."""
        self._image_env = dict(line.partition("=")[::2] for line in config.get("Env") or ())
        directory = config.get("WorkingDir") or "/"
        if self._spec.workdir is None and directory != "/":
            self.workdir = directory
        if self._proxy is not None and self._spec.network != "none":
            relayed = self._relayed() is not None
            self.proxy_url = f"http://127.0.0.1:{PROXY_PORT}" if relayed else self._proxy.url

    def _relayed(self) -> Path | None:
        """The socket that the container relays to. One that shares the host's loopback needs no relay."""
        if self._proxy is None or self._spec.network in ("none", "host") or not self._its(self._engine).local:
            return None
        return self._proxy.unix_socket and self._proxy.unix_socket.absolute()

    async def _make(self, engine: Engine) -> None:
        """Shielded: whoever is cancelled here still learns what to remove."""
        plan = Plan(self._spec, self._options, self._its(self._kit), self._relayed(), self.workdir, self._labels)
        self._asked = True
        living.add((self._options.url, self._name))
        with anyio.CancelScope(shield=True):
            await engine.create(self._name, plan.config())
        self._made = True

    async def _remove(self, engine: Engine) -> None:
        """One whose making had no answer may appear late: it was never started, and is waited for."""
        with anyio.move_on_after(0 if self._made else _LATE_GRACE):
            while True:
                try:
                    return await self._deleted(engine)
                except Missing:
                    if self._made:
                        return
                await anyio.sleep(0.25)

    async def _deleted(self, engine: Engine) -> None:
        with anyio.CancelScope(shield=True):
            await engine.delete(self._name)

    async def _settle(self, engine: Engine) -> None:
        """Find out who commands run as, and make workspace and home where they are not there."""
        wanted = self._options.home
        places = [self.workdir, wanted or DEFAULT_HOME]
        try:
            found = await self._work({"mode": "probe", "places": places}, told="start a command")
        except SandboxError as error:
            raise SandboxError(f"{error} {await self._why()}".strip()) from error
        own = found["home"]
        if wanted is None and not self._options.read_only and own != "/" and own in found["writable"]:
            self.home = places[1] = own
        mode = (0o755, found["uid"], found["gid"])
        if missing := [place for place in places if place not in found["there"]]:
            await engine.put(self._name, archive.directories(dict.fromkeys(missing, mode)), "/")
        if closed := sorted(set(places) - set(found["writable"])) if self._options.read_only else []:
            # Volumes that the image says nothing of are root's, and there root has no right but an owner's.
            await self._work({"mode": "share", "places": closed}, user="0", told="open the volumes")

    async def _why(self) -> str:
        """What a container that does not run says about it."""
        engine = self._its(self._engine)
        try:
            state = (await engine.inspect(self._name))["State"]
            return "" if state["Running"] else f"{state.get('Error') or ''} {await engine.logs(self._name)}"
        except SandboxError:
            return ""

    # --- what can be done with it -------------------------------------------------------------------------------------

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        watch: Watch | None = None,
    ) -> ExecResult:
        """As `Runtime.exec`; a script runs under the image's bash, or sh. A missing `cwd` is exit code 126.

        `oom` is set where the container's memory ran out and the kernel killed the command, or the container, for it.
        """
        order = {
            "mode": "exec",
            "argv": None if isinstance(command, str) else list(command),
            "script": command if isinstance(command, str) else None,
            "env": {**self._base_env(), **self._spec.env, **(env or {})},
            "cwd": self._inside(cwd or self.workdir),
            "stdin": len(stdin),
        }
        with self._execution() as execution:
            told = Conversation(order, pieces(stdin), self._options.output_bytes, timeout, watch)
            return await self._result(told, await self._converse(execution, told))

    async def upload(self, source: Path | bytes, target: str) -> None:
        """As `Runtime.upload`, streamed, with the rights of the user that commands have."""
        if isinstance(source, Path) and not _exists(source):
            raise SandboxError(f"cannot upload {source}: it does not exist")
        made = archive.content(source) if isinstance(source, bytes) else archive.pack(str(source))
        order = {"mode": "unpack", "path": target, "cwd": self.workdir}
        try:
            await self._work(order, payload=streamed(made), told=f"copy to {target!r}")
        except OSError as error:
            raise SandboxError(f"cannot upload {source!r}: {error}") from error

    async def download(self, source: str, target: Path) -> None:
        """As `Runtime.download`, streamed. Set-uid bits are dropped, and nothing is made outside `target`."""
        order = {"mode": "pack", "path": source, "cwd": self.workdir}
        async with staged(target) as place:
            await self._receive(order, place, told=f"copy {source!r}")

    async def _receive(self, order: Mapping[str, Any], place: Path, *, told: str) -> None:
        """The container's side writes a tar, which a thread of ours takes apart."""
        send, receive = anyio.create_memory_object_stream[bytes](16)
        reader = Reader(receive)
        work = partial(archive.unpack, reader.read, str(place), limit=self._options.download_bytes)
        problem: list[SandboxError] = []

        async def take_apart() -> None:
            with receive:
                try:
                    await anyio.to_thread.run_sync(work)
                except (OSError, ValueError) as error:
                    problem.append(SandboxError(f"cannot {told}: {error}"))

        async def put(piece: bytes) -> None:
            try:
                await send.send(piece)
            except anyio.BrokenResourceError as error:
                raise SandboxError(f"cannot {told}: nobody reads it any more") from error

        async with anyio.create_task_group() as group:
            group.start_soon(take_apart)
            try:
                await self._work(order, sink=put, told=told)
            except SandboxError as error:
                problem.append(error)
            finally:
                send.close()
        if problem:
            raise _plainest(problem)

    # --- one command --------------------------------------------------------------------------------------------------

    @contextmanager
    def _execution(self) -> Generator[_Execution]:
        """Raises SandboxError before `start`, after `stop`, and where the container is of no more use."""
        if self._stopped:
            raise SandboxError("the sandbox is stopped")
        if not self._started:
            raise SandboxError("the sandbox is not started")
        if self._broken:
            raise SandboxError(self._broken)
        execution = _Execution()
        self._running.add(execution)
        try:
            yield execution
        finally:
            self._running.discard(execution)
            execution.ended.set()

    async def _converse(self, execution: _Execution, told: Conversation, user: str = "") -> str:
        """Have a supervisor of the container's run it; the id of the engine's exec. Raises SandboxError."""
        engine = self._its(self._engine)
        with execution.scope:
            prepared = await engine.prepare_exec(self._name, self._its(self._kit).argv(KIT, "run"), user)
            try:
                await told.run(prepared, engine.slot("exec", EXECS))
            finally:
                if told.stuck:
                    await self._give_up("a command did not end when it was killed")
            if self._stopped:
                raise SandboxError("the sandbox was stopped while a command ran")
            return prepared.id
        raise SandboxError("the sandbox was stopped while a command ran")

    async def _work(
        self,
        order: Mapping[str, Any],
        *,
        payload: AsyncIterator[bytes] | None = None,
        sink: Callable[[bytes], Any] | None = None,
        user: str = "",
        told: str,
    ) -> Mapping[str, Any]:
        """What the supervisor does by itself; what it found. Raises SandboxError."""
        with self._execution() as execution:
            conversation = Conversation(order, payload or pieces(b""), 1 << 16, sink=sink)
            await self._converse(execution, conversation, user)
        report = conversation.report
        if report is None or report.error is not None:
            said = (conversation.stdout + conversation.stderr).decode(errors="replace")
            raise SandboxError(f"cannot {told}: {report.error if report else said.strip() or 'it was ended'}")
        return report.found

    async def _result(self, told: Conversation, exec_id: str) -> ExecResult:
        if told.report is not None:
            code, oom = told.report.code, told.report.oom
        else:
            code, oom = await self._without_report(told, exec_id)
        killed = told.timed_out or told.ended
        return ExecResult(
            _KILLED if killed else code,
            told.stdout,
            told.stderr,
            told.seconds,
            timed_out=told.timed_out,
            oom=oom and not killed,
            truncated=told.truncated,
            ended=told.ended,
        )

    async def _without_report(self, told: Conversation, exec_id: str) -> tuple[int, bool]:
        """The supervisor was killed, by the agent or with the container; or never began, or we have lost sight of it.

        Exit code, and whether memory ran out. Raises SandboxError where it is no command's doing.
        """
        engine = self._its(self._engine)
        state = (await engine.inspect(self._name))["State"]
        if not state["Running"]:
            self._broken = "the container has ended" + (": its memory ran out" if state["OOMKilled"] else "")
            if state["OOMKilled"] or told.stuck:
                return _KILLED, state["OOMKilled"]
            raise SandboxError(f"{self._broken} while a command ran, with exit code {state['ExitCode']}")
        code = await self._exit_code(engine, exec_id)
        said = (told.stdout + told.stderr).decode(errors="replace").strip()
        if code == inside.LOST or (code == _ENGINES_OWN and not said):
            await self._give_up("the connection to the engine broke while a command ran")
            raise SandboxError(f"{self._broken}; it is not run again")
        if code != _KILLED:
            raise SandboxError(f"the sandbox did not start its command: {said or f'exit code {code}'}")
        await self._cleared(engine)
        return code, False

    async def _exit_code(self, engine: Engine, exec_id: str) -> int:
        """Of an exec that we have no connection to any more."""
        with anyio.move_on_after(KILL_GRACE):
            while True:
                found = await engine.call("look at a command", engine.docker.containers.exec(exec_id).inspect)
                if not found["Running"]:
                    return int(found["ExitCode"])
                await anyio.sleep(0.05)
        await self._give_up("the engine's connection was lost, and the command did not end by itself")
        raise SandboxError(f"{self._broken}; it is not run again")

    async def _cleared(self, engine: Engine) -> None:
        """After a supervisor's death: have the first process kill what it had watched over."""
        prepared = await engine.prepare_exec(self._name, self._its(self._kit).argv(KIT, "census"))
        census = Conversation({}, pieces(b""), 1 << 16, timeout=KILL_GRACE)
        await census.run(prepared, engine.slot("exec", EXECS))
        if await self._exit_code(engine, prepared.id):
            await self._give_up("processes outlived their command")

    async def _give_up(self, reason: str) -> None:
        """What cannot be cleaned is ended whole: nothing of it may meet what comes next."""
        self._broken = f"the container was killed: {reason}"
        with anyio.CancelScope(shield=True):
            await self._its(self._engine).signal(self._name, "SIGKILL")

    def _base_env(self) -> dict[str, str]:
        told = {"PATH": _PATH, "USER": "agent", "LANG": "C.UTF-8", **self._image_env}
        return {**told, "HOME": self.home, "TMPDIR": "/tmp"}

    def _inside(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}"

    @staticmethod
    def _its(part: T | None) -> T:
        if part is None:
            raise SandboxError("the sandbox is not started")
        return part


def _plainest(problems: Sequence[SandboxError]) -> SandboxError:
    """Where one side failed the other does too: a stream that broke off is the lesser news."""
    return next((error for error in problems if "no whole archive" not in str(error)), problems[0])


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()
