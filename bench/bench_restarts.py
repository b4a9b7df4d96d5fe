"""Kills and stops the processes of a job again and again under load, and checks that nothing is
lost or repeated.

Clients run commands, functions, commands in sessions of their own and of others, calls of services
and grants of an endpoint, over sockets and over an MPI world with a gateway. Meanwhile the broker
is killed (SIGKILL) or stopped for a while (SIGSTOP), and its parent starts it again; now and then a
worker is killed or stopped, or the gateway is stopped. Every execution leaves a line in a file, so
that executions are counted where they happen. `chaos/promises.py` says what is checked.

`pause_s` is the time in which a client's thread got no result around the death of a broker, less
what one action takes without it; times in which something else was disturbed too are in
`pause_max_with_others_s` only. `load` is the machine's, over the last 15 minutes. The
status is 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from chaos.actions_of_clients import Order
from chaos.disturbances import Disturber
from chaos.disturbed_job import DisturbedJob
from chaos.promises import Journaled, Promises, pauses, read_journaled


def arguments() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tiny", action="store_true", help="some seconds, for the tests")
    p.add_argument("--seconds", type=float, default=120.0, help="length of the run")
    p.add_argument("--gap", type=float, default=5.0, help="mean seconds between two disturbances")
    p.add_argument("--pause", type=float, nargs=2, default=(2.0, 20.0), metavar=("LEAST", "MOST"),
                   help="shortest and longest stop of the broker, seconds")
    p.add_argument("--clients", type=int, default=3, help="clients that use the broker's socket")
    p.add_argument("--threads", type=int, default=4, help="threads of each client and rank")
    p.add_argument("--workers", type=int, default=3)
    p.add_argument("--grace", type=float, default=30.0, help="the setting `grace_s`, seconds; a "
                   "broker takes longer to come back where the machine does other work too")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--keep", type=Path, help="copy the job's files to this folder at the end")
    return p.parse_args()


def figures(promises: Promises, journaled: Journaled, disturber: Disturber, job: DisturbedJob
            ) -> dict[str, Any]:
    """What the line tells."""
    actions = [seen for seen in promises.seen if seen.kind != "attach"]
    took = pauses(promises.seen, disturber.kills, disturber.others)
    any_took = pauses(promises.seen, disturber.kills, ())
    return {
        "actions": len(actions),
        "by_kind": dict(Counter(seen.kind for seen in actions)),
        "by_channel": dict(Counter(seen.via for seen in actions if seen.via)),
        "once": sum(seen.once for seen in actions),
        "submitted_again": sum(seen.again for seen in actions),
        "executed": {kind: {str(times): count for times, count in sorted(counts.items())}
                     for kind, counts in promises.executed.items()},
        "excused": dict(promises.excused), "wrong": len(promises.wrong),
        "broker_kills": len(disturber.kills), "broker_stops": len(disturber.stops),
        "stopped_s": round(sum(disturber.stops), 1), "brokers_that_served": journaled.starts,
        "nodes_lost": len(journaled.gone), "mpi_worlds": job.worlds,
        "disturbances": dict(disturber.done),
        "sessions": len(journaled.closed), "sessions_lost": len(journaled.lost_sessions),
        "pause_p50_s": _at(took, 0.5), "pause_p99_s": _at(took, 0.99), "pause_max_s": _at(took, 1),
        "pause_max_with_others_s": _at(any_took, 1),
        "load": round(os.getloadavg()[2], 1)}


def _at(ordered: Sequence[float], share: float) -> float | None:
    return (round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) if ordered
            else None)


def main() -> int:
    """Runs the benchmark and prints its result as one line of JSON."""
    args = arguments()
    if args.tiny:
        args.seconds, args.gap, args.pause, args.clients, args.threads = 2.0, 0.8, (0.2, 0.6), 1, 1
        args.workers = 1
    rng = random.Random(args.seed)
    limit_s = 150.0 + args.pause[1] + args.grace
    order = Order("", "", "", "", "", args.threads, (), limit_s, args.seed)
    with tempfile.TemporaryDirectory() as place:
        try:
            with DisturbedJob(Path(place), order, args.workers, args.clients, args.grace) as job:
                disturber = Disturber(job, args.gap, tuple(args.pause), rng, args.grace)
                disturber.disturb(args.seconds)
                job.finish()
            time.sleep(0.2)
        finally:
            if args.keep is not None:
                shutil.copytree(place, args.keep, dirs_exist_ok=True,
                                ignore=shutil.ignore_patterns("*.sock"))
        journaled = read_journaled(job.access.parent)
        promises = Promises(job.outcomes, job.effects, journaled)
        promises.wrong += job.wrong
    for text in promises.wrong[:50]:
        print(text, file=sys.stderr)
    common.line("restarts", {**vars(args), "keep": None},
                figures(promises, journaled, disturber, job))
    return 1 if promises.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
