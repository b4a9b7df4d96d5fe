"""Which GPUs a worker here would lend, and how they may be shared.

Law: by the doors of `resources/gpu`; nothing is started on a GPU, no daemon is spoken to.
"""

from __future__ import annotations

from ..resources.gpu.devices import CPU, FAKE, find_devices
from ..resources.gpu.mps import mps_serves
from ..resources.gpu.nvml import look
from .check import Finding, Item, Where, ok, skip, warn


def driver(where: Where) -> Finding:
    """NVML: whether GPUs are seen at all."""
    seen = look()
    told = ", ".join(f"{g.name} {g.mem_mib / 1024:.0f} GiB" for g in seen.gpus)
    version = f"driver {seen.driver}, CUDA {seen.cuda}" if seen.driver else ""
    if seen.gpus and not seen.why:
        return ok(f"{version}: {told}")
    if seen.gpus:
        return warn(f"{version}: {told}; {seen.why}", "ask the site about the GPU left out")
    given = len(where.place.gpus) if where.place is not None else 0
    if given and where.config.devices.partition(":")[0] not in (CPU, FAKE, "none"):
        return warn(f"{seen.why}, but Slurm gave {given}",
                    "where they are real, load the driver or install the extra `gpu`; where Slurm "
                    "only counts them, set `devices` to \"fake\" or \"cpu\"")
    if "nvidia-ml-py" in seen.why or "reload" in seen.why or seen.driver:
        return warn(seen.why, "mend it, or set `devices` to \"none\"")
    return skip(seen.why)


def slices(where: Where) -> Finding:
    """MIG: a process sees one slice only."""
    gpus = look().gpus
    if not gpus:
        return skip("no GPU is seen")
    sliced = [g for g in gpus if g.mig]
    if not sliced:
        return ok("off: GPUs are whole")
    count = sum(len(g.slices) for g in sliced)
    text = f"on, on {len(sliced)} of {len(gpus)} GPUs: {count} slices"
    if not count:
        return warn(f"{text}: nothing can run on them", "have slices made, or MIG turned off")
    return ok(f"{text}; give each worker one of them")


def sharing(where: Where) -> Finding:
    """MPS: several processes on a GPU at once."""
    if not look().gpus:
        return skip("no GPU is seen")
    if mps_serves(where.environ):
        return ok("a daemon serves you: processes may share a GPU at once")
    return skip("no daemon serves you, and none is needed: processes on one GPU take turns")


def lent(where: Where) -> Finding:
    """The worker's own finding of its devices."""
    given = where.place.gpus if where.place is not None else None
    found = find_devices(where.environ, where.config.devices, given, look)
    if not found.devices:
        return skip(f"none: {found.why}")
    if found.why:
        return warn(found.summary(), "see `NVML` above; `devices` names what is to be lent")
    return ok(found.summary())


CHECKS = (Item("NVML", driver, 30.0, "the driver hangs: ask the site, or set `devices` to "
               "\"none\""), Item("MIG", slices, 30.0), Item("MPS", sharing, 30.0),
          Item("lent", lent, 30.0))
