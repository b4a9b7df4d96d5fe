"""Parses the ids by which people name a job or an action: those of `tangram acct`, and sacct's.

`tangram acct` prints `JOB.CLIENT.COUNTER`. An option that takes a job therefore accepts this form
too and uses the JOB in it; an option that takes an action uses all three parts. Of Slurm's ids, a
component (`4711+1`) and a job step (`4711.0`, `4711.batch`, `4711+1.extern`) name their job. A task
of a job array (`209_1`) has a job number of its own, which only Slurm knows.

The functions are used as `type=` of argparse's arguments, so that a wrong id is reported with the
verb's usage.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from ...domain.ids import parse

_ACTION = re.compile(r"(?:(?P<job>.+)\.)?(?P<id>[1-9]\d*\.[1-9]\d*)")
_SLURM = re.compile(r"(?P<job>\d+)(\+\d+)?(\.(\d+|[a-z]+)(\+\d+)?)?")
_ARRAY = re.compile(r"\d+_(\d+|\[.*\])(\.\w+)?")


@dataclass(frozen=True)
class Named:
    """A job, an action of a job, or both.

    Attributes:
        job: Job id; empty for the default job.
        action: Action id, CLIENT.NUMBER; empty for all actions.
    """

    job: str
    action: str = ""

    @property
    def number(self) -> int:
        """Returns the action's id as a whole number; 0 for all actions."""
        return parse(self.action) if self.action else 0


def jobs(text: str) -> list[Named]:
    """Parses ids of jobs and actions that are separated by commas, as `sacct -j` takes them.

    An empty text is refused: it is a shell variable that is not set, and whoever gave it did not
    mean the default.
    """
    found = [named_job(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no job; leave the option out to mean the "
                                         "default")
    return found


def job(text: str) -> str:
    """Returns the job that an id names: `4711`, `4711+1`, `4711.0`, `4711.2.17` or `local-...`. An
    empty text is refused, as by `jobs`. argparse parses defaults too, so the default is None.
    """
    return named_job(text).job


def named_job(text: str) -> Named:
    """Parses the id of a job or of one action of a job. An empty text is refused, as by `jobs`."""
    if not text.strip():
        return jobs(text)[0]
    if "\n" in text:  # the output of `squeue`, one id on each line
        raise argparse.ArgumentTypeError(f"{text!r:.60} holds a line break; name one job, "
                                         "or put commas between ids where several are taken")
    if _ARRAY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a task of a job array; give the task's own job number, which `sacct -X "
            f"-n -j {text.partition('.')[0]} -o JobIDRaw` prints")
    if slurm := _SLURM.fullmatch(text):
        return Named(slurm["job"])
    found = _ACTION.fullmatch(text)
    if found and found["job"]:
        return Named(named_job(found["job"]).job, found["id"])
    return Named(text)


def action(text: str) -> Named:
    """Parses the id of an action or a session, with or without its job: `2.17` or `4711.2.17`."""
    found = _ACTION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the id of an action; write CLIENT.NUMBER, such as 2.17, or "
            "JOB.CLIENT.NUMBER as `tangram acct` prints it")
    return Named(named_job(found["job"]).job if found["job"] else "", found["id"])
