"""The adapters of `ServiceBackend` as the conformance suite uses them, one `BackendCase` for each,
and a watch on what they leave behind. Another adapter joins the suite by a class here and its place
in `ADAPTERS`.

Law: a copy is made to fail from outside, as a node would; only a fake is told to.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

from helpers.executor_rig import alive
from helpers.gpu_rig import NEEDS_GPU, gpu_place, needs_torch
from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServiceBackend, ServicePlace, ServiceReply, ServiceRequest
from tangram_hpc.protocol.value import decode_value, encode_value
from tangram_hpc.resources import process_tree
from tangram_hpc.services.backend_registry import make_backend
from tangram_hpc.services.fake import FakeBackend
from tangram_hpc.services.processes.process import ProcessBackend

TORCH = all(find_spec(name) for name in ("torch", "transformers", "safetensors", "tokenizers"))
NEEDS_TORCH = [pytest.mark.long, pytest.mark.timeout(300),
               pytest.mark.skipif(not TORCH, reason="needs the extra: torch")]


def request(method: str, **fields: Any) -> ServiceRequest:
    return ServiceRequest(method, encode_value(fields))


def value(reply: ServiceReply) -> Any:
    """The answer; asserts that there is one."""
    assert not reply.error, reply.error
    return decode_value(reply.value)


class BackendCase(Protocol):
    """One adapter, and how its copies come to harm."""

    name: str
    good: list[ServiceRequest]
    wrong: list[ServiceRequest]
    large: list[ServiceRequest]  # a batch that does not fit where it is `tight`

    def make(self, home: Path, scratch: Path, tight: str = "") -> ServiceBackend:
        """A copy. `home`: kept for the whole run; `tight`: its device is too small to "wake" it,
        or for a large "call"."""
        ...

    def freeze(self, copy: ServiceBackend, order: str) -> None:
        """From now on nothing happens in it; `order` is the next one."""
        ...

    async def crash(self, copy: ServiceBackend, order: str, run: Callable[[], Awaitable[Any]]
                    ) -> None:
        """It ends while `run`, which gives the order, is under way; raises what that raises."""
        ...

    async def crash_idle(self, copy: ServiceBackend) -> None:
        """It ends while it has no order."""
        ...


class Fake:
    """The fake service."""

    name = "fake"
    good = [request("score", texts=["a"]), request("score", length=3), request("judge")]
    wrong = [request("wrong"), ServiceRequest("score", encode_value([1])),
             request("score", length=-1), ServiceRequest("score", b"\xc1")]
    large = [request("oom")]

    def make(self, home: Path, scratch: Path, tight: str = "") -> ServiceBackend:
        spec = service_spec("it", {"backend": "fake", "weights_mib": 7, "wake_s": 0.001,
                                   "park_s": 0.001, "call_s": 0.001, "token_s": 0.0001})
        copy = make_backend(spec, ServicePlace((0,), "cpu", str(scratch)))
        assert isinstance(copy, FakeBackend)
        if tight == "wake":
            copy.trouble["wake"] = "oom"
        return copy

    def freeze(self, copy: ServiceBackend, order: str) -> None:
        assert isinstance(copy, FakeBackend)
        copy.trouble[order] = "hang"

    async def crash(self, copy: ServiceBackend, order: str, run: Callable[[], Awaitable[Any]]
                    ) -> None:
        assert isinstance(copy, FakeBackend)
        copy.trouble[order] = "crash"
        await run()

    async def crash_idle(self, copy: ServiceBackend) -> None:
        copy.kill()


class Torch:
    """Models that the runner of this package serves."""

    wrong = [request("nonsense", texts=["a"]), request("score"),
             request("logprobs", prompts=["a"]), ServiceRequest("logprobs", encode_value([1])),
             ServiceRequest("score", b"\xc1"), request("score", texts="a"),
             request("score", texts=[[1.5]]), request("score", texts=[[10**6]]),
             request("score", texts=["a"], more=1),
             request("logprobs", prompts=["a"], completions=["b", "c"]),
             request("logprobs", prompts=["a" * 300], completions=["b" * 300]),
             request("generate", prompts=["a"], max_new_tokens=0),
             request("generate", prompts=["a"], max_new_tokens=600),
             request("generate", prompts=[""], max_new_tokens=6),
             request("generate", prompts=["a"], max_new_tokens=6, temperature=-1)]
    _place_mib = {"": 400, "wake": 1, "call": 4}  # the models take 2 to 3

    def __init__(self, task: str) -> None:
        self.name = f"torch-{task}"
        self.task = task
        if task == "causal":
            self.good = [request("logprobs", prompts=["one", "and one"], completions=["two", "!"]),
                         request("generate", prompts=["say"], max_new_tokens=4),
                         request("logprobs", prompts=["so"], completions=["on and on"])]
            self.large = [request("logprobs", prompts=["x" * 200] * 40, completions=["y"] * 40)]
        else:
            self.good = [request("score", texts=["a good one", "bad"]),
                         request("score", texts=["another"])]
            self.large = [request("score", texts=["x" * 200] * 40)]

    def make(self, home: Path, scratch: Path, tight: str = "") -> ServiceBackend:
        spec = service_spec("it", {"backend": "torch", "model": str(tiny(home, self.task)),
                                   "task": self.task})
        env = (("TANGRAM_DEVICE_MIB", str(self._place_mib[tight])),)
        return make_backend(spec, self.place(scratch, env))

    def place(self, scratch: Path, env: tuple[tuple[str, str], ...]) -> ServicePlace:
        return ServicePlace((0,), "cpu", str(scratch), env)

    def freeze(self, copy: ServiceBackend, order: str) -> None:
        assert isinstance(copy, ProcessBackend)
        os.kill(copy.pid, signal.SIGSTOP)

    async def crash(self, copy: ServiceBackend, order: str, run: Callable[[], Awaitable[Any]]
                    ) -> None:
        assert isinstance(copy, ProcessBackend)
        if copy.pid:
            os.kill(copy.pid, signal.SIGSTOP)  # so that the order is under way when it ends
        task = asyncio.ensure_future(run())
        while not copy.pid:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        os.kill(copy.pid, signal.SIGKILL)
        await task

    async def crash_idle(self, copy: ServiceBackend) -> None:
        assert isinstance(copy, ProcessBackend)
        pid = copy.pid
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            await asyncio.sleep(0.002)


class TorchOnGpu(Torch):
    """The same models on a real GPU."""

    _place_mib = {"": 4096, "wake": 1, "call": 256}  # what torch takes for itself is much of it

    def __init__(self, task: str) -> None:
        super().__init__(task)
        self.name += "-gpu"
        rows = 1000
        self.large = [request("score", texts=["x" * 500] * rows) if task == "classifier" else
                      request("logprobs", prompts=["x" * 500] * rows, completions=["y"] * rows)]

    def place(self, scratch: Path, env: tuple[tuple[str, str], ...]) -> ServicePlace:
        return gpu_place(str(scratch), env)


ADAPTERS: list[Any] = [
    pytest.param(Fake(), id="fake"),
    pytest.param(Torch("causal"), id="torch-causal", marks=NEEDS_TORCH),
    pytest.param(Torch("classifier"), id="torch-classifier", marks=NEEDS_TORCH),
    pytest.param(TorchOnGpu("causal"), id="torch-causal-gpu", marks=[*NEEDS_GPU, needs_torch]),
]


def tiny(home: Path, task: str, **about: Any) -> Path:
    """A small model in a folder of `home`, made once."""
    from tangram_hpc.services.torch.tiny import make_tiny

    words = "-".join(f"{name}={about[name]}" for name in sorted(about))
    folder = home / f"{task}-{words}"
    if not (folder / "tokenizer.json").exists():
        make_tiny(folder, task, **{"hidden": 128, "layers": 4, **about})
    return folder


@contextmanager
def nothing_left(scratch: Path) -> Iterator[None]:
    """Asserts that no process, descriptor or file of a copy is there afterwards."""
    processes, files = set(process_tree.descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
    yield
    assert set(process_tree.descendants(os.getpid())) <= processes
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not scratch.exists()


def on_gpu(folder: Path, scratch: Path, steps: Callable[[ProcessBackend], Awaitable[None]],
           dtype: str = "float32") -> None:
    """Takes a copy of a model through `steps` and closes it."""
    async def life() -> None:
        spec = service_spec("it", {"backend": "torch", "model": str(folder), "dtype": dtype})
        copy = make_backend(spec, gpu_place(str(scratch)))
        assert isinstance(copy, ProcessBackend)
        try:
            await steps(copy)
        finally:
            await copy.close()

    with nothing_left(scratch):
        asyncio.run(life())
