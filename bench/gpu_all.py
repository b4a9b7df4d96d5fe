"""Runs every check that needs a GPU, one by one, in at most ten minutes, without a network.

    python bench/gpu_all.py [--cpu] [--tiny] [--seconds 600] [--out FOLDER]

Each check has a log in the folder, and `results.json` has the outcome of each, its figures, and
what is not installed. A check is not begun when no time is left for it. With `--cpu` the benches
run on slots of CPU, and the tests are those of the same services on such slots. The exit status is
1 if a check failed or did not begin.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tangram_hpc.resources.gpu.devices import find_devices
from tangram_hpc.resources.gpu.mps import mps_serves
from tangram_hpc.resources.gpu.nvml import look

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "nvidia-ml-py", "pytest-xdist",
            "vllm", "sglang")
PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control")
PATIENCE_S = 45.0  # how long a check that is stopped may take to end
WORKERS = 8  # tests at a time that share a GPU, at most
FIGURES = ("wake_over_copy", "park_over_copy", "rest_ms", "mean_act_ms", "restores_per_min",
           "restore_share_of_busy", "overhead")


@dataclass(frozen=True)
class Check:
    """One program. `share`: the part of the whole time that it may take at most."""

    name: str
    command: tuple[str, ...]
    share: float


def checks(cpu: bool, tiny: bool) -> list[Check]:
    """All checks. Engines come first, as they have been run least. Of the tests, those in `vllm`
    and `alone` read the GPU's memory, so that nothing may run beside them; those in `beside` share
    the GPU."""
    small, slots = ("--tiny",) * tiny, ("--cpu",) * cpu
    spread = ("-n", str(min(WORKERS, len(os.sched_getaffinity(0))))) if find_spec("xdist") else ()
    tests = ("-m", "pytest", "-v", "--durations=5", "-m", "" if cpu else "gpu")
    beside = ["tests/services/test_service_backends.py"]
    alone = ["tests/services/test_service_numbers.py"]
    if not cpu:
        beside.append("tests/services/test_gpu_services.py")
        alone = ["tests/services/test_gpu_memory.py", "tests/resources/test_gpu_real.py"]
    vllm = Check("vllm", (*tests, "tests/services/test_vllm_real.py"), 0.5)
    return [
        *([] if cpu else [vllm]),
        Check("mopd", ("bench/bench_mopd_gpu.py", "--loads", "0.7", *small, *slots), 0.45),
        Check("alone", (*tests, *alone), 0.35),
        Check("park", ("bench/bench_park.py" if cpu else "bench/bench_gpu_park.py", *small), 0.3),
        Check("beside", (*tests, *spread, *beside, "-k", "torch or gpu"), 0.3),
    ]


def run(check: Check, out: Path, limit_s: float) -> dict[str, Any]:
    """Runs a check and returns its outcome."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    began = time.monotonic()
    log = out / f"{check.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *check.command], cwd=ROOT, stdout=file,
                                   stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path})
        try:
            status = f"exit {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then says what has failed so far
            status = f"stopped after {limit_s:.0f} s"
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
    took_s = time.monotonic() - began
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    try:
        told = json.loads(last)
    except ValueError:
        told = last
    return {"check": check.name, "status": "ok" if status == "exit 0" else status,
            "seconds": round(took_s, 1), "told": told}


def installed() -> dict[str, str]:
    """The version of each package, and the path of each program; empty for those that are not
    there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return {**found, **{program: shutil.which(program) or "" for program in PROGRAMS}}


def devices(cpu: bool) -> dict[str, Any]:
    """What a worker would lend here, and what shares or divides it."""
    seen = look()
    return {"lent": find_devices(os.environ, "cpu:1" if cpu else "").summary(),
            "driver": seen.driver, "cuda": seen.cuda, "mps": mps_serves(os.environ),
            "mig": [gpu.name for gpu in seen.gpus if gpu.mig]}


def brief(told: Any, where: str = "") -> list[str]:
    """The figures of a result that a reader looks for first, each with its place in the result."""
    if not isinstance(told, (dict, list)):
        return []
    lines = []
    for key, value in told.items() if isinstance(told, dict) else enumerate(told):
        if key in FIGURES:
            lines.append(f"{where}{key} = {value}")
        else:
            lines += brief(value, f"{where}{key} ")
    return lines


def main() -> int:
    """Runs the checks and prints what they told."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cpu", action="store_true", help="on slots of CPU in place of a GPU")
    p.add_argument("--tiny", action="store_true", help="small models")
    p.add_argument("--seconds", type=float, default=600, help="for all checks together")
    p.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    p.add_argument("--only", nargs="*", default=[], help="names of checks")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + a.seconds, []
    have = installed()
    missing = [name for name, where in have.items() if not where]
    about = devices(a.cpu)
    print(f"{about}\nnot installed: {', '.join(missing) or 'nothing'}", flush=True)
    for check in checks(a.cpu, a.tiny):
        if a.only and check.name not in a.only:
            continue
        limit_s = min(check.share * a.seconds, end - time.monotonic())
        result = run(check, a.out, limit_s) if limit_s > 5 else {
            "check": check.name, "status": "not begun", "seconds": 0, "told": ""}
        results.append(result)
        print(f"{result['check']:12} {result['status']:10} {result['seconds']:7.1f} s  "
              f"{result['told'] if isinstance(result['told'], str) else ''}", flush=True)
        for line in brief(result["told"]):
            print(f"             {line}", flush=True)
        (a.out / "results.json").write_text(json.dumps(
            {"installed": have, "devices": about, "results": results}, indent=1))
    return int(any(result["status"] != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
