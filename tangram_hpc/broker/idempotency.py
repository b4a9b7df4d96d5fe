"""Actions with an idempotency key (`Action.once`), and the submissions that wait for each of them.

An idempotency key names work that is done once in a job, across clients and restarts of the broker.
The description of the work is in the spool before the journal says that it was submitted; its
result is there before the journal says that it ended. So a broker that is killed at any time can be
followed by one that either has the result or starts the work again.

The result of an action that ended by itself is kept until its key is forgotten. After any other end
(a node failed, the action was cancelled) the key is free, so that the work can be submitted again.
This module does not decide when an action runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ..domain import event as ev
from ..domain.action import Action, Kind
from ..domain.ids import client_of, show
from ..domain.states import ActionState
from ..ports import Spool
from ..protocol import message as ms
from ..protocol.frame import Buffer
from ..scheduler.state.ledger import Ledger

_KEPT = (ActionState.COMPLETED, ActionState.FAILED, ActionState.TIMEOUT,
         ActionState.OUT_OF_MEMORY)
Reply = tuple[ms.Message, Buffer | None]


class IdempotencyKeys:
    """The broker's tables of idempotency keys.

    Args:
        spool: keeps calls and results on disk; None: keys are refused.
        on_drop: called with the keys for which nothing is kept any more.
    """

    def __init__(self, ledger: Ledger, spool: Spool | None,
                 on_drop: Callable[[list[str]], None]) -> None:
        self._ledger, self._spool, self._on_drop = ledger, spool, on_drop
        self._open: dict[int, Action] = {}  # the open actions with a key
        self._followers: dict[int, list[int]] = {}  # open action -> submissions that wait for it
        self._leader: dict[int, int] = {}  # a submission that waits -> the open action
        self._earlier: set[int] = set()  # actions that were open when this broker began
        # Keys whose action ended without a result to keep. Their calls are dropped only when the
        # journal has the end: an action that is open for the next broker needs its call.
        self._ended: dict[str, int] = {}  # key -> action
        self._without_call: set[int] = set()  # open actions whose call was not kept

    # ---- another start of the broker --------------------------------------------------------

    def unrecorded_ends(self, now: int) -> list[ev.Event]:
        """Returns the ends of attempts whose results an earlier broker kept and could not journal
        before it was killed. Their nodes say when the units are free: processes may be left."""
        if self._spool is None:
            return []
        found: list[ev.Event] = []
        for name, action in self._ledger.once.items():
            lease = self._ledger.leases.get(self._ledger.actions[action].lease)
            kept = self._spool.result(name) if lease is not None else None
            if lease is not None and kept is not None and kept[0].action == action:
                clean = not lease.node  # a lease of no node, as a grant's, leaves no processes
                found.append(ev.LeaseFinished(now, lease.lease, kept[0].outcome, clean))
        return found

    def resume(self) -> dict[int, Buffer]:
        """Returns the payloads of the open actions whose call was kept, by action id."""
        payloads: dict[int, Buffer] = {}
        if self._spool is None:
            return payloads
        self._earlier = set(self._ledger.once.values())
        for name, action in self._ledger.once.items():
            payload = self._spool.call(name, action)
            self._open[action] = self._ledger.actions[action].action
            if payload is None:
                self._without_call.add(action)
            else:
                payloads[action] = payload
        self._drop([name for name in self._spool.names()
                    if name not in self._ledger.once and not self._spool.has_result(name)])
        return payloads

    def unstartable(self, now: int) -> list[ev.Event]:
        """Returns the ends of actions that wait and whose call was not kept, as after a failure of
        the broker's machine. One that a node may be running is left alone: it can end by itself.
        O(such actions).
        """
        found: list[ev.Event] = []
        if not self._without_call:
            return found
        for action in sorted(self._without_call):
            entry = self._ledger.actions.get(action)
            if entry is None or not entry.lease:
                self._without_call.discard(action)
                if entry is not None and entry.state is ActionState.PENDING:
                    found.append(ev.ActionCancelled(now, action, "what it was to do was not kept",
                                                    ActionState.NODE_FAIL))
        return found

    def submitted_again(self, action: Action, payload: Buffer) -> bool:
        """Keeps the call of an open action whose call was not kept, since its client has submitted
        it again; returns whether it was such an action and its call is kept now."""
        if action.id not in self._without_call or self.keep(action, payload):
            return False
        self._without_call.discard(action.id)
        return True

    def spooled(self, name: str) -> Buffer | None:
        """Returns the payload of the result that is kept for a key; None if there is none."""
        kept = self._spool.result(name) if self._spool is not None else None
        return kept[1] if kept is not None else None

    # ---- submissions ------------------------------------------------------------------------

    def settle(self, action: Action) -> list[Reply] | None:
        """Returns what to answer to a submission that an earlier one with the same key settles:
        nothing yet while the earlier action is open. None if no earlier one settles it.
        """
        if action.id in self._leader:
            return []  # the same submission after a reconnect: it waits already
        open_one = self._ledger.once.get(action.once)
        if open_one is not None:
            other = self._ledger.actions[open_one].action
            if _differ(action, other, open_one in self._earlier):
                why = (f"once: {action.once!r} is the name of {_work(other)} {other.name} "
                       f"({show(open_one)}), not of {_work(action)} {action.name}")
                return [(ms.Rejected(action.id, why), None)]
            self._leader[action.id] = open_one
            self._followers.setdefault(open_one, []).append(action.id)
            return []
        kept = self._spool.result(action.once) if self._spool is not None else None
        if kept is None:
            return None
        if kept[2] not in ("", _work(action)):
            why = (f"once: {action.once!r} is the name of an action that has ended, of {kept[2]}, "
                   f"not of {_work(action)} {action.name}; choose another name, or call `forget` "
                   "first")
            return [(ms.Rejected(action.id, why), None)]
        return [(kept[0].under(action.id), kept[1])]

    def keep(self, action: Action, payload: Buffer) -> str:
        """Keeps the call of an action; returns why that is impossible, else an empty text."""
        if self._spool is None:
            return "once: this broker keeps no spool"
        if not self._spool.keep_call(action.once, payload, action.id):
            return ("once: the job's spool is full; forget what your checkpoint holds "
                    "(Client.forget), or raise the config field `once_mib`")
        self._open[action.id] = action
        self._ended.pop(action.once, None)  # the spool's call belongs to this action now
        return ""

    def leader(self, action: int) -> int:
        """Returns the action that runs for a submission: the first one with the same key."""
        return self._leader.get(action, action)

    # ---- ends -------------------------------------------------------------------------------

    def ended(self, result: ms.ActionResult, payload: Buffer | None,
              ran: bool) -> list[ms.ActionResult]:
        """Keeps the result of an action, and returns results for all submissions that wait for it.

        Args:
            ran: the result comes from a node, not from the broker itself.
        """
        action = self._open.pop(result.action, None)
        self._without_call.discard(result.action)
        if action is not None and self._spool is not None:
            if not ran or result.outcome.state not in _KEPT:
                self._ended[action.once] = result.action
            elif not self._spool.has_result(action.once):
                self._spool.keep_result(action.once, result, payload, _work(action))
        found: list[ms.ActionResult] = []
        for follower in self._followers.pop(result.action, ()):
            self._leader.pop(follower, None)
            owner = self._ledger.clients.get(client_of(follower))
            if owner is not None and owner.uid:
                found.append(result.under(follower))
        return found

    def found_again(self, result: ms.ActionResult, payload: Buffer | None) -> None:
        """Keeps the result of an action that has ended, which its worker sends once more or the
        journal has: after a failure of the broker's machine the spool may lack it.
        """
        action = self._ledger.actions[result.action].action
        name = action.once
        if (name and self._spool is not None and name not in self._ledger.once
                and result.outcome.state in _KEPT and not self._spool.has_result(name)):
            self._spool.keep_result(name, result, payload, _work(action))

    def forget(self, names: tuple[str, ...], prefix: str) -> int:
        """Drops the results of these keys, and of all keys that begin with `prefix` if it is not
        empty; returns how many. Keys of open actions stay. O(names), and with a prefix O(keys that
        are kept).
        """
        if self._spool is None:
            return 0
        begun = (n for n in self._spool.names() if n.startswith(prefix)) if prefix else ()
        wanted = [*names, *begun]
        gone = [n for n in dict.fromkeys(wanted) if self._spool.has_result(n)]
        self._drop(gone)
        return len(gone)

    def in_use(self, name: str) -> bool:
        """Returns whether an action with this key is open, or its result is kept."""
        return name in self._ledger.once or (
            self._spool is not None and self._spool.has_result(name))

    def _drop(self, names: list[str]) -> None:
        assert self._spool is not None
        self._spool.drop(names)
        self._on_drop(names)

    def commit(self) -> dict[str, int]:
        """Hands the spool's changes to the kernel; called before the journal's own commit.

        Returns:
            What `committed` is to be given when the journal is safe.
        """
        if self._spool is not None:
            self._spool.commit()
        return dict(self._ended)

    def committed(self, ended: dict[str, int]) -> None:
        """Drops the calls of actions whose ends the journal has."""
        if not ended:
            return
        gone = [name for name, action in ended.items() if self._ended.get(name) == action]
        for name in gone:
            del self._ended[name]
        if gone:
            self._drop(gone)


def _differ(one: Action, other: Action, earlier: bool) -> bool:
    """Returns whether two actions with one key cannot be the same work.

    Args:
        earlier: `other` was submitted to an earlier broker of the job. Then the classes of the
            commands are not compared, because releases derive them differently, and the trainer may
            be of another release than the journal.
    """
    if _work(one) != _work(other):
        return True
    return one.name != other.name and not (earlier and (one.guessed or other.guessed))


def _work(action: Action) -> str:
    """Returns which work an action is: its kind or, for a call, what it calls. A turn is a call of
    its pool, wherever it is routed to."""
    if action.kind is not Kind.CALL:
        return str(action.kind.value)
    return f"rollouts:{action.turn.pool}" if action.turn is not None else action.key
