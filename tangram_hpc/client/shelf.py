"""What a client has put into the job's store, and until when it must stay there.

Payloads over 64 KiB and functions travel through the job's store. They are content-addressed, so
that a batch that submits one large argument many times stores it once; hence each entry is
counted: it stays as long as an open action of this client needs it (a retry reads it again), or the
book of functions may use it again, and is removed when the last of them lets go. Entries belong to
their client: two clients that store the same bytes have two entries, and neither can take the
other's away. The entries of actions with a name of their own (`once`) outlive their client and are
removed by the broker.
"""

from __future__ import annotations

import threading
from collections import deque

from ..domain.ids import client_of
from ..ports import Store
from ..protocol.payload import owner_by_name


class Shelf:
    """One client's entries; any thread may call.

    Args:
        store: the job's.
        client: this client's number.
    """

    def __init__(self, store: Store, client: int) -> None:
        self._store, self._owner = store, f"{client}.call"
        self._lock = threading.Lock()  # held while an entry is written: its count says it is there
        self._held: dict[str, int] = {}  # entry -> how many hold it
        self._released: deque[str] = deque()  # let go of, and not yet counted; see `_settle`

    def put(self, data: bytes, once: str = "") -> str:
        """Stores the bytes and holds them once; their name in the store.

        Raises:
            InvalidInput: the store cannot be written.
        """
        if once:
            return self._store.put(data, owner_by_name(once))
        with self._lock:
            name = self._store.put(data, self._owner)
            self._held[name] = self._held.get(name, 0) + 1
        self._settle()
        return name

    def keep(self, name: str, once: str) -> str:
        """An entry of this client's for an action with a name of its own; its other name."""
        return self._store.put(self._store.get(name), owner_by_name(once))

    def release(self, name: str) -> None:
        """Lets an entry go (empty: none), which is removed when nobody holds it any more. Never
        waits."""
        if name:
            self._released.append(name)
            self._settle()

    def _settle(self) -> None:
        """Counts the entries that were let go of. Does not wait for the lock, as the client's own
        thread must not wait for a large write; whoever holds the lock comes here after it."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    self._let_go(self._released.popleft())
            finally:
                self._lock.release()

    def _let_go(self, name: str) -> None:
        left = self._held.get(name, 0) - 1
        if left > 0:
            self._held[name] = left
        elif left == 0:
            del self._held[name]
            self._store.drop(name)

    def get(self, name: str) -> bytes:
        """What lies in the store under a name; see `ports.Store.get`."""
        return self._store.get(name)

    def taken(self, name: str, action: int, once: str) -> None:
        """A result of this client's action was read, and is not kept for others."""
        if not once and name.partition(".")[2].startswith(f"{client_of(action)}."):
            self._store.drop(name)
