"""What all benchmarks share: their arguments, and the one JSON line that each prints.

A line has name, parameters, versions, commit and figures. Ratios compare measurements of one run,
since machines are shared and noisy. `--tiny` runs the same code in about a second, for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def arguments(about: str | None, **numbers: str) -> argparse.Namespace:
    """`--tiny`, and an option for each of these numbers, whose text is its help."""
    p = argparse.ArgumentParser(description=about)
    p.add_argument("--tiny", action="store_true", help="about a second, for the tests")
    for name, text in numbers.items():
        p.add_argument(f"--{name}", type=int, help=text)
    return p.parse_args()


def line(name: str, parameters: dict[str, Any], figures: dict[str, Any]) -> None:
    """Prints the bench's line."""
    print(json.dumps({
        "bench": name, "parameters": parameters, "figures": figures,
        "versions": {"python": platform.python_version(), "kernel": platform.release(),
                     **{p: _version(p) for p in ("tangram-hpc", "msgspec", "mpi4py", "mpich")},
                     **{p: v for p in ("torch", "transformers") if (v := _version(p))}},
        "cpus": len(os.sched_getaffinity(0)), "commit": _commit()}), flush=True)


def allow_open_files() -> None:
    """Lets this process, and those that it starts, open as many files as it may at most: each
    caller of a server has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in ms."""
    ordered = sorted(seconds)
    return {"p50_ms": round(ordered[len(ordered) // 2] * 1e3, 4),
            "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * .99))] * 1e3, 4)}


def timed(call: Callable[[], Any], times: int, pause_s: float = 0.0) -> list[float]:
    """Seconds of each of `times` calls, `pause_s` apart."""
    took = []
    for _ in range(times):
        if pause_s:
            time.sleep(pause_s)
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return took


def mpiexec() -> str:
    """The launcher beside this interpreter."""
    return str(Path(sys.executable).with_name("mpiexec"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of this checkout; empty outside of one, and where there is no git."""
    if not shutil.which("git"):
        return ""
    told = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"],
                          capture_output=True, text=True, check=False)
    return told.stdout.strip()
