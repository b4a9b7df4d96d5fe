"""Pure. What keeps a client that has much work from delaying the others (decision 0113): how many
messages of one connection the broker handles before the others have their turn, how soon it plans
again, and how many plain actions a client may have here at a time.

Problem. A busy broker works in large batches, because a scheduling cycle costs nearly the same for
one action and for a hundred. A client with a single action waits for four or five batches of a
client that has thousands.

Idea: batches are large while nobody suffers from it. While one client has many actions open and
another one, with few, submits, the turns of all connections are short and cycles follow one another
without a pause. That costs the first client a quarter of its throughput, so it ends as soon as
clients with few actions are silent. Clients that are all alike have long turns, and so has one that
is alone: a client that has few actions now and many a moment later counts as one with many.
"""

from __future__ import annotations

from collections.abc import Callable

from ..scheduler.state.ledger import Ledger

LONG, SHORT = 128, 16  # messages in a turn; 128 take a broker some 5 ms
MANY, FEW = 256, 16  # open actions of a client that makes others wait, and of one that waits
_RECENT_NS = 500_000_000  # for how long a turn of either is remembered

# How many plain actions (one CPU and nothing else) one client may have at the broker
# (`client/submission_credit.py`): 16,384, and 1,024 more for each node that is there, which is
# eight for each CPU of a node with 128. Units idle only while a client is away for longer than
# these last. A checkpoint takes 1 us for each action.
CREDIT, CREDIT_OF_NODE = 16_384, 1024


def credit_of(ledger: Ledger) -> int:
    """Returns how many plain actions a client may have here; 0 for any number. O(1), as many
    clients ask often.

    A broker that may ask for more nodes takes all, since it judges by the work that waits here.
    """
    if ledger.allocs.policy.max_nodes:
        return 0
    return CREDIT + CREDIT_OF_NODE * (len(ledger.nodes) - len(ledger.lost))


class Turns:
    """The turns of a broker's connections. Each call takes O(1).

    Args:
        ledger: knows how many actions of each client have not ended.
        now: returns the time in epoch ns.
        gap_s: the pause between two cycles of a busy broker in seconds.
    """

    __slots__ = ("_few_at", "_few_client", "_gap_s", "_ledger", "_many_at", "_many_client", "_now")

    def __init__(self, ledger: Ledger, now: Callable[[], int], gap_s: float) -> None:
        self._ledger, self._now, self._gap_s = ledger, now, gap_s
        # when a client with many, and one with few open actions last had a turn (epoch ns)
        self._many_at = self._few_at = 0
        self._many_client = self._few_client = 0  # which client that was

    def ended(self, client: int) -> None:
        """Notes a turn of a client, after its messages were handled; 0 stands for a worker."""
        entry = self._ledger.clients.get(client)
        if entry is None:
            return
        if entry.open_actions > MANY:
            self._many_at, self._many_client = self._now(), client
            if client == self._few_client:
                self._few_at = 0
        elif entry.active_at and 0 < entry.open_actions <= FEW:
            now = self._now()
            if client == self._many_client:
                self._many_at = 0
            if now - entry.active_at < _RECENT_NS:  # else it only waits for a long action
                self._few_at, self._few_client = now, client

    @property
    def short(self) -> bool:
        """Whether turns are short now."""
        return bool(self._few_at) and self._now() - min(self._many_at, self._few_at) < _RECENT_NS

    def length(self) -> int:
        """Returns how many messages the next turn of any connection has at most."""
        return SHORT if self.short else LONG

    def gap_s(self) -> float:
        """Returns the pause before the next cycle of a busy broker, in seconds."""
        return 0.0 if self.short else self._gap_s
