"""Measures the time to bring a model onto its device and off it, where the device is CPU memory.

`wake_over_copy` is the time to wake the model divided by the time to copy as many bytes into fresh
memory in this process; both take turns, and the figure is the median of the rounds' ratios. The
times of wake, park, load and one call are in ms, for a model of a few MiB and one of about 200 MB.
The benchmark needs the extra `torch`; without it the line only says so.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import common
import numpy as np

from tangram_hpc.ports import ServicePlace, ServiceRequest
from tangram_hpc.protocol.service_frames import LoadModel
from tangram_hpc.protocol.value import encode_value
from tangram_hpc.services.processes.process import ProcessBackend

SIZES = {"small": {"hidden": 128, "layers": 4}, "large": {"hidden": 1024, "layers": 6}}


async def took_ms(step: Awaitable[Any]) -> float:
    """How long it takes, ms."""
    began = time.perf_counter()
    await step
    return (time.perf_counter() - began) * 1e3


def copy_ms(source: np.ndarray) -> float:
    """Copies these bytes into fresh memory; ms."""
    began = time.perf_counter()
    source.copy()
    return (time.perf_counter() - began) * 1e3


async def measure(model: Path, scratch: str, rounds: int) -> dict[str, float]:
    """The figures of one model."""
    weights = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    source = np.ones(weights, np.uint8)
    copy = ProcessBackend(LoadModel(str(model), "causal", "float32", 512, "cpu", 1),
                          ServicePlace((0,), "cpu", scratch), 300)
    figures = {"weights_mb": weights / 1e6, "load_ms": await took_ms(copy.load())}
    call = [ServiceRequest("logprobs", encode_value({"prompts": ["one"], "completions": ["two"]}))]
    found: dict[str, list[float]] = {"wake": [], "call": [], "park": [], "ratio": []}
    for _ in range(rounds):
        found["wake"].append(await took_ms(copy.wake((0,))))
        found["call"].append(await took_ms(copy.call(call)))
        found["park"].append(await took_ms(copy.park()))
        found["ratio"].append(found["wake"][-1] / copy_ms(source))
    await copy.close()
    figures |= {f"{n}_ms": statistics.median(found[n]) for n in ("wake", "call", "park")}
    return figures | {"wake_over_copy": statistics.median(found["ratio"])}


def main(tiny: bool) -> None:
    """Prints the line."""
    rounds, sizes = (2, ["small"]) if tiny else (10, list(SIZES))
    figures: dict[str, Any] = {}
    if any(importlib.util.find_spec(n) is None for n in ("torch", "transformers")):
        figures["skipped"] = "torch is not installed (pip install .[torch])"
    else:
        from tangram_hpc.services.torch.tiny import make_tiny

        with tempfile.TemporaryDirectory() as home:
            for size in sizes:
                model = make_tiny(Path(home, size), positions=512, **SIZES[size])
                told = asyncio.run(measure(model, f"{home}/scratch", rounds))
                figures[size] = {name: round(value, 3) for name, value in told.items()}
    common.line("park", {"rounds": rounds, "device": "cpu"}, figures)


if __name__ == "__main__":
    main(common.arguments(__doc__).tiny)
