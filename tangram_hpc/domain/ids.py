"""Makes and shows the ids of actions and sessions. Pure.

An id is a whole number that the client chooses: the client's number in the high bits, and the
client's own counter in the low 32. Ids make submissions idempotent: an action that is submitted
twice under one id runs once. Nothing in the project orders by `hash()` or `id()`, which differ
between runs.
"""

from __future__ import annotations

COUNTER_BITS = 32
# Counters from here on number the actions that the broker itself submits for a client's sessions.
BROKER_COUNTER = 1 << 31


def mint(client: int, counter: int) -> int:
    """Returns the id of the `counter`-th action or session of this client; both count from 1."""
    assert client > 0 and 0 < counter < 1 << COUNTER_BITS
    return client << COUNTER_BITS | counter


def client_of(any_id: int) -> int:
    """Returns the number of the client that chose this id."""
    return any_id >> COUNTER_BITS


def show(any_id: int) -> str:
    """Returns an id as people read it, `client.counter`; an empty string for 0, which means none.
    """
    return f"{any_id >> COUNTER_BITS}.{any_id & (1 << COUNTER_BITS) - 1}" if any_id else ""


def parse(text: str) -> int:
    """Returns the id that `show` wrote as this text.

    Raises:
        ValueError: the text is not `client.counter`.
    """
    client, counter = map(int, text.split("."))
    if client < 1 or not 0 < counter < 1 << COUNTER_BITS:
        raise ValueError(f"{text!r} is no id")
    return mint(client, counter)
