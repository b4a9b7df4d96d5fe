"""Ends a gateway that hangs inside MPI, where no signal handler or timer of the program runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from ..protocol.liveness import Patience

STUCK_S = 30.0
STATUS = 70
_LOOK_S = 1.0  # between two looks


def watch(progress: Callable[[], int | None], stuck_s: float = STUCK_S,
          alive: Callable[[], None] = lambda: None) -> None:
    """Starts a thread that ends the process with one line when it hangs.

    Args:
        progress: returns a number that stays the same while the process hangs; None while nothing
            is to be judged.
        stuck_s: how long it may stay the same, in seconds in which the process ran: after a time
            in which it was stopped, this thread may run before the one that it watches.
        alive: called at each look, about once a second.
    """

    def guard() -> None:
        last, step = progress(), 2 * _LOOK_S
        patience = Patience(time.monotonic(), stuck_s, step)
        while True:
            time.sleep(min(_LOOK_S, stuck_s / 4))
            alive()
            now = progress()
            if now is None or now != last:
                last, patience = now, Patience(time.monotonic(), stuck_s, step)
            elif patience.over(time.monotonic()):
                print(f"tangram: gateway: stuck in MPI for {stuck_s:.0f} s: ending; ranks go on "
                      "over the socket", file=sys.stderr, flush=True)
                os._exit(STATUS)

    threading.Thread(target=guard, name="tangram-gateway-watchdog", daemon=True).start()
