"""The one door to NVML, NVIDIA's management library: which GPUs there are, and what they do now.

Law: the only importer of `pynvml` (extra `gpu`), and only when somebody looks. It changes nothing
on a GPU. No library, no driver, no GPU and whatever NVML refuses are answers (an empty list and one
line, or -1 for a value), never exceptions.
"""

from __future__ import annotations

import ctypes
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
    """A GPU at one moment; -1: it does not say. `util_pct` is over the last second or less."""

    util_pct: int = -1
    used_mib: int = -1
    energy_mj: int = -1  # since the driver was loaded
    power_mw: int = -1


class GpuProcess(NamedTuple):
    """A process that holds a GPU's memory; `used_mib` -1: the driver does not say."""

    pid: int
    used_mib: int


@dataclass(frozen=True)
class Slice:
    """A MIG instance: what CUDA takes for a GPU of its own. `path` is its place on its GPU, as
    GPU instance / compute instance."""

    uuid: str
    name: str
    mem_mib: int
    used_mib: int
    path: str = ""


@dataclass(frozen=True)
class Gpu:
    """`index` counts those that this process may open, as CUDA does in PCI order. With `mig` the
    GPU itself cannot be used, its slices can. Memory 0: it does not say."""

    index: int
    uuid: str
    name: str
    mem_mib: int
    used_mib: int
    mig: bool = False
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What NVML sees. `why`: one line on what is missing; without GPUs it is never empty."""

    gpus: tuple[Gpu, ...] = ()
    why: str = ""
    driver: str = ""
    cuda: str = ""


class Nvml:
    """An open NVML; any thread."""

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
                    continue  # of another job: CUDA does not count it either
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
                continue  # an empty place
            total, used = self._memory(handle)
            places = (self._ask(-1, "nvmlDeviceGetGpuInstanceId", handle),
                      self._ask(-1, "nvmlDeviceGetComputeInstanceId", handle))
            found.append(Slice(uuid, _text(self._ask("MIG", "nvmlDeviceGetName", handle)),
                               max(0, total), max(0, used),
                               "" if min(places) < 0 else f"{places[0]}/{places[1]}"))
        return tuple(found)

    def read(self, uuid: str) -> Reading:
        """A GPU or a slice now; all -1 when it cannot be found."""
        handle = self._handle(uuid)
        if handle is None:
            return Reading()
        use = self._ask(None, "nvmlDeviceGetUtilizationRates", handle)
        return Reading(int(use.gpu) if use is not None else -1, self._memory(handle)[1],
                       int(self._ask(-1, "nvmlDeviceGetTotalEnergyConsumption", handle)),
                       int(self._ask(-1, "nvmlDeviceGetPowerUsage", handle)))

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who computes on a GPU; empty when it does not say. In a container the pids may be those
        outside."""
        handle = self._handle(uuid)
        told = self._ask((), "nvmlDeviceGetComputeRunningProcesses", handle) if handle else ()
        return tuple(GpuProcess(int(p.pid), -1 if p.usedGpuMemory is None
                                else int(p.usedGpuMemory) >> 20) for p in told)

    def close(self) -> None:
        """Lets go of the library."""
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
        """Total and used, MiB; -1 each where the memory is not the GPU's own."""
        told = self._ask(None, "nvmlDeviceGetMemoryInfo", handle)
        return (-1, -1) if told is None else (int(told.total) >> 20, int(told.used) >> 20)

    def _ask(self, default: Any, call: str, *args: Any) -> Any:
        try:
            return getattr(self._lib, call)(*args)
        except self._lib.NVMLError:
            return default


def open_nvml(lib: Any = None) -> tuple[Nvml | None, str]:
    """NVML, or None and one line that says why not. `lib`: the module, `pynvml` when None."""
    if lib is None:
        try:
            ctypes.CDLL(_LIBRARY)  # first: the module takes long to import, and is no use then
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
    """What there is now. `lib` as in `open_nvml`."""
    nvml, why = open_nvml(lib)
    if nvml is None:
        return Seen((), why)
    try:
        return nvml.seen()
    finally:
        nvml.close()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _is(error: Exception, kind: str) -> bool:
    return type(error).__name__ == f"NVMLError_{kind}"
