"""Measures how fast a torch service of 8 GB moves to its GPU and back, compared with plain copies.

The weights are random and made by the benchmark. The reference is the best of several copies of one
large pinned block. The service's times are medians, measured through the backend that a worker
uses. A ratio of 1 means that the service reaches the speed of the hardware.
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
from pathlib import Path
from typing import Any

import common

from tangram_hpc.config.services import service_spec
from tangram_hpc.ports import ServicePlace
from tangram_hpc.resources.gpu.devices import Devices, find_devices

# hidden size, layers: 9 x hidden^2 parameters a layer, 2 bytes each
LARGE, TINY = (8192, 7), (256, 2)


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
    took: dict[str, list[float]] = {"wake": [], "park": []}
    try:
        held_mib = await backend.load()
        for _ in range(rounds + 1):  # the first round is left out: it makes the device's context
            for name in ("wake", "park"):
                began = time.perf_counter()
                await (backend.wake(place.gpus) if name == "wake" else backend.park())
                took[name].append(time.perf_counter() - began)
    finally:
        await backend.close()
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    figures: dict[str, Any] = {"weights_gb": round(weights / 1e9, 3), "held_mib": held_mib,
                               "first_wake_s": round(took["wake"][0], 3)}
    for name, seconds in took.items():
        middle = statistics.median(seconds[1:])
        figures |= {f"{name}_s": round(middle, 4), f"{name}_gbs": round(weights / 1e9 / middle, 2)}
    return figures


def measure(devices: Devices, size: tuple[int, int], block_mib: int, rounds: int
            ) -> dict[str, Any]:
    """Returns the rates of the plain copies and of the service, and their ratios."""
    from tangram_hpc.services.torch.tiny import make_tiny

    env = devices.visible(devices.indices[:1])
    told = subprocess.run([sys.executable, __file__, "--copy", str(block_mib), str(rounds)],
                          env={**os.environ, **env}, check=True, capture_output=True, text=True)
    rates = json.loads(told.stdout)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny(Path(scratch) / "model", hidden=size[0], layers=size[1],
                           dtype="bfloat16")
        place = ServicePlace(devices.indices[:1], devices.kind, f"{scratch}/copy",
                             tuple(env.items()), len(os.sched_getaffinity(0)))
        figures = asyncio.run(park_and_wake(folder, place, rounds))
    return {"device": devices.summary(), **{k: round(v, 2) for k, v in rates.items()}, **figures,
            "wake_over_copy": round(figures["wake_gbs"] / rates["to_device_gbs"], 3),
            "park_over_copy": round(figures["park_gbs"] / rates["to_host_gbs"], 3)}


def lacking(devices: Devices) -> str:
    """Returns why this machine cannot run the benchmark; empty when it can."""
    if devices.kind != "cuda":
        return f"no GPU: {devices.why}"
    if any(d.uuid == "" for d in devices.devices):
        return devices.why
    try:
        import tangram_hpc.services.torch.tiny  # noqa: F401
    except ImportError as error:
        return f"tangram-hpc's extra `torch` is not installed ({error})"
    return ""


def main() -> None:
    """Prints one line."""
    tiny = common.arguments(__doc__).tiny
    size, block_mib, rounds = (TINY, 16, 1) if tiny else (LARGE, 1024, 7)
    devices = find_devices(os.environ)
    why = lacking(devices)
    figures = {"left_out": why} if why else measure(devices, size, block_mib, rounds)
    common.line("gpu_park", {"hidden": size[0], "layers": size[1], "block_mib": block_mib,
                             "rounds": rounds}, figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--copy"]:
        copy_rates(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
