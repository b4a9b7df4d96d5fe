"""A real vLLM server, started by the tests from a small model, where vLLM is installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

READY_S = 240.0  # how long a server may take until it answers
CACHE_BYTES = 2 << 30  # of a server's KV cache
LENGTH = 512  # longest sequence of the small models, tokens

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@dataclass(frozen=True)
class VllmServer:
    """A server that runs. `log` is what it printed."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_vllm(model: Path, *more: str) -> VllmServer:
    """Starts a server and does not wait for it. It compiles nothing, since a test does not wait for
    that. Its cache has a fixed size: to measure what is free, it would have to start alone."""
    port, log = free_port(), model / "vllm.log"
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
           "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
               "--port", str(port), "--model", str(model), "--served-model-name", model.name,
               "--enable-sleep-mode", "--enforce-eager", "--max-model-len", str(LENGTH),
               "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(CACHE_BYTES),
               "--dtype", "float32",
               *os.environ.get("TANGRAM_VLLM_OPTIONS", "").split(), *more]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    return VllmServer(f"http://127.0.0.1:{port}", model.name, process, log)


def await_ready(server: VllmServer) -> None:
    """Returns when the server answers; fails with what it printed when it ends or does not."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(f"vLLM ended with {server.process.returncode}: {server.tail()}")
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"vLLM was not ready within {READY_S:g} s: {server.tail()}")


def end(*servers: VllmServer) -> None:
    """Kills servers and all of their processes."""
    for server in servers:
        try:
            os.killpg(server.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for server in servers:
        server.process.wait(30)


@contextmanager
def vllm_servers(*wanted: tuple[Path, tuple[str, ...]]) -> Iterator[list[VllmServer]]:
    """Servers that are ready, each of a model and with options; they start at the same time."""
    servers = [start_vllm(model, *more) for model, more in wanted]
    try:
        for server in servers:
            await_ready(server)
        yield servers
    finally:
        end(*servers)
