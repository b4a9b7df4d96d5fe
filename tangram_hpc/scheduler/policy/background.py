"""Pure. CPUs for background processes: when an action is added for them, and when its slice ends.

A session with `background="run"` lets processes run on after the action that started them. When
such a process can run, its worker says so (`BackgroundWants`). The broker then submits an action of
kind BACKGROUND for the session, which waits for CPUs among all others and holds them until nothing
in the session can run any more.

Nobody knows how long that takes; a training run in the background may take days. So such an action
holds its CPUs for SLICE_NS at least. After that it gives them up as soon as another action waits
for CPUs of its node, or for CPUs that its tenant's limit allows, and it comes to wait again at the
end of the queue. Background processes of many sessions therefore take turns, and a session can be
polled whose own background processes hold all that its tenant may hold. The order in which they
come is that of all actions (`state/fair_order`, the placer).

A placer that starts the shortest action first needs an expected run time. Slices are short, but
what they belong to is not: it is expected to go on for as long as it has run since something of the
session was last able to rest (least attained service first; Nuyens and Wierman, 2008). So a short
job in the background starts soon, and an endless one comes after the actions of clients, as far as
the placer lets it be overtaken.

Invariant: a session has one such action at a time. The functions here read the ledger and return
events.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...domain import event as ev
from ...domain.action import Action, Kind, Profile
from ...domain.ids import BROKER_COUNTER, client_of, mint
from ...domain.isolation import guards_without_image
from ...domain.states import ActionState, NodeState, SessionState
from ..state.estimator import PRIOR
from ..state.queue import CPU

if TYPE_CHECKING:
    from ..state.ledger import Ledger, NodeEntry, SessionEntry

SLICE_NS = 200_000_000  # how long background processes keep their CPUs although others wait
EXPECTED_MOST_NS = 10_000_000_000  # more would keep it off nodes whose allocation ends soon
NAME = "background"  # the class of these actions, by which accounting and estimates know them
OTHERS_WAIT = "its slice is over, and other actions wait for CPUs of its node"
TENANT_WAITS = "its slice is over, and other actions wait for CPUs that its tenant may hold"


def wanted(ledger: Ledger, session: SessionEntry, now: int) -> ev.ActionSubmitted | None:
    """The action to submit because background processes of a session could run.

    Returns None if the session has such an action already, is not open, or is on a node that lends
    nothing more. The worker asks again.
    """
    is_open = session.state in (SessionState.IDLE, SessionState.BUSY)
    if session.spec.background != "run" or session.background or not is_open:
        return None
    if ledger.nodes[session.node].state is not NodeState.UP:
        return None
    client = client_of(session.spec.id)
    counter = BROKER_COUNTER + ledger.clients[client].background_actions
    while mint(client, counter) in ledger.actions:  # a client may number its own actions so
        counter += 1
    work_ns = min(max(SLICE_NS, session.background_ran_ns), EXPECTED_MOST_NS)
    return ev.ActionSubmitted(now, Action(
        mint(client, counter), NAME, Kind.BACKGROUND, session.spec.background_cpus,
        session=session.spec.id, profile=Profile(work_ns, PRIOR * 1000)))


def slices_over(ledger: Ledger, now: int) -> list[ev.Event]:
    """The ends of background actions whose slice is over and for whose CPUs others wait. On each
    node, and of each tenant that is at its limit, at most as many end as actions wait, those that
    hold their CPUs for longest first.

    O(background leases + shape queues of their nodes and of tenants with a limit), and O(1) while
    there are none.
    """
    events: list[ev.Event] = []
    if not ledger.background or not ledger.ready.waits(CPU):
        return events
    waiting: dict[int, int] = {}  # by node
    limited: Counter[str] | None = None  # by tenant; counted when the first slice is over
    for number in ledger.background:
        lease = ledger.leases[number]
        if lease.granted_at + SLICE_NS > now:
            break  # they are in the order of their grants
        entry = ledger.actions.get(lease.action)
        if lease.reserved or entry is None:
            continue
        if lease.node not in waiting:
            waiting[lease.node] = _waiting_at(ledger, ledger.nodes[lease.node])
        if limited is None:
            limited = _waiting_for_limits(ledger)
        tenant = ledger.tenants.tenant_of(client_of(lease.action))
        on_node, of_tenant = waiting[lease.node] > 0, limited[tenant] > 0
        if not on_node and not of_tenant:
            continue
        waiting[lease.node] -= on_node
        limited[tenant] -= of_tenant
        if entry.forced_outcome is None:  # else its CPUs are about to become free
            events.append(ev.ActionCancelled(now, lease.action,
                                             OTHERS_WAIT if on_node else TENANT_WAITS,
                                             ActionState.PREEMPTED))
    return events


def next_slice_end(ledger: Ledger, looked_at: int) -> int:
    """When the next slice is over (epoch ns) of those that were not over when `slices_over` was
    last called, at `looked_at`; 0 for none, or if no action waits for CPUs. O(slices not over).
    """
    end = 0
    if ledger.background and ledger.ready.waits(CPU):
        for number in reversed(ledger.background):
            until = ledger.leases[number].granted_at + SLICE_NS
            if until <= looked_at:
                break
            end = until
    return end


def drained(ledger: Ledger, session: SessionEntry, now: int) -> list[ev.Event]:
    """The end of a session's background action on a node that lends nothing more."""
    entry = ledger.actions[session.background]
    if entry.forced_outcome is not None and entry.lease:
        return []  # its lease is about to end
    state = ActionState.PREEMPTED if entry.lease else ActionState.NODE_FAIL
    reason = f"node {ledger.nodes[session.node].spec.name}: {ledger.nodes[session.node].draining}"
    return [ev.ActionCancelled(now, session.background, reason, state)]


def _waiting_for_limits(ledger: Ledger) -> Counter[str]:
    """How many actions of each tenant wait because it may hold no more CPUs."""
    found: Counter[str] = Counter()
    if not ledger.tenants.limited:
        return found
    for shard in ledger.ready.shards(CPU):
        use = ledger.tenants.look_up(CPU, ledger.tenants.tenant_of(shard.share.client))
        found[use.spec.name] += sum(
            len(queue) for shape, queue in shard.queues.items()
            if use.held + next(filter(None, shape.degrees)) > use.limit)
    return found


def _waiting_at(ledger: Ledger, node: NodeEntry) -> int:
    """How many actions wait that may run on this node and may want more CPUs than are free there.
    """
    free, found = node.cores.free, 0
    for home in (node.node, 0):
        for shard in ledger.ready.shards_at(CPU, "cpu", home):
            found += sum(len(queue) for shape, queue in shard.queues.items()
                         if not shape.session and shape.degrees[-1] > free
                         and node.spec.serves(shape.component)
                         and (not shape.guarded or guards_without_image(node.spec.untrusted)))
    return found
