"""The types of a check of `tangram doctor`: its input, its answer, and its entry in the list.

Rules that every check keeps: it calls the same code as the broker or worker would, leaves nothing
changed behind, needs no root, and says "ok" only of what it has tried. An exception in a check
becomes the finding of that check, and the other checks go on.
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
    """The answer of a check.

    Attributes:
        state: "ok", "warn" (it works with less), "fail", or "skip" (the check does not apply).
        found: One line on what was found, or for "skip" on why the check does not apply.
        remedy: What to do; empty for "ok" and "skip".
    """

    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """A finding as the page and `--json` show it.

    Attributes:
        group: The subject, such as "Slurm".
        name: The check's name.
        state: See `Finding`.
        found: See `Finding`.
        remedy: See `Finding`.
        seconds: How long the check took, seconds.
    """

    group: str
    name: str
    state: str
    found: str
    remedy: str
    seconds: float


@dataclass(frozen=True)
class SlurmFacts:
    """What Slurm's controller answered.

    Attributes:
        conf: The controller's configuration; empty if it did not answer.
        configured: Whether this machine belongs to a Slurm cluster, whether or not it answers.
        why: Why `conf` is empty, in one line.
        seconds: How long the answer took, seconds.
        skew_s: Bounds on the seconds by which the controller's clock is ahead of ours: (least,
            most).
    """

    conf: dict[str, str] = field(default_factory=dict)
    configured: bool = False
    why: str = ""
    seconds: float = 0.0
    skew_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class CheckContext:
    """The input of all checks.

    Attributes:
        environ: The environment.
        config: The settings; the defaults where `wrong` is set.
        address: The address that a broker here would tell others; empty if there is none.
        slurm: What Slurm's controller answered.
        place: What Slurm gave to this job; None outside a job.
        wrong: Why the settings cannot be read; empty if they can.
        mpi: How srun shall start MPI; empty for what the MPI library needs.
        listen: The address on which a broker would listen, if it is not `address`.
        no_address: Why a broker here has no address to tell others; empty if it has one.
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
        """Where the doctor runs: "job" inside a Slurm job, "login" elsewhere on a Slurm cluster,
        "machine" without Slurm.
        """
        return JOB if self.place is not None else LOGIN if self.slurm.configured else MACHINE


@dataclass(frozen=True)
class CheckSpec:
    """A check on the list.

    Attributes:
        name: The check's name, which is unique.
        act: Carries the check out.
        seconds: How long the check may take, seconds.
        late: The remedy when it takes longer.
    """

    name: str
    act: Callable[[CheckContext], Finding]
    seconds: float = 10.0
    late: str = "find out what hangs"


def ok(found: str) -> Finding:
    """Returns the finding that all is well."""
    return Finding(OK, found)


def warn(found: str, remedy: str) -> Finding:
    """Returns the finding that something works, but with less than it could."""
    return Finding(WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Returns the finding that something does not work."""
    return Finding(FAIL, found, remedy)


def skip(why: str) -> Finding:
    """Returns the finding that a check does not apply, or cannot be decided here."""
    return Finding(SKIP, why)
