"""On a real NVIDIA GPU: NVML against nvidia-smi, masks against CUDA, the meter and the bench."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.gpu_rig import DEVICES, NEEDS_GPU, SEEN, needs_torch

from tangram_hpc import LocalCluster
from tangram_hpc.resources.gpu.devices import MASK, allowed
from tangram_hpc.resources.gpu.gpu_meter import GpuMeter
from tangram_hpc.resources.gpu.nvml import open_nvml

BARE = {k: v for k, v in os.environ.items() if k != MASK}
pytestmark = NEEDS_GPU

# asks the driver itself, without torch; prints the UUIDs that this process sees
CUDA = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        assert cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), device) == 0
        print(bytes(uuid).hex())
"""
# holds memory and computes until its stdin ends; says "on" when it does
BURN = """
import select, sys, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("on", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(20):
        b = a @ a
    torch.cuda.synchronize()
"""


def smi(*words: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *words], env=BARE, capture_output=True, text=True,
                              check=True).stdout
    except FileNotFoundError:
        pytest.skip("nvidia-smi is not there")


def cuda_sees(mask: str) -> list[str]:
    """The UUIDs that CUDA shows a process with this mask, as 32 hex digits."""
    told = subprocess.run([sys.executable, "-c", CUDA], env={**BARE, MASK: mask},
                          capture_output=True, text=True, check=True)
    return told.stdout.split()


def bare(uuid: str) -> str:
    return re.sub(r"^(GPU|MIG)-|-", "", uuid)


def test_nvml_agrees_with_nvidia_smi() -> None:
    rows = [[word.strip() for word in row.split(",")] for row in smi(
        "--query-gpu=uuid,name,memory.total,driver_version",
        "--format=csv,noheader,nounits").strip().splitlines()]
    assert [[g.uuid, g.name, str(g.mem_mib), SEEN.driver] for g in SEEN.gpus] == rows
    slices = re.findall(r"UUID: (MIG-[^)]+)\)", smi("-L"))
    assert [s.uuid for g in SEEN.gpus for s in g.slices] == slices


def test_a_process_gets_exactly_the_lent_device() -> None:
    for device in DEVICES.devices:
        assert cuda_sees(DEVICES.mask([device.index])) == [bare(device.uuid)]
    assert cuda_sees("") == []


@pytest.mark.skipif(any(g.mig for g in SEEN.gpus), reason="CUDA shows one slice at a time")
def test_device_masks_are_read_as_cuda_reads_them() -> None:
    last, uuids = len(SEEN.gpus) - 1, [g.uuid for g in SEEN.gpus]
    for mask in ["0", f"{last},0,99" if last else "0,99", "-1", "0,-1", "99", "99,0", "NoDevFiles",
                 uuids[0], uuids[last], f"{uuids[0]},-1", uuids[0][:-1], "0,0",
                 ",".join(uuids), ",".join(str(n) for n in range(last, -1, -1))]:
        units, _ = allowed(mask, SEEN.gpus)
        assert [bare(u.uuid) for u in units] == cuda_sees(mask), mask


@needs_torch
def test_memory_and_the_meter_follow_a_process() -> None:
    device = DEVICES.devices[0]
    nvml, _ = open_nvml()
    assert nvml is not None
    before, meter = nvml.read(device.uuid), GpuMeter(DEVICES)
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, text=True,
                          env={**BARE, **DEVICES.visible([device.index])},
                          stdout=subprocess.PIPE) as burn:
        assert burn.stdout is not None and burn.stdout.readline() == "on\n"
        token = meter.begin([device.index])
        time.sleep(4)
        during, usage = nvml.read(device.uuid), meter.end(token)
        burn.communicate()
    meter.close()
    nvml.close()
    assert during.used_mib - before.used_mib >= 1024
    assert usage.max_mem_mib >= 1024
    if before.util_pct >= 0:
        assert usage.util_pct > 50
    if before.energy_mj >= 0:
        drawn = during.energy_mj - before.energy_mj  # before the lease too
        assert 0 < usage.energy_mj <= drawn * 1.1


def test_actions_and_info_name_the_device(tmp_path: Path) -> None:
    with LocalCluster(cpus=1, home=tmp_path) as cluster:
        node = cluster.ask("nodes")["nodes"][0]
        assert (node["gpus"], node["devices"]) == (len(DEVICES.devices), DEVICES.summary())
        told = cluster.submit(["sh", "-c", f"echo ${MASK}"], gpus=1, trusted=True).result()
        assert told.text.strip() in {d.uuid for d in DEVICES.devices}
        with_gpu = cluster.submit([sys.executable, "-c", CUDA], gpus=1, trusted=True).result()
        assert with_gpu.text.split() == [bare(told.text.strip())]
        without = cluster.submit([sys.executable, "-c", CUDA], trusted=True).result()
        assert without.text == ""


@needs_torch
def test_the_parking_bench_prints_its_figures(tmp_path: Path) -> None:
    bench = Path(__file__).resolve().parents[2] / "bench" / "bench_gpu_park.py"
    told = subprocess.run([sys.executable, str(bench), "--tiny"], capture_output=True, text=True,
                          cwd=tmp_path, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    figures = json.loads(told.stdout)["figures"]
    assert "left_out" not in figures, figures
    [model] = figures["models"]
    assert model["wake_over_copy"] > 0 and figures["to_device_gbs"] > 0
