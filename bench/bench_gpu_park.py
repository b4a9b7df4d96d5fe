"""Measures how fast torch services of 1, 4 and 16 GB come to a GPU, compared with plain copies.

The weights are random and made by the benchmark. The reference is the best of several copies of one
large pinned block, in both directions. The service's times are medians, measured through the
backend that a worker uses. A ratio of 1 means that the service reaches the speed of the hardware;
`rest_ms` is what a wake takes beyond the plain copy of as many bytes. Parking copies nothing,
because the host keeps its copy of the weights, so it is faster than a copy.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from large_models import LAYERS, hidden_for, make_large

from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServicePlace
from tangram_hpc.resources.gpu.devices import CUDA, Devices, find_devices
from tangram_hpc.resources.gpu.nvml import look
from tangram_hpc.services.processes.process import ProcessBackend

SIZES_GB = (1.0, 4.0, 16.0)
TINY = (256, 2)  # hidden size, layers


def copy_rates(mib: int, times: int) -> None:
    """Runs in a child process that uses nothing but the device; prints GB/s for each direction."""
    import torch

    host = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

    def rate(to: Any, of: Any) -> float:
        best = 0.0
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            begin.record()
            to.copy_(of, non_blocking=True)
            end.record()
            torch.cuda.synchronize()
            best = max(best, to.numel() / 1e6 / begin.elapsed_time(end))
        return best

    print(json.dumps({"to_device_gbs": rate(device, host), "to_host_gbs": rate(host, device)}))


async def park_and_wake(folder: Path, place: ServicePlace, rounds: int) -> dict[str, Any]:
    """Returns the medians of the times to bring a copy to its block and to park it again."""
    from tangram_hpc.services.backend_registry import make_backend

    spec = service_spec("bench", {"backend": "torch", "model": str(folder), "dtype": "bfloat16",
                                  "load_s": 1800})
    backend = make_backend(spec, place)
    assert isinstance(backend, ProcessBackend)
    took: dict[str, list[float]] = {"wake": [], "park": []}
    began = time.perf_counter()
    try:
        held_mib = await backend.load()
        load_s = time.perf_counter() - began
        own_mib = own_memory_mib(backend.pid)
        for _ in range(rounds + 1):  # the first round is left out: it loads the device's kernels
            for name in ("wake", "park"):
                began = time.perf_counter()
                await (backend.wake(place.gpus) if name == "wake" else backend.park())
                took[name].append(time.perf_counter() - began)
    finally:
        await backend.close()
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    figures: dict[str, Any] = {"weights_gb": round(weights / 1e9, 3), "held_mib": held_mib,
                               "own_mib": own_mib, "load_s": round(load_s, 2),
                               "first_wake_s": round(took["wake"][0], 3)}
    for name, seconds in took.items():
        middle = statistics.median(seconds[1:])
        figures |= {f"{name}_s": round(middle, 4), f"{name}_gbs": round(weights / 1e9 / middle, 2)}
    return figures


def own_memory_mib(pid: int) -> int:
    """Memory that the process shares with no other, MiB: weights are in it only where they could
    not be mapped."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) >> 10


def measure(devices: Devices, shapes: Sequence[tuple[int, int]], block_mib: int, rounds: int
            ) -> dict[str, Any]:
    """Returns the rates of the plain copies, and for each size those of the service."""
    env = devices.visible(devices.indices[:1])
    told = subprocess.run([sys.executable, __file__, "--copy", str(block_mib), str(rounds)],
                          env={**os.environ, **env}, check=True, capture_output=True, text=True)
    rates = json.loads(told.stdout)
    models = []
    for hidden, layers in shapes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_large(Path(scratch) / "model", hidden, layers)
            place = ServicePlace(devices.indices[:1], devices.kind, f"{scratch}/copy",
                                 tuple(env.items()), len(os.sched_getaffinity(0)))
            seen = asyncio.run(park_and_wake(folder, place, rounds))
        plain_s = seen["weights_gb"] / rates["to_device_gbs"]
        models.append({**seen, "rest_ms": round((seen["wake_s"] - plain_s) * 1e3, 1),
                       "wake_over_copy": round(seen["wake_gbs"] / rates["to_device_gbs"], 3),
                       "park_over_copy": round(seen["park_gbs"] / rates["to_host_gbs"], 3)})
    return {"device": devices.summary(), "driver": look().driver,
            **{k: round(v, 2) for k, v in rates.items()}, "models": models}


def lacking(devices: Devices) -> str:
    """Returns why a benchmark cannot run on these devices; empty when it can."""
    if not devices.kind:
        return f"no GPU: {devices.why}"
    if any(d.kind == CUDA and d.uuid == "" for d in devices.devices):
        return devices.why
    try:
        import tangram_hpc.services.torch.tiny  # noqa: F401
    except ImportError as error:
        return f"tangram-hpc's extra `torch` is not installed ({error})"
    return ""


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    shapes = [TINY] if tiny else [(hidden_for(size), LAYERS) for size in SIZES_GB]
    block_mib, rounds = (16, 1) if tiny else (1024, 5)
    devices = find_devices(os.environ)
    why = lacking(devices)
    figures = {"left_out": why} if why else measure(devices, shapes, block_mib, rounds)
    common.line("gpu_park", {"shapes": shapes, "block_mib": block_mib, "rounds": rounds}, figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--copy"]:
        copy_rates(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
