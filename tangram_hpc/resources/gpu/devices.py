"""Which devices a node lends, how they are numbered, and by what name a process sees them.

Law: decides and asks nobody but `look`; never touches a device. The numbers lent are Slurm's where
Slurm gave GPUs, as in `scontrol show job -d`, else NVML's. What a process gets is a UUID wherever
one is known: numbers mean something else behind every mask and cgroup, a UUID never does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .mps import mps_serves
from .nvml import Gpu, Seen, look

MASK = "CUDA_VISIBLE_DEVICES"
CUDA, CPU, FAKE = "cuda", "cpu", "fake"
_ELSEWHERE = ("fake", "http", "vllm", "sglang")  # backends that start nothing on a device


@dataclass(frozen=True)
class Device:
    """One device. `index`: its number as the node lends it; `kind`: "cuda", "cpu" (a slot of CPU
    that stands in for a GPU) or "fake" (nothing at all); `selector`: its name in
    CUDA_VISIBLE_DEVICES, empty when it is no GPU. `mem_mib` 0, `uuid` and `name` empty: not known.
    """

    index: int
    uuid: str = ""
    name: str = ""
    mem_mib: int = 0
    kind: str = CUDA
    selector: str = ""


@dataclass(frozen=True)
class Devices:
    """What a node lends, all of one `kind` (empty: nothing). `why`: one line on what is missing;
    `mps`: several processes may share a GPU at once."""

    devices: tuple[Device, ...] = ()
    kind: str = ""
    why: str = ""
    mps: bool = False

    @property
    def indices(self) -> tuple[int, ...]:
        """The numbers it lends, ascending."""
        return tuple(sorted(d.index for d in self.devices))

    def mask(self, block: Sequence[int]) -> str:
        """`CUDA_VISIBLE_DEVICES` for these lent numbers; empty, so no GPU, for what is none.

        Raises:
            KeyError: a number is not lent here.
        """
        if not block:
            return ""
        by_index = {d.index: d.selector for d in self.devices}
        return ",".join(name for name in (by_index[i] for i in block) if name)

    def visible(self, block: Sequence[int]) -> dict[str, str]:
        """What the environment of a process on this block must hold. Raises as `mask`."""
        return {MASK: self.mask(block)}

    def refusal(self, backend: str) -> str:
        """Why services of this backend cannot run on them, with the remedy; empty when they can."""
        if backend in _ELSEWHERE:
            return ""
        if self.kind == FAKE:
            return f"backend: {backend} does not run on fake GPUs: say devices = \"{CPU}:N\""
        if len(self.devices) > 1 and any(d.uuid.startswith("MIG-") for d in self.devices):
            return "a process sees one MIG slice only, and this node lends several: give each " \
                   "worker one of them"
        return ""

    def summary(self) -> str:
        """One line for people: how many of what, "fake" and "cpu" said plainly."""
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
    """What this node lends.

    Args:
        environ: of the worker.
        config_devices: the setting `devices`, checked by `config`.
        slurm_gpus: the numbers of the GPUs that Slurm gave this step; None outside a Slurm job.
        look: how to ask NVML.
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
    if not seen.gpus:
        return _by_slurms_word(mask, slurm_gpus or (), seen.why)
    if mask is None and slurm_gpus and len(slurm_gpus) < len(seen.gpus):
        mask = ",".join(map(str, slurm_gpus))  # no cgroup hides the others
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
    """Without NVML nothing is known of GPUs but what Slurm said."""
    words = _words(mask) if mask is not None else [str(i) for i in numbers]
    if not numbers or len(words) != len(numbers):
        return Devices(why=why)
    if set(words) == {str(i) for i in numbers}:
        words = [str(i) for i in numbers]
    return Devices(tuple(Device(i, "" if w.isdigit() else w, kind=CUDA, selector=w)
                         for i, w in zip(numbers, words, strict=True)), CUDA,
                   f"known by Slurm's word only: {why}")


# ---- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------


class Unit(NamedTuple):
    """What CUDA takes for one device: a GPU, or a slice of GPU number `gpu`."""

    gpu: int
    uuid: str
    name: str
    mem_mib: int
    aliases: tuple[str, ...] = ()
    slice: bool = False


def allowed(mask: str | None, gpus: Sequence[Gpu]) -> tuple[list[Unit], str]:
    """What a mask leaves of these GPUs, in its order, and one line on what it names in vain.

    As CUDA reads it: numbers, UUIDs or beginnings of them that fit one device; what is not a device
    ends the list (-1 and NoDevFiles are meant so); a device named twice leaves none. A GPU in MIG
    mode stands for all of its slices.
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
    """The devices that one word of a mask names; none when it names nothing, or several."""
    if word.isdigit():
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
