"""The real GPUs of this machine for the tests that need one, and what is missing without one."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tangram_hpc.ports import ServicePlace
from tangram_hpc.resources.gpu.devices import find_devices
from tangram_hpc.resources.gpu.nvml import look, open_nvml

SEEN = look()
DEVICES = find_devices(os.environ)
WHY = SEEN.why if not SEEN.gpus else DEVICES.why if not DEVICES.devices else ""
_TORCH = all(importlib.util.find_spec(n) for n in ("torch", "transformers", "safetensors",
                                                   "tokenizers"))

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.timeout(300),
             pytest.mark.skipif(bool(WHY), reason=f"no GPU: {WHY}")]
needs_torch = pytest.mark.skipif(not WHY and not _TORCH,
                                 reason="the extra `torch` is not installed")


def gpu_place(scratch: str, env: tuple[tuple[str, str], ...] = ()) -> ServicePlace:
    """A place on the first GPU, which is number 0 there."""
    first = DEVICES.devices[0].index
    return ServicePlace((0,), "cuda", scratch, (*DEVICES.visible([first]).items(), *env), 1)


def used_mib() -> int:
    """Memory of the first GPU that is in use, by NVML."""
    nvml, why = open_nvml()
    assert nvml is not None, why
    try:
        return nvml.read(DEVICES.devices[0].uuid).used_mib
    finally:
        nvml.close()
