"""How long the turns of a broker's connections are, and how soon it plans again."""

from __future__ import annotations

import pytest
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


def test_results_that_are_not_acknowledged_do_not_count() -> None:
    w, turns = world(2)
    w.client = 1
    many = [w.submit(1) for _ in range(MANY + 1)]
    for action in many:
        w.happen(ev.ActionCancelled(w.now, action, "by its client"))
    turns.ended(1)
    assert len(w.ledger.clients[1].actions) > MANY
    submit(w, turns, 2, 1)
    assert turns.length() == LONG


@pytest.mark.parametrize("counts", [(1, MANY), (MANY + 1, -MANY)])
def test_a_client_that_is_alone_has_long_turns(counts: tuple[int, int]) -> None:
    """It has few open actions and then many, or many and then few."""
    w, turns = world(1)
    submitted: list[int] = []
    for count in counts:
        if count > 0:
            submitted += [w.submit(1) for _ in range(count)]
        for action in submitted[count:] if count < 0 else ():
            w.happen(ev.ActionCancelled(w.now, action, "by its client"))
        turns.ended(1)
        assert turns.length() == LONG
    submit(w, turns, 1, 1)
    assert turns.length() == LONG


def test_a_client_that_comes_to_have_many_leaves_the_others_with_few_short_turns() -> None:
    w, turns = world(2)
    submit(w, turns, 1, 1)
    submit(w, turns, 2, 1)
    submit(w, turns, 1, MANY)
    assert turns.length() == SHORT


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
