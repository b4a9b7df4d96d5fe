"""`LocalCluster`: a broker, workers and a client in one process tree, without Slurm or MPI.

It runs the same programs as on a cluster, on one machine. They end with this process, even if it is
killed: each child holds the reading end of a pipe whose writing end is in this process. The end of
one of several workers is a node failure, and that worker is not started again. When no worker is
left, all workers are started again, because otherwise nothing could ever run. A broker that has
crashed is started again too, and goes on from its journal; the workers stay.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..client.client import Client
from ..client.forked import not_ours
from ..client.request import check_text
from ..config.settings import Config, load_config
from ..errors import BrokerUnreachable, InvalidInput, TangramError
from ..slurm.job_environment import without_slurm
from ..start_module import module_command
from ..storage.access import NAME as ACCESS
from ..storage.rundir import SCRATCH_JOB, local_job_name, make_own_dir, own_dir
from .broker_location import await_access
from .connecting import connect
from .http_server import HttpServer
from .restarts import RestartLimit, crashed, how_it_ended, mark_crashed

_START_S = 120.0  # an import from a busy shared file system can take a minute
_WORKERS_MAX = 1024
# workers that end within _SHORT_S seconds _AGAIN_MAX times in a row are not started again
_SHORT_S, _AGAIN_MAX = 10.0, 3
_BROKER_AGAIN_MAX = 3  # restarts of the broker within 10 minutes


class LocalCluster:
    """A broker with its workers on this machine, and a client of it. Every method and attribute of
    `Client` is there too, once it is started. Use it as a context manager, or `start` and `close`.

    Args:
        cpus: CPUs that each worker lends; None for all that this process may use. CPUs beyond those
            are only counted.
        mem_mib: memory that each worker lends, in MiB; None for all.
        placer: the placer: `elastic`, `paper`, `first-fit`, `fcfs:K` or `static:K`.
        workers: how many worker processes, from 1 to 1024. Each stands for a node.
        home: the folder in which the job's folder is made; None for `$TANGRAM_HOME`, else
            `~/.tangram`.
        job: the job's name; empty for a new one. A job of this name that was interrupted is
            continued (see `once` of `Client.submit`).
        http: whether `tangram serve http` is started too (extra `http`).
        settings: other fields of the settings file, such as `sync="batch"` or `grace_s=5`.

    Attributes:
        job: the job's name.
        folder: the job's folder.
        access: the access file, for `tangram_hpc.connect` in other processes.
        client: the client; None before `start`.
        http: the HTTP server, with its `url` and `key`; None without one.

    Raises:
        InvalidInput: an argument is wrong; the message names it.

    Example:
        with LocalCluster(cpus=8) as cluster:
            print(cluster.submit(["uname", "-a"]).result().text)
    """

    # the arguments of the interpreter; tests and benches may start others
    _program: Sequence[str] = tuple(module_command("tangram_hpc")[1:])

    def __init__(self, cpus: int | None = None, *, mem_mib: int | None = None,
                 placer: str = "elastic", workers: int = 1, home: str | Path | None = None,
                 job: str = "", http: bool = False, **settings: Any) -> None:
        for field in settings:
            if field not in Config.model_fields:
                near = difflib.get_close_matches(field, Config.model_fields, n=1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise InvalidInput(f"{field}: LocalCluster knows no such setting{hint}")
        if type(workers) is not int or not 0 < workers <= _WORKERS_MAX:
            raise InvalidInput(f"workers: {workers!r} is not a whole number from 1 to "
                               f"{_WORKERS_MAX}")
        check_text(job, "job")
        if home is not None and not isinstance(home, str | os.PathLike):
            raise InvalidInput(f"home: {home!r:.60} is not the path of a folder")
        self.job = job or local_job_name()
        self._environ = {**without_slurm(os.environ), **_kept(os.environ),
                         "TANGRAM_PLACER": placer, "TANGRAM_BIND": "none"}
        if home is not None:
            self._environ["TANGRAM_HOME"] = str(home)
        chosen = {"cpus": cpus, "mem_mib": mem_mib, **settings}
        self._environ.update({f"TANGRAM_{k.upper()}": _text(v) for k, v in chosen.items()
                              if v is not None})
        load_config(self._environ)  # checks the settings as the broker and the workers will
        self.folder = own_dir(self._environ, self.job)
        self.access = self.folder / ACCESS
        self._workers = workers
        self._children: list[subprocess.Popen[bytes]] = []  # the broker, then the workers
        self._restarts = RestartLimit(_BROKER_AGAIN_MAX)
        self._broker_over = False  # whether the broker has ended and is not started again
        self._lifeline = self._lifeline_read = -1
        self._owner = 0  # the process that started it; 0 before its start
        self._spawning = threading.Lock()  # held while children are started, replaced or closed
        self.client: Client | None = None
        self.http: HttpServer | None = None
        self._with_http = http

    def start(self) -> LocalCluster:
        """Starts broker, workers and client. Returns when actions can be submitted; until `close`,
        `tangram_hpc.connect()` in this process and its children finds this cluster.

        Returns:
            The cluster itself.

        Raises:
            BrokerUnreachable: broker or workers did not start; the message holds the last line that
            they printed and the path of their log.
            ClientClosed: another process started it, of which this process is a fork.
        """
        if self._is_copy():
            raise not_ours("LocalCluster", self._owner, self._again())
        self._owner = os.getpid()
        _clusters.add(self)
        self._lifeline_read, self._lifeline = _pipe()
        try:
            broker = self._spawn_broker()
            self._await_broker(broker)
            threading.Thread(target=self._keep_broker, args=(broker,), name="tangram-broker",
                             daemon=True).start()
            with self._spawning:
                self._spawn_workers()
            self.client = connect(self.access)
            self._await_workers()
            if self._with_http:
                self.http = HttpServer(self._program, self._environ, self.access,
                                       self._lifeline_read, self.folder / "serve.log")
            _export(self)
            threading.Thread(target=self._keep_workers, name="tangram-workers",
                             daemon=True).start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Ends client, broker and workers in order. The journal stays for `tangram acct`. In the
        child of a fork it does nothing, because all of it is the parent's; nor while Python
        finalizes, because broker and workers then end with this process, and the threads that wait
        for them stand still."""
        if self._is_copy() or sys.is_finalizing():
            return
        _take_back(self)
        if self.http is not None:
            self.http.close()
        if self.client is not None:
            self.client.close()
        with self._spawning:
            for child in self._children[:1]:
                child.terminate()  # the broker tells the workers
            self._cut_lifeline()
        for child in self._children:
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children = []

    def _cut_lifeline(self) -> None:
        """Closes this process's ends of the pipe; the children end then."""
        ends = self._lifeline, self._lifeline_read
        self._lifeline = self._lifeline_read = -1  # first: a fork meanwhile must not close others
        for fd in ends:
            if fd >= 0:
                os.close(fd)

    def _is_copy(self) -> bool:
        """Whether this process is a fork of the process that started the cluster."""
        return self._owner not in (0, os.getpid())

    def _again(self) -> str:
        return f"tangram_hpc.connect({str(self.access.absolute())!r})"

    def _disown(self) -> None:
        """Closes the child's copy of the pipe right after a fork: broker and workers live as long
        as the parent does, and not as long as this process."""
        self._spawning = threading.Lock()
        self._cut_lifeline()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a LocalCluster cannot be sent to another process; call "
                           f"{self._again()} there for a client of its own")

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        client = self.client
        if self._is_copy() or sys.is_finalizing():
            return self.close()
        if self.http is not None:
            self.http.close()  # before the broker: without one the server would wait for its return
        if client is not None and self._children and exc[0] is None:
            with contextlib.suppress(TangramError, subprocess.TimeoutExpired):
                client.shutdown_broker("its run is over")  # nothing is kept for another start
                self._children[0].wait(15)
        self.close()

    def __getattr__(self, name: str) -> Any:
        client = self.__dict__.get("client")
        if client is None:
            raise AttributeError(f"LocalCluster has no {name!r} before start() or after close(): "
                                 "write `with LocalCluster(...) as client`")
        return getattr(client, name)

    def _await_broker(self, broker: subprocess.Popen[bytes]) -> None:
        try:
            await_access(self.access, _START_S, lambda: broker.poll() is None, broker.pid)
        except BrokerUnreachable:
            if broker.poll() is None:
                raise
            raise self._not_started("broker") from None

    def _not_started(self, part: str) -> BrokerUnreachable:
        """Makes the error of a part that ended, with the last line of its log."""
        return BrokerUnreachable(f"a {part} did not start: {self._last_line(part)}")

    def _last_line(self, part: str) -> str:
        """Returns the last line of a part's log, and the log's path."""
        path = self.folder / f"{part}.log"
        said = path.read_text(errors="replace").strip().rpartition("\n")[2]
        said = said.removeprefix("tangram: ").removeprefix("error: ")
        if not said and not os.statvfs(self.folder).f_bavail:
            said = "its file system is full; make room, or set TANGRAM_HOME to another folder"
        return f"{said or 'it said nothing'} ({path})"

    def _await_workers(self) -> None:
        assert self.client is not None
        deadline = time.monotonic() + _START_S
        while self.client.ask("info")["nodes"] < self._workers:
            with self._spawning:
                workers = self._children[1:]
            if any(child.poll() is not None for child in workers):
                raise self._not_started("worker")
            if time.monotonic() > deadline:
                raise BrokerUnreachable("the workers did not join in time")
            time.sleep(0.01)

    def _spawn_workers(self) -> None:
        for number in range(self._workers):
            name = ["--name", f"local{number}"] if self._workers > 1 else []
            self._spawn("worker", *name, access=self.access)

    def _spawn_broker(self, *more: str) -> subprocess.Popen[bytes]:
        return self._spawn("broker", "--supervised", "--job", self.job, "--nodes",
                           str(self._workers), *more)

    def _keep_broker(self, broker: subprocess.Popen[bytes]) -> None:
        """Starts the broker again whenever it has crashed, until it ends in another way or too
        often."""
        while True:
            status = broker.wait()
            with self._spawning:
                again = self._restart_broker(status) if self._lifeline >= 0 else None
                self._broker_over = again is None
            if again is None:
                return
            broker = again

    def _restart_broker(self, status: int) -> subprocess.Popen[bytes] | None:
        """Starts the broker again if it has crashed; returns it, or None. The lock is held."""
        if not crashed(status):
            return None
        told = (f"tangram: the broker of {self.job} {how_it_ended(status)} "
                f"({self.folder / 'broker.log'})")
        if not (taken := self._restarts.take(time.monotonic())):
            print(f"{told}; it is not started again", file=sys.stderr, flush=True)
            mark_crashed(self.access, (self._children[0].pid,))
            return None
        print(f"{told}; it is started again ({taken} of {self._restarts.count} times within 10 "
              "minutes)", file=sys.stderr, flush=True)
        try:
            self._spawn_broker("--workers-live")
        except (OSError, InvalidInput) as error:
            print(f"tangram: the broker cannot be started: {error}", file=sys.stderr, flush=True)
            return None
        self._children[0] = self._children.pop()
        return self._children[0]

    def _keep_workers(self) -> None:
        """Starts the workers anew when none is left, unless they ended in order."""
        short, workers = 0, self._children[1:]
        while True:
            begun = time.monotonic()
            statuses = [worker.wait() for worker in workers]
            if not any(statuses) or not self._await_living_broker():
                return
            with self._spawning:
                if self._lifeline < 0:
                    return
                short = short + 1 if time.monotonic() - begun < _SHORT_S else 0
                told = f"tangram: no worker of {self.job} is left ({self.folder / 'worker.log'})"
                if short > _AGAIN_MAX:
                    print(f"{told}; it is not started again", file=sys.stderr, flush=True)
                    return self._end_broker()
                print(f"{told}; starting anew", file=sys.stderr, flush=True)
                del self._children[1:]
                try:
                    self._spawn_workers()
                except (OSError, InvalidInput) as error:
                    print(f"tangram: a worker cannot be started: {error}", file=sys.stderr)
                    return self._end_broker()
                workers = self._children[1:]

    def _end_broker(self) -> None:
        """Ends the broker, because no worker will come: its clients would wait for ever."""
        said = self._last_line("worker")
        with contextlib.suppress(TangramError):  # the client may be closed
            if self.client is not None:
                self.client.shutdown_broker(f"its workers ended: {said}")
                return
        self._children[0].terminate()

    def _await_living_broker(self) -> bool:
        """Waits until the broker serves, which may be crashing or starting again just now. Returns
        False if the cluster is closed or no broker will serve any more."""
        while True:
            with self._spawning:
                if self._lifeline < 0 or self._broker_over:
                    return False
                broker = self._children[0]
            if self._serves(broker):
                return True
            time.sleep(0.05)  # `_keep_broker` is about to see that it has ended

    def _serves(self, broker: subprocess.Popen[bytes]) -> bool:
        """Waits until this broker has written the access file; returns whether it lives."""
        with contextlib.suppress(BrokerUnreachable):
            await_access(self.access, _START_S, lambda: broker.poll() is None, broker.pid)
        return broker.poll() is None

    def _spawn(self, *words: str, access: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts a part. `access` travels in the environment, because every process of this machine
        may read an argv."""
        command: Sequence[str] = [sys.executable, *self._program, *words,
                                  "--lifeline", str(self._lifeline_read)]
        try:
            make_own_dir(self._environ, self.folder)
        except OSError as error:
            raise InvalidInput(f"home: cannot make {self.folder} ({error.strerror}); set "
                               "TANGRAM_HOME to a folder of your own") from None
        with open(self.folder / f"{words[0]}.log", "ab") as log:
            env = self._environ if access is None else {
                **self._environ, "TANGRAM_ACCESS": str(access)}
            child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL,
                                     stdout=log, stderr=log, start_new_session=True,
                                     pass_fds=[self._lifeline_read])
        self._children.append(child)
        return child


# ---- forks, and processes that this one starts -------------------------------------------------


_clusters: weakref.WeakSet[LocalCluster] = weakref.WeakSet()


def _in_child() -> None:
    for cluster in _clusters:
        cluster._disown()


os.register_at_fork(after_in_child=_in_child)

# the clusters that run in this process, each with the TANGRAM_ACCESS of before its start
_shown: list[tuple[LocalCluster, str | None]] = []


def _export(cluster: LocalCluster) -> None:
    """Lets `tangram_hpc.connect()` and the commands find this cluster from now on, in this process
    and in its children."""
    _shown.append((cluster, os.environ.get("TANGRAM_ACCESS")))
    os.environ["TANGRAM_ACCESS"] = str(cluster.access.absolute())


def _take_back(cluster: LocalCluster) -> None:
    """Undoes `_export`, but keeps a TANGRAM_ACCESS that other code has set meanwhile."""
    at = next((n for n, (one, _) in enumerate(_shown) if one is cluster), -1)
    if at < 0:
        return
    before, ours = _shown.pop(at)[1], str(cluster.access.absolute())
    # a cluster that was started later will restore this path
    if at < len(_shown) and _shown[at][1] == ours:
        _shown[at] = (_shown[at][0], before)
    elif os.environ.get("TANGRAM_ACCESS") == ours:
        os.environ.pop("TANGRAM_ACCESS")
        os.environ.update({} if before is None else {"TANGRAM_ACCESS": before})


def _pipe() -> tuple[int, int]:
    """Makes a pipe whose ends are not 0 to 2. Where this process was started without standard
    streams those numbers are free, but a child has its own streams there."""
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    finally:
        for end in ends:
            os.close(end)
    return reading, writing


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _kept(environ: Any) -> dict[str, str]:
    """Returns the user's TANGRAM_* settings, without those that would lead to another broker, and,
    inside a Slurm job, where the job's scratch is and whose epilog removes what is left there."""
    dropped = {"TANGRAM_ACCESS", "TANGRAM_JOB", "TANGRAM_GATEWAY", "TANGRAM_WORLD_SIZE"}
    kept = {k: v for k, v in environ.items() if k.startswith("TANGRAM_") and k not in dropped}
    if "SLURM_TMPDIR" in environ:
        kept["SLURM_TMPDIR"] = environ["SLURM_TMPDIR"]
    if "SLURM_JOB_ID" in environ:
        kept[SCRATCH_JOB] = environ["SLURM_JOB_ID"]
    return kept
