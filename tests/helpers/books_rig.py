"""What tests of the books share: histories that hypothesis draws, journals of them, and servers.

A history is played on the real scheduler, so that it has every consequence that a broker would
journal: attempts that follow a lost node, actions that are cancelled while they wait, and results
that nobody has acknowledged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from sqlalchemy import select

from helpers.builders import World
from helpers.ordinary_user import NOBODY
from tangram_hpc.accounting.books.schema import Books, actions, jobs
from tangram_hpc.domain import event as ev
from tangram_hpc.domain.action import Action
from tangram_hpc.domain.outcome import Outcome
from tangram_hpc.domain.states import ENDED, ActionState
from tangram_hpc.storage.journal import FileJournal
from tangram_hpc.storage.journal_segments import JobJournal, begin_next

BEGAN = 1_700_000_000 * 10**9
NAMES = ("pytest", "Pytest", "lint ", "lint", "a\0b", "größe")
_STATES = (ActionState.COMPLETED, ActionState.FAILED, ActionState.TIMEOUT, ActionState.PREEMPTED)


@st.composite
def histories(draw: Any) -> list[ev.Event]:
    """Events of one job, whose broker may still run."""
    w = World()
    w.now = BEGAN
    start = ev.BrokerStarted(BEGAN - 1, "4711", "first-fit", "none", "me")
    w.node(cpus=3, component="cpu")
    for _ in range(draw(st.integers(1, 25))):
        w.now += draw(st.sampled_from([1, 10**6, 3 * 10**9, 1800 * 10**9]))
        step = draw(st.sampled_from([_submit, _submit, _plan, _plan, _finish, _finish, _lose,
                                     _cancel, _acknowledge]))
        step(draw, w)
    stop = draw(st.booleans())
    return [start, *w.events, *([ev.BrokerStopped(w.now + 5, "its job ended")] * stop)]


def _submit(draw: Any, w: World) -> None:
    for _ in range(draw(st.integers(1, 3))):
        w.happen(ev.ActionSubmitted(w.now, Action(
            w.id(), draw(st.sampled_from(NAMES)), degrees=(draw(st.integers(1, 2)),),
            attempts_max=draw(st.integers(1, 3)), trajectory=draw(st.sampled_from(["", "t1"])))))


def _plan(draw: Any, w: World) -> None:
    w.plan()


def _finish(draw: Any, w: World) -> None:
    number, lease = next(((n, e) for n, e in w.ledger.leases.items() if e.begun), (0, None))
    if lease is not None:
        held = len(lease.cores) * (w.now - lease.granted_at)
        w.happen(ev.LeaseFinished(w.now, number, Outcome(
            draw(st.sampled_from(_STATES)), exit_code=1, exec_ns=w.now - lease.granted_at,
            cpu_ns=held * draw(st.integers(0, 4)) // 4, maxrss_kib=draw(st.integers(0, 10**6)),
            reason="it ended\0so"), True))


def _lose(draw: Any, w: World) -> None:
    w.happen(ev.NodeLost(w.now, max(w.ledger.nodes), "gone"))
    w.now += draw(st.integers(0, 10**9))
    w.node(cpus=3, component="cpu")


def _cancel(draw: Any, w: World) -> None:
    open_ones = [a for a, entry in w.ledger.actions.items() if entry.state not in ENDED]
    if open_ones:
        w.happen(ev.ActionCancelled(w.now, draw(st.sampled_from(open_ones)), "by its client"))


def _acknowledge(draw: Any, w: World) -> None:
    ended = tuple(a for a, entry in w.ledger.actions.items() if entry.state in ENDED)
    if ended:
        w.happen(ev.ActionAcknowledged(w.now, ended))


def write_journal(folder: Path, events: list[ev.Event], each: int = 3) -> Path:
    """Writes events as the next segment of a job's journal, `each` in a record."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = JobJournal(folder)
    list(journal.events())
    path = begin_next(folder, journal.next_head(1))
    file = FileJournal(path, "none", lambda call: call())
    for at in range(0, len(events), each):
        file.append(events[at : at + each])
        file.commit(lambda: None)
    file.close()
    return path


def contents(books: Books) -> tuple[list[Any], list[Any]]:
    """All jobs and all rows of actions, without the numbers that a database chose."""
    with books.reading() as connection:
        names = {row.id: (row.name, row.began_ns) for row in connection.execute(select(jobs))}
        every = [tuple(row)[1:] for row in connection.execute(
            select(jobs).order_by(jobs.c.name, jobs.c.began_ns))]
        rows = sorted((names[row.job_id], *tuple(row)[1:])
                      for row in connection.execute(select(actions)))
    return every, rows


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Runs a PostgreSQL server of an ordinary user, and yields the URL of an empty database."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if shutil.which("psql") else []
    if not found:
        pytest.skip("PostgreSQL is not installed; `make system-long` installs it")
    home = _home(folder)
    _run([found[-1] / "initdb", "-D", home / "data", "-A", "trust", "-U", "books", "--no-sync"])
    with _server([found[-1] / "postgres", "-D", home / "data", "-k", home, "-c",
                  "listen_addresses=", "-c", "fsync=off"], home / ".s.PGSQL.5432"):
        yield f"postgresql://books@/postgres?host={home}"


@contextmanager
def mariadb(folder: Path) -> Iterator[str]:
    """Runs a MariaDB server of an ordinary user, and yields the URL of an empty database."""
    if not shutil.which("mariadbd") or not shutil.which("mariadb-install-db"):
        pytest.skip("MariaDB is not installed; `make system-long` installs it")
    home = _home(folder)
    _run(["mariadb-install-db", "--no-defaults", f"--datadir={home}/data", "--skip-test-db",
          "--auth-root-authentication-method=normal"])
    sock = home / "socket"
    with _server(["mariadbd", "--no-defaults", f"--datadir={home}/data", f"--socket={sock}",
                  f"--pid-file={home}/pid", "--skip-networking"], sock):
        _run(["mariadb", "--no-defaults", f"--socket={sock}", "-u", "root", "-e",
              "CREATE DATABASE books CHARACTER SET utf8mb4"])
        yield f"mariadb://root@localhost/books?unix_socket={sock}"


def _home(folder: Path) -> Path:
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return folder


def _as_user() -> dict[str, Any]:
    other = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    return {"cwd": "/", "stdin": subprocess.DEVNULL, **other}


def _run(words: list[Any]) -> None:
    told = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120,
                          check=False, **_as_user())
    assert told.returncode == 0, told.stdout + told.stderr


@contextmanager
def _server(words: list[Any], ready: Path) -> Iterator[None]:
    """Runs a server until the block has ended; it is ready when its socket is there."""
    log = ready.parent / "log"
    with open(log, "w") as out:
        server = subprocess.Popen(list(map(str, words)), stdout=out, stderr=out, **_as_user())
    try:
        until = time.monotonic() + 60
        while not ready.exists():
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait(60)
