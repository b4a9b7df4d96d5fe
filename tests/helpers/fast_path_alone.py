"""Single orders for `_fast_path.c`: `fast_path_alone.py LIBRARY`, run by test_fast_path.py as a
process of its own (see fast_path_fuzz.py). Prints how each came back, whether it had ended, and
what it said.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from helpers.fast_path_fuzz import Bench, order
from tangram_hpc.protocol.payload import ExecCall, decode
from tangram_hpc.protocol.process_frames import RECEIVE, frame
from tangram_hpc.sandbox.process.fast_path import ReturnCode

PACKETS = """if 1:
    import fcntl, os
    fcntl.fcntl(1, fcntl.F_SETFL, os.O_WRONLY | os.O_DIRECT)  # then a read takes one write only
    for word in (b"one ", b"two ", b"three"):
        os.write(1, word)
"""


def look(bench: Bench, call: ExecCall) -> list[Any]:
    back, ends = bench.play(frame(order(call)))
    seen = bench.served.command
    if not ends:
        bench.take_over()
    result = decode(ends[0].payload or b"") if ends else None
    return [back.name, seen.ended, result.stdout.decode() if result else None]  # type: ignore


def left(bench: Bench, text: str) -> str:
    """How the library comes back after it has served an action without a session."""
    back, ends = bench.play(frame(order(ExecCall(shell=text), keep=False)))
    assert [end.none_left for end in ends] == [back is ReturnCode.READ], (text, back)
    if back is ReturnCode.FRESHEN:
        bench.theirs.recv(RECEIVE)  # the next order, which it has not read
    return back.name


def flood(bench: Bench) -> list[Any]:
    """It is woken without a pause, as by a command whose children end all the time."""
    def wake() -> None:
        time.sleep(0.1)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                os.write(bench.into, bytes([signal.SIGCHLD]) * (1 << 16))

    fcntl.fcntl(bench.into, fcntl.F_SETPIPE_SZ, 1 << 20)
    other = threading.Thread(target=wake)
    other.start()
    seen = look(bench, ExecCall(shell="sleep 1"))
    other.join()
    return seen


def main() -> None:
    bench = Bench(sys.argv[1])
    bench.served.command.patience_ns = 900_000_000
    seen = {"packets": look(bench, ExecCall(argv=(sys.executable, "-SIc", PACKETS)))}
    seen["left"] = [left(bench, text) for text in (
        "true", "pwd >f", "true", "rm f", "echo >../tmp/f", "rm ../tmp/f", "chmod 0 .",
        "chmod 700 .; rmdir ../tmp; ln -s /nowhere ../tmp")]
    bench.served.command.patience_ns = 300_000_000
    seen["flood"] = flood(bench)
    print(json.dumps(seen))


main()
