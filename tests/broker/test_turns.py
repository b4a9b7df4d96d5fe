"""How long the turns of a broker's connections are, and how soon it plans again."""

from __future__ import annotations

from helpers.builders import World

from tangram_hpc.broker.turns import FEW, LONG, MANY, SHORT, Turns
from tangram_hpc.domain import event as ev

S = 10**9


def world(clients: int) -> tuple[World, Turns]:
    """Clients 1 to `clients`, and the turns of their broker."""
    w = World()
    for number in range(2, clients + 1):
        w.happen(ev.ClientJoined(0, number, f"uid-{number}", f"c{number}", 0, 1, "socket"))
    w.node(4)
    w.now = S
    return w, Turns(w.ledger, lambda: w.now, .002)


def submit(w: World, turns: Turns, client: int, count: int) -> None:
    w.client = client
    for _ in range(count):
        w.submit(1)
    turns.ended(client)


def test_turns_are_short_while_a_client_with_few_actions_is_beside_one_with_many() -> None:
    w, turns = world(2)
    submit(w, turns, 1, MANY + 1)
    assert (turns.length(), turns.gap_s()) == (LONG, .002)
    submit(w, turns, 2, 1)
    assert (turns.length(), turns.gap_s()) == (SHORT, 0.)
    w.now += S
    turns.ended(1)
    assert (turns.length(), turns.gap_s()) == (LONG, .002)  # the second client is silent
    turns.ended(2)
    assert turns.length() == LONG  # it said something, and submitted nothing: its action is long


def test_turns_are_long_among_clients_that_are_alike() -> None:
    w, turns = world(3)
    for client in (1, 2):
        submit(w, turns, client, MANY + 1)
    submit(w, turns, 3, FEW + 1)
    assert turns.length() == LONG
    w, turns = world(3)
    for client in (1, 2, 3):
        submit(w, turns, client, 1)
    turns.ended(0)  # a worker
    assert turns.length() == LONG
