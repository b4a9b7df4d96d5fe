"""How a person names a job or an action: the ids of `tangram acct`, and sacct's forms.

`tangram acct` prints `JOB.CLIENT.COUNTER`, so whatever takes a job takes that too and means its
job, and whatever takes an action finds the job in it. Of Slurm's own ids, a component (`4711+1`)
and a step (`4711.0`, `4711.batch`, `4711+1.extern`) name their job: its broker is the job's, and
actions are no steps. An array task (`209_1`) has a number of its own, which only Slurm knows.

The functions are `type=` of argparse's arguments, so that a wrong id is told with the verb's usage.
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
    """A job, an action of it, or both; an empty job is the usual one, an empty action all."""

    job: str
    action: str = ""

    @property
    def number(self) -> int:
        """The action's id as a whole number; 0 for all actions."""
        return parse(self.action) if self.action else 0


def job(text: str) -> str:
    """The job that an id names: `4711`, `4711+1`, `4711.0`, `4711.2.17`, `local-...`."""
    return named_job(text).job


def jobs(text: str) -> list[Named]:
    """Jobs, and actions of jobs, divided by commas, as `sacct -j` takes them."""
    return [named_job(part.strip()) for part in text.split(",") if part.strip()]


def named_job(text: str) -> Named:
    """A job, or one action of a job."""
    if _ARRAY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a task of a job array; give its own job number: `sacct -X -n -j "
            f"{text.partition('.')[0]} -o JobIDRaw`")
    if slurm := _SLURM.fullmatch(text):
        return Named(slurm["job"])
    found = _ACTION.fullmatch(text)
    if found and found["job"]:
        return Named(named_job(found["job"]).job, found["id"])
    return Named(text)


def action(text: str) -> Named:
    """An action's or session's id, with or without its job: `2.17`, `4711.2.17`."""
    found = _ACTION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no action id; write CLIENT.NUMBER, such as 2.17, or JOB.CLIENT.NUMBER "
            "as `tangram acct` prints it")
    return Named(named_job(found["job"]).job if found["job"] else "", found["id"])
