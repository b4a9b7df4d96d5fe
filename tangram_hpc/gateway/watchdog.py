"""Ends a gateway that hangs inside MPI, where no signal handler or timer of the program runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

STUCK_S = 30.0
STATUS = 70


def watch(progress: Callable[[], int], stuck_s: float = STUCK_S,
          alive: Callable[[], None] = lambda: None) -> None:
    """Starts a thread that ends the process with one line when `progress()` stays the same for
    `stuck_s` seconds. `alive` is called at each look, about once a second.
    """

    def guard() -> None:
        last, at = progress(), time.monotonic()
        while True:
            time.sleep(min(1.0, stuck_s / 4))
            alive()
            now = progress()
            if now != last:
                last, at = now, time.monotonic()
            elif time.monotonic() - at > stuck_s:
                print(f"tangram: gateway: stuck in MPI for {stuck_s:.0f} s: ending; ranks go on "
                      "over the socket", file=sys.stderr, flush=True)
                os._exit(STATUS)

    threading.Thread(target=guard, name="tangram-gateway-watchdog", daemon=True).start()
