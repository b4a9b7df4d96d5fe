"""The only program that imports pyslurm. It reads orders as JSON lines and answers in JSON lines.

It is a program of its own, and no module imports it, for four reasons. Importing pyslurm can end
the process (without a configuration: exit status 1). Its calls hold the GIL for as long as the
controller is silent. It changes how libraries are loaded. And it is under GPL-2.0-only, so nothing
but values may pass this pipe.

The program knows no rate limit and no deadline; its parent (`binding.py`) does. It ends when its
standard input ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pyslurm


def _submit(order: dict[str, Any]) -> int:
    # the environment is always passed, because pyslurm's own default fails with some Pythons
    asked = pyslurm.JobSubmitDescription(script=order["script"], environment=order["environ"],
                                         **order["options"])
    return int(asked.submit())


def _query(order: dict[str, Any]) -> list[dict[str, Any]]:
    # pyslurm has no filter, and `Job.load` of a het job's leader leaks the other components
    ids, names, me = set(order["jobs"]), set(order["names"]), os.geteuid()
    found = []
    for job in pyslurm.Jobs.load().values():
        leader = job.heterogeneous_id or 0
        if job.user_id == me and ((leader or job.id) in ids or job.name in names):
            found.append({  # pyslurm gives None for zero: offset 0, no restarts
                "job": leader or job.id,
                "component": (job.heterogeneous_offset or 0) if leader else -1,
                "state": job.state, "reason": job.state_reason, "name": job.name,
                "partition": job.partition, "nodes": job.allocated_nodes,
                "start_s": job.start_time, "end_s": job.end_time,
                "restarts": job.requeue_count, "comment": job.comment,
                "element": job.array_id is not None})
    return found


def _cancel(order: dict[str, Any]) -> None:
    # all are tried, and the first rejection is reported
    refused = None
    for job in order["jobs"]:
        try:
            pyslurm.Job(job).cancel()
        except pyslurm.RPCError as error:
            refused = refused or error
    if refused is not None:
        raise refused


def _components(order: dict[str, Any]) -> dict[str, int]:
    """Returns the job ids of het jobs' components by `LEADER+OFFSET`."""
    return {f"{job.heterogeneous_id}+{job.heterogeneous_offset or 0}": job.id
            for job in pyslurm.Jobs.load().values()
            if job.heterogeneous_id in order["leaders"]}


def _comment(order: dict[str, Any]) -> None:
    pyslurm.Job(order["job"]).modify(pyslurm.JobSubmitDescription(comment=order["text"]))


_DOES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "submit": _submit, "query": _query, "cancel": _cancel, "components": _components,
    "comment": _comment}


def _answer(line: str) -> dict[str, Any]:
    order = json.loads(line)
    try:
        return {"value": _DOES[order["do"]](order)}
    except pyslurm.RPCError as error:
        return {"error": str(error.msg), "errno": int(error.errno)}
    except (ValueError, TypeError, AttributeError) as error:  # raised by pyslurm for bad arguments
        return {"error": f"{type(error).__name__}: {error}", "errno": 0}


def main() -> None:
    """Answers orders until standard input ends."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # output of the library must not mix with our answers
        out.write(json.dumps({"value": str(pyslurm.__version__)}) + "\n")
        out.flush()
        for line in sys.stdin:
            out.write(json.dumps(_answer(line)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
