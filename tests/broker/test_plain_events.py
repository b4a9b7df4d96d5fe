"""The events that the broker handles by the shorter way: none may need the longer one."""

from __future__ import annotations

from tangram_hpc.broker.driver import PLAIN_EVENTS
from tangram_hpc.domain import event as ev
from tangram_hpc.scheduler.handlers.consequences import CONSEQUENCES


def test_no_other_event_follows_from_a_plain_one() -> None:
    assert not PLAIN_EVENTS & CONSEQUENCES.keys()


def test_the_driver_does_nothing_of_its_own_about_a_plain_event() -> None:
    assert not PLAIN_EVENTS & {ev.ClientExpired, ev.NodeLost}
