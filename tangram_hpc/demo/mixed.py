"""The mixed demo: the coding step with a judge, three teachers and a search endpoint.

The step runs in two phases with the same seeds: once all services share one device, and once each
service has a device of its own. Each phase has an embedded cluster, a search server and an MPI
world of its own. The phases differ in the number of devices; in the second one each service also
stays on its device. Timing begins after each model was loaded and called once.
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
from ..storage.journal_segments import read_journals
from .demo_models import DEMO_MODELS, question
from .job import SESSION_ROOM_MIB, DemoPlan, Progress, run_ranks, warm
from .mixed_report import MixedMetrics, gather_mixed
from .policy import GROUP
from .problems import load_problems
from .search import SEARCH, SearchServer

RATE, BURST, JITTER_MS, CONCURRENCY = 40.0, 10.0, 100.0, 16  # the search endpoint's quota
SHARED, OWN = "shared", "own"
RANK = f"{__package__}.mixed_rank"  # the module that each trainer rank runs
DEVICES = {SHARED: 1, OWN: len(DEMO_MODELS)}
_STAY_S = 3600.0
_LOAD_S = 300.0


def run_mixed(plan: DemoPlan, models: dict[str, dict[str, Any]], phase: str,
              progress: Progress) -> MixedMetrics:
    """Runs one mixed step; `phase` is a key of `DEVICES`.

    Raises:
        TangramError: A trainer rank failed, or a service was not loaded in time.
    """
    total = plan.problems * GROUP
    room = max(1024, total * SESSION_ROOM_MIB) + _weights_mib(models)
    devices = DEVICES[phase]
    with SearchServer(load_problems(), RATE, BURST) as search:
        with LocalCluster(plan.cpus, placer="elastic", home=plan.home, mem_mib=room,
                          devices=f"cpu:{devices}") as cluster:
            warm(cluster, plan.cpus)
            _declare(cluster, models, _STAY_S if phase == OWN else 0.0)
            summary = run_ranks(plan, cluster, RANK,
                                lambda share: progress(phase, share), "--port", str(search.port))
            folder, job = cluster.folder, cluster.job
    progress(phase, 1.0)
    records = fold(read_journals(folder)).records.values()
    return gather_mixed(summary, list(records), phase, devices, search.served, search.throttled,
                        job)


def _weights_mib(models: dict[str, dict[str, Any]]) -> int:
    files = (file for declared in models.values()
             for file in Path(declared["model"]).glob("*.safetensors"))
    return sum(math.ceil(file.stat().st_size / (1 << 20)) for file in files)


def _declare(cluster: LocalCluster, models: dict[str, dict[str, Any]], stay_s: float) -> None:
    """Declares the endpoint and the services, and calls each service once.

    After its first call a service is loaded, and the cost of bringing it to a device is known. The
    services are called one after the other, so that each finds a free device where there is one.
    """
    cluster.register_endpoint(SEARCH, concurrency=CONCURRENCY, rate=RATE, burst=BURST,
                              jitter_ms=JITTER_MS)
    for name, declared in models.items():
        cluster.register_service(name, {**declared, "stay_s": stay_s})
    deadline = time.monotonic() + _LOAD_S
    for name in models:
        method, arguments = question(name, "def one():\n", "    return 1\n")
        try:
            cluster.call(name, method, name="warm", **arguments).result(deadline - time.monotonic())
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise TangramError(f"service {name}: it was not loaded within {_LOAD_S:.0f} s; see "
                               f"{cluster.folder}/worker.log") from None
