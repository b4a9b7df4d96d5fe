"""Instructions that an action costs: its decisions, its messages, and all that the broker does. A
guard against regressions.

    python bench/bench_instructions.py                                        # the counts
    python bench/bench_instructions.py --other ../parent/.venv/bin/python     # compared

Counts of instructions do not depend on what else the machine does, so that a few per cent show on
a busy one too. Each work is done once and twice as often in processes of their own; the difference
of their counts is the cost without starts and imports. Hashes are not randomised. With `--other`,
the same is counted with another checkout's interpreter, and the status is 1 if this checkout needs
more than `WORSE` times as many instructions for any of the works.

The counter is `perf stat -e instructions:u` where the kernel lets it count, else valgrind's
cachegrind (some 20 times slower), else CPU time, which is noisy: then nothing is judged. The line
says which. `--tiny` takes perf or CPU time, as valgrind takes a minute.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

WORSE = 1.05
TURN = 100  # messages in a frame
Counter = Callable[[list[str], dict[str, str]], float]


def decisions(count: int) -> None:
    """`count` actions from submission to end in the scheduler, among 300 that wait."""
    from bench_placement import DONE, drain, loaded

    from tangram_hpc.domain import event as ev
    from tangram_hpc.domain.action import Action, Profile
    from tangram_hpc.domain.ids import mint

    scheduler, _ = loaded("elastic", 2, 300)
    now = 10**9
    for number in range(count):
        now += 10**6
        action = Action(mint(1, 10**6 + number), "shell", degrees=(1, 2, 4),
                        profile=Profile(10**8, 100_000))
        scheduler.handle(ev.ActionSubmitted(now, action))
        lease = next(iter(scheduler.ledger.leases))
        scheduler.handle(ev.LeaseFinished(now, lease, DONE, True))
        drain(scheduler, now)


def messages(count: int) -> None:
    """`count` submissions and results through frames, with payloads of 200 bytes."""
    from tangram_hpc.domain.action import Action
    from tangram_hpc.domain.ids import mint
    from tangram_hpc.domain.outcome import Outcome
    from tangram_hpc.domain.states import ActionState
    from tangram_hpc.protocol.frame import Inbox, Outbox
    from tangram_hpc.protocol.message import ActionResult, Submit

    outbox, inbox, payload = Outbox(), Inbox(), bytes(200)
    for number in range(count):
        action = mint(1, number + 1)
        outbox.put(Submit(Action(action, "shell")), payload)
        outbox.put(ActionResult(action, Outcome(ActionState.COMPLETED, exec_ns=10**6), "n1", (0,),
                                1, 10**5, 10**6, 1), payload)
        read = list(inbox.feed(b"".join(outbox.take())))
        assert len(read) == 2


class _Side:
    """One connection of a broker, as its other end sees it: frames of many messages. (The tests'
    `broker_rig` sends one message at a time and writes no journal, so it would count other work.)
    """

    unsent = 0

    def __init__(self, broker: Any) -> None:
        from tangram_hpc.protocol.frame import Inbox, Outbox

        self._out, self._in = Outbox(), Inbox()
        self.heard: list[Any] = []
        self._broker, self._peer = broker, broker.accept(self)

    def send(self, message: Any, payload: Any = None) -> None:
        self._out.put(message, payload)

    def flush(self) -> None:
        self.heard += [message for message, _ in self._in.feed(b"".join(self._out.take()))]

    def say(self, envelopes: list[tuple[Any, bytes | None]]) -> None:
        from tangram_hpc.protocol.frame import Inbox, Outbox

        box = Outbox()
        for envelope in envelopes:
            box.put(*envelope)
        for envelope in Inbox().feed(b"".join(box.take())):
            self._broker.receive(self._peer, *envelope)

    def take(self, kind: type) -> list[Any]:
        heard, self.heard = self.heard, []
        return [message for message in heard if type(message) is kind]


class _Timer:
    """Calls what is due at once, and nothing that is due later."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def now_ns(self) -> int:
        return time.time_ns()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        if delay_s < 0.01:
            self._due.append(call)

    def run(self) -> None:
        due, self._due = self._due, []
        for call in due:
            call()


def broker_trips(count: int) -> None:
    """`count` functions through a broker, each submitted when the last one has ended."""
    broker_actions(count, 1)


def broker_actions(count: int, turn: int = TURN) -> None:
    """`count` functions through a broker with its journal, in frames of `turn` messages."""
    from tangram_hpc.broker.driver import Broker, Settings
    from tangram_hpc.domain.action import Action, Kind
    from tangram_hpc.domain.ids import mint
    from tangram_hpc.domain.node import NodeSpec
    from tangram_hpc.domain.outcome import Outcome
    from tangram_hpc.domain.states import ActionState
    from tangram_hpc.protocol import message as ms
    from tangram_hpc.scheduler.placement.placers.placer_registry import make_placer
    from tangram_hpc.scheduler.scheduler import Scheduler
    from tangram_hpc.storage.journal import FileJournal

    timer, done = _Timer(), Outcome(ActionState.COMPLETED, exec_ns=50_000, cpu_ns=20_000)
    with tempfile.TemporaryDirectory() as folder:
        journal = FileJournal(Path(folder) / "journal", "none", lambda call: None)
        broker = Broker(Scheduler(make_placer("elastic")), journal, timer, timer,
                        Settings("j", folder), lambda: None)
        broker.start()
        client, worker = _Side(broker), _Side(broker)
        spec = NodeSpec("n1", "host", (0, 1), 4096, backends=("process",), untrusted=("process",),
                        ahead=TURN)
        worker.say([(ms.WorkerHello(ms.PROTOCOL_VERSION, "j", spec), None)])
        client.say([(ms.ClientHello(ms.PROTOCOL_VERSION, "j", "u"), None)])
        timer.run()
        number = client.take(ms.Welcome)[0].client
        for first in range(1, count + 1, turn):
            client.say([(ms.Submit(Action(mint(number, first + each), "f", Kind.FUNCTION)),
                         bytes(90)) for each in range(turn)])
            left = turn
            while left:
                timer.run()
                started = worker.take(ms.StartAttempt)
                worker.say([(ms.Finished(start.lease, done, n=1), bytes(40)) for start in started])
                left -= len(started)
            timer.run()
            client.say([(ms.Ack(tuple(each.action for each in client.take(ms.ActionResult))),
                         None)])
        journal.close()


WORKS: dict[str, tuple[Callable[[int], None], int]] = {
    "decision": (decisions, 300), "message_pair": (messages, 2000),
    "broker_action": (broker_actions, 10 * TURN), "broker_trip": (broker_trips, 200)}


def by_perf(argv: list[str], environ: dict[str, str]) -> float:
    """Instructions in user mode, counted by the processor."""
    with tempfile.NamedTemporaryFile("r") as out:
        subprocess.run(["perf", "stat", "-x,", "-e", "instructions:u", "-o", out.name, *argv],
                       env=environ, check=True)
        told = re.search(r"^(\d+),", Path(out.name).read_text(), re.MULTILINE)
    return float(told[1]) if told else 0.0


def by_valgrind(argv: list[str], environ: dict[str, str]) -> float:
    """Instructions, counted by a simulated processor."""
    told = subprocess.run(["valgrind", "--tool=cachegrind", "--cache-sim=no",
                           "--cachegrind-out-file=/dev/null", *argv], env=environ, check=True,
                          capture_output=True, text=True).stderr
    found = re.search(r"I\s+refs:\s+([\d,]+)", told)
    return float(found[1].replace(",", "")) if found else 0.0


def by_cpu_time(argv: list[str], environ: dict[str, str]) -> float:
    """CPU time in ns."""
    def used() -> float:
        told = resource.getrusage(resource.RUSAGE_CHILDREN)
        return told.ru_utime + told.ru_stime

    before = used()
    subprocess.run(argv, env=environ, check=True)
    return (used() - before) * 1e9


def counter(tiny: bool) -> tuple[str, Counter]:
    """What counts here, best first."""
    if shutil.which("perf"):
        try:
            if by_perf([sys.executable, "-c", ""], dict(os.environ)):
                return "perf", by_perf
        except subprocess.CalledProcessError:
            pass
    if shutil.which("valgrind") and not tiny:
        return "valgrind", by_valgrind
    return "cpu_ns", by_cpu_time


def cost(python: str, name: str, count: int, counted: Counter) -> float:
    """What one piece of the work costs with this interpreter's package. It runs outside of the
    checkouts: Python would import the package from its current directory."""
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    argv = [python, str(Path(__file__).resolve()), "--work", name, "--count"]
    once, twice = (counted([*argv, str(count * times)], environ) for times in (1, 2))
    if twice <= once and counted is not by_cpu_time:
        sys.exit(f"bench_instructions: {python}: its work could not be counted; give the path of "
                 "an interpreter, not of a script that starts one")
    return (twice - once) / count


def main() -> None:
    """Prints one line, or does the work that `--work` names."""
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="seconds, for the tests")
    p.add_argument("--other", help="the Python interpreter of the checkout to compare with")
    p.add_argument("--work", choices=WORKS, help=argparse.SUPPRESS)
    p.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.work:
        WORKS[arguments.work][0](arguments.count)
        return
    # perhaps a relative path; not resolved, since an interpreter in a venv is a link
    other = arguments.other and os.path.abspath(arguments.other)
    kind, counted = counter(arguments.tiny)
    here = os.getcwd()
    os.chdir(tempfile.gettempdir())
    figures: dict[str, Any] = {}
    for name, (_, count) in WORKS.items():
        figures[name] = round(cost(sys.executable, name, count, counted))
        if other:
            figures[f"{name}_other"] = round(cost(other, name, count, counted))
            figures[f"{name}_ratio"] = round(figures[name] / max(1, figures[f"{name}_other"]), 4)
    os.chdir(here)
    worse = [name for name in WORKS if figures.get(f"{name}_ratio", 0.0) > WORSE]
    common.line("instructions", {"counter": kind, "other": arguments.other or "", "worse": WORSE,
                                 **{name: count for name, (_, count) in WORKS.items()}},
                {**figures, "worse": worse if kind != "cpu_ns" else "not judged by CPU time"})
    if worse and kind != "cpu_ns":
        sys.exit(1)


if __name__ == "__main__":
    main()
