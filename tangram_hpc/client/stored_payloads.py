"""The entries that a client has in the job's store, with a count of users that keeps each there.

Payloads over 64 KiB and functions travel through the job's store. The store names an entry by its
content, so a batch that submits one large argument many times stores it once. Each entry therefore
has a count of users. It stays as long as an open action of this client needs it (a retry reads it
again) or the function cache may use it again, and it is removed when the count falls to 0.

Entries belong to their client: two clients that store the same bytes have two entries, and neither
can remove the other's. Entries of actions with an idempotency key (`once`) outlive their client;
the broker removes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ..domain.ids import client_of
from ..interrupts import CallersLock, if_free
from ..ports import Store
from ..protocol.payload import owner_by_name


class StoredPayloads:
    """The entries of one client. All methods may be called from any thread.

    Args:
        store: the job's store.
        client: the client's number.
    """

    def __init__(self, store: Store, client: int) -> None:
        self._store, self._owner = store, f"{client}.call"
        # held while an entry is written, so that each counted entry exists
        self._lock = CallersLock()
        self._users: dict[str, int] = {}  # name of an entry -> its count of users
        self._released: deque[str] = deque()  # releases that are not yet counted; see `_settle`

    def put(self, data: bytes, once: str = "") -> str:
        """Stores the bytes and counts one user.

        Args:
            data: the content.
            once: the idempotency key of the action that needs the entry; such an entry is not
                counted.

        Returns:
            The entry's name.

        Raises:
            StoreFailed: the store cannot be written.
        """
        if once:
            return self._store.put(data, owner_by_name(once))
        with self._lock:
            name = self._store.put(data, self._owner)
            self._users[name] = self._users.get(name, 0) + 1
        self._settle()
        return name

    def keep(self, name: str, once: str) -> str:
        """Copies an entry of this client for an action with an idempotency key.

        Returns:
            The name of the copy.
        """
        return self._store.put(self._store.get(name), owner_by_name(once))

    def release(self, name: str) -> None:
        """Subtracts one user, and removes the entry when no user is left. An empty name is ignored.
        The method never waits for a lock."""
        if name:
            self._released.append(name)
            self._settle()

    def _settle(self) -> None:
        """Counts the pending releases. The method does not wait for the lock, because the
        connection's thread must not wait for a large write; a thread that holds the lock calls this
        method after it has released the lock."""
        while self._released and if_free(self._lock, self._count_releases) is not None:
            pass

    def _count_releases(self) -> bool:
        while self._released:
            self._count_release(self._released.popleft())
        return True

    def _count_release(self, name: str) -> None:
        users = self._users.get(name, 0) - 1
        if users > 0:
            self._users[name] = users
        elif users == 0:
            del self._users[name]
            self._store.drop(name)

    def get(self, name: str) -> bytes:
        """Returns the content of an entry; see `ports.Store.get`."""
        return self._store.get(name)

    def keep_secrets(self, values: Mapping[str, str | None]) -> None:
        """Adds, replaces or removes secrets of the job; see `ports.Store.keep_secrets`."""
        self._store.keep_secrets(values)

    def drop_result(self, name: str, action: int, once: str) -> None:
        """Removes a result of this client's action that was read. The result of an action with an
        idempotency key stays, for later submissions of the same key."""
        if not once and name.partition(".")[2].startswith(f"{client_of(action)}."):
            self._store.drop(name)
