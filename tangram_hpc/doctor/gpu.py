"""Checks which GPUs a worker here would lend, and how processes may share them.

The checks ask `resources/gpu`. They start nothing on a GPU and speak to no daemon.
"""

from __future__ import annotations

from ..resources.gpu.devices import CPU, FAKE, find_devices
from ..resources.gpu.mps import mps_serves
from ..resources.gpu.nvml import look
from .check import CheckContext, CheckSpec, Finding, ok, skip, warn


def driver(context: CheckContext) -> Finding:
    """Checks whether NVML finds GPUs."""
    inventory = look()
    names = ", ".join(f"{g.name} {g.mem_mib / 1024:.0f} GiB" for g in inventory.gpus)
    version = f"driver {inventory.driver}, CUDA {inventory.cuda}" if inventory.driver else ""
    if inventory.gpus and not inventory.why:
        return ok(f"{version}: {names}")
    if inventory.gpus:
        return warn(f"{version}: {names}; {inventory.why}", "ask the site about the GPU left out")
    given = len(context.place.gpus) if context.place is not None else 0
    if given and context.config.devices.partition(":")[0] not in (CPU, FAKE, "none"):
        return warn(f"{inventory.why}, but Slurm gave {given}",
                    "where they are real, load the driver or install the extra `gpu`; where Slurm "
                    "only counts them, set `devices` to \"fake\" or \"cpu\"")
    if "nvidia-ml-py" in inventory.why or "reload" in inventory.why or inventory.driver:
        return warn(inventory.why, "correct it, or set `devices` to \"none\"")
    return skip(inventory.why)


def slices(context: CheckContext) -> Finding:
    """Checks whether MIG divides the GPUs; a process sees one slice only."""
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


def sharing(context: CheckContext) -> Finding:
    """Checks whether MPS lets several processes use a GPU at the same time."""
    if not look().gpus:
        return skip("no GPU is seen")
    if mps_serves(context.environ):
        return ok("a daemon serves you: processes may share a GPU at once")
    return skip("no daemon serves you, and none is needed: processes on one GPU take turns")


def lent(context: CheckContext) -> Finding:
    """Checks which devices a worker would lend, by the worker's own search."""
    given = context.place.gpus if context.place is not None else None
    found = find_devices(context.environ, context.config.devices, given, look)
    if not found.devices:
        return skip(f"none: {found.why}")
    if found.why:
        return warn(found.summary(), "see `NVML` above; `devices` names what is to be lent")
    return ok(found.summary())


CHECKS = (CheckSpec("NVML", driver, 30.0, "the driver hangs: ask the site, or set `devices` to "
                    "\"none\""), CheckSpec("MIG", slices, 30.0), CheckSpec("MPS", sharing, 30.0),
          CheckSpec("lent", lent, 30.0))
