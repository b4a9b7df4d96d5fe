"""A place for attacks: a real executor, a session that attacks, a neighbour that works meanwhile,
and photographs of all that could be left behind.

Law: every attack is bounded in itself (a count, a time, an `ulimit`), so that an isolation that
does not hold fails a test and not the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.executor_rig import Rig, as_an_ordinary_user, until
from helpers.forked_start import server_processes
from tangram_hpc import LocalCluster
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ActionState
from tangram_hpc.ports import SandboxSettings
from tangram_hpc.protocol.payload import ExecCall, ExecReturn
from tangram_hpc.resources import process_tree

# A container program replaces them where this names one, and a folder that it takes for an image.
CONTAINER, _, IMAGE = os.environ.get("TANGRAM_TEST_CONTAINER", "").partition(":")
BACKENDS = (CONTAINER,) if CONTAINER else ("process", "bwrap")
# As a command that Python serves, and as the second of its kind, which is plain (`_fast_path.c`).
# Without that library all are Python's.
WAYS = [pytest.param((backend, way), id=f"{backend}-{way}",
                     marks=[] if way == "plain" else [pytest.mark.long])
        for backend in BACKENDS for way in ("plain", "python")]
_PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
PIDS, DISK_MIB, OUTPUT_MAX = 64, 32, 100_000
SHARED = ("/dev/shm", "/tmp", "/var/tmp")

# What every attack in Python begins with: `attempt` notes what could be done though it must not.
PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, time
libc, done = ctypes.CDLL(None, use_errno=True), []
def attempt(name, work):
    try:
        done.append([name, repr(work())[:80]])
    except (OSError, ImportError):
        pass
def call(name, *args):
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), name)
def tell():
    print(json.dumps(done), flush=True)
"""
_WORK = "while [ ! -e stop ]; do sleep 0.02; done; sha256sum <data; echo fine"
_DATA = bytes(range(256)) * 4000


def reason_to_skip(backend: str) -> str:
    """Why this backend cannot hold untrusted code here; "" when it can."""
    probed = as_an_ordinary_user(SandboxSettings())
    return "" if backend in probed.untrusted else f"{backend}: {probed.why_not.get(backend)}"


class UsersCluster(LocalCluster):
    """A cluster whose worker offers `process` to untrusted code also when it is root; see
    `as_an_ordinary_user`."""

    _program = ("-c", "import sys; from tangram_hpc.sandbox.manager import backends; "
                "backends.is_root = lambda: False; from tangram_hpc.cli import main; "
                "sys.exit(main())")


@dataclass
class Photo:
    """What is there of ours, and of what attackers leave under a name with the token."""

    processes: set[int]
    cgroups: set[str]
    mounts: set[str]
    files: set[str]
    shared: set[str]
    sysv: set[str]

    @classmethod
    def taken(cls, scratch: Path, token: str) -> Photo:
        shared = {f"{folder}/{name}" for folder in SHARED for name in _names(folder)
                  if token in name}
        cgroups = {path for path, *_ in os.walk("/sys/fs/cgroup")  # others' go while we look
                   if f"tangram-{os.getpid()}-" in path}
        mounts = {line for line in Path("/proc/self/mountinfo").read_text().splitlines()
                  if str(scratch) in line or token in line}
        mine = {str(p) for p in [os.getpid(), *process_tree.descendants(os.getpid())]}
        sysv = {f"{kind} {row}" for kind in ("shm", "sem", "msg")
                for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
                if row.split()[0] == str(sysv_key(token)) or set(row.split()[4:6]) & mine}
        return cls(set(process_tree.descendants(os.getpid())), cgroups, mounts,
                   {str(p) for p in scratch.glob("worker-*/*")}, shared, sysv)


def sysv_key(token: str) -> int:
    """A key for System V objects, of this token's own."""
    return int(hashlib.sha256(token.encode()).hexdigest()[:7], 16)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@dataclass
class Arena:
    """An executor whose sandboxes are of one backend."""

    rig: Rig
    backend: str
    token: str
    outside: Path  # a directory of the same user with a secret in it
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))

    def photo(self) -> Photo:
        return Photo.taken(self.rig.scratch, self.token)

    def open(self, **spec: Any) -> int:
        number = next(self.numbers)
        if self.backend == CONTAINER:
            spec |= {"image": IMAGE, "backend": CONTAINER}
        self.rig.open(number, **spec)
        return number

    def close(self, session: int) -> None:
        self.rig.loop.call_soon(self.rig.executor.close_session, session)
        self.rig.until(lambda: session in self.rig.down)

    def settles(self, before: Photo) -> None:
        """Nothing is left of what came after the photograph."""
        deadline = time.monotonic() + 10
        while (now := self.photo()) != before and time.monotonic() < deadline:
            self.rig.loop.run_until_complete(asyncio.sleep(0.01))
        assert now == before

    @contextmanager
    def duel(self, **spec: Any) -> Iterator[Duel]:
        """A session that attacks, and one whose action runs all the while and must end right."""
        before = self.photo()
        attacker, neighbour = self.open(**spec), self.open(mem_mib=100)
        self.rig.file("data", _DATA, session=neighbour)
        lease = self.rig.begin(ExecCall(shell=_WORK, env={"MINE": self.token}), Kind.EXEC,
                               session=neighbour, cores=self.rig.cores[1:])
        self.rig.until(lambda: ("started", lease) in self.rig.events)
        try:
            yield Duel(self, attacker, neighbour, lease)
        except BaseException:  # the next test shall find it empty
            for session in (attacker, neighbour):
                self.close(session)
            raise
        assert lease not in self.rig.done, self.rig.done[lease]
        self.rig.file("stop", b"", session=neighbour)
        outcome, back, _ = self.rig.end(lease)
        assert outcome.state is ActionState.COMPLETED, outcome
        want = f"{hashlib.sha256(_DATA).hexdigest()}  -\nfine\n"
        assert (back.stdout.decode(), back.stderr) == (want, b"")
        self.close(attacker)
        self.close(neighbour)
        self.settles(before)


@dataclass
class Duel:
    """Two sessions of an arena."""

    arena: Arena
    attacker: int
    neighbour: int
    lease: int

    @property
    def rig(self) -> Rig:
        return self.arena.rig

    def shell(self, text: str, **fields: Any) -> tuple[Outcome, ExecReturn]:
        return self.rig.shell(text, session=self.attacker, **fields)

    def python(self, source: str, *args: object, **fields: Any) -> tuple[Outcome, ExecReturn]:
        return self.rig.exec(*program(source, *args), session=self.attacker, **fields)

    def successes(self, source: str, *args: object) -> list[list[str]]:
        """What an attack could do that it must not; it must have come to its end."""
        outcome, back = self.python(source, *args, timeout_ns=60_000_000_000)
        assert outcome.state is ActionState.COMPLETED, (outcome, back)
        return json.loads(back.stdout)

    def home(self, session: int) -> Path:
        """Where a session's files really lie."""
        process = self.rig.session(session).process
        assert process is not None
        return Path(process.folder)

    def victim(self) -> int:
        """A process of the neighbour, as numbered here."""
        process = self.rig.session(self.neighbour).process
        assert process is not None
        shells: list[int] = []

        def found() -> bool:
            shells[:] = [pid for pid in process_tree.descendants(process.pid)
                         if b"sha256sum" in (process_tree.read(f"/proc/{pid}/cmdline") or b"")]
            return bool(shells)

        until(found, "the neighbour's shell to run")
        return shells[0]

    def goes_on(self) -> None:
        """The session that attacked can still be used."""
        outcome, back = self.shell("echo on; echo file >f; cat f")
        assert outcome.state is ActionState.COMPLETED, outcome
        assert back.stdout == b"on\nfile\n"


def program(source: str, *args: object) -> tuple[str, ...]:
    """A command line that runs an attack, by a Python that every sandbox shows."""
    return (_PYTHON, "-I", "-S", "-c", PRELUDE + source, *map(str, args))


@contextmanager
def arena(backend: str, folder: Path, enforcement: str = "", way: str = "plain", **settings: Any
          ) -> Iterator[Arena]:
    """An executor for attacks, with secrets in its environment and beside its scratch. `way`: see
    `WAYS`.

    Skips the test where this backend or enforcement cannot be had.
    """
    if why := reason_to_skip(backend):
        pytest.skip(why)
    token = os.urandom(8).hex()
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text(token)
    secrets = {"SLURM_JOB_ID": token, "MUNGE_SOCKET": token, "TANGRAM_ACCESS": token,
               "PMI_FD": token, "MY_API_KEY": token}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in secrets.items():
            patch.setenv(name, value)
        before = set(process_tree.descendants(os.getpid()))
        options = {"session_pids": PIDS, "disk_mib": DISK_MIB, "output_max": OUTPUT_MAX,
                   "compiled": way == "plain", "again": way == "plain"} | settings
        rig = Rig(folder, trusted=False, isolation=backend, enforcement=enforcement, **options)
        rig.scratch = rig.scratch.resolve()
        yield Arena(rig, backend, token, outside)
        rig.close()
        assert set(rig.processes()) <= before | server_processes()
