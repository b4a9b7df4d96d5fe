"""What a check is, what it is told and what it may say.

Law: a check looks by the means of those who do the work, changes nothing that outlives it, needs no
root, and says "ok" of nothing that it has not tried. It never ends the page: what it raises is its
finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..config.settings import Config
from ..slurm.job_environment import SlurmPlace

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
MACHINE, LOGIN, JOB = "machine", "login", "job"


@dataclass(frozen=True)
class Finding:
    """What a check says. `state`: "ok", "warn", "fail" or "skip"; `found`: one line on what is, or
    for "skip" on why it does not apply; `remedy`: what to do, empty for "ok"."""

    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A finding with the check's name and subject, and the seconds it took."""

    group: str
    name: str
    state: str
    found: str
    remedy: str
    seconds: float


@dataclass(frozen=True)
class SlurmFacts:
    """What the controller answered.

    Attributes:
        conf: its configuration; empty when it did not answer.
        configured: there is a Slurm for this machine, answering or not.
        why: why `conf` is empty, in one line.
        seconds: how long it took.
        skew_s: the least and the most seconds that its clock is ahead of ours.
    """

    conf: dict[str, str] = field(default_factory=dict)
    configured: bool = False
    why: str = ""
    seconds: float = 0.0
    skew_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Where:
    """What checks are told.

    Attributes:
        environ, config: the environment, and the settings (the defaults where `wrong` is set).
        address: what a broker here would tell others; empty for nothing (setting `bind`).
        slurm: what Slurm's controller said.
        place: None outside a job.
        wrong: why the settings cannot be read.
        mpi: how srun starts MPI; empty for what the library wants.
        listen: where a broker would listen, if elsewhere than at `address`.
        no_address: why a broker here has no address that it could tell others.
    """

    environ: Mapping[str, str]
    config: Config
    address: str
    slurm: SlurmFacts
    place: SlurmPlace | None = None
    wrong: str = ""
    mpi: str = ""
    listen: str = ""
    no_address: str = ""

    @property
    def kind(self) -> str:
        """"job" inside one, "login" where Slurm is, "machine" where it is not."""
        return JOB if self.place is not None else LOGIN if self.slurm.configured else MACHINE


@dataclass(frozen=True)
class Item:
    """A check on the list: it has so many seconds; `late` is the remedy when it takes longer."""

    name: str
    act: Callable[[Where], Finding]
    seconds: float = 10.0
    late: str = "find out what hangs"


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(OK, found)


def warn(found: str, remedy: str) -> Finding:
    """It works, with less."""
    return Finding(WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(FAIL, found, remedy)


def skip(why: str) -> Finding:
    """It does not apply, or cannot be told."""
    return Finding(SKIP, why)
