"""Seeds that once broke a law: each is played by the short tests, with the plan that it had.

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
)
