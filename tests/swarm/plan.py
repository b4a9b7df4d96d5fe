"""What one seed draws before its run begins: which faults are possible, how often, and the job.

A plan is small and can be written as one line, so that a failing run is told to a person as its
plan. The minimiser (`shrinking.py`) tries smaller plans. So that a fault kind can be left out
without changing everything else, each kind has a random stream of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

# Kinds of faults, and the most strikes in 1,000 turns that a seed may draw for each.
KINDS: dict[str, float] = {
    "kill_broker": 12.0,  # between two steps
    "kill_at_write": 12.0,  # before, within or after a write of journal, spool or checkpoint
    "supersede": 3.0,  # another broker takes the folder while this one is stopped
    "supersede_at_write": 3.0,  # the same between this one's check and its write
    "pause_broker": 4.0,  # it stands still for 1 to 60 s
    "disk_error": 2.0,  # a write fails; the broker ends with last words
    "bit_flip": 2.0,  # one bit of a journal or spool flips before the next start
    "power": 3.0,  # the broker's machine fails: what was not synced is lost
    "requeue": 1.0,  # the whole job starts again
    "long_absence": 1.0,  # the next broker comes after the grace
    "wall_clock": 3.0,  # the wall clock jumps, and the next start of a broker sees it
    "cut_worker": 4.0,  # a connection breaks; a part of what was on its way arrives
    "cut_client": 8.0,
    "delay": 10.0,  # one connection carries nothing for a while
    "partition_worker": 2.0,
    "partition_client": 3.0,
    "pause_worker": 2.0,
    "pause_client": 4.0,
    "kill_worker": 2.0,
    "kill_client": 2.0,
    "duplicate": 60.0,  # a message that may arrive twice does
    "drain_node": 1.5,  # a worker says that it leaves, or its node's allocation ends
    "slurm_silent": 3.0,  # Slurm does not answer the next queries
}


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: from which everything else is drawn.
        rates: strikes in 1,000 turns, by fault kind; a kind that is not in it never strikes.
        turns: how many turns the run has before everything is brought to its end.
        workers: how many workers lend nodes.
        clients: how many clients submit.
        sync: the journal's mode.
        checkpoint: after how many events a checkpoint is due.
        acts: the share of turns in which somebody does something by himself.
    """

    seed: int
    rates: dict[str, float]
    turns: int = 900
    workers: int = 2
    clients: int = 2
    sync: str = "none"
    checkpoint: int = 100_000
    acts: float = 0.3

    def without(self, kind: str) -> Plan:
        """Returns this plan without one kind of fault."""
        return replace(self, rates={k: r for k, r in self.rates.items() if k != kind})

    def show(self) -> str:
        """Returns the plan as arguments of the command that plays it."""
        rates = ",".join(f"{kind}:{rate:g}" for kind, rate in self.rates.items())
        return (f"--seeds {self.seed} --turns {self.turns} --workers {self.workers} "
                f"--clients {self.clients} --sync {self.sync} --checkpoint {self.checkpoint} "
                f"--acts {self.acts:g} --faults {rates or '-'}")


def drawn(seed: int) -> Plan:
    """Draws the plan of a seed."""
    rng = random.Random(f"plan {seed}")
    share = rng.choice((0.15, 0.35, 0.6))
    # powers of two, so that some kinds strike again and again and others once or never
    rates = {kind: round(most * 2.0 ** -rng.randrange(4), 3) for kind, most in KINDS.items()
             if rng.random() < share}
    sync = rng.choice(("none", "none", "batch", "always"))
    if sync == "none":
        rates.pop("power", None)  # that mode promises nothing about the machine's failure
    return Plan(seed, rates, rng.choice((120, 200, 350, 600)), rng.choice((1, 2, 2, 3)),
                rng.choice((1, 2, 2, 3)), sync, rng.choice((100_000, 40, 150)),
                rng.choice((0.15, 0.3, 0.5)))
