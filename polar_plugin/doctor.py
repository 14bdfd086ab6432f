"""What `polar-plugin doctor` looks at before a run: engine, renderer, sandbox. Each finding says what to do."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from . import plugins
from .config import RolloutConfig
from .engine.base import Renderer
from .engine.render import extension_report
from .errors import ConfigError, PolarError, SandboxError
from .placeholders import fill
from .proxy.session import Ready
from .records import ChatRequest, Completion, RuntimeSpec
from .runtimes.base import Runtime
from .service import RolloutService

_ASK = """\
import sys, urllib.request as u
request = u.Request(sys.argv[1] + "/v1/models", headers={"Authorization": "Bearer " + sys.argv[2]})
print(u.urlopen(request, timeout=10).status)
"""
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
_SAME = ("backend", "import_path", "image", "network", "harness_root", "kwargs")
"""What of a runtime a sandbox can be tried with."""
_ELSEWHERE = ("192.0.2.1", 443)  # TEST-NET-1: an address of nobody


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    what: str
    told: str
    remedy: str = ""


async def examine(config: RolloutConfig) -> list[Finding]:
    """All findings, in the order a rollout meets them. Nothing is raised for what is found."""
    findings: list[Finding] = []
    try:
        async with RolloutService(config) as service:
            findings += _engine(service)
            findings += _renderer(service.policy.renderer, config)
            findings += await _sandbox(service)
    except PolarError as error:
        findings.append(
            Finding("fail", error.boundary, str(error), "mend this first; what comes after was not looked at")
        )
    return findings


def _engine(service: RolloutService) -> list[Finding]:
    info, asked = service.info, service.config.engine.context_length
    told = f"{info.model or 'the model'} (weights {info.weight_version!r}) answers with token ids and log-probabilities"
    findings = [Finding("ok", "engine", told)]
    if asked and asked > info.context_length:
        remedy = (
            f"set engine.context_length to at most {info.context_length}, or start the engine with a longer context"
        )
        findings.append(Finding("fail", "context", f"{asked} asked, but the engine has {info.context_length}", remedy))
    else:
        findings.append(Finding("ok", "context", f"{service.policy.context_length} tokens"))
    return [*findings, *_vocabulary(service)]


def _vocabulary(service: RolloutService) -> list[Finding]:
    has, needs = cast("int | None", getattr(service.engine, "vocab_size", None)), service.policy.renderer.vocab_size
    if has is None:
        return [
            Finding(
                "warn", "vocabulary", "the engine does not tell its size", "make sure that tokenizer and model match"
            )
        ]
    if needs > has:
        told = f"the renderer may make ids up to {needs - 1}, the engine has {has}"
        return [Finding("fail", "vocabulary", told, "set renderer.tokenizer to the tokenizer of the engine's model")]
    return [Finding("ok", "vocabulary", f"{has} ids in the engine, {needs} in the renderer")]


def _renderer(renderer: Renderer, config: RolloutConfig) -> list[Finding]:
    findings = [Finding("ok", "renderer", f"{renderer.name} (history: {config.renderer.history})")]
    for check in extension_report(cast("Any", renderer)):
        remedy = "" if check.ok else "turns of this kind break the chain (counted); try another renderer.kind"
        findings.append(Finding("ok" if check.ok else "warn", f"renderer: {check.name}", check.detail, remedy))
    return findings


async def _sandbox(service: RolloutService) -> list[Finding]:
    spec = task_runtime(service.config)
    try:
        async with _opened(service, spec) as (runtime, key):
            return [
                Finding("ok", "sandbox", f"{spec.plugin} starts and runs commands"),
                await _reaches_proxy(runtime, key),
                *[finding async for finding in _reaches_nothing_else(service, spec, runtime)],
            ]
    except ConfigError as error:
        if spec.image is not None:
            raise
        return [Finding("warn", "sandbox", f"not looked at: {error}", "run the doctor with the image of one sample")]
    except SandboxError as error:
        return [Finding("fail", "sandbox", str(error), "agents cannot run until this is mended")]


def task_runtime(config: RolloutConfig) -> RuntimeSpec:
    """The task's runtime as far as it names no sample."""
    told: Any = config.task.get("runtime", {})
    if not isinstance(told, Mapping):  # a placeholder for the whole of it
        return RuntimeSpec()
    runtime = cast("Mapping[str, Any]", told)
    plain: dict[str, Any] = {name: runtime[name] for name in _SAME if name in runtime and _plain(runtime[name])}
    return RuntimeSpec(**plain)


def _plain(value: Any) -> bool:
    """Whether a part of a template is the same for every sample."""
    try:
        return fill(value, {}) == value
    except ConfigError:
        return False


class _NoReply:
    """The token side of a session in which nothing is asked."""

    async def __call__(self, request: ChatRequest, ready: Ready) -> Completion:
        raise SandboxError("the doctor does not sample")

    async def count(self, request: ChatRequest) -> int:
        raise SandboxError("the doctor does not count")


@asynccontextmanager
async def _opened(service: RolloutService, spec: RuntimeSpec) -> AsyncGenerator[tuple[Runtime, str]]:
    factory = cast("Callable[..., Runtime]", plugins.resolve(spec.plugin, plugins.RUNTIMES, "runtime"))
    runtime = factory(spec, proxy=service.proxy.endpoint, labels={"session": "doctor"})
    async with service.proxy.session("doctor", _NoReply()) as session:
        try:
            await runtime.start()
            yield runtime, session.key
        finally:
            await runtime.stop()


async def _reaches_proxy(runtime: Runtime, key: str) -> Finding:
    result = await runtime.exec(["python3", "-c", _ASK, runtime.proxy_url, key], timeout=30)
    if result.ok:
        return Finding("ok", "sandbox: proxy", f"reached at {runtime.proxy_url}")
    remedy = "set proxy.host to an address that sandboxes can reach, or runtime.network to proxy_only"
    return Finding("fail", "sandbox: proxy", result.text.strip()[-300:], remedy)


async def _reaches_nothing_else(
    service: RolloutService, spec: RuntimeSpec, runtime: Runtime
) -> AsyncGenerator[Finding]:
    engine = urlsplit(service.config.engine.url or "")
    places: dict[str, tuple[str, int]] = {"a public address": _ELSEWHERE}
    if engine.hostname:
        places["the engine"] = (engine.hostname, engine.port or 80)
    for name, (host, port) in places.items():
        result = await runtime.exec(["python3", "-c", _CONNECT, host, str(port)], timeout=10)
        if not result.ok:
            yield Finding("ok", "sandbox: egress", f"{name} cannot be reached")
        else:
            level = "fail" if spec.network == "proxy_only" else "warn"
            remedy = "set runtime.network to proxy_only, or accept that agents reach it"
            yield Finding(level, "sandbox: egress", f"{name} can be reached from inside", remedy)
