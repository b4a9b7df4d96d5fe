"""The memory of torch services on a real GPU, by NVML. Nothing else may use the GPU meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.backend_rig import on_gpu, request, tiny
from helpers.gpu_rig import NEEDS_GPU, needs_torch, used_mib

from tangram_hpc import LocalCluster
from tangram_hpc.services.processes.process import ProcessBackend

pytestmark = [*NEEDS_GPU, needs_torch]

NEAR_MIB = 96  # what the driver and torch may take for kernels that were loaded meanwhile


def test_memory_that_a_copy_takes_and_frees_is_what_nvml_shows(tmp_path: Path) -> None:
    folder = tiny(tmp_path, "causal", hidden=2048, layers=6)
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors")) >> 20
    before, ask = used_mib(), request("logprobs", prompts=["a"], completions=["b"])

    async def steps(copy: ProcessBackend) -> None:
        await copy.load()
        await copy.wake((0,))
        await copy.call([ask])  # its kernels stay loaded
        await copy.park()
        parked = used_mib()
        assert parked - before < 1500  # the driver's context
        for _ in range(2):
            await copy.wake((0,))
            await copy.call([ask])
            assert abs(used_mib() - parked - weights) < NEAR_MIB
            await copy.park()
            assert abs(used_mib() - parked) < 8

    on_gpu(folder, tmp_path / "s", steps)
    assert abs(used_mib() - before) < 8


@pytest.mark.parametrize("state", ["parked", "awake", "called"])
def test_a_killed_copy_leaves_no_memory_on_the_gpu(state: str, tmp_path: Path) -> None:
    folder, before = tiny(tmp_path, "causal", hidden=1024, layers=6), used_mib()
    ask = request("logprobs", prompts=["x" * 400] * 64, completions=["y" * 100] * 64)

    async def steps(copy: ProcessBackend) -> None:
        await copy.load()
        if state != "parked":
            await copy.wake((0,))
        task = asyncio.ensure_future(copy.call([ask])) if state == "called" else None
        await asyncio.sleep(0.05)
        os.kill(copy.pid, signal.SIGKILL)
        await asyncio.gather(*filter(None, [task]), return_exceptions=True)
        while copy.pid:
            await asyncio.sleep(0.01)

    on_gpu(folder, tmp_path / "s", steps)
    deadline = time.monotonic() + 30
    while used_mib() - before > 8 and time.monotonic() < deadline:
        time.sleep(0.1)  # the driver frees the memory when the process is gone
    assert abs(used_mib() - before) <= 8


# reports, from an action, how much of its GPU is in use
IN_USE = """
import os, pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByUUID(os.environ["CUDA_VISIBLE_DEVICES"])
print(pynvml.nvmlDeviceGetMemoryInfo(device).used >> 20)
"""


@pytest.mark.parametrize("cache", ["kept", "swapped"])
def test_services_take_turns_on_a_gpu_while_their_calls_wait(cache: str, tmp_path: Path) -> None:
    texts = [f"text {n} of many, and no two of them are alike" for n in range(40)]
    names, before = ("a", "b", "c"), used_mib()
    folders = [tiny(tmp_path, "causal", hidden=1024, layers=6, seed=n) for n in range(3)]
    with LocalCluster(2, mem_mib=16384, home=tmp_path / "home",
                      weights_cache_mib=-1 if cache == "kept" else 0) as cluster:
        def ask(service: str, text: str) -> Any:
            return cluster.call(service, "logprobs", prompts=["so: "], completions=[text])

        for name, folder in zip(names, folders, strict=True):
            cluster.register_service(name, {"backend": "torch", "batch": 4, "model": str(folder)})
        alone = {name: ask(name, texts[0]).result(120)[0] for name in names}
        calls = [(name, text, ask(name, text)) for text in texts for name in names]
        restores = 0
        for name, text, call in calls:
            [logprobs] = call.result(120)
            assert len(logprobs) == len(text)
            restores += call.details.restore_s > 0
            if text == texts[0]:
                assert np.abs(logprobs - alone[name]).max() < 2e-3
        assert restores >= 2
        assert np.abs(alone["a"] - alone["b"]).max() > 1  # models of their own
        weights = sum(f.stat().st_size for f in folders[0].glob("*.safetensors")) >> 20
        in_use = used_mib() - before
        action = cluster.submit([sys.executable, "-c", IN_USE], gpus=1, trusted=True)
        freed = in_use - (int(action.result(60).text) - before)
        assert abs(freed - weights * (3 if cache == "kept" else 1)) < 2 * NEAR_MIB
        assert np.abs(ask("b", texts[0]).result(60)[0] - alone["b"]).max() < 2e-3
