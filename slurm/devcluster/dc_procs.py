"""Starts, recognises and ends the processes of a cluster. Invariants of this module:

- a pid counts only together with the start time recorded beside it (pids are reused);
- a process without a record is ours only by a mark that no other process has: a Slurm daemon
  with the prefix in its environment, arguments or open files; a descendant of one; a task of
  a step of this configuration; a process of the unix user that `up` created;
- never a process by its name alone, never this process or one of its ancestors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from dc_base import SAFE_PATH, Cluster, ClusterError

DAEMONS = {"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd"}
TAIL_LINES = 12


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on (0 state, 1 ppid, 19 start time); None when gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else -1


def alive(daemon: dict) -> bool:
    return start_time(daemon["pid"]) == daemon["start"]


def read_proc(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def open_paths(pid: int) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def base_env(c: Cluster) -> dict[str, str]:
    return {"PATH": SAFE_PATH, "LANG": "C.UTF-8", "SLURM_CONF": c.conf}


def start(c: Cluster, name: str, argv: list[str], log: str, **env: str) -> subprocess.Popen:
    """Start a daemon in the foreground of its own session and record it."""
    out = c.root / "log" / f"{name}.out"
    with open(out, "ab") as sink:
        proc = subprocess.Popen(
            argv, env=base_env(c) | {"HOME": "/"} | env, cwd="/", stdin=subprocess.DEVNULL,
            stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    c.daemons.append(
        {"name": name, "pid": proc.pid, "start": start_time(proc.pid), "log": log or str(out)}
    )
    c.save()
    return proc


def tail(path: str) -> str:
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


def fail(c: Cluster, name: str, why: str) -> ClusterError:
    """The error for a daemon: its name, why, and the end of its log."""
    log = next((d["log"] for d in c.daemons if d["name"] == name), "")
    out = str(c.root / "log" / f"{name}.out")
    return ClusterError(f"{name} {why}", tail=tail(log) or tail(out))


def wait_for(
    c: Cluster, name: str, proc: subprocess.Popen, ready: Callable[[], bool], seconds: float
) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if proc.poll() is not None:
            raise fail(c, name, f"ended at once (exit {proc.returncode}); its log says")
        if time.monotonic() > end:
            raise fail(c, name, f"was not ready after {seconds:.0f} s; its log says")
        time.sleep(0.02)


def listening(port: int) -> bool:
    """Whether something listens on the TCP port, without connecting to it."""
    want = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        if any(r[1].endswith(want) and r[3] == "0A" for r in map(str.split, rows)):
            return True
    return False


def ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return found


def live_parents() -> dict[int, int]:
    """Every live process and its parent."""
    found = {}
    for pid in (int(p) for p in os.listdir("/proc") if p.isdigit()):
        fields = stat_fields(pid)
        if fields and fields[0] != "Z":
            found[pid] = int(fields[1])
    return found


def is_daemon(c: Cluster, pid: int) -> bool:
    if read_proc(pid, "comm").decode(errors="replace").strip() not in DAEMONS:
        return False
    below = c.prefix + "/"
    if f"SLURM_CONF={c.conf}".encode() in read_proc(pid, "environ").split(b"\0"):
        return True
    words = read_proc(pid, "cmdline").decode(errors="replace").split("\0")
    return any(below in w for w in words) or any(p.startswith(below) for p in open_paths(pid))


def is_task(c: Cluster, pid: int) -> bool:
    env = read_proc(pid, "environ").split(b"\0")
    return f"SLURM_CONF={c.conf}".encode() in env and any(
        v.startswith((b"SLURMD_NODENAME=", b"SLURM_TASK_PID=")) for v in env
    )


def of_created_user(uids: set[int], pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid in uids
    except OSError:
        return False


def network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def on_node(holder: int) -> list[int]:
    """Every live process in the network namespace of a node's holder."""
    space = network_of(holder)
    return [pid for pid in live_parents() if space and network_of(pid) == space]


def find(c: Cluster) -> dict[str, set[int]]:
    """Every live process of the cluster: `daemons`, and `work` (steps, tasks, the user's)."""
    ours: dict[str, set[int]] = {"daemons": set(), "work": set()}
    spare = ancestors()
    uids = {u.uid for u in c.users if u.created and u.uid > 0}
    recorded = {d["pid"] for d in c.daemons if alive(d)}
    parents = live_parents()
    if c.netns:
        for d in c.daemons:
            if d["name"].startswith("node-") and alive(d):
                ours["work"] |= set(on_node(d["pid"])) - spare - recorded
    for pid in parents.keys() - spare:
        if pid in recorded or is_daemon(c, pid):
            step = read_proc(pid, "comm").startswith(b"slurmstepd")
            ours["work" if step else "daemons"].add(pid)
        elif is_task(c, pid) or of_created_user(uids, pid):
            ours["work"].add(pid)
    known = new = ours["daemons"] | ours["work"]
    while new := {p for p, parent in parents.items() if parent in new} - known - spare:
        known = known | new
        ours["work"] |= new
    return ours


def send(pids: set[int], sig: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def end(pids: set[int], grace: float) -> None:
    """SIGTERM, and SIGKILL to what is left after `grace` seconds."""
    born = {pid: start_time(pid) for pid in pids}
    send(pids, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while pids and time.monotonic() < deadline:
        time.sleep(0.02)
        pids = {p for p in pids if born[p] >= 0 and start_time(p) == born[p]}
    send(pids, signal.SIGKILL)
