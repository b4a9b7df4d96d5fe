"""Pure. Why waiting actions and sessions wait, for queries about many of them at once.

Problem: `admission.reason` looks at every node, so a reply about 100,000 waiting actions on 100
nodes would stop the broker for minutes.

Idea: all waiting actions of one shape wait for the same reason, and so do all actions behind the
first of one session, and all sessions that ask for the same. So one `WaitReasons` finds out each
reason once. It is made for one reply, since reasons change with every event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from ...domain.ids import client_of
from ...domain.session import SessionSpec
from ...domain.states import ActionState, SessionState
from ...scheduler.placement.eligible_nodes import session_reason
from ...scheduler.policy.admission import reason
from ...scheduler.scheduler import Scheduler
from ...scheduler.state.ledger import ActionEntry, SessionEntry


class WaitReasons:
    """The reasons of one scheduler's waiting actions and sessions at one time.

    Args:
        scheduler: the scheduler; it must not change while this object is used.
        now: the broker's time in epoch ns.
    """

    def __init__(self, scheduler: Scheduler, now: int) -> None:
        self._ledger, self._now = scheduler.ledger, now
        self._reserve = scheduler.state.placer.reserve
        self._known: dict[Hashable, str] = {}
        self._of_sessions: dict[Hashable, str] = {}

    def of(self, entry: ActionEntry) -> str:
        """Returns why a PENDING action waits, as a Reason of one word."""
        action, ready = entry.action, self._ledger.ready
        key: Hashable
        if entry.withheld:
            return reason(self._ledger, entry, self._reserve, self._now)
        if action.id in ready:
            key = ready.shape_of(action.id), ready.shard_of(action.id).share.tenant
        elif action.session:
            session = self._ledger.sessions.get(action.session)
            if session is not None and session.state is SessionState.WAITING:
                return "Session" + self.of_session(session)
            key = action.session
        else:  # a turn without a route
            return reason(self._ledger, entry, self._reserve, self._now)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = reason(self._ledger, entry, self._reserve, self._now)
        return found

    def of_session(self, session: SessionEntry) -> str:
        """Returns why a session without a node waits, as a Reason of one word."""
        tenant = self._ledger.tenants.tenant_of(client_of(session.spec.id))
        key = _wants(session.spec, tenant)
        found = self._of_sessions.get(key)
        if found is None:
            found = self._of_sessions[key] = session_reason(self._ledger, session, self._reserve)
        return found

    def counts(self) -> Counter[str]:
        """Returns how many actions wait for each reason.

        It costs O(shapes + sessions + open turns of rollout pools), and for a session whose actions
        run side by side O(its waiting actions); no other waiting action is looked at. Actions whose
        payload a restarted broker has not received again are left out, and so are the background
        actions of busy sessions.
        """
        found: Counter[str] = Counter()
        ledger, ready = self._ledger, self._ledger.ready
        for pool in ready.pools:
            for shard in ready.shards(pool):
                for queue in shard.queues.values():
                    first = queue.actions.at[queue.actions.first()]
                    found[self.of(ledger.actions[first])] += len(queue)
        for session in ledger.sessions.values():
            waiting = session.waiting
            if waiting.head:
                queued = sum(a in ready for a in waiting) if session.parallel else (
                    waiting.head in ready)
                if len(waiting) > queued:
                    behind = next(a for a in waiting if a not in ready)
                    found[self.of(ledger.actions[behind])] += len(waiting) - queued
        for rollouts in ledger.rollouts.values():
            for turn in rollouts.open_turns:
                entry = ledger.actions[turn]
                if entry.route is None and entry.state is ActionState.PENDING:
                    found[rollouts.why(turn)] += 1
        return found


def _wants(spec: SessionSpec, tenant: str) -> Hashable:
    """What `session_reason` looks at of a session, whose tenant is given."""
    return (spec.component, spec.mem_mib, spec.backend, spec.image, spec.trusted,
            str(spec.network), spec.id if spec.origin else 0, tenant)
