"""What snapshots cost: starts as ratios of one run, forks that diverge, and many sessions of one
image beside podman and bubblewrap alone.

`start` is the time from `Client.session` to the first result when the warm pool is empty. It is
measured in plain bwrap without an image (the base of the ratios), with an image, from a snapshot of
a session with the image, and from a snapshot of a session without an image. Each round measures all
kinds in a random order; medians are given, and the range of the middle half of the ratios. `take`
is the time for a snapshot of a session that changed many files. `forks` is the time in which forks
of that session were opened, up to the first result of the last fork; then each fork changes the
same file, and `diverged` says how many kept their own change. `many` gives the disk space and the
proportional memory (PSS) of each of many open sessions of the image, and the same for containers of
podman and of apptainer, and for bubblewrap alone with a read-only image. `--many N` opens N
sandboxes of ours and of bubblewrap's, `--theirs N` opens N containers. `left_out` says why a kind
is missing, and `opened` how many could be opened. PSS can be read by root only.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import common
from bench_image_session import make_image
from bench_sandbox import UsersCluster

from tangram_hpc import LocalCluster
from tangram_hpc.resources import process_tree

BASE = "bwrap"
# crun refuses a machine that has both versions of cgroups mounted; podman sees one of them
_ONE_CGROUP = ("for each in $(grep ' /sys/fs/cgroup/.* cgroup2 ' /proc/mounts | cut -d' ' -f2); do "
               "umount $each; done; exec \"$@\"")


def start(cluster: LocalCluster, spec: dict[str, Any]) -> float:
    """Returns the seconds from the request of a session to its first result. The session is gone
    when this returns, so that its end does not slow down the next start."""
    began = time.perf_counter()
    with cluster.session(**spec) as session:
        session.exec("true").result().check()
        took = time.perf_counter() - began
    session.closed.result()
    return took


def starts(cluster: LocalCluster, specs: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Returns the median time of the starts of each kind, and their ratios to the base of the same
    round: the median, and between which two values the middle half of the rounds lies."""
    took = []
    for _ in range(rounds):
        order = random.sample(sorted(specs), len(specs))  # no kind always follows the same other
        took.append({kind: start(cluster, specs[kind]) for kind in order})
    ratios = {kind: [one[kind] / one[BASE] for one in took] for kind in specs if kind != BASE}
    return {"start_ms": {kind: round(1e3 * statistics.median(one[kind] for one in took), 2)
                         for kind in specs},
            f"start_over_{BASE}": {kind: round(statistics.median(each), 3)
                                   for kind, each in ratios.items()},
            "start_middle_half": {kind: _middle_half(each) for kind, each in ratios.items()}}


def _middle_half(ratios: list[float]) -> list[float]:
    cuts = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return [round(cuts[0], 3), round(cuts[2], 3)]


def forked(cluster: LocalCluster, spec: dict[str, Any], changed: int, forks: int) -> dict[str, Any]:
    """Measures a snapshot and forks of a session with `changed` changed files."""
    with cluster.session(**spec) as session:
        session.exec(f"i=0; while [ $i -lt {changed} ]; do echo $i >/data/new-$i; i=$((i+1)); "
                     "done").result().check()
        began = time.perf_counter()
        session.snapshot().result()
        took = time.perf_counter() - began
        began = time.perf_counter()
        copies = [session.fork() for _ in range(forks)]
        for result in [copy.exec("true") for copy in copies]:
            result.result().check()
        seconds = time.perf_counter() - began
        for number, copy in enumerate(copies):
            copy.exec(f"echo {number} >/data/new-0; echo {number} >note")
        kept = [copy.exec("read a </data/new-0; read b <note; echo $a $b").result().text
                for copy in copies]
        for copy in copies:
            copy.close()
        return {"take_ms": round(1e3 * took, 2), "forks_ms": round(1e3 * seconds, 1),
                "fork_ms": round(1e3 * seconds / forks, 2),
                "diverged": sum(text == f"{n} {n}\n" for n, text in enumerate(kept))}


# ---- many at once ----


def disk_mib(folder: str) -> float:
    """Returns the space of a folder on its disk in MiB, without mounts in it."""
    told = subprocess.run(["du", "-skx", folder], capture_output=True, text=True, check=False)
    return int(told.stdout.split()[0]) / 1024


def pss_mib(pids: Iterator[int] | list[int]) -> float:
    """Returns the proportional memory (PSS) of some processes in MiB."""
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total / 1024


def each(count: int, before: tuple[float, float], after: tuple[float, float], took: float
         ) -> dict[str, Any]:
    """Returns the cost of one of `count` sandboxes, from disk and memory before and after."""
    if not count:
        raise OSError("none was opened")
    return {"opened": count, "disk_kib": round((after[0] - before[0]) * 1024 / count, 1),
            "pss_mib": round((after[1] - before[1]) / count, 3),
            "start_ms": round(1e3 * took / count, 2)}


def sessions(cluster: LocalCluster, home: Path, spec: dict[str, Any], count: int) -> dict[str, Any]:
    """Measures open sessions, in each of which a command has run."""
    def now() -> tuple[float, float]:
        return disk_mib(str(home)), pss_mib(process_tree.descendants(os.getpid()))

    before, began = now(), time.perf_counter()
    some = [cluster.session(**spec) for _ in range(count)]
    for result in [session.exec("true") for session in some]:
        result.result().check()
    told = each(count, before, now(), time.perf_counter() - began)
    for session in some:
        session.close()
    for session in some:
        session.closed.result()
    return told


def alone(image: str, count: int) -> dict[str, Any]:
    """Measures sandboxes of bubblewrap alone, with a read-only image."""
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", image, "/", "--proc",
            "/proc", "--dev", "/dev", "/bin/sh", "-c", "echo ready; read wait"]
    began, some = time.perf_counter(), list[subprocess.Popen[bytes]]()
    try:
        for _ in range(count):
            one = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            some.append(one)
            assert one.stdout is not None and one.stdout.readline() == b"ready\n"
        took = time.perf_counter() - began
        pids = [pid for one in some for pid in (one.pid, *process_tree.descendants(one.pid))]
        return each(count, (0.0, 0.0), (0.0, pss_mib(pids)), took)
    finally:
        for one in some:
            one.kill()
            one.communicate()


def podman(image: str, store: Path, count: int, patience_s: float) -> dict[str, Any]:
    """Measures containers of podman, each with a layer of its own over the same folder; opens as
    many as it can within `patience_s`.
    """
    word = ["unshare", "--mount", "sh", "-c", _ONE_CGROUP, "sh", "podman", "--root",
            f"{store}/root", "--runroot", f"{store}/run", "--cgroup-manager", "cgroupfs"]
    names: list[str] = []

    def now() -> tuple[float, float]:
        pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if str(store).encode() in (process_tree.read(f"/proc/{pid}/cmdline") or b"")]
        return disk_mib(str(store)), pss_mib(sorted(
            {below for pid in pids for below in (pid, *process_tree.descendants(pid))}))

    store.mkdir()
    before, began = now(), time.perf_counter()
    try:
        while len(names) < count and time.perf_counter() - began < patience_s:
            done = subprocess.run(
                [*word, "run", "--detach", "--network=none", "--cgroups=disabled",
                 "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--rootfs",
                 f"{image}:O", "/bin/sleep", "1000"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"podman: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
            names.append(done.stdout.strip())
        return each(len(names), before, now(), time.perf_counter() - began)
    finally:
        subprocess.run([*word, "rm", "--force", "--all", "--time", "0"], capture_output=True,
                       check=False)
        for mount in Path("/proc/mounts").read_text().splitlines():
            if str(store) in mount:
                subprocess.run(["umount", "-l", mount.split()[1]], check=False)


def apptainer(image: str, count: int, patience_s: float) -> dict[str, Any]:
    """Measures containers of apptainer with the same folder as a read-only root; opens as many as
    it can within `patience_s`.
    """
    # without privileges, as it refuses to start where root itself does not have all of them
    argv = ["apptainer", "--nocolor", "--silent", "exec", "--no-privs", "--containall",
            "--no-mount", "hostfs,cwd,home", image, "/bin/sh", "-c", "echo ready; read wait"]
    some, opened = list[subprocess.Popen[bytes]](), list[subprocess.Popen[bytes]]()
    began = time.perf_counter()
    try:
        while len(some) < count and time.perf_counter() - began < patience_s:
            one = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
            some.append(one)
            assert one.stdout is not None and one.stderr is not None
            rest_s = max(0.0, began + patience_s - time.perf_counter())
            ready = select.poll()  # select takes no more than 1024 descriptors
            ready.register(one.stdout, select.POLLIN | select.POLLHUP)
            if not ready.poll(1e3 * rest_s):
                one.kill()
                break  # the patience is used up; this one does not count
            if one.stdout.readline() != b"ready\n":
                one.kill()
                said = one.stderr.read().decode(errors="replace").strip().splitlines()
                raise OSError(f"apptainer: {(said or ['it ended at once'])[-1]}")
            opened.append(one)
        took = time.perf_counter() - began
        pids = [pid for one in opened for pid in (one.pid, *process_tree.descendants(one.pid))]
        return each(len(opened), (0.0, 0.0), (0.0, pss_mib(pids)), took)
    finally:
        for one in some:
            one.kill()
            one.communicate()


def many(cluster: LocalCluster, top: Path, image: str, spec: dict[str, Any], count: dict[str, int]
         ) -> dict[str, Any]:
    """Returns the measurements of many open sessions, and why a kind is missing."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "image": lambda: sessions(cluster, top, spec, count["many"]),
        "bwrap_alone": lambda: alone(image, count["many"]),
        "podman": lambda: podman(image, top / "podman", count["theirs"], count["theirs_s"]),
        "apptainer": lambda: apptainer(image, count["theirs"], count["theirs_s"])}
    figures: dict[str, Any] = {"left_out": {}}
    for kind, measure in kinds.items():
        if kind == "podman" and os.geteuid() != 0:
            figures["left_out"][kind] = "it is measured as root only"
            continue
        if not shutil.which(kind.removesuffix("_alone")) and kind != "image":
            figures["left_out"][kind] = "it is not installed"
            continue
        try:
            figures[kind] = measure()
        except (OSError, AssertionError) as error:
            figures["left_out"][kind] = str(error)[:300]
    return figures


def main() -> int:
    args = common.arguments(__doc__, many="sandboxes of ours and of bubblewrap alone (500)",
                            theirs="containers of each other program (500)")
    count = {"rounds": 1, "files": 20, "changed": 5, "forks": 2, "many": 2, "theirs": 1,
             "theirs_s": 20} if args.tiny else {
        "rounds": 60, "files": 2000, "changed": 200, "forks": 64, "many": 500, "theirs": 500,
        "theirs_s": 300}
    count |= {name: given for name in ("many", "theirs")
              if (given := getattr(args, name)) is not None}
    figures: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda number, where: sys.exit(1))
    with ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-bench-")))
        image = make_image(top / "image", count["files"])
        shutil.copy("/bin/sleep", f"{image}/bin/sleep")
        for name in ("proc", "dev", "tmp", "sys", "run"):  # others mount there
            Path(image, name).mkdir()
        (top / "scratch").mkdir()
        cluster = stack.enter_context(UsersCluster(cpus=2, home=top / "home", warm=0,
                                                   scratch=str(top / "scratch")))
        specs: dict[str, dict[str, Any]] = {
            BASE: {"backend": "bwrap"}, "image": {"backend": "bwrap", "image": image}}
        try:
            start(cluster, specs["image"])
        except Exception as error:  # noqa: BLE001 - told in the bench's line
            common.line("snapshots", count, {"skipped": str(error)[:300]})
            return 0
        for kind, below in (("snapshot", "image"), ("folder_snapshot", BASE)):
            with cluster.session(**specs[below]) as session:
                session.exec("echo changed >/tmp/a; echo changed >note").result().check()
                if below == "image":
                    session.exec("echo changed >/data/0").result().check()
                specs[kind] = {"backend": "bwrap", "snapshot": session.snapshot().result()}
        figures |= starts(cluster, specs, count["rounds"])
        figures |= forked(cluster, specs["image"], count["changed"], count["forks"])
        figures["many"] = many(cluster, top, image, specs["image"], count)
    common.line("snapshots", count, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
