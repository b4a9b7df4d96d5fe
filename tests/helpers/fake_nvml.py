"""FakeNvml: a stand-in for the module `pynvml`: its names, types and errors, and no GPU behind.

Shapes are as nvidia-ml-py 12 and 13 answer: ints and structs with fields, memory in bytes, energy
in mJ, power in mW, text as str (bytes in old versions), one exception class an error code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's: its subclasses are named after the code, its text is the library's."""


class NVMLError_NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_NotFound(NVMLError):
    def __str__(self) -> str:
        return "Not Found"


class NVMLError_NoPermission(NVMLError):
    def __str__(self) -> str:
        return "Insufficient Permissions"


class NVMLError_GpuIsLost(NVMLError):
    def __str__(self) -> str:
        return "GPU is lost"


class NVMLError_DriverNotLoaded(NVMLError):
    def __str__(self) -> str:
        return "Driver Not Loaded"


class NVMLError_LibraryNotFound(NVMLError):
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


class NVMLError_Unknown(NVMLError):
    def __str__(self) -> str:
        return "Unknown Error"


@dataclass
class FakeGpu:
    """A GPU, or with `path` a MIG instance; `slices` None: no MIG at all, else its places."""

    uuid: str
    name: str = "Fake H200"
    total: int = 140 * GIB
    used: int = 1 * GIB
    util: int = 0
    energy_mj: int = 0
    power_mw: int = 100_000
    slices: list[FakeGpu | None] | None = None
    mig: bool = False
    path: tuple[int, int] | None = None
    hidden: bool = False  # by a cgroup
    processes: list[tuple[int, int | None]] = field(default_factory=list)


class FakeNvml:
    """The module. `fails`: call -> the error that it raises, for all GPUs or for one UUID."""

    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, fails: dict[Any, NVMLError] | None = None) -> None:
        self.gpus, self.fails, self.open = list(gpus), fails or {}, 0
        self.calls: list[str] = []

    def _may(self, call: str, gpu: FakeGpu | None = None) -> None:
        self.calls.append(call)
        assert self.open or call == "nvmlInit", f"{call} before nvmlInit"
        for key in (call, (call, gpu.uuid if gpu else "")):
            if key in self.fails:
                raise self.fails[key]

    def nvmlInit(self) -> None:
        self._may("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self._may("nvmlShutdown")
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._may("nvmlSystemGetDriverVersion")
        return "580.159.03"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._may("nvmlSystemGetCudaDriverVersion")
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        self._may("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> FakeGpu:
        gpu = self.gpus[number]
        self._may("nvmlDeviceGetHandleByIndex", gpu)
        if gpu.hidden:
            raise NVMLError_NoPermission
        return gpu

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        self._may("nvmlDeviceGetHandleByUUID")
        for gpu in self.gpus:
            for one in [gpu, *(s for s in gpu.slices or () if s)]:
                if one.uuid == uuid:
                    return one
        raise NVMLError_NotFound

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        self._may("nvmlDeviceGetUUID", gpu)
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes | str:
        self._may("nvmlDeviceGetName", gpu)
        return gpu.name.encode() if gpu.path else gpu.name  # both happen

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        self._may("nvmlDeviceGetMemoryInfo", gpu)
        return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._may("nvmlDeviceGetUtilizationRates", gpu)
        if gpu.path:
            raise NVMLError_NotSupported
        return SimpleNamespace(gpu=gpu.util, memory=0)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._may("nvmlDeviceGetTotalEnergyConsumption", gpu)
        if gpu.path:
            raise NVMLError_NotSupported
        return gpu.energy_mj

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._may("nvmlDeviceGetPowerUsage", gpu)
        if gpu.path:
            raise NVMLError_NotSupported
        return gpu.power_mw

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        self._may("nvmlDeviceGetComputeRunningProcesses", gpu)
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in gpu.processes]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        self._may("nvmlDeviceGetMigMode", gpu)
        if gpu.slices is None:
            raise NVMLError_NotSupported
        return [int(gpu.mig), int(gpu.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        self._may("nvmlDeviceGetMaxMigDeviceCount", gpu)
        return len(gpu.slices or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, number: int) -> FakeGpu:
        self._may("nvmlDeviceGetMigDeviceHandleByIndex", gpu)
        one = (gpu.slices or [])[number]
        if one is None:
            raise NVMLError_NotFound
        return one

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        self._may("nvmlDeviceGetGpuInstanceId", gpu)
        assert gpu.path
        return gpu.path[0]

    def nvmlDeviceGetComputeInstanceId(self, gpu: FakeGpu) -> int:
        self._may("nvmlDeviceGetComputeInstanceId", gpu)
        assert gpu.path
        return gpu.path[1]


def two() -> FakeNvml:
    """Two GPUs without MIG."""
    return FakeNvml(FakeGpu("GPU-aaaa1111-0"), FakeGpu("GPU-aabb2222-0"))


def sliced() -> FakeNvml:
    """One GPU in MIG mode with two slices in seven places, and one whole GPU."""
    slices = [FakeGpu(f"MIG-{n}{n}", f"Fake H200 MIG {n}g.{n}8gb", n * 18 * GIB, path=(n, 0))
              for n in (1, 3)]
    return FakeNvml(FakeGpu("GPU-aaaa1111-0", mig=True, slices=[*slices, *[None] * 5]),
                    FakeGpu("GPU-aabb2222-0", slices=[], mig=False))
