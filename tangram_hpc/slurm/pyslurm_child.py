"""The one program that imports pyslurm: orders come in as JSON lines, answers go out as such.

Law: a program of its own, never imported. Importing pyslurm may end the process (no configuration:
exit 1), its calls hold the interpreter for as long as the controller is silent, and it changes how
libraries are loaded: none of that is wanted in a broker. It is under GPL-2.0-only, too; nothing of
it passes this pipe but values. It knows no budget, no deadline and no policy: its parent does. It
ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pyslurm


def _submit(order: dict[str, Any]) -> int:
    """`environ` is always given: by default pyslurm reads it from where some Pythons have none."""
    asked = pyslurm.JobSubmitDescription(script=order["script"], environment=order["environ"],
                                         **order["options"])
    return int(asked.submit())


def _query(order: dict[str, Any]) -> list[dict[str, Any]]:
    """All jobs are loaded, as there is no filter (`Job.load` of a het leader leaks the others)."""
    ids, names, me = set(order["jobs"]), set(order["names"]), os.geteuid()
    found = []
    for job in pyslurm.Jobs.load().values():
        leader = job.heterogeneous_id or 0
        if job.user_id == me and ((leader or job.id) in ids or job.name in names):
            found.append({  # zero reads as None in pyslurm: offset 0, no restarts
                "job": leader or job.id,
                "component": (job.heterogeneous_offset or 0) if leader else -1,
                "state": job.state, "reason": job.state_reason, "name": job.name,
                "partition": job.partition, "nodes": job.allocated_nodes,
                "start_s": job.start_time, "end_s": job.end_time,
                "restarts": job.requeue_count, "comment": job.comment})
    return found


def _cancel(order: dict[str, Any]) -> None:
    """All are tried; the first refusal is told. Unknown and finished ones are none."""
    refused = None
    for job in order["jobs"]:
        try:
            pyslurm.Job(job).cancel()
        except pyslurm.RPCError as error:
            refused = refused or error
    if refused is not None:
        raise refused


def _components(order: dict[str, Any]) -> dict[str, int]:
    """The ids of a het job's components by `LEADER+OFFSET`."""
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
    except (ValueError, TypeError, AttributeError) as error:  # what it says of bad arguments
        return {"error": f"{type(error).__name__}: {error}", "errno": 0}


def main() -> None:
    """Serves its parent."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what the library prints is none of our words
        out.write(json.dumps({"value": str(pyslurm.__version__)}) + "\n")
        out.flush()
        for line in sys.stdin:
            out.write(json.dumps(_answer(line)) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
