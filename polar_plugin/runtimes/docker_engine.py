"""A Docker engine's client: each call has a deadline, faults are SandboxErrors, what may be repeated is."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import anyio
import anyio.lowlevel
from aiodocker import Docker, DockerError
from aiodocker.execs import Exec

from ..errors import SandboxError

T = TypeVar("T")

STARTS, EXECS = 8, 16
"""How many starts, and beginnings of commands, an engine is asked for at once: more of them only take longer each."""
_TRIES = 4
_PULL_TRIES = 5
_CANNOT_CONNECT = 900
_AGAIN = frozenset({_CANNOT_CONNECT, 429, 500, 502, 503, 504})
_NEVER_AGAIN = (
    "no space left",
    "oci runtime",
    "no such",
    "not found",
    "denied",
    "unauthorized",
    "read-only",
    "bind source",
)

_limits: anyio.lowlevel.RunVar[dict[tuple[str, str], anyio.CapacityLimiter]] = anyio.lowlevel.RunVar("docker_limits")
_pulls: anyio.lowlevel.RunVar[dict[str, anyio.Lock]] = anyio.lowlevel.RunVar("docker_pulls")


class Missing(SandboxError):
    """There is no such container, image or path."""


class Engine:
    """One client; `close` it. All methods raise SandboxError."""

    def __init__(self, url: str | None, *, seconds: float = 60.0) -> None:
        """`seconds` is what each call may take."""
        self._seconds = seconds
        try:
            self.docker = Docker(url, timeout=aiohttp.ClientTimeout())
        except (AssertionError, ValueError, OSError) as error:
            raise SandboxError(
                "no Docker engine is found: start one, or set runtime.kwargs.url (or DOCKER_HOST) to its address"
            ) from error
        self.name = url or ""

    @property
    def local(self) -> bool:
        """Whether it is reached by a Unix socket, so that it can mount this machine's directories."""
        return isinstance(self.docker.connector, aiohttp.UnixConnector)

    async def close(self) -> None:
        await self.docker.close()

    @asynccontextmanager
    async def slot(self, kind: str, count: int) -> AsyncGenerator[None]:
        """One of `count` of that kind at this engine, over all its clients of this event loop."""
        try:
            limits = _limits.get()
        except LookupError:
            _limits.set(limits := {})
        async with limits.setdefault((self.name, kind), anyio.CapacityLimiter(count)):
            yield

    # --- containers ---------------------------------------------------------------------------------------------------

    async def create(self, name: str, config: Mapping[str, Any]) -> None:
        """Make a container of this name. The name makes it repeatable: what a lost answer has made is found again."""

        async def ask() -> None:
            try:
                await self.docker.containers.create(dict(config), name=name)
            except DockerError as error:
                if error.status != 409:
                    raise

        await self.call(f"create a container of {config['Image']}", ask)

    async def start(self, name: str) -> None:
        await self.call("start the container", lambda: self._container(name).start())

    async def inspect(self, name: str) -> dict[str, Any]:
        return await self.call("look at the container", lambda: self._container(name).show())

    async def signal(self, name: str, number: str) -> None:
        await self.call(f"send {number} to the container", lambda: self._container(name).kill(signal=number))

    async def delete(self, name: str) -> None:
        """Kill and remove it, with its anonymous volumes. Raises Missing."""
        await self.call("remove the container", lambda: self._container(name).delete(force=True, v=True))

    async def delete_network(self, name: str) -> None:
        """Raises Missing."""

        async def ask() -> None:
            await (await self.docker.networks.get(name)).delete()

        await self.call("remove a network", ask)

    async def logs(self, name: str) -> str:
        return "".join(await self.call("read logs", lambda: self._container(name).log(stdout=True, stderr=True)))

    async def put(self, name: str, archive: bytes, place: str) -> None:
        """Unpack a tar at `place` in the container, with the engine's rights and the archive's owners."""

        async def ask() -> None:
            await self._container(name).put_archive(place, archive)

        await self.call("make directories in the container", ask)

    async def prepare_exec(self, name: str, argv: Sequence[str], user: str = "") -> Exec:
        """What runs only once it is started, as the container's user unless told otherwise."""

        async def ask() -> Exec:
            return await self._container(name).exec(list(argv), stdin=True, user=user)

        return await self.call("prepare a command", ask)

    def _container(self, name: str) -> Any:
        """Its methods are typed too vaguely to be of use."""
        containers: Any = self.docker.containers
        return containers.container(name)

    # --- images -------------------------------------------------------------------------------------------------------

    async def image(self, name: str, *, pull: str, auth: Mapping[str, str] | None) -> dict[str, Any]:
        """What the engine knows of an image, pulled where it has to be; one pull at a time for all who want it."""
        try:
            pulls = _pulls.get()
        except LookupError:
            _pulls.set(pulls := defaultdict(anyio.Lock))
        if pull != "always" and (found := await self._known(name)):
            return found
        if pull == "never":
            raise SandboxError(f"the engine has no image {name!r}: build or load it there, or set runtime.kwargs.pull")
        async with pulls[f"{self.name} {name}"]:
            if pull == "always" or not await self._known(name):
                await self._pull(name, auth)
        if found := await self._known(name):
            return found
        raise SandboxError(f"the engine has no image {name!r} though it was pulled")

    async def _known(self, name: str) -> dict[str, Any] | None:
        try:
            return await self.call("look at an image", lambda: self.docker.images.inspect(name))
        except Missing:
            return None

    async def _pull(self, name: str, auth: Mapping[str, str] | None) -> None:
        """With growing pauses: registries limit how often they are asked."""
        for number in range(_PULL_TRIES):
            try:
                await self.docker.images.pull(name, auth=dict(auth) if auth else None)
                return
            except (DockerError, aiohttp.ClientError, OSError) as error:
                if number == _PULL_TRIES - 1 or not _worth_another_pull(error):
                    raise SandboxError(
                        f"the engine has no image {name!r} and cannot pull it ({_told(error)}): check runtime.image, "
                        "log in to its registry, or build or load the image on the engine's machine"
                    ) from error
                await _pause(number, longest=30.0)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def call(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer; only for what does no harm when it is done twice."""
        for number in range(_TRIES):
            try:
                with anyio.fail_after(self._seconds):
                    return await ask()
            except DockerError as error:
                if error.status not in _AGAIN or number == _TRIES - 1 or _is_final(error):
                    raise _as_sandbox_error(what, error) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                if number == _TRIES - 1:
                    raise SandboxError(f"the Docker engine cannot {what}: {error!r}") from error
            except TimeoutError as error:
                raise SandboxError(f"the Docker engine did not {what} within {self._seconds:g} s") from error
            await _pause(number, longest=5.0)
        raise AssertionError("unreachable")


def _as_sandbox_error(what: str, error: DockerError) -> SandboxError:
    if error.status == _CANNOT_CONNECT:
        return SandboxError(f"{error.message}: is the engine running, and may this user use it?")
    kind = Missing if error.status == 404 else SandboxError
    return kind(f"the Docker engine cannot {what}: {_told(error)}")


def _is_final(error: DockerError) -> bool:
    told = _told(error).lower()
    return any(reason in told for reason in _NEVER_AGAIN)


def _worth_another_pull(error: Exception) -> bool:
    """Whether it may be the network, or a limit on how often one may ask."""
    told = _told(error).lower()
    if any(
        reason in told for reason in ("toomanyrequests", "429", "timeout", "timed out", "reset", "eof", "503", "502")
    ):
        return True
    return isinstance(error, DockerError) and error.status in _AGAIN and not _is_final(error)


def _told(error: Exception) -> str:
    if isinstance(error, DockerError):
        return str(error.message)
    return str(error) or repr(error)


async def _pause(number: int, *, longest: float) -> None:
    await anyio.sleep(min(longest, 0.25 * 4**number) * random.uniform(0.7, 1.3))
