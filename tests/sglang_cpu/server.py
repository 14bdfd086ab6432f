"""The real SGLang 0.5.23 server on this machine's CPU, with a tiny random model: a pytest fixture.

Needs `tests/sglang_cpu/install.sh` once. Boots in about half a minute and serves a few hundred tokens a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VENV = HERE.parent.parent / ".cache" / "sglang-venv"
BOOT_SECONDS = 240
VOCAB_SIZE = 320
CONTEXT_LENGTH = 4096

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more threads spin-wait, which is far slower on a busy machine
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(HERE / "stand_ins"),
}
_FLAGS = (
    "--device cpu --host 127.0.0.1 --disable-overlap-schedule --attention-backend torch_native"
    " --sampling-backend pytorch --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
    " --mem-fraction-static 0.1 --max-total-tokens 16384 --skip-server-warmup --sleep-on-idle --grammar-backend none"
    f" --served-model-name tiny --context-length {CONTEXT_LENGTH}"
).split()


@dataclass(frozen=True, slots=True)
class Served:
    """A process that answers at `url`."""

    url: str
    boot_seconds: float
    log: Path


def write_tiny_model(directory: Path) -> None:
    """A random Qwen3 of two layers and a byte-level tokenizer, without an end-of-text id: it stops only when told."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def python() -> Path:
    """The interpreter that has SGLang; skips the test where it is not installed."""
    if not (VENV / ".installed").exists():
        pytest.skip("SGLang is not installed: run tests/sglang_cpu/install.sh")
    return VENV / "bin" / "python"


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path, *, ready: str, env: Mapping[str, str]) -> Iterator[Served]:
    """Start `command` in a process group of its own, wait until `ready` answers, and end the group on leaving."""
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            _await(f"{url}{ready}", process, log)
            yield Served(url, time.monotonic() - started, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _die_with_parent() -> None:
    """A killed test run leaves no server behind (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if _answers(url):
            return
        time.sleep(0.25)
    raise RuntimeError(f"{url} did not come up:\n{log.read_text(errors='replace')[-4000:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def sglang(model: Path, log: Path, *extra: str) -> Iterator[Served]:
    port = free_port()
    command = [str(python()), "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    with serving([*command, *_FLAGS, *extra], port, log, ready="/health", env=_ENVIRONMENT) as served:
        yield served


@contextlib.contextmanager
def router(workers: list[str], log: Path) -> Iterator[Served]:
    """The real sglang-router 0.3.2 in front of `workers`."""
    port = free_port()
    command = [str(python()), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    with serving(
        [*command, "--worker-urls", *workers, "--prometheus-port", str(free_port())],
        port,
        log,
        ready="/readiness",
        env=_ENVIRONMENT,
    ) as served:
        yield served


@pytest.fixture(scope="session", name="tiny_model")
def tiny_model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-model")
    write_tiny_model(directory)
    return directory


@pytest.fixture(scope="session", name="real_sglang")
def real_sglang_fixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of float32 weights for the whole run."""
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with sglang(tiny_model, log, "--dtype", "float32") as served:
        yield served
