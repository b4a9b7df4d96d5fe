"""How much of a GPU that weights of parked services may take: by the setting and the devices."""

from __future__ import annotations

import pytest

from tangram_hpc.app.worker import weights_cache_mib
from tangram_hpc.config.settings import Config
from tangram_hpc.resources.gpu.devices import CPU, CUDA, FAKE, Device, Devices


def devices(kind: str, *mib: int) -> Devices:
    return Devices(tuple(Device(i, mem_mib=each, kind=kind) for i, each in enumerate(mib)), kind)


@pytest.mark.parametrize(("setting", "lent", "expected"), [
    (-1, devices(CUDA, 80000, 40000), 20000),  # half of the smallest
    (-1, devices(CUDA, 0), 0),  # the size is not known
    (-1, devices(CPU, 0, 0), 0),
    (-1, devices(FAKE, 0), 0),
    (-1, Devices(), 0),
    (0, devices(CUDA, 80000), 0),
    (500, devices(CUDA, 80000), 500),
    (500, devices(CPU, 0), 500)])
def test_the_default_is_half_of_a_real_gpu(setting: int, lent: Devices, expected: int) -> None:
    assert weights_cache_mib(Config(weights_cache_mib=setting), lent) == expected
