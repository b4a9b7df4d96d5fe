"""Which devices a node lends, how they are numbered, and by what name a process sees them.

The broker's numbers are Slurm's where Slurm gave GPUs, as in `scontrol show job -d`, and NVML's
otherwise. A process gets a UUID wherever one is known: behind a mask or a cgroup a number may mean
another GPU, while a UUID always means the same. Only `look` asks the machine, and no device is
touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .mps import mps_serves
from .nvml import Gpu, Seen, look

MASK, AMD_MASK = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
CUDA, CPU, FAKE = "cuda", "cpu", "fake"
_ELSEWHERE = ("fake", "http", "vllm", "sglang")  # backends that start nothing on a device


@dataclass(frozen=True)
class Device:
    """A device that a node lends.

    Attributes:
        index: its number as the node lends it.
        uuid: its UUID; empty when unknown, as is `name`.
        mem_mib: its memory in MiB; 0 when unknown.
        kind: "cuda", "cpu" (a CPU slot that stands in for a GPU) or "fake" (nothing at all).
        selector: its name in CUDA_VISIBLE_DEVICES; empty when it is no GPU.
    """

    index: int
    uuid: str = ""
    name: str = ""
    mem_mib: int = 0
    kind: str = CUDA
    selector: str = ""


@dataclass(frozen=True)
class Devices:
    """The devices that a node lends.

    Attributes:
        devices: the devices, which are all of one kind.
        kind: the kind of the devices; empty when there are none.
        why: one line that says what is missing.
        mps: whether several processes may share a GPU at once (NVIDIA MPS).
    """

    devices: tuple[Device, ...] = ()
    kind: str = ""
    why: str = ""
    mps: bool = False

    @property
    def indices(self) -> tuple[int, ...]:
        """The numbers of the devices, in ascending order."""
        return tuple(sorted(d.index for d in self.devices))

    def mask(self, block: Sequence[int]) -> str:
        """The value of `CUDA_VISIBLE_DEVICES` for these numbers. Devices that are no GPU are left
        out.

        Raises:
            KeyError: a number is not lent here.
        """
        if not block:
            return ""
        by_index = {d.index: d.selector for d in self.devices}
        return ",".join(name for name in (by_index[i] for i in block) if name)

    def visible(self, block: Sequence[int]) -> dict[str, str]:
        """The environment variables of a process on this block; raises what `mask` raises."""
        return {MASK: self.mask(block)}

    def refusal(self, backend: str) -> str:
        """Why services of this backend cannot run here, with the remedy; empty when they can."""
        if backend in _ELSEWHERE:
            return ""
        if self.kind == FAKE:
            return f"backend: {backend} does not run on fake GPUs: say devices = \"{CPU}:N\""
        if len(self.devices) > 1 and any(d.uuid.startswith("MIG-") for d in self.devices):
            return "a process sees one MIG slice only, and this node lends several: give each " \
                   "worker one of them"
        return ""

    def summary(self) -> str:
        """One line for people: how many devices of what kind; "fake" and "cpu" are named as such.
        """
        n, s = len(self.devices), "s" * (len(self.devices) != 1)
        if not n:
            return f"none ({self.why})"
        if self.kind == CPU:
            return f"{n} slot{s} of CPU (cpu)"
        if self.kind == FAKE:
            return f"{n} fake GPU{s} (fake)"
        alike = Counter((d.name, d.mem_mib) for d in self.devices)
        told = ", ".join(f"{count} x {name or 'GPU'}{f' {mem / 1024:.0f} GiB' if mem else ''}"
                         for (name, mem), count in alike.items())
        return f"{told} (cuda{', MPS' if self.mps else ''}){f'; {self.why}' if self.why else ''}"


def find_devices(environ: Mapping[str, str], config_devices: str = "",
                 slurm_gpus: tuple[int, ...] | None = None, look: Callable[[], Seen] = look
                 ) -> Devices:
    """Finds out what this node lends.

    Args:
        environ: the worker's environment.
        config_devices: the setting `devices`, checked by `config`.
        slurm_gpus: the numbers of the GPUs that Slurm gave this job step; None outside a Slurm job.
        look: asks NVML.
    """
    kind, _, number = config_devices.partition(":")
    if kind == "none":
        return Devices(why="the setting `devices` is \"none\"")
    if kind in (CPU, FAKE):
        if not number and not slurm_gpus:
            return Devices(why=f"the setting `devices` is \"{kind}\": as many as Slurm gave, and "
                               f"it gave none; \"{kind}:N\" makes N")
        numbers = tuple(range(int(number))) if number else slurm_gpus or ()
        name = "slot of CPU" if kind == CPU else "fake GPU"
        return Devices(tuple(Device(i, name=name, kind=kind) for i in numbers), kind)
    if slurm_gpus == ():
        return Devices(why="Slurm gave this step no GPU: ask for some with --gres=gpu:N")
    seen, mask = look(), environ.get(MASK)
    # without AutoDetect in gres.conf, Slurm sets the variables of all kinds of GPUs
    if not seen.gpus and (seen.amd or (mask is None and environ.get(AMD_MASK))):
        return Devices(why="AMD GPUs are not lent yet: ask Slurm for none, and run services on "
                           "their own engine (backend = \"http\")")
    if not seen.gpus:
        return _by_slurms_word(mask, slurm_gpus or (), seen.why)
    if mask is None and slurm_gpus and len(slurm_gpus) < len(seen.gpus):
        mask = ",".join(map(str, slurm_gpus))  # no cgroup hides the other GPUs
    units, why = allowed(mask, seen.gpus)
    why = "; ".join(note for note in (why, seen.why) if note)
    if not units:
        return Devices(why=why)
    sliced = any(u.slice for u in units)
    own = tuple(range(len(units))) if sliced else tuple(u.gpu for u in units)
    numbers = slurm_gpus if slurm_gpus and _fits(slurm_gpus, units) else own
    if set(numbers) == set(own):
        numbers = own  # the same numbers, in the mask's order
    return Devices(tuple(Device(i, u.uuid, u.name, u.mem_mib, CUDA, u.uuid)
                         for i, u in zip(numbers, units, strict=True)), CUDA, why,
                   mps_serves(environ))


def _by_slurms_word(mask: str | None, numbers: tuple[int, ...], why: str) -> Devices:
    """Returns the devices without NVML, when only Slurm's variables tell of GPUs."""
    words = _words(mask) if mask is not None else [str(i) for i in numbers]
    if not numbers or len(words) != len(numbers):
        return Devices(why=why)
    if set(words) == {str(i) for i in numbers}:
        words = [str(i) for i in numbers]
    return Devices(tuple(Device(i, "" if w.isdecimal() else w, kind=CUDA, selector=w)
                         for i, w in zip(numbers, words, strict=True)), CUDA,
                   f"known by Slurm's word only: {why}")


# ---- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------


class Unit(NamedTuple):
    """One device as CUDA counts them: a GPU or a MIG slice.

    Attributes:
        gpu: the number of the GPU, or of the GPU that it is a slice of.
        uuid: its UUID.
        name: its product name.
        mem_mib: its memory in MiB.
        aliases: further names that a mask may use.
        slice: whether it is a MIG slice.
    """

    gpu: int
    uuid: str
    name: str
    mem_mib: int
    aliases: tuple[str, ...] = ()
    slice: bool = False


def allowed(mask: str | None, gpus: Sequence[Gpu]) -> tuple[list[Unit], str]:
    """Returns those of these GPUs that a mask names, in the mask's order.

    The second value is one line about entries that name no device here, or empty. The mask is read
    as CUDA reads it: it holds numbers, UUIDs, or beginnings of UUIDs that fit one device. Any other
    entry ends the list, as -1 and NoDevFiles are meant to do. If the mask names a device twice,
    CUDA sees no device at all. A GPU in MIG mode stands for all of its slices.
    """
    units = [unit for gpu in gpus for unit in _units(gpu)]
    if mask is None:
        return units, "" if units else "the GPUs are in MIG mode and have no slices"
    found: list[Unit] = []
    for word in _words(mask):
        named = _named(word, gpus, units)
        if not named:
            quiet = word in ("-1", "NoDevFiles")
            why = "" if quiet and found else f"{MASK} is {mask!r}" + (
                "" if quiet else f": {word!r} is no device here")
            return found, why
        if any(unit in found for unit in named):
            return [], f"{MASK} is {mask!r}: it names a device twice, so CUDA sees none"
        found += named
    return found, "" if found else f"{MASK} is {mask!r}"


def _words(mask: str) -> list[str]:
    return [word.strip() for word in mask.split(",")] if mask.strip() else []


def _units(gpu: Gpu) -> list[Unit]:
    if not gpu.mig:
        return [Unit(gpu.index, gpu.uuid, gpu.name, gpu.mem_mib)]
    return [Unit(gpu.index, s.uuid, s.name, s.mem_mib,
                 (f"MIG-{gpu.uuid}/{s.path}",) if s.path else (), True) for s in gpu.slices]


def _named(word: str, gpus: Sequence[Gpu], units: Sequence[Unit]) -> list[Unit]:
    """Returns the devices that one entry of a mask names; none if the entry is ambiguous."""
    if word.isdecimal():
        return [u for u in units if u.gpu == int(word)]
    fitting = [u for u in units if word in u.aliases]
    if not fitting and word.startswith("MIG-"):
        fitting = [u for u in units if u.slice and u.uuid.startswith(word)]
    if not fitting and word.startswith("GPU-"):
        parents = [g.index for g in gpus if g.uuid.startswith(word)]
        return [u for u in units if [u.gpu] == parents]
    return fitting if len(fitting) == 1 else []


def _fits(numbers: tuple[int, ...], units: Sequence[Unit]) -> bool:
    return len(numbers) == len(units) == len(set(numbers))
