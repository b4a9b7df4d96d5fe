"""Calls of services and actions with `gpus=` take turns on the GPUs of a node under `elastic`: none
of the two sides waits without end while the other one keeps coming."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from helpers.builders import World

from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action, Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.service import ServiceSpec
from tangram_hpc.domain.states import ActionState
from tangram_hpc.scheduler.placement.placers.waiting import OVERDUE_NS

S = 10**9
RESTORE_NS, CALL_NS, ACTION_NS = S, S // 10, S // 3


class Node(World):
    """A node with GPUs on which calls and actions take their time, one event after the other."""

    def __init__(self, gpus: int, batch: int, services: str = "ab") -> None:
        super().__init__("elastic")
        self.node(64, gpus=gpus, ahead=8)
        for name in services:
            self.happen(ev.ServiceDeclared(0, ServiceSpec(name, RESTORE_NS, backend="fake",
                                                          batch=batch)))
        self.ends: dict[int, int] = {}  # of the leases that run
        self.asked: dict[int, int] = {}  # when each action was submitted
        self.classes: dict[str, list[int]] = {}  # the actions of each class
        self.waits: dict[int, int] = {}  # how long each waited until it ran

    def call(self, service: str, degrees: tuple[int, ...] = (1,)) -> int:
        return self._asked(Action(self.id(), service, Kind.CALL, degrees, f"service:{service}"))

    def command(self, gpus: int = 1) -> int:
        return self._asked(Action(self.id(), "cmd", Kind.EXEC, (1,), gpus=gpus))

    def _asked(self, action: Action) -> int:
        self.asked[action.id] = self.now
        self.classes.setdefault(action.name, []).append(action.id)
        self.happen(ev.ActionSubmitted(self.now, action))
        return action.id

    def play(self, until: int, ended: Callable[[int], object] = lambda action: None) -> None:
        """Goes on until a time; `ended` is told of each action that has ended."""
        while self.now < until:
            self.plan()
            for lease in self.ledger.leases.values():
                if lease.lease not in self.ends and next(iter(lease.lease_queue)) == lease.lease:
                    self.waits[lease.action] = self.now - self.asked[lease.action]
                    runs = CALL_NS if lease.key != "cpu" else ACTION_NS
                    self.ends[lease.lease] = self.now + lease.restore_ns + runs
            soonest = min(self.ends, key=self.ends.__getitem__, default=0)
            at = self.scheduler.next_deadline() or until
            if soonest and self.ends[soonest] <= at:
                self.now = max(self.now, self.ends.pop(soonest))
                action = self.ledger.leases[soonest].action
                self.happen(ev.LeaseFinished(self.now, soonest, Outcome(
                    ActionState.COMPLETED, exec_ns=CALL_NS, batch=1), True))
                ended(action)
            else:
                self.now = min(at, until)

    def longest_wait(self, of: str) -> int:
        """The longest wait of the actions of a class, those included that still wait."""
        return max(self.waits.get(a, self.now - self.asked[a]) for a in self.classes[of])


def closed_loop(w: Node, *makers: Callable[[], int]) -> Callable[[int], None]:
    """Submits one action by each maker, and the next one whenever it has ended."""
    again = {make(): make for make in makers}

    def ended(action: int) -> None:
        if (make := again.pop(action, None)) is not None:
            again[make()] = make
    return ended


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_command_is_served_while_calls_keep_coming(batch: int, gpus: int) -> None:
    w = Node(2, batch)
    ended = closed_loop(w, *[lambda name=name: w.call(name) for name in "ab" * 6])
    w.play(5 * S, ended)
    command = w.command(gpus)
    w.play(120 * S, ended)
    assert w.waits[command] <= OVERDUE_NS + 20 * S
    assert len(w.waits) > 300, "the calls go on"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("degrees", [(1,), (2,)])
def test_a_call_is_served_while_commands_keep_coming(batch: int, degrees: tuple[int, ...]) -> None:
    w = Node(2, batch)
    ended = closed_loop(w, *[w.command] * 6)
    w.play(5 * S, ended)
    call, other = w.call("a", degrees), w.call("b", degrees)
    w.play(120 * S, ended)
    assert max(w.waits[call], w.waits[other]) <= OVERDUE_NS + 20 * S
    assert len(w.waits) > 300, "the commands go on"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("wide", [1, 2])
def test_both_sides_are_served_while_both_have_more_than_fits(batch: int, wide: int) -> None:
    """A deep queue of commands, each overdue, and calls of three services on two GPUs."""
    w = Node(2, batch, "abc")
    for gpus in itertools.islice(itertools.cycle((1, wide)), 1200):
        w.command(gpus)
    ended = closed_loop(w, *[lambda name=name: w.call(name) for name in "abc" * 4])
    w.play(200 * S, ended)
    commands = sum(a in w.waits for a in w.classes["cmd"])
    calls = len(w.waits) - commands
    assert 100 < commands < 1200 and calls > 100, (commands, calls)
    for name in "abc":
        assert w.longest_wait(name) <= 4 * OVERDUE_NS, name


def test_wide_calls_and_wide_commands_do_not_wait_for_each_other() -> None:
    """A wide call lacks a GPU that has a copy, and a wide command the one that is booked for it."""
    w = Node(2, 1)
    ended = closed_loop(w, *[lambda: w.command(2)] * 2, *[w.command] * 3,
                        *[lambda: w.call("a", (2,))] * 4, *[lambda: w.call("b")] * 4)
    w.play(400 * S, ended)
    for name in ("cmd", "a", "b"):
        assert w.longest_wait(name) <= 6 * OVERDUE_NS, name


def test_an_action_that_asks_for_gpus_is_counted_while_it_waits() -> None:
    w = Node(1, 1)
    assert not w.ledger.ready.gpu_actions
    first, second = w.command(), w.command()
    assert w.ledger.ready.gpu_actions == 2
    w.plan()
    assert w.ledger.ready.gpu_actions == 1
    waits = second if w.ledger.actions[first].lease else first
    w.happen(ev.ActionCancelled(w.now, waits, "by its client"))
    assert not w.ledger.ready.gpu_actions
