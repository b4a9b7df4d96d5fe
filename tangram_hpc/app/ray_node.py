"""One node of a Ray cluster that lives as long as a trainer's command (`tangram rank --launcher`).

Each task of the job step runs `ray start --block` as a child. The child of rank 0 is the head. When
all nodes have joined the head, rank 0 runs the command. When the command has ended, rank 0 writes a
file that tells the other nodes to end. Such files lie in the broker's own folder, which all nodes
see. Only the Ray processes that were started here are ended, so another Ray on the same node goes
on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import InvalidInput, TangramError
from .trainer_launchers import RAY_FOLDER, contained, ray_folder
from .trainer_rank import write_whole

_UP, _OVER = "up", "over"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.5
_END_S = 20.0  # how long Ray's processes may take to end before they are killed
_LOG_LINES = 20
# Run by the trainer's own Python, in which Ray is installed.
_COUNT_NODES = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(0.5)
"""


class RayFailed(TangramError):
    """Ray did not start on a node, or ended before the command did."""


@dataclass(frozen=True)
class RayNode:
    """What a node must know about its Ray cluster.

    Attributes:
        rank: the number of this node; 0 is the head.
        nodes: how many nodes the cluster has.
        address: host and port of the head, as `host:port`.
        meeting: path in a folder that all nodes see; the files `meeting.up` and `meeting.over` say
            that the head has started, and that the command has ended.
        image: apptainer image in which Ray and the command run; empty for none.
        patience_s: how long the head waits for all nodes, and a node for the head.
    """

    rank: int
    nodes: int
    address: str
    meeting: Path
    image: str = ""
    patience_s: float = 300.0

    def has(self, what: str) -> bool:
        """Returns whether a file of the cluster was written. The folder is listed, because a shared
        file system may still remember the name as missing. If the folder is gone, the cluster is
        over.
        """
        try:
            return f"{self.meeting.name}.{what}" in os.listdir(self.meeting.parent)
        except FileNotFoundError:
            return what == _OVER

    def say(self, what: str) -> None:
        """Writes a file of the cluster, by which the other nodes learn of a new state."""
        write_whole(self.meeting.with_name(f"{self.meeting.name}.{what}"), "\n")


def start_words(node: RayNode, environ: Mapping[str, str]) -> list[str]:
    """Returns the command line that starts Ray on a node and stays in the foreground."""
    host, port = node.address.rsplit(":", 1)
    place = (["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
             if node.rank == 0 else [f"--address={node.address}"])
    cpus = environ.get("SLURM_CPUS_PER_TASK")  # without it Ray takes all CPUs of the machine
    words = ["ray", "start", "--block", "--disable-usage-stats", *place,
             *([f"--num-cpus={cpus}"] if cpus else [])]
    return contained(node.image, words, environ)


def run_node(node: RayNode, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs this node until the trainer's command has ended.

    Args:
        node: the node.
        command: the trainer's command, which rank 0 runs.
        environ: the environment of Ray and of the command.

    Returns:
        On rank 0 the command's exit status, 128 plus the number of a signal that ended it; on
        other nodes 0.

    Raises:
        InvalidInput: Ray or the command cannot be started here.
        SystemExit: a signal came before the command had begun.
        RayFailed: Ray did not start, or ended before the command did.
    """
    if node.rank:
        # Slurm signals all tasks of a job step; this task must go on for as long as the command. A
        # signal that is ignored would be ignored by Ray as well, which could then only be killed.
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)
        _wait(node, "the head of the Ray cluster", lambda: node.has(_UP) or node.has(_OVER))
        if node.has(_OVER):
            raise RayFailed("--launcher ray: the head has ended; its own output says why")
        with _started(node, environ) as (ray, made):
            return _follow(node, ray, made)

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in _SIGNALS:  # this holds until the command runs; then signals go to the command
        signal.signal(number, leave)
    try:
        with _started(node, environ) as (ray, made):
            return _lead(node, ray, command, made)
    finally:
        with suppress(InvalidInput):  # the folder is gone, and so are the other nodes
            node.say(_OVER)


@contextmanager
def _started(node: RayNode, environ: Mapping[str, str]
             ) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Starts Ray on this node. In the end it ends Ray and removes its files, unless somebody else
    has named their folder. Yields Ray's process, and the environment by which other programs find
    Ray.
    """
    made = {**environ, "RAY_TMPDIR": str(ray_folder(environ))}
    ray = None
    try:
        with open(_log(made, "start"), "wb") as log, _signals_put_off():
            # a process session of its own, because Ray's reaper ends the process group that it is
            # in
            ray = _popen("ray", start_words(node, made), env=made, stdout=log, stderr=log,
                         stdin=subprocess.DEVNULL, start_new_session=True)
        yield ray, made
    finally:
        with _signals_put_off():
            if ray is not None:
                _end(ray)
            if not environ.get(RAY_FOLDER):
                shutil.rmtree(made["RAY_TMPDIR"], ignore_errors=True)


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """Delays signals until the `with` body is over, so that none ends this process after Ray has
    started and before this process has noted that. Ray would inherit a signal mask."""
    came: list[int] = []
    old = {number: signal.signal(number, lambda number, frame: came.append(number))
           for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def _popen(what: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program.

    Raises:
        InvalidInput: it cannot be started.
    """
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        raise InvalidInput(f"--launcher ray: {what!r} cannot be started: {error.strerror}; install "
                           "it where the trainer runs, or let `setup` put it on PATH") from None


def _log(environ: Mapping[str, str], name: str) -> Path:
    return Path(environ["RAY_TMPDIR"], f"ray-{name}.log")


def _lead(node: RayNode, ray: subprocess.Popen[bytes], command: Sequence[str],
          environ: dict[str, str]) -> int:
    """Runs the command when all nodes have joined; returns its exit status."""
    environ["RAY_ADDRESS"] = node.address
    node.say(_UP)
    found = node.image or shutil.which("python", path=environ.get("PATH"))
    python = "python" if found else "python3"
    count = contained(node.image, [python, "-c", _COUNT_NODES, node.address, str(node.nodes)],
                      environ)
    with open(_log(environ, "nodes"), "wb") as log:
        counting = _popen(python, count, env=environ, stdout=log, stderr=log)
    try:
        _wait(node, f"{node.nodes} nodes of the Ray cluster", lambda: counting.poll() is not None,
              ray, _log(environ, "start"))
    finally:
        counting.kill()
    if counting.wait():
        if ray.poll() is not None:  # both ended between two looks, and Ray's end is the cause
            raise RayFailed(_told("Ray did not start", _log(environ, "start")))
        raise RayFailed(_told("Ray's head did not answer", _log(environ, "nodes")))
    return _run_and_forward(command[0], contained(node.image, command, environ), environ)


def _run_and_forward(what: str, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command that gets the signals of this process; returns its exit status."""
    running: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # what comes while the command starts

    def forward(number: int, _frame: FrameType | None) -> None:
        if running:
            running[0].send_signal(number)
        else:
            early.append(number)

    for number in _SIGNALS:
        signal.signal(number, forward)
    running.append(_popen(what, command, env=environ))
    for each in early:
        running[0].send_signal(each)
    status = running[0].wait()
    return status if status >= 0 else 128 - status


def _follow(node: RayNode, ray: subprocess.Popen[bytes], environ: Mapping[str, str]) -> int:
    """Waits until the command has ended."""
    while not node.has(_OVER):
        if ray.poll() is not None:
            raise RayFailed(_told("Ray ended before the command", _log(environ, "start")))
        time.sleep(_POLL_S)
    return 0


def _wait(node: RayNode, what: str, true: Callable[[], bool],
          ray: subprocess.Popen[bytes] | None = None, log: Path = Path()) -> None:
    """Waits until a condition holds.

    Args:
        node: the node; `patience_s` is the longest wait.
        what: what is awaited, for the error.
        true: the condition.
        ray: Ray's process, whose end is an error; None if it is not started yet.
        log: Ray's output, whose end is printed then.

    Raises:
        RayFailed: it took too long, or Ray ended.
    """
    deadline = time.monotonic() + node.patience_s
    while not true():
        if ray is not None and ray.poll() is not None:
            raise RayFailed(_told("Ray did not start", log))
        if time.monotonic() > deadline:
            raise RayFailed(f"--launcher ray: waited {node.patience_s:.0f} s for {what}; "
                                    "look at the output of the other nodes")
        time.sleep(_POLL_S)


def _told(what: str, log: Path) -> str:
    """Prints the end of a log to stderr; returns the text of an error that refers to it."""
    for line in log.read_text(errors="replace").splitlines()[-_LOG_LINES:]:
        print(line, file=sys.stderr)
    return f"--launcher ray: {what}; the end of its output stands above"


def _end(ray: subprocess.Popen[bytes]) -> None:
    """Ends the Ray processes of this node."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(ray.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _END_S
        while number == signal.SIGTERM and time.monotonic() < deadline:
            ray.poll()  # reaps Ray's process, so that its process group can become empty
            try:
                os.killpg(ray.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
    ray.wait()
