"""Which GPUs there are and what they do now, according to NVML, NVIDIA's management library.

This is the only importer of `pynvml` (extra `gpu`), and the import happens at the first question.
Nothing on a GPU is changed. A missing library, driver or GPU, or a refusal by NVML, never raises an
exception: the answer is then an empty list with one line that says why, or -1 for a value.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_REMEDIES = {
    "NVMLError_LibraryNotFound": f"no NVIDIA driver here: {_LIBRARY} is not found",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NVMLError_LibRmVersionMismatch": "the NVIDIA driver was changed while it ran: its library and "
                                      "its kernel module differ; reload the module",
}


class Reading(NamedTuple):
    """The state of a GPU at one moment; -1 stands for a value that the GPU does not report.

    Attributes:
        util_pct: utilisation over the last second or less, in percent.
        used_mib: memory in use, in MiB.
        energy_mj: energy since the driver was loaded, in mJ.
        power_mw: power, in mW.
    """

    util_pct: int = -1
    used_mib: int = -1
    energy_mj: int = -1
    power_mw: int = -1


class GpuProcess(NamedTuple):
    """A process that holds a GPU's memory. `used_mib` is -1 when the driver does not say."""

    pid: int
    used_mib: int


@dataclass(frozen=True)
class Slice:
    """A MIG instance, which CUDA takes for a GPU of its own. `path` is its place on its GPU: GPU
    instance / compute instance.
    """

    uuid: str
    name: str
    mem_mib: int
    used_mib: int
    path: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        index: counts the GPUs that this process may open, as CUDA does in PCI order.
        uuid: its UUID.
        name: its product name.
        mem_mib: its memory in MiB; 0 when unknown.
        used_mib: memory in use, in MiB.
        mig: whether it is in MIG mode. Then only its slices can be used, and not the whole GPU.
        slices: its MIG instances.
    """

    index: int
    uuid: str
    name: str
    mem_mib: int
    used_mib: int
    mig: bool = False
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What NVML sees. `why` is one line that says what is missing; without GPUs there always is
    such a line. `amd` says that AMD's driver runs here.
    """

    gpus: tuple[Gpu, ...] = ()
    why: str = ""
    driver: str = ""
    cuda: str = ""
    amd: bool = False


class Nvml:
    """An open NVML. It may be used from any thread."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self._handles: dict[str, Any] = {}

    def seen(self) -> Seen:
        """All GPUs that this process may use. O(GPUs), some ms each."""
        lib, gpus, notes, index = self._lib, [], [], 0
        cuda = self._ask(0, "nvmlSystemGetCudaDriverVersion")
        driver = _text(self._ask("", "nvmlSystemGetDriverVersion"))
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        try:
            count = lib.nvmlDeviceGetCount()
        except lib.NVMLError as error:
            return Seen((), f"NVML does not count its GPUs ({error})", driver, version)
        for number in range(count):
            try:
                handle = lib.nvmlDeviceGetHandleByIndex(number)
                gpus.append(self._gpu(handle, index))
            except lib.NVMLError as error:
                if _is(error, "NoPermission"):
                    continue  # a GPU of another job: CUDA does not count it either
                notes.append(f"GPU {index} is left out: {error}")
            index += 1
        if not gpus and not notes:
            notes.append("the NVIDIA driver has no GPU that this process may open")
        return Seen(tuple(gpus), "; ".join(notes), driver, version)

    def _gpu(self, handle: Any, index: int) -> Gpu:
        lib = self._lib
        uuid = _text(lib.nvmlDeviceGetUUID(handle))
        total, used = self._memory(handle)
        mig = bool(self._ask((0, 0), "nvmlDeviceGetMigMode", handle)[0])
        return Gpu(index, uuid, _text(self._ask("GPU", "nvmlDeviceGetName", handle)),
                   max(0, total), max(0, used), mig, self._slices(handle) if mig else ())

    def _slices(self, gpu: Any) -> tuple[Slice, ...]:
        lib, found = self._lib, []
        for number in range(self._ask(0, "nvmlDeviceGetMaxMigDeviceCount", gpu)):
            try:
                handle = lib.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
                uuid = _text(lib.nvmlDeviceGetUUID(handle))
            except lib.NVMLError:
                continue  # no instance has this number
            total, used = self._memory(handle)
            places = (self._ask(-1, "nvmlDeviceGetGpuInstanceId", handle),
                      self._ask(-1, "nvmlDeviceGetComputeInstanceId", handle))
            found.append(Slice(uuid, _text(self._ask("MIG", "nvmlDeviceGetName", handle)),
                               max(0, total), max(0, used),
                               "" if min(places) < 0 else f"{places[0]}/{places[1]}"))
        return tuple(found)

    def read(self, uuid: str) -> Reading:
        """The state of a GPU or a slice; all -1 when it cannot be found."""
        handle = self._handle(uuid)
        if handle is None:
            return Reading()
        use = self._ask(None, "nvmlDeviceGetUtilizationRates", handle)
        return Reading(int(use.gpu) if use is not None else -1, self._memory(handle)[1],
                       int(self._ask(-1, "nvmlDeviceGetTotalEnergyConsumption", handle)),
                       int(self._ask(-1, "nvmlDeviceGetPowerUsage", handle)))

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Returns the processes that compute on a GPU; empty when the driver does not say. In a
        container, the pids may be those of the host.
        """
        handle = self._handle(uuid)
        told = self._ask((), "nvmlDeviceGetComputeRunningProcesses", handle) if handle else ()
        return tuple(GpuProcess(int(p.pid), -1 if p.usedGpuMemory is None
                                else int(p.usedGpuMemory) >> 20) for p in told)

    def close(self) -> None:
        """Closes the library."""
        self._handles.clear()
        self._ask(None, "nvmlShutdown")

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            handle = self._ask(None, "nvmlDeviceGetHandleByUUID", uuid)
            if handle is None:
                return None
            self._handles[uuid] = handle
        return self._handles[uuid]

    def _memory(self, handle: Any) -> tuple[int, int]:
        """Total memory and memory in use, in MiB; -1 each where the memory is not the GPU's own."""
        told = self._ask(None, "nvmlDeviceGetMemoryInfo", handle)
        return (-1, -1) if told is None else (int(told.total) >> 20, int(told.used) >> 20)

    def _ask(self, default: Any, call: str, *args: Any) -> Any:
        try:
            return getattr(self._lib, call)(*args)
        except self._lib.NVMLError:
            return default


def open_nvml(lib: Any = None) -> tuple[Nvml | None, str]:
    """Returns NVML, or None and one line that says why not. `lib` is the module; None means
    `pynvml`.
    """
    if lib is None:
        try:
            # tried first: without the library, the slow import of the module is useless
            ctypes.CDLL(_LIBRARY)
        except OSError:
            return None, _REMEDIES["NVMLError_LibraryNotFound"]
        try:
            import pynvml
        except ImportError:
            return None, "there is an NVIDIA driver, but nvidia-ml-py is not installed: install " \
                         "tangram-hpc with its extra `gpu`"
        lib = pynvml
    try:
        lib.nvmlInit()
    except lib.NVMLError as error:
        return None, _REMEDIES.get(type(error).__name__, f"NVML does not start ({error})")
    return Nvml(lib), ""


def look(lib: Any = None) -> Seen:
    """What NVML sees now. `lib` is as in `open_nvml`."""
    nvml, why = open_nvml(lib)
    if nvml is None:
        return Seen((), why, amd=os.path.exists("/dev/kfd"))
    try:
        return nvml.seen()
    finally:
        nvml.close()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _is(error: Exception, kind: str) -> bool:
    return type(error).__name__ == f"NVMLError_{kind}"
