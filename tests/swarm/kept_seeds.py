"""Seeds that once broke a law, or break one where a bug is planted (`tests/planted`): each is
played by the short tests, with the plan that it had.

What a seed draws changes when fault kinds are added, so the minimised plan is kept, with one line
about what was wrong.
"""

from __future__ import annotations

from swarm.plan import Plan

KEPT: tuple[tuple[Plan, str], ...] = (
    (Plan(7, {"kill_broker": 10.0}, 200), "a restart forgot the calls of an endpoint"),
    (Plan(25, {"kill_broker": 8.0, "kill_client": 8.0}, 113, 1, acts=0.5),
     "a session waited for calls of a client that was gone"),
    (Plan(39, {"disk_error": 12.0}, 231, 1, acts=0.5),
     "last words carried orders that no journal had"),
    (Plan(135, {"cut_worker": 4.0, "pause_client": 2.0, "duplicate": 60.0}, 450, 1,
          checkpoint=150, acts=0.5),
     "accounting forgot the attempt of a prefetched lease that was lost with its node"),
    (Plan(500010, {"kill_at_write": 6.0, "cut_worker": 0.5, "kill_worker": 0.5, "kill_client": 0.25,
                   "duplicate": 30.0}, 394, 3, 3, "always", 150, 0.15),
     "a client waited for a result that was lost with its node"),
    (Plan(500083, {"kill_broker": 3.0, "supersede_at_write": 1.5, "power": 3.0, "requeue": 1.0,
                   "delay": 5.0}, 600, 1, 3, "batch", 150, 0.5),
     "a result counted as lost with its node although its client had it"),
    (Plan(700036, {"power": 12.0}, 300, sync="batch", acts=0.5),
     "the spool was not synced before the journal"),
    (Plan(701162, {"power": 12.0}, 300, sync="batch", acts=0.5),
     "a name had two results, since the spool was not synced before the journal"),
    (Plan(700044, {"power": 12.0}, 300, sync="batch", acts=0.5),
     "a session was opened where its earlier sandbox was closing, and its new one stayed"),
    (Plan(700055, {"power": 12.0}, 300, sync="batch", acts=0.5),
     "a named action ran again although its node still ran it: its call was not kept"),
    (Plan(700246, {"power": 12.0}, 300, sync="batch", acts=0.5),
     "a named action ran again although its worker still had its result: the spool had lost it"),
    (Plan(703571, {"power": 12.0}, 85, sync="batch", checkpoint=100_000, acts=0.5),
     "a broker waited for a result that its worker no longer had, and whose client had it"),
    (Plan(60898, {"kill_at_write": 6.0}, 307, 2, 2, "none", 100_000, 0.15),
     "units were lent again although processes of a named action were left on them"),
    (Plan(73472, {"supersede_at_write": 0.75, "wall_clock": 1.5, "partition_worker": 0.5}, 263, 1,
          3, "batch", 40, 0.3),
     "a call waited until a clock that was set back had reached its submission"),
    (Plan(701217, {"power": 12.0}, 300, 2, 1, "batch", 150, 0.5),
     "a named action ran the call of an earlier action of that name"),
    (Plan(111326, {"kill_broker": 1.5, "kill_at_write": 1.5, "bit_flip": 1.0, "cut_worker": 2.0,
                   "kill_client": 2.0}, 350, 1, 2, "none", 100_000, 0.15),
     "a flipped bit of a journal without events moved the later journals away"),
    (Plan(160051, {"pause_broker": 2.0, "power": 3.0}, 307, 2, 2, "batch", 100_000, 0.3),
     "the laws took a sandbox whose order was lost with the machine for the session's second one"),
    (Plan(165944, {"kill_broker": 12.0, "kill_at_write": 12.0, "disk_error": 1.0, "bit_flip": 2.0,
                   "cut_worker": 4.0, "delay": 1.25, "pause_client": 4.0, "kill_worker": 2.0,
                   "kill_client": 0.25, "duplicate": 7.5, "drain_node": 0.375}, 525, 3, 3,
          "always", 40, 0.15),
     "a journal's head did not count where a flipped bit had made its version an earlier one"),
)
