"""Lists all checks by subject, and runs them.

Each check runs in a process and under a deadline of its own, so a check that hangs or crashes costs
its own line and no other. What a failed check means for the main job is decided in `severity.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..config.settings import Config
from ..errors import TangramError
from ..slurm.job_environment import slurm_place
from ..transport.socket.address import Addresses
from . import gpu, isolation, limits, mpi, net, rehearsal, slurm, storage
from .check import Check, CheckContext, CheckSpec, Finding, SlurmFacts, fail, skip
from .deadline import with_deadline

GROUPS: Mapping[str, tuple[CheckSpec, ...]] = {
    "Node": limits.CHECKS, "Slurm": slurm.CHECKS, "MPI": mpi.CHECKS,
    "Isolation": isolation.CHECKS, "GPUs": gpu.CHECKS, "Files": storage.CHECKS,
    "Network": net.CHECKS, "Rehearsal": rehearsal.CHECKS,
}


def gather_context(environ: Mapping[str, str], config: Config, own: Addresses | str | None,
                   wrong: str = "", mpi: str = "") -> CheckContext:
    """Returns the input of the checks; asks Slurm's controller, where there is one.

    Args:
        environ: The environment.
        config: The settings.
        own: Where a broker here would listen; None for nowhere; a text says why it cannot listen.
        wrong: Why the settings cannot be read; empty if they can.
        mpi: How srun shall start MPI; empty for what the MPI library needs.
    """
    facts = with_deadline(lambda: slurm.ask(environ), SlurmFacts, slurm.ASK_S + 5)
    if facts is None:
        facts = SlurmFacts(configured=True, why=f"no answer in {slurm.ASK_S:g} s")
    no_address = own if isinstance(own, str) else ""
    listen, advertised = own if isinstance(own, Addresses) else ("", "")
    return CheckContext(environ, config, advertised, facts, slurm_place(environ), wrong, mpi,
                        listen, no_address)


def run_checks(context: CheckContext, before: Callable[[str, str], None] = lambda group, name: None,
               groups: Mapping[str, tuple[CheckSpec, ...]] = GROUPS) -> list[Check]:
    """Runs all checks, one after another, and returns their findings.

    Args:
        context: What the checks are given.
        before: Called with the subject and the name of each check before it runs.
        groups: The checks of each subject.
    """
    checks = []
    for group, items in groups.items():
        for item in items:
            before(group, item.name)
            began = time.monotonic()
            finding = _one(item, context)
            checks.append(Check(group, item.name, finding.state, finding.found, finding.remedy,
                                round(time.monotonic() - began, 3)))
    return checks


def _one(item: CheckSpec, context: CheckContext) -> Finding:
    began = time.monotonic()
    finding = with_deadline(lambda: _caught(item, context), Finding, item.seconds)
    if finding is not None:
        return finding
    if time.monotonic() - began < item.seconds:
        return fail("the check itself failed; its traceback is on stderr", "please report it")
    return fail(f"no answer in {item.seconds:g} s", item.late)


def _caught(item: CheckSpec, context: CheckContext) -> Finding:
    try:
        return item.act(context)
    except storage.NoFolder as error:
        return skip(f"no folder can be made in {error.filename}: {error.strerror}")
    except TangramError as error:
        return fail(str(error), "correct the setting or path that this line names")
    except OSError as error:
        return fail(f"{error.filename or ''} {error.strerror or error}".strip(),
                    "correct the setting or path that this line names")
