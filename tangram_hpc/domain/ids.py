"""Pure. Ids are whole numbers that their owner mints; nothing orders by hash() or id().

An action or session id is minted by its client: client number in the high bits, the client's own
counter in the low 32. It is the idempotency key: the same id submitted twice runs once.
"""

from __future__ import annotations

COUNTER_BITS = 32


def mint(client: int, counter: int) -> int:
    """The id of a client's `counter`-th action (or session)."""
    assert client > 0 and 0 < counter < 1 << COUNTER_BITS
    return client << COUNTER_BITS | counter


def client_of(any_id: int) -> int:
    """The number of the client that minted this id."""
    return any_id >> COUNTER_BITS


def show(any_id: int) -> str:
    """`client.counter`, as people read it; an empty string for 0 (none)."""
    return f"{any_id >> COUNTER_BITS}.{any_id & (1 << COUNTER_BITS) - 1}" if any_id else ""


def parse(text: str) -> int:
    """The inverse of `show`.

    Raises:
        ValueError: the text is not `client.counter`.
    """
    client, counter = map(int, text.split("."))
    if client < 1 or not 0 < counter < 1 << COUNTER_BITS:
        raise ValueError(f"{text!r} is no id")
    return mint(client, counter)
