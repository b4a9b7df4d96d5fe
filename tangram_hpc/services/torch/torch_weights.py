"""The weights of one model: parked in host memory, or on the device as well.

The host keeps one copy of each parameter and buffer. Tensors that the model's safetensors files
hold exactly as they are used (same name, dtype, shape and values) are mapped and not read: all
copies and variants of a model on one node share those pages of the page cache. A node that runs
short of memory may drop such pages and read them again later. Everything else (converted weights,
computed buffers) is one private buffer. A file that is written over changes the parked weights, in
part at first, so a model is not served with them: its move to a device fails.

On the device all weights are one allocation, which few large copies fill, because tensors that are
neighbours in a file are neighbours on the device too. With CUDA the host's buffers are page-locked,
so that they are copied at the full width of the bus. A file is mapped only where the driver can
lock pages that it only reads; elsewhere its tensors go into the private buffer. The device "cpu"
uses the same code, without locks.

Nothing here computes with the weights. Nobody else may change them: parking copies nothing back.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_ALIGN = 256  # bytes; alignment of each run on the device, the same as that of torch's allocator
_RUN_ALIGN = 64  # bytes; a tensor whose offset in its run is no multiple of this begins a new run
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_*: the flags PORTABLE and READ_ONLY
_HEAD = 8  # bytes; a safetensors file begins with the length of its JSON head, little-endian


@dataclass(frozen=True)
class _Run:
    """Consecutive bytes of the host that are copied to the device at once.

    Attributes:
        host: The bytes.
        at: Their offset in the device's allocation, bytes.
    """

    host: torch.Tensor
    at: int


@dataclass(frozen=True)
class _Spot:
    """One parameter or buffer.

    Attributes:
        tensor: The module's own tensor, whose data is switched between host and device.
        host: The tensor's values on the host.
        at: The tensor's offset in the device's allocation, bytes.
    """

    tensor: torch.Tensor
    host: torch.Tensor
    at: int


class _MappedFile:
    """A file that is mapped for reading; all processes that map it share its pages.

    Attributes:
        buffer: The bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")
        self._written = self._state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of memory that is only read
            self.buffer = torch.frombuffer(
                mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)

    def check(self) -> None:
        """Raises RuntimeError if the file was written over. One that was replaced or removed stays
        as it was for those that have it open.
        """
        if self._state() != self._written:
            raise RuntimeError(f"model: {self._path} was changed after it was loaded")

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


class Weights:
    """The weights of a module that was loaded onto the host; they are parked at first.

    Args:
        module: The model.
        model: The folder from which the module was loaded.
        device: The kind of device that the weights go to.
        mapped: Whether to map the folder's files. If not, the weights are this process's own and
            may be replaced.

    Attributes:
        bytes: Memory that the weights take on the device, bytes.
        host_bytes: Memory that they take on the host, pages of mapped files included, bytes.
    """

    def __init__(self, module: torch.nn.Module, model: Path, device: torch.device,
                 mapped: bool = True) -> None:
        self._device = device
        if device.type == "cuda":
            torch.zeros(1, device=device)  # makes CUDA create its context now
        self._runs: list[_Run] = []
        self._spots: list[_Spot] = []
        self._files: list[_MappedFile] = []
        self._flat: torch.Tensor | None = None
        self.bytes = 0
        named = _named(module)
        names = {id(tensor): name for name, tensor in named.items()}
        for path in sorted(model.glob("*.safetensors")) if mapped else ():
            self._map(path, named)
        self._copy_privately(list(named.values()))
        self.host_bytes = sum(len(run.host) for run in self._runs)
        self._by_name = {names[id(spot.tensor)]: spot for spot in self._spots}
        self._put_on_host()
        release(device)

    @property
    def awake(self) -> bool:
        """Whether the weights are on the device."""
        return self._flat is not None

    # ---- moving ----

    def wake(self, device: torch.device) -> None:
        """Copies the weights onto this device, which must be of the kind that they were made for.

        Raises:
            torch.OutOfMemoryError: They do not fit; they are parked as before.
            RuntimeError: A mapped file was written over since it was loaded.
        """
        assert not self.awake, "they are on the device"
        self._device = device
        flat = torch.empty(self.bytes, dtype=torch.uint8, device=self._device)
        for run in self._runs:
            flat[run.at : run.at + len(run.host)].copy_(run.host, non_blocking=True)
        for spot in self._spots:
            buffer = flat[spot.at : spot.at + spot.host.nbytes]
            spot.tensor.data = buffer.view(spot.host.dtype).view(spot.host.shape)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for file in self._files:
            file.check()
        self._flat = flat

    def park(self) -> None:
        """Frees the device's memory, except the driver's own memory for this process."""
        self._put_on_host()
        self._flat = None
        release(self._device)

    def replace(self, newer: Mapping[str, torch.Tensor]) -> None:
        """Replaces the values of the tensors of these names, on the host and, if awake, on the
        device.

        Raises:
            ValueError: A tensor is not the model's or has another shape; nothing is replaced.
        """
        for name, tensor in newer.items():
            spot = self._by_name.get(name)
            if spot is None or spot.host.shape != tensor.shape:
                raise ValueError(f"{name} {tuple(tensor.shape)} is no tensor of this model")
        for name, tensor in newer.items():
            spot = self._by_name[name]
            spot.host.copy_(tensor)
            if self.awake:
                spot.tensor.data.copy_(spot.host)

    def _put_on_host(self) -> None:
        for spot in self._spots:
            spot.tensor.data = spot.host

    # ---- the host's copy ----

    def _map(self, path: Path, named: dict[str, torch.Tensor]) -> None:
        """Maps a file, and removes from `named` the tensors that it holds in the form in use."""
        file = _MappedFile(path)
        buffer = file.buffer
        found = [(name, start, stop) for name, start, stop in _entries(buffer)
                 if name in named and _holds(buffer[start:stop], start, named[name])]
        if not found or (self._device.type == "cuda"
                         and not _lock(buffer, _PORTABLE | _READ_ONLY)):
            return
        self._files.append(file)
        begin, end = -1, -1  # offsets of the current run in the file
        for name, start, stop in found:
            tensor = named.pop(name)
            if start != end or (start - begin) % _RUN_ALIGN:
                self._end_run(buffer, begin, end)
                begin = start
            end = stop
            host = buffer[start:stop].view(tensor.dtype).view(tensor.shape)
            self._spots.append(_Spot(tensor, host, self.bytes + start - begin))
        self._end_run(buffer, begin, end)

    def _copy_privately(self, tensors: list[torch.Tensor]) -> None:
        """Copies these tensors into one buffer of our own."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if not size:
            self._spots += [_Spot(tensor, tensor.data, 0) for tensor in tensors]
            return
        buffer = torch.zeros(size, dtype=torch.uint8)
        for tensor, start in zip(tensors, starts, strict=True):
            host = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            host.copy_(tensor.data)
            self._spots.append(_Spot(tensor, host, self.bytes + start))
            tensor.data = host  # frees the tensor's old data before the next is copied
        self._end_run(buffer, 0, size)
        if self._device.type == "cuda":
            _lock(buffer, _PORTABLE)  # where this is refused, copies are only slower

    def _end_run(self, buffer: torch.Tensor, begin: int, end: int) -> None:
        if end > begin >= 0:
            self._runs.append(_Run(buffer[begin:end], self.bytes))
            self.bytes += -(-(end - begin) // _ALIGN) * _ALIGN


def release(device: torch.device) -> None:
    """Gives unused memory of torch's allocator back to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # frees up to tens of MiB that nothing else frees
        torch.cuda.empty_cache()


def _named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns all parameters and buffers, each once, however many names it has."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _entries(buffer: torch.Tensor) -> Iterator[tuple[str, int, int]]:
    """Yields name, begin and end of each tensor of a mapped safetensors file, in the file's order.
    """
    length = int.from_bytes(buffer[:_HEAD].numpy().tobytes(), "little")
    head = json.loads(buffer[_HEAD : _HEAD + length].numpy().tobytes())
    data = _HEAD + length
    entries = [(name, *about["data_offsets"]) for name, about in head.items()
               if name != "__metadata__"]
    for name, start, stop in sorted(entries, key=lambda each: each[1]):
        yield name, data + start, data + stop


def _holds(data: torch.Tensor, start: int, tensor: torch.Tensor) -> bool:
    """Returns whether these bytes, at this offset of a file, are exactly the tensor's values. A
    tensor with NaNs is never equal, and is copied.
    """
    return (len(data) == tensor.nbytes and start % tensor.itemsize == 0
            and bool(torch.equal(data.view(tensor.dtype).view(tensor.shape), tensor)))


def _lock(buffer: torch.Tensor, flags: int) -> bool:
    """Page-locks a buffer for CUDA, and returns whether the driver did.

    The driver is called directly, because CUDA's runtime would report a refusal again to its next
    caller.
    """
    begin, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(len(buffer))
    driver = ctypes.CDLL("libcuda.so.1")
    status: int = driver.cuMemHostRegister_v2(begin, size, ctypes.c_uint(flags))
    return status == 0
