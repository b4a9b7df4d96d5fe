"""The mixed demo: the coding step with a judge, three teachers and a search endpoint, once on one
shared device and once with a device for each service, over the same seeds.

Law: each phase is a fresh embedded cluster, search server and MPI world; only the devices differ,
and that a service which has one of its own stays there. Nothing is timed before the models are
loaded and each was called once.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from pathlib import Path
from typing import Any

from ..accounting.record import fold
from ..app.local import LocalCluster
from ..errors import TangramError
from ..storage.journal import read_journals
from .crew import CREW, question
from .job import SESSION_ROOM_MIB, DemoPlan, Progress, run_ranks, warm
from .mixed_report import Mixed, gather_mixed
from .policy import GROUP
from .problems import load_problems
from .search import SEARCH, SearchServer

RATE, BURST, JITTER_MS, CONCURRENCY = 40.0, 10.0, 100.0, 16  # the search endpoint's quota
SHARED, OWN = "shared", "own"
DEVICES = {SHARED: 1, OWN: len(CREW)}
_STAY_S = 3600.0
_LOAD_S = 300.0

def run_mixed(plan: DemoPlan, models: dict[str, dict[str, Any]], phase: str,
              progress: Progress) -> Mixed:
    """One mixed step; `phase`: on one device that all share, or on one for each service.

    Raises:
        TangramError: a part of it failed.
    """
    total = plan.problems * GROUP
    room = max(1024, total * SESSION_ROOM_MIB) + _weights_mib(models)
    devices = DEVICES[phase]
    with SearchServer(load_problems(), RATE, BURST) as search:
        with LocalCluster(plan.cpus, placer="elastic", home=plan.home, mem_mib=room,
                          devices=f"cpu:{devices}") as cluster:
            warm(cluster, plan.cpus)
            _declare(cluster, models, _STAY_S if phase == OWN else 0.0)
            told = run_ranks(plan, cluster, "mixed_rank", lambda share: progress(phase, share),
                             "--port", str(search.port))
            folder, job = cluster.folder, cluster.job
    progress(phase, 1.0)
    records = fold(read_journals(folder)).records.values()
    return gather_mixed(told, list(records), phase, devices, search.served, search.throttled, job)


def _weights_mib(models: dict[str, dict[str, Any]]) -> int:
    files = (file for told in models.values() for file in Path(told["model"]).glob("*.safetensors"))
    return sum(math.ceil(file.stat().st_size / (1 << 20)) for file in files)


def _declare(cluster: LocalCluster, models: dict[str, dict[str, Any]], stay_s: float) -> None:
    """Declares services and endpoint, and calls each service once: it is loaded then, and what
    bringing it in costs is known. One after the other, so that each finds a device of its own
    where there is one."""
    cluster.register_endpoint(SEARCH, concurrency=CONCURRENCY, rate=RATE, burst=BURST,
                              jitter_ms=JITTER_MS)
    for name, told in models.items():
        cluster.register_service(name, {**told, "stay_s": stay_s})
    deadline = time.monotonic() + _LOAD_S
    for name in models:
        method, asked = question(name, "def one():\n", "    return 1\n")
        try:
            cluster.call(name, method, name="warm", **asked).result(deadline - time.monotonic())
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise TangramError(f"service {name}: not loaded within {_LOAD_S:.0f} s; see "
                               f"{cluster.folder}/worker.log") from None
