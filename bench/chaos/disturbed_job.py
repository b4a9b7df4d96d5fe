"""The job of `bench_restarts.py`: a supervised broker, its workers, and the processes of clients.

Every part is a process of its own, as a batch script would start it. The first two workers have
one device each, and several services take turns on it. Some clients use the broker's socket; an
MPI world of two ranks and a gateway is started by `mpiexec`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import tangram_hpc
from tangram_hpc.resources import process_tree

from .actions_of_clients import CONCURRENCY, ENDPOINT, Order
from .counting_engine import CountingEngine

PROGRAM = [sys.executable, "-m", "tangram_hpc"]
CLIENT = [sys.executable, str(Path(__file__).with_name("actions_of_clients.py"))]
JOB, RANKS = "restarts", 2
BEGIN_S = 300.0  # how long the job, or an MPI world, may take to begin
Process = subprocess.Popen[bytes]


class DisturbedJob:
    """The job's processes, and the files that tell what happened. Used as a context manager.

    Args:
        home: the job's home, an empty folder.
        order: what each client is to do; names and files are filled in here.
        workers: how many workers there are.
        clients: how many clients use the broker's socket.
        grace_s: the setting `grace_s`.

    Attributes:
        access: the access file.
        effects: the file of executions.
        outcomes: the folder of what the clients saw, a file for each.
        supervisor: the parent of the broker.
        workers: the workers, by number.
        clients: the clients that use the socket.
        world: the process that started the MPI world; None where MPI is not installed.
        worlds: how many MPI worlds there were.
        wrong: what went wrong with the processes, in words.
    """

    def __init__(self, home: Path, order: Order, workers: int, clients: int,
                 grace_s: float) -> None:
        self.home, self._stack, self._clients = home, ExitStack(), clients
        self.access = home / "jobs" / JOB / "access.json"
        self.effects, self.outcomes = home / "effects", home / "outcomes"
        self.outcomes.mkdir()
        self.effects.touch()
        (home / "handles").mkdir()
        self._order = replace(order, effects=str(self.effects), handles=str(home / "handles"))
        self._count, self._grace_s = workers, grace_s
        self.workers: list[Process] = []
        self.clients: list[Process] = []
        self.world: Process | None = None
        self.worlds = 0
        self.wrong: list[str] = []

    def __enter__(self) -> DisturbedJob:
        self._out = self._stack.enter_context(open(self.home / "log", "ab"))
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _begin(self) -> None:
        engines = {f"judge{n}": CountingEngine(str(self.effects)) for n in range(4)}
        for engine in engines.values():
            self._stack.callback(engine.close)
        self._order = replace(self._order, services=tuple(engines))
        self.supervisor = self._start("broker", "--job", JOB, "--nodes", str(self._count),
                                      "--restarts", "1000000")
        self._until(self.access.exists, "the access file")
        for number in range(self._count):
            self.workers.append(self._worker(number))
        with tangram_hpc.connect(self.access) as first:
            self._until(lambda: len(first.ask("nodes")["nodes"]) == self._count, "the workers")
            for n, (name, engine) in enumerate(engines.items()):
                node = f"w{n % min(2, self._count)}"
                first.register_service(name, {**engine.service, "node": node})
            first.register_endpoint(ENDPOINT, concurrency=CONCURRENCY)
        for number in range(self._clients):
            told = replace(self._order, name=f"c{number}", over=str(self.home / "over"),
                           outcomes=str(self.outcomes / f"c{number}"), seed=number)
            self.clients.append(self._run([*CLIENT, json.dumps(asdict(told))]))
        self._until(lambda: len(list(self.outcomes.glob("*.ready"))) == self._clients,
                    "the clients")
        if importlib.util.find_spec("mpi4py") is not None:
            self.begin_world()

    # ---- processes ---------------------------------------------------------------------------

    def broker(self) -> int:
        """The broker's process id, also of one that does not serve yet; 0 if there is none."""
        pids = process_tree.children(self.supervisor.pid)
        return pids[0] if pids else 0

    def gateway(self) -> int:
        """The process id of the MPI world's gateway; 0 if there is none."""
        if self.world is not None:
            for pid in process_tree.descendants(self.world.pid):
                try:
                    if b"gateway\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return pid
                except (FileNotFoundError, ProcessLookupError):
                    pass  # it has just ended
        return 0

    def replace_worker(self, number: int) -> None:
        """Starts a worker in the place of one that was killed."""
        self.workers[number].wait(60)
        self.workers[number] = self._worker(number)

    def begin_world(self) -> None:
        """Starts an MPI world, and waits until its ranks run actions."""
        self.worlds += 1
        name = f"m{self.worlds}"
        told = replace(self._order, name=name, over=str(self.home / f"over.{name}"),
                       outcomes=str(self.outcomes / name), seed=1000 + self.worlds)
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        self.world = self._run([mpiexec, "-n", str(RANKS + 1), *PROGRAM, "rank", "--gateway", "on",
                                "--", *CLIENT, json.dumps(asdict(told))])
        self._until(lambda: len(list(self.outcomes.glob(f"{name}?.ready"))) == RANKS,
                    f"MPI world {name}")

    def end_world(self) -> None:
        """Lets the MPI world end in order."""
        if self.world is None:
            return
        (self.home / f"over.m{self.worlds}").touch()
        self._ended(self.world, f"MPI world m{self.worlds}")
        self.world = None

    def finish(self) -> None:
        """Lets all clients end in order, and then the broker."""
        (self.home / "over").touch()
        for number, client in enumerate(self.clients):
            self._ended(client, f"client c{number}")
        self.end_world()
        with tangram_hpc.connect(self.access) as last:
            last.shutdown_broker("its run is over")
        self._ended(self.supervisor, "the broker")

    def _ended(self, process: Process, what: str) -> None:
        try:
            status = process.wait(self._order.limit_s + BEGIN_S)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"{what}: it does not end")
            process.kill()
            return
        if status:
            self.wrong.append(f"{what}: it ended with status {status}")

    def _worker(self, number: int) -> Process:
        devices = "cpu:1" if number < 2 else "none"
        return self._start("worker", "--name", f"w{number}", "--devices", devices)

    def _start(self, *words: str) -> Process:
        return self._run([*PROGRAM, *words])

    def _run(self, command: list[str]) -> Process:
        environ = {**os.environ, "TANGRAM_HOME": str(self.home), "TANGRAM_BIND": "none",
                   "TANGRAM_CPUS": "4", "TANGRAM_MEM_MIB": "4000",
                   "TANGRAM_GRACE_S": str(self._grace_s),
                   "TANGRAM_SCRATCH": str(self.home), "TANGRAM_ACCESS": str(self.access)}
        child = subprocess.Popen(command, env=environ, stdout=self._out, stderr=self._out,
                                 stdin=subprocess.DEVNULL)
        self._stack.callback(_end, child)
        return child

    def _until(self, true: object, what: str) -> None:
        assert callable(true)
        deadline = time.monotonic() + BEGIN_S
        while not true():
            if time.monotonic() > deadline:
                said = (self.home / "log").read_text(errors="replace")
                raise RuntimeError(f"waited {BEGIN_S:.0f} s for {what}: {said[-2000:]}")
            time.sleep(0.02)


def _end(child: Process) -> None:
    """Ends a process that has not ended by itself."""
    if child.poll() is None:
        child.send_signal(signal.SIGCONT)
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
