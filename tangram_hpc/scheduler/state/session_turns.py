"""Pure. The actions that wait in one session, and the turns between the clients that share it.

Problem: a session runs one action at a time, and several clients may submit to it. In plain order
of arrival a client that submits 1,000 actions makes another client's one action wait behind all.

Idea: the clients take turns. Each client's actions stay in the order in which it submitted them;
when one of them starts, its client goes behind the other clients that wait.

Invariants: with one client the order is that of submission. The head stays the head until it
starts or is dropped, whatever is added, because it may be in the ready queue already. Every
operation but iteration and counting costs O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ...domain.ids import client_of


class SessionTurns:
    """The waiting actions of one session.

    Queues are OrderedDicts, since finding the first key of a dict costs a look at all keys that
    were deleted before it.

    Attributes:
        head: the action that starts next; 0 if none waits. Only the methods here change it.
    """

    __slots__ = ("_by_client", "head")

    def __init__(self) -> None:
        # client -> its actions in order of submission; the client whose turn it is comes first
        self._by_client: OrderedDict[int, OrderedDict[int, None]] = OrderedDict()
        self.head = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __contains__(self, action: int) -> bool:
        return action in self._by_client.get(client_of(action), ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionTurns) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"SessionTurns({list(self)})"

    def __iter__(self) -> Iterator[int]:
        """Yields the actions in the order in which they would start if no other came. The turns
        must not change during the walk."""
        if len(self._by_client) == 1:
            yield from next(iter(self._by_client.values()))
            return
        rests = [iter(queue) for queue in self._by_client.values()]
        while rests:
            behind = []
            for rest in rests:
                action = next(rest, None)
                if action is not None:
                    yield action
                    behind.append(rest)
            rests = behind

    def add(self, action: int) -> None:
        """Adds an action behind all others of its client."""
        client = client_of(action)
        queue = self._by_client.get(client)
        if queue is None:
            queue = self._by_client[client] = OrderedDict()
        queue[action] = None
        if not self.head:
            self.head = action

    def put_back(self, action: int) -> None:
        """Adds an action that had been started in vain: it is the head again."""
        self.add(action)
        client = client_of(action)
        self._by_client[client].move_to_end(action, last=False)
        self._by_client.move_to_end(client, last=False)
        self.head = action

    def start(self, action: int) -> None:
        """Removes an action that starts; its client's next turn comes after those of others."""
        client = client_of(action)
        if self._remove(client, action):
            self._by_client.move_to_end(client)
        self.head = self._first()

    def drop(self, action: int) -> None:
        """Removes an action that will not start."""
        self._remove(client_of(action), action)
        self.head = self._first()

    def first_of(self, client: int) -> int:
        """Returns the first waiting action of a client; 0 if none waits."""
        return next(iter(self._by_client.get(client, ())), 0)

    def of(self, client: int) -> tuple[int, ...]:
        """Returns the waiting actions of a client, in order of submission."""
        return tuple(self._by_client.get(client, ()))

    def _remove(self, client: int, action: int) -> bool:
        """Takes an action out, and returns whether others of its client wait."""
        queue = self._by_client[client]
        del queue[action]
        if not queue:
            del self._by_client[client]
        return bool(queue)

    def _first(self) -> int:
        for queue in self._by_client.values():
            return next(iter(queue))
        return 0
