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
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from helpers.fast_path_fuzz import Bench, order
from tangram_hpc.protocol.payload import ExecCall, decode
from tangram_hpc.protocol.process_frames import RECEIVE, FreezeBackground, frame
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


def longer(bench: Bench, text: str, wake: Callable[[], object] | None = None) -> list[Any]:
    """What becomes of a command that is not over at once, and the memory that was told of it."""
    waker = threading.Timer(0.2, wake) if wake is not None else None
    if waker is not None:
        waker.start()
    back, ends = bench.play(frame(order(ExecCall(shell=text))))
    seen = bench.served.command
    if not ends:
        with suppress(ProcessLookupError):
            os.killpg(seen.pid, signal.SIGKILL)
        bench.take_over()
    if waker is not None:
        waker.join()
    memory = ends[0].outcome.maxrss_kib if ends else 0
    return [back.name, seen.ended, memory > 100]


def until_served(run: Callable[[], list[Any]]) -> list[Any]:
    """What becomes of a command that says something and is served if the machine is not too busy
    to end it soon after."""
    for _ in range(200):
        seen = run()
        if seen[0] == "READ":
            break
    return seen


def all_longer(bench: Bench) -> dict[str, list[Any]]:
    bench.served.command.patience_ns = 3_600_000_000_000

    def send() -> None:
        bench.ours.sendall(frame(FreezeBackground()))

    found = {"silent": longer(bench, "exec sleep 0.3"),
             "talks": until_served(lambda: longer(bench, "echo a; sleep 0.01; echo b")),
             "is heard": longer(bench, "echo a; exec sleep 60"),
             "floods": longer(bench, "sleep 0.01; head -c 200000 /dev/zero; exec sleep 60"),
             "order": longer(bench, "exec sleep 60", send)}
    bench.theirs.recv(RECEIVE)
    found["signal"] = longer(bench, "exec sleep 60", lambda: os.write(bench.into, b"x"))
    os.read(bench.wake, 64)
    bench.served.command.patience_ns = 100_000_000
    found["patience"] = longer(bench, "exec sleep 60")
    return found


def main() -> None:
    bench = Bench(sys.argv[1])
    bench.served.command.patience_ns = 3_600_000_000_000  # no busy machine takes so long
    packets = ExecCall(argv=(sys.executable, "-SIc", PACKETS))
    seen = {"packets": until_served(lambda: look(bench, packets))}
    seen["left"] = [left(bench, text) for text in (
        "true", "pwd >f", "true", "rm f", "echo >../tmp/f", "rm ../tmp/f", "chmod 0 .",
        "chmod 700 .; rmdir ../tmp; ln -s /nowhere ../tmp")]
    bench.served.command.patience_ns = 300_000_000
    seen["flood"] = flood(bench)
    with suppress(BlockingIOError):
        while os.read(bench.wake, 1 << 16):
            pass
    seen["longer"] = all_longer(bench)
    print(json.dumps(seen))


main()
