"""Owns: where the weights of one model are - parked on the host, or on the device as well. Must not
compute with them, and takes it that nobody else changes them: parking copies nothing back.

On the host lies one copy of each parameter and buffer. What the model's safetensors files hold as
it is used (same name, dtype, shape and values) is not read into memory but mapped: the copies and
variants of a model on one node share those pages of the page cache (which a node that runs short
may drop, and then reads again). All else (converted weights, computed buffers) is one private
piece.

On the device everything is one allocation, filled by few large copies: neighbours in a file are
neighbours there. With CUDA the host's pieces are page-locked, so that they are copied at the full
width of the bus; mapped files stay shared where the driver can lock pages that it only reads.
A device of "cpu" goes the very same way.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_ALIGN = 256  # bytes; of each run on the device, as its own allocator aligns
_NEAR = 64  # bytes; a tensor of a run that is not aligned so begins a run of its own
_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_*: for all devices; only read
_HEAD = 8  # bytes; safetensors: the length of its JSON head, little-endian


@dataclass(frozen=True)
class _Run:
    """Bytes that are copied at once, and where they go."""

    host: torch.Tensor
    at: int


@dataclass(frozen=True)
class _Spot:
    """A parameter or buffer: where it lies on the host, and in the device's allocation."""

    tensor: torch.Tensor
    host: torch.Tensor
    at: int


class Weights:
    """The weights of `module`, which was loaded from the folder `model` onto the host; parked. Not
    `mapped`: they may be replaced, and are this process's own.

    Attributes:
        bytes: what they take on the device.
        host_bytes: what they take on the host, pages of mapped files included.
    """

    def __init__(self, module: torch.nn.Module, model: Path, device: torch.device,
                 mapped: bool = True) -> None:
        self._device = device
        self._pieces: list[torch.Tensor] = []
        self._runs: list[_Run] = []
        self._spots: list[_Spot] = []
        self._flat: torch.Tensor | None = None
        self.bytes = 0
        named = _named(module)
        names = {id(tensor): name for name, tensor in named.items()}
        for path in sorted(model.glob("*.safetensors")) if mapped else ():
            self._map(path, named)
        self._keep(list(named.values()))
        self.host_bytes = sum(len(run.host) for run in self._runs)
        self._by_name = {names[id(spot.tensor)]: spot for spot in self._spots}
        self._put_on_host()
        if device.type == "cuda":
            torch.zeros(1, device=device)  # the driver has a context from here on
            for piece in self._pieces:
                _lock(piece)
            release(device)

    @property
    def awake(self) -> bool:
        """Whether they are on the device."""
        return self._flat is not None

    # ---- moving ----

    def wake(self, device: torch.device) -> None:
        """Brings them onto this device, of the kind that they were made for.

        Raises:
            torch.OutOfMemoryError: they do not fit; they are parked as before.
        """
        assert not self.awake, "they are on the device"
        self._device = device
        flat = torch.empty(self.bytes, dtype=torch.uint8, device=self._device)
        for run in self._runs:
            flat[run.at : run.at + len(run.host)].copy_(run.host, non_blocking=True)
        for spot in self._spots:
            piece = flat[spot.at : spot.at + spot.host.nbytes]
            spot.tensor.data = piece.view(spot.host.dtype).view(spot.host.shape)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._flat = flat

    def park(self) -> None:
        """Frees the device's memory; what the driver keeps for the process itself stays."""
        self._put_on_host()
        self._flat = None
        release(self._device)

    def replace(self, newer: Mapping[str, torch.Tensor]) -> None:
        """Takes these values for the tensors of these names, wherever they are now.

        Raises:
            ValueError: one is not the model's, or of another shape; nothing is replaced.
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
        """Takes the tensors that this file holds as they are out of `named`."""
        size = path.stat().st_size
        piece = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        begin, end = -1, -1  # of the run, in the file
        for name, start, stop in _held(piece):
            tensor = named.get(name)
            if tensor is None or stop - start != tensor.nbytes or start % tensor.itemsize:
                continue
            host = piece[start:stop].view(tensor.dtype).view(tensor.shape)
            if not torch.equal(host, tensor):  # NaNs are never equal: they are kept apart
                continue
            if start != end or (start - begin) % _NEAR:
                self._end_run(piece, begin, end)
                begin = start
            end = stop
            self._spots.append(_Spot(tensor, host, self.bytes + start - begin))
            del named[name]
        if end >= 0:
            self._end_run(piece, begin, end)
            self._pieces.append(piece)

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        """Copies these into a piece of our own."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if not size:
            self._spots += [_Spot(tensor, tensor.data, 0) for tensor in tensors]
            return
        piece = torch.zeros(size, dtype=torch.uint8)
        for tensor, start in zip(tensors, starts, strict=True):
            host = piece[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            host.copy_(tensor.data)
            self._spots.append(_Spot(tensor, host, self.bytes + start))
            tensor.data = host  # frees what it was before the next one is copied
        self._end_run(piece, 0, size)
        self._pieces.append(piece)

    def _end_run(self, piece: torch.Tensor, begin: int, end: int) -> None:
        if end > begin >= 0:
            self._runs.append(_Run(piece[begin:end], self.bytes))
            self.bytes += -(-(end - begin) // _ALIGN) * _ALIGN


def release(device: torch.device) -> None:
    """Gives what the allocator holds unused back to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()  # up to tens of MiB that nothing else frees
        torch.cuda.empty_cache()


def _named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, each once, however many names it has."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _held(piece: torch.Tensor) -> Iterator[tuple[str, int, int]]:
    """Name, begin and end of each tensor of a mapped safetensors file, in the file's order."""
    length = int.from_bytes(piece[:_HEAD].numpy().tobytes(), "little")
    head = json.loads(piece[_HEAD : _HEAD + length].numpy().tobytes())
    data = _HEAD + length
    held = [(name, *about["data_offsets"]) for name, about in head.items()
            if name != "__metadata__"]
    for name, start, stop in sorted(held, key=lambda each: each[1]):
        yield name, data + start, data + stop


def _lock(piece: torch.Tensor) -> None:
    """Page-locks a piece for CUDA's current device. The first way leaves a mapped file's pages
    shared; the second makes them this process's own; where neither is possible copies go through
    the driver's own buffer, only slower. Asked of the driver itself: the runtime would tell a
    refusal once more, to whoever uses it next."""
    driver = ctypes.CDLL("libcuda.so.1")
    for flags in (_PORTABLE | _READ_ONLY, _PORTABLE):
        begin, size = ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(len(piece))
        if driver.cuMemHostRegister_v2(begin, size, ctypes.c_uint(flags)) == 0:
            return
