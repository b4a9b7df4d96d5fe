"""The Slurm adapter that uses pyslurm, which runs in a child process (`pyslurm_child.py`).

This module never imports pyslurm: the import can end the process, its calls hold the GIL while the
controller is silent, and it is under the GPL. What pyslurm cannot do goes to Slurm's commands: het
jobs, options for which pyslurm has no name, and the Comment of a job that the controller has
forgotten.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..domain.slurm import JobOrder, JobRef, JobView, with_job_comment
from ..errors import ProtocolError
from ..ports import SlurmRejected, SlurmTransient
from ..start_module import module_command
from .adapter import checked_comment, comment_of, failure, says_over, wanted
from .child import Child, ChildGone, ChildLate
from .commands import DEADLINE_S, Commands
from .hostlist import expand
from .job_environment import slurm_command_environment

CHILD = "tangram_hpc.slurm.pyslurm_child"
# sbatch's long options and their names in pyslurm; a job with any other goes to sbatch itself
_NAMES = {
    "job-name": "name", "partition": "partitions", "account": "account", "qos": "qos",
    "nodes": "nodes", "ntasks": "ntasks", "cpus-per-task": "cpus_per_task",
    "mem": "memory_per_node", "mem-per-cpu": "memory_per_cpu", "gres": "gres_per_node",
    "time": "time_limit", "output": "standard_output", "error": "standard_error",
    "comment": "comment", "chdir": "working_directory", "constraint": "constraints",
    "reservation": "reservations", "exclude": "excluded_nodes", "nodelist": "required_nodes",
}
_NUMBERS = frozenset({"ntasks", "cpus_per_task", "time_limit"})
_FLAGS = {"requeue": ("is_requeueable", True), "no-requeue": ("is_requeueable", False),
          "hold": ("priority", 0)}
_FIELDS = ("state", "reason", "name", "partition", "comment")


class PyslurmUnusable(SlurmTransient):
    """Raised when pyslurm has never answered.

    It is not installed, was built for another release of Slurm, or finds no configuration.
    """


class Pyslurm:
    """The adapter over pyslurm; see `adapter.SlurmAdapter`.

    Args:
        environ: the caller's environment, from which the child's is made.
        deadline_s: how long one call may take, seconds; then the child is killed.
    """

    def __init__(self, environ: Mapping[str, str], deadline_s: float = DEADLINE_S) -> None:
        env = slurm_command_environment(environ)
        self._commands, self._conf = Commands(environ, deadline_s), env.get("SLURM_CONF", "")
        self._submitters = dict(env)
        self._child = Child(module_command(CHILD), env, deadline_s)
        self._answered = False

    @property
    def name(self) -> str:
        """Always `pyslurm`; see `adapter.SlurmAdapter.name`."""
        return "pyslurm"

    @property
    def version(self) -> str:
        """The version of pyslurm; empty before its first answer."""
        return str(self._child.greeting.get("value", ""))

    @property
    def pid(self) -> int:
        """The child's process id; 0 while there is none."""
        return self._child.pid

    async def submit(self, order: JobOrder) -> int:
        """Submits through pyslurm, or through sbatch for what pyslurm cannot express."""
        options = _translated(order)
        if options is None:
            return await self._commands.submit(order)
        answer = await self._ask({"do": "submit", "script": order.script, "options": options,
                                  "environ": {**self._submitters, **dict(order.environ)}})
        return int(answer)

    async def query(self, jobs: Sequence[int], names: Sequence[str]) -> tuple[JobView, ...]:
        """Returns the rows that pyslurm gives; see `adapter.SlurmAdapter.query`."""
        answer = await self._ask({"do": "query", "jobs": list(jobs), "names": list(names)})
        return wanted([_view(row) for row in answer], jobs, names)

    async def cancel(self, jobs: Sequence[JobRef]) -> None:
        """Cancels jobs and components through pyslurm; see `adapter.SlurmAdapter.cancel`."""
        leaders = [each.job for each in jobs if each.component >= 0]
        ids = await self._ask({"do": "components", "leaders": leaders}) if leaders else {}
        numbers = [ids.get(each.show(), 0) if each.component >= 0 else each.job for each in jobs]
        await self._ask({"do": "cancel", "jobs": [number for number in numbers if number]})

    async def comment(self, job: int, text: str) -> None:
        """Sets the Comment through pyslurm, or through Slurm's commands if the job has ended.

        An element of a job array also goes to the commands: pyslurm knows a job by its number
        only, and the last element of an array has the number of the whole array.
        """
        checked_comment(text)
        rows = await self._ask({"do": "query", "jobs": [job], "names": []})
        old = comment_of(wanted([_view(row) for row in rows], [job], ()))
        if old is not None and not any(row["element"] for row in rows):
            try:
                await self._ask({"do": "comment", "job": job, "text": with_job_comment(old, text)})
                return
            except SlurmRejected as never:
                if not says_over(never):
                    raise
        await self._commands.comment(job, text)

    async def close(self) -> None:
        """Kills the child process; see `adapter.SlurmAdapter.close`."""
        await self._child.kill()
        await self._commands.close()

    async def _ask(self, order: Mapping[str, Any]) -> Any:
        # without this check, pyslurm would try for a minute
        if self._conf and not os.path.exists(self._conf):
            raise SlurmTransient(f"SLURM_CONF names {self._conf}, which does not exist")
        try:
            answer = await self._child.ask(order)
        except ChildLate as late:
            raise SlurmTransient(f"pyslurm: {late}", unsure=True) from None
        except ChildGone as gone:
            if not self._answered:
                raise PyslurmUnusable(f"pyslurm: {gone}") from None
            raise SlurmTransient(f"pyslurm: its process has ended: {gone}", unsure=True) from None
        self._answered = True
        if "error" in answer:
            raise failure(f"pyslurm: {answer['error']}")
        if "value" not in answer:
            raise ProtocolError(f"pyslurm's process answered {str(answer)[:80]}")
        return answer["value"]


def _translated(order: JobOrder) -> dict[str, Any] | None:
    """Returns the order's options under pyslurm's names, or None if sbatch itself must be used.

    Options of the order win over the script's `#SBATCH` lines. The answer is None where pyslurm has
    no name for an option, or the job is a het job.
    """
    asked: dict[str, Any] = {}
    for name, value in [*_directives(order.script), *order.options]:
        if name in _FLAGS and not value:
            word, meaning = _FLAGS[name]
            asked[word] = meaning
        elif name in _NAMES and value:
            word = _NAMES[name]
            asked[word] = int(value) if word in _NUMBERS and value.isdigit() else value
        else:
            return None
    return asked


def _directives(script: str) -> list[tuple[str, str]]:
    """Returns the options of the `#SBATCH` lines before the first command, as (name, value).

    An option that is not written `--NAME[=VALUE]` has an empty name, which no table knows.
    """
    found = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            for word in shlex.split(line[7:], comments=True):
                match = re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word)
                found.append((match[1], match[2] or "") if match else ("", ""))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def _view(row: Mapping[str, Any]) -> JobView:
    words = {name: str(row[name] or "") for name in _FIELDS}
    words["reason"] = "" if words["reason"] == "None" else words["reason"]
    try:
        nodes = expand(str(row["nodes"] or ""))
    except ValueError as error:
        raise SlurmRejected(f"pyslurm: {error}") from None
    return JobView(
        int(row["job"]), int(row["component"]), nodes=nodes,
        start_ns=int(row["start_s"] or 0) * 10**9, end_ns=int(row["end_s"] or 0) * 10**9,
        restarts=int(row["restarts"] or 0), **words)
