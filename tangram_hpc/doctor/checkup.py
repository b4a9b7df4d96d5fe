"""The list of checks, by subject, and their run, each in a process and with a deadline of its own.

Law: knows which checks there are and in what order; not what they look at, nor what they mean for
the main job (`verdict`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..config.settings import Config
from ..errors import TangramError
from ..slurm.job_environment import slurm_place
from ..transport.socket.address import Addresses
from . import gpu, isolation, limits, mpi, net, rehearsal, slurm, storage
from .check import Check, Finding, Item, SlurmFacts, Where, fail, skip
from .deadline import with_deadline

GROUPS: Mapping[str, tuple[Item, ...]] = {
    "Node": limits.CHECKS, "Slurm": slurm.CHECKS, "MPI": mpi.CHECKS,
    "Isolation": isolation.CHECKS, "GPUs": gpu.CHECKS, "Files": storage.CHECKS,
    "Network": net.CHECKS, "Rehearsal": rehearsal.CHECKS,
}


def look_around(environ: Mapping[str, str], config: Config, own: Addresses | str | None,
                wrong: str = "", mpi: str = "") -> Where:
    """Where this process stands: asks Slurm's controller, where there is one. `own`: where a broker
    here would listen; None: nowhere; a text: why it cannot."""
    facts = with_deadline(lambda: slurm.ask(environ), SlurmFacts, slurm.ASK_S + 5)
    if facts is None:
        facts = SlurmFacts(configured=True, why=f"no answer in {slurm.ASK_S:g} s")
    no_address = own if isinstance(own, str) else ""
    listen, told = own if isinstance(own, Addresses) else ("", "")
    return Where(environ, config, told, facts, slurm_place(environ), wrong, mpi, listen,
                 no_address)


def check_up(where: Where, before: Callable[[str, str], None] = lambda group, name: None,
             groups: Mapping[str, tuple[Item, ...]] = GROUPS) -> list[Check]:
    """All checks, one after another. `before` hears the subject and name of each."""
    found = []
    for group, items in groups.items():
        for item in items:
            before(group, item.name)
            began = time.monotonic()
            said = _one(item, where)
            found.append(Check(group, item.name, said.state, said.found, said.remedy,
                               round(time.monotonic() - began, 3)))
    return found


def _one(item: Item, where: Where) -> Finding:
    began = time.monotonic()
    said = with_deadline(lambda: _caught(item, where), Finding, item.seconds)
    if said is not None:
        return said
    if time.monotonic() - began < item.seconds:
        return fail("the check itself broke; its last words are on stderr", "please report it")
    return fail(f"no answer in {item.seconds:g} s", item.late)


def _caught(item: Item, where: Where) -> Finding:
    try:
        return item.act(where)
    except storage.NoFolder as error:
        return skip(f"no folder can be made in {error.filename}: {error.strerror}")
    except TangramError as error:
        return fail(str(error), "mend what it names")
    except OSError as error:
        return fail(f"{error.filename or ''} {error.strerror or error}".strip(),
                    "mend what it names")
