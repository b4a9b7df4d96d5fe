"""Inits that their own sandboxes have stopped go on soon, and hold up nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from helpers.executor_rig import Rig, alive

from tangram_hpc.resources import process_tree

_INITS = 12


def test_inits_that_are_stopped_hold_up_no_other_sandbox(tmp_path: Path) -> None:
    """Each goes on 0.2 s after its own stop; one wait after the other would take 2.4 s, in which no
    sandbox could begin."""
    rig = Rig(tmp_path)
    for session in range(1, _INITS + 1):
        rig.open(session)
    inits = [rig.session(number).process.pid for number in range(1, _INITS + 1)]
    began = time.monotonic()
    for pid in inits:
        os.kill(pid, signal.SIGSTOP)
    rig.until(lambda: all(process_tree.state(pid) != "T" for pid in inits))
    rig.open(_INITS + 1)
    assert time.monotonic() - began < 2
    rig.close()


def test_an_init_that_is_stopped_and_continued_without_end_is_killed(tmp_path: Path) -> None:
    """Each further stop must not postpone what is done about it."""
    rig = Rig(tmp_path)
    rig.open(1)
    pid = rig.session(1).process.pid
    until = time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(0.01)
    assert not alive(pid)
    rig.close()
