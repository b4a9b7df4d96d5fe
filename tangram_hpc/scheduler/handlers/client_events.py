"""Pure. Handlers of events about clients.

A client is connected, disconnected (`Ledger.disconnected`) or expired. A client that comes back
within its grace keeps its number. After it has expired its entry stays, without a uid, until its
last action and session are gone, so that no process can come back as that client.
"""

from __future__ import annotations

from ...domain import event as ev
from ...domain.decision import Decision
from ...domain.ids import client_of
from ...domain.states import ENDED
from ..policy.session_life import gone_since
from ..state.ledger import ClientEntry, Ledger
from ..state.scheduler_state import SchedulerState
from .attachment_events import leave_sessions


def on_client_joined(state: SchedulerState, event: ev.ClientJoined) -> list[Decision]:
    """Adds a client, or marks one that came back as connected."""
    ledger = state.ledger
    entry = ledger.clients.get(event.client)
    if entry is None:
        ledger.clients[event.client] = ClientEntry(event.client, event.uid, event.name)
        ledger.by_uid[event.uid] = event.client
        ledger.next_client = max(ledger.next_client, event.client + 1)
    else:
        ledger.disconnected.pop(event.client, None)
        state.dirty = True  # endpoints may be granted to it again
    return []


def on_tenant_declared(state: SchedulerState, event: ev.TenantDeclared) -> list[Decision]:
    """Sets what a tenant is granted."""
    state.ledger.tenants.declare(event.spec)
    state.ledger.revision += 1
    state.dirty = True
    return []


def on_tenant_named(state: SchedulerState, event: ev.TenantNamed) -> list[Decision]:
    """Lets a client's actions and sessions count for a tenant. The client has none of them yet."""
    state.ledger.tenants.spec(event.tenant)
    state.ledger.tenants.of_client[event.client] = event.tenant
    return []


def on_client_left(state: SchedulerState, event: ev.ClientLeft) -> list[Decision]:
    """Marks a client as disconnected; its grace begins."""
    state.ledger.disconnected[event.client] = gone_since(
        state.ledger, event.client, event.at, event.expires_at, event.bye)
    return []


def on_client_expired(state: SchedulerState, event: ev.ClientExpired) -> list[Decision]:
    """Forgets a client and all of its actions that have ended."""
    ledger = state.ledger
    entry = ledger.clients[event.client]
    ledger.disconnected.pop(event.client, None)
    for pool in ledger.rollouts.values():
        pool.lost_client(event.client)
    leave_sessions(ledger, entry)
    del ledger.by_uid[entry.uid]
    for action in [a for a in entry.actions if ledger.actions[a].state in ENDED]:
        forget_action(ledger, action)
    entry.uid = ""
    forget_if_gone(ledger, entry)
    return []


def forget_action(ledger: Ledger, action: int) -> None:
    """Removes an action whose result its client has received, or whose client is gone."""
    del ledger.actions[action]
    owner = ledger.clients[client_of(action)]
    del owner.actions[action]
    if not owner.uid:
        forget_if_gone(ledger, owner)


def forget_if_gone(ledger: Ledger, owner: ClientEntry) -> None:
    """Removes an expired client with its last action and session."""
    if not owner.uid and not owner.actions and not owner.sessions:
        ledger.clients.pop(owner.client, None)
        ledger.tenants.of_client.pop(owner.client, None)
