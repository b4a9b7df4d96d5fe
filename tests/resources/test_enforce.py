"""Each kind of enforcement on this machine keeps the same promises, or says that it cannot.

A process here is what a sandbox process is in a worker: it starts others and adopts their orphans.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tangram_hpc.errors import InvalidInput
from tangram_hpc.resources import process_tree
from tangram_hpc.resources.cpu import affinity, cgroupfs, enforce
from tangram_hpc.resources.cpu.cgroup import CgroupGroup
from tangram_hpc.resources.cpu.enforce import Enforcer, Group

REPO = Path(__file__).resolve().parents[2]
CORES = affinity.usable()
NOBODY = 65534
MIB = 1 << 20
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")

# As the init of a sandbox does, it has the kernel kill what it starts before itself: where memory
# runs out while a child begins, both are of the same size.
PROGRAM = """
import ctypes, json, os, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
print(json.dumps(0), flush=True)
def first():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
for line in sys.stdin:
    order = json.loads(line)
    if order["wait"]:
        done = subprocess.run(order["argv"], capture_output=True, text=True, preexec_fn=first)
        print(json.dumps([done.returncode, done.stdout]), flush=True)
    else:
        child = subprocess.Popen(order["argv"], stdout=subprocess.DEVNULL, preexec_fn=first)
        print(json.dumps(child.pid), flush=True)
"""
BUSY = "while True: pass"
# a child with a thread, a grandchild, and a daemon in a session of its own
TREE = """
import os, subprocess, threading, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(100)
    os._exit(0)
os.wait()
threading.Thread(target=time.sleep, args=(100,)).start()
subprocess.Popen(["sh", "-c", "sleep 100 & wait"])
time.sleep(100)
"""
TREE_TASKS = 5  # itself and its thread, sh, sleep, the daemon
# always one process, never for long the same one; it ends itself, but later than a test waits
RUNAWAY = """
import os, time
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
"""
# so many that whoever kills them one by one takes longer than a runaway needs
CROWD = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        break
time.sleep(100)
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text]


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


class Process:
    """A process, and a connection to control it."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(python(PROGRAM), stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self._answer()
        self.pid = self.popen.pid

    def _answer(self) -> object:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def _order(self, argv: list[str], wait: bool) -> object:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"argv": argv, "wait": wait}) + "\n")
        self.popen.stdin.flush()
        return self._answer()

    def start(self, argv: list[str]) -> int:
        pid = self._order(argv, False)
        assert isinstance(pid, int)
        return pid

    def run(self, argv: list[str]) -> tuple[int, str]:
        code, output = self._order(argv, True)  # type: ignore[misc]
        return code, output

    def beneath(self) -> list[int]:
        """The live descendants."""
        return [pid for pid in process_tree.descendants(self.pid) if cgroupfs.started(pid)]

    def tasks(self) -> list[int]:
        return [t for p in self.beneath() for t in process_tree.threads(p)]

    def end(self) -> None:
        deadline = time.monotonic() + 20
        while (beneath := self.beneath()) and time.monotonic() < deadline:  # some may fork away
            for pid in beneath:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()
        for file in (self.popen.stdin, self.popen.stdout):
            assert file is not None
            with contextlib.suppress(OSError):
                file.close()


def cgroups_of(pid: int) -> set[str]:
    """Every cgroup that a worker has, with all cgroups beneath."""
    paths = (f"{here}/{name}" for mount in cgroupfs.mounts()
             for here, folders, _ in os.walk(mount.point) for name in folders)
    return {path for path in paths if f"/tangram-{pid}-" in path or path.endswith(cgroupfs.LEAF)}


def own_cgroups() -> set[str]:
    return cgroups_of(os.getpid())


def some(name: str) -> Enforcer:
    try:
        return enforce.probe(True, name)
    except InvalidInput as error:
        pytest.skip(str(error))


@pytest.fixture(params=["cgroup2", "cgroup1", "affinity"])
def enforcer(request: pytest.FixtureRequest) -> Iterator[Enforcer]:
    before = own_cgroups()
    one = some(request.param)
    yield one
    one.close()
    assert own_cgroups() <= before


@pytest.fixture
def processes() -> Iterator[Callable[[], Process]]:
    made: list[Process] = []

    def make() -> Process:
        made.append(Process())
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def process(processes: Callable[[], Process]) -> Process:
    return processes()


@pytest.fixture
def group(enforcer: Enforcer, process: Process) -> Group:
    return enter(enforcer, 1, process)


def enter(enforcer: Enforcer, number: int, process: Process) -> Group:
    """As a process does by itself."""
    group = enforcer.group(number, process.pid)
    for path in group.joins:
        cgroupfs.write(path, str(process.pid))
    return group


def needs(enforcer: Enforcer, limit: str) -> None:
    if limit not in enforcer.limits:
        pytest.skip(f"{enforcer.name} does not enforce {limit} here")


# ---- cores ----

SEEN = "import os; print(sorted(os.sched_getaffinity(0)))"


@two_cores
def test_a_command_sees_the_cores_that_were_bound(group: Group, process: Process) -> None:
    for cores in (CORES[:1], CORES[1:2], CORES[:2], CORES[:1]):
        assert group.bind(cores, len(cores))
        assert process.run(python(SEEN)) == (0, f"{sorted(cores)}\n")


@two_cores
def test_a_running_process_tree_is_rebound_completely(group: Group, process: Process) -> None:
    group.bind(CORES[:1], 1)
    process.start(python(TREE))
    until(lambda: len(process.tasks()) == TREE_TASKS, "the tree stands")
    for cores in (CORES[:2], CORES[1:2], CORES[:1], CORES[:2]):
        assert group.rebind(cores, len(cores))
        tasks = process.tasks()
        assert len(tasks) == TREE_TASKS
        assert [os.sched_getaffinity(t) for t in tasks] == [set(cores)] * TREE_TASKS
        assert process.run(python(SEEN)) == (0, f"{sorted(cores)}\n")


@two_cores
@pytest.mark.attack("code", "cpu")
@pytest.mark.attack("session", "cpu")
def test_a_program_cannot_widen_its_cores(enforcer: Enforcer, group: Group,
                                          process: Process) -> None:
    needs(enforcer, "cores")
    group.bind(CORES[:1], 1)
    widen = f"import os; os.sched_setaffinity(0, {set(CORES)}); {SEEN}"
    assert process.run(python(widen)) == (0, f"{list(CORES[:1])}\n")


@two_cores
def test_a_core_that_is_not_there_is_not_bound(group: Group, process: Process) -> None:
    assert not group.bind((4000,), 1)
    assert group.bind(CORES[:1], 1)
    assert process.run(python(SEEN)) == (0, f"{list(CORES[:1])}\n")


@two_cores
def test_binding_no_cores_gives_a_cgroup_all_cores(
        enforcer: Enforcer, group: Group, process: Process) -> None:
    needs(enforcer, "cores")
    group.bind(CORES[:1], 1)
    assert group.bind((), 0)
    assert process.run(python(SEEN)) == (0, f"{sorted(CORES)}\n")


@two_cores
def test_cpu_time_is_limited_where_cores_are_not(enforcer: Enforcer, group: Group,
                                                 process: Process) -> None:
    needs(enforcer, "quota")
    for _ in range(2):
        process.start(python(BUSY))

    def round_of(units: int) -> tuple[float, int]:
        """CPU time in cores over a third of a second or more, and how often the group was
        throttled."""
        assert group.rebind((), units)
        time.sleep(0.1)  # the period in which it changed
        held, before, began = throttled(group), group.usage().cpu_ns, time.monotonic_ns()
        time.sleep(0.35)
        after, ended = group.usage().cpu_ns, time.monotonic_ns()
        assert before is not None and after is not None
        return (after - before) / (ended - began), throttled(group) - held

    one = two = held = 0.0
    with before_others(group):
        for _ in range(40):  # others may have the cores for a while
            now, times = round_of(1)
            one, held = max(one, now), held + times
            two = max(two, round_of(2)[0])
            assert one < 1.35  # a period's worth may fall on either side
            if held and two > 1.5:
                return
    raise AssertionError(f"it got {one:.2f} of one core, {two:.2f} of two, held back {held} times")


@contextlib.contextmanager
def before_others(group: Group) -> Iterator[None]:
    """Gives the group 32 times the weight of another process, so that its limit shows on a busy
    machine. This process gets still more, because it would starve beside the group otherwise.
    """
    assert isinstance(group, CgroupGroup)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):  # without root, its weight has to do
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        for folder in map(os.path.dirname, group.folders):
            for name, most in (("cpu.shares", "32768"), ("cpu.weight", "3200")):
                if os.path.exists(f"{folder}/{name}"):
                    cgroupfs.write(f"{folder}/{name}", most)
        yield
    finally:
        assert group.rebind((), 1)  # whoever ends the group's processes needs the other core
        os.setpriority(os.PRIO_PROCESS, 0, usual)


def throttled(group: Group) -> int:
    """How often the kernel has throttled a group."""
    assert isinstance(group, CgroupGroup)
    told = [cgroupfs.flat_keyed(f"{folder}/cpu.stat", "nr_throttled") for folder in group.folders]
    return next(n for n in told if n is not None)


def test_repeating_an_unchanged_binding_is_cheap(enforcer: Enforcer, group: Group) -> None:
    needs(enforcer, "cores")

    def median_ns(cores: list[tuple[int, ...]]) -> float:
        spent = []
        for n in range(200):
            began = time.perf_counter_ns()
            group.bind(cores[n % 2], 1)
            spent.append(time.perf_counter_ns() - began)
        return statistics.median(spent)

    one, other = CORES[:1], CORES[-1:] if len(CORES) > 1 else ()
    same, new = median_ns([one, one]), median_ns([one, other])
    assert same * 3 < new


def test_a_binding_of_a_dead_process_is_refused(enforcer: Enforcer, processes: Callable[[],
                                                Process]) -> None:
    dead = processes()
    dead.end()
    with pytest.raises(OSError):
        enter(enforcer, 1, dead)


def test_a_process_can_join_its_group_by_itself(enforcer: Enforcer) -> None:
    group = enforcer.group(1, os.getpid())
    folders = {os.path.dirname(path) for path in group.joins}
    pid = os.fork()
    if pid == 0:
        try:
            cgroupfs.join(group.joins)
            os._exit(0 if all(os.getpid() in cgroupfs.members(f) for f in folders) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool(folders) == (enforcer.name != "affinity")


# ---- memory and processes ----

HOG = "x = bytearray({} << 20); import time; time.sleep({})"


def test_exceeding_a_memory_limit_kills_only_the_offender(
        enforcer: Enforcer, processes: Callable[[], Process]) -> None:
    needs(enforcer, "memory")
    bad, good = processes(), processes()
    groups = [enter(enforcer, n, one) for n, one in enumerate((bad, good))]
    groups[0].limit(64, 0)
    groups[1].limit(256, 0)
    beside = bad.start(["sleep", "100"])
    innocent = good.start(python(HOG.format(100, 100)))
    for n in (1, 2):
        assert bad.run(python(HOG.format(200, 0)))[0] == -signal.SIGKILL
        assert groups[0].oom_kills() == n
    assert groups[1].oom_kills() == 0
    assert bad.beneath() == [beside] and good.beneath() == [innocent]
    groups[0].limit(300, 0)
    assert bad.run(python(HOG.format(200, 0)))[0] == 0
    groups[0].limit(0, 0)
    assert bad.run(python(HOG.format(400, 0)))[0] == 0


def test_a_memory_limit_below_the_current_use_is_no_error(
        enforcer: Enforcer, group: Group, process: Process) -> None:
    """The kernel refuses such a limit, or would kill more than one process. So the group only gets
    no further memory until the limit can be set."""
    needs(enforcer, "memory")
    holder = process.start(python("x = bytearray(100 << 20); import os; os.kill(os.getpid(), 19)"))
    until(lambda: cgroupfs.read(f"/proc/{holder}/stat").split()[2] == "T", "it holds 100 MiB")
    group.limit(64, 0)
    assert group.oom_kills() == 0 and holder in process.beneath()
    assert process.run(python(HOG.format(200, 0)))[0] == -signal.SIGKILL
    assert group.oom_kills() > 0
    if holder in process.beneath():
        os.kill(holder, signal.SIGKILL)
    until(lambda: not process.beneath(), "it is gone")
    group.limit(64, 0)
    assert process.run(python(HOG.format(90, 0)))[0] == -signal.SIGKILL
    assert process.run(python(HOG.format(30, 0)))[0] == 0


def test_a_tmpfs_file_counts_as_memory(enforcer: Enforcer, group: Group, process: Process,
                                       tmp_path: Path) -> None:
    needs(enforcer, "memory")
    group.limit(64, 0)
    fill = ("import mmap; m = mmap.mmap(-1, 200 << 20)\n"
            "for at in range(0, 200 << 20, 4096): m[at] = 1")
    assert process.run(python(fill))[0] == -signal.SIGKILL
    assert group.oom_kills() == 1


FORKS = """
import os, time
n = 0
try:
    while n < 50:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        n += 1
except BlockingIOError:
    pass
print(n)
"""


def test_a_process_limit_applies_to_its_group_only(
        enforcer: Enforcer, processes: Callable[[], Process]) -> None:
    needs(enforcer, "pids")
    bad, good = processes(), processes()
    groups = [enter(enforcer, n, one) for n, one in enumerate((bad, good))]
    groups[0].limit(0, 20)
    assert bad.run(python(FORKS)) == (0, "18\n")  # the process and the program make 20
    assert good.run(python(FORKS)) == (0, "50\n")
    assert groups[1].usage().tasks is not None


def test_a_group_reports_tasks_peak_memory_and_cpu_time(
        enforcer: Enforcer, group: Group, process: Process) -> None:
    process.start(python("x = bytearray(80 << 20)\n" + BUSY))
    tasks = group.usage().tasks
    assert tasks is not None and tasks >= 2

    def grown() -> bool:
        peak = group.usage().peak_mem_kib
        return peak is None or peak >= 80 * 1024

    until(grown, "its memory is seen")
    if enforcer.name != "affinity":
        until(lambda: (group.usage().cpu_ns or 0) > 10_000_000, "its CPU time is seen")


# ---- ends ----


@pytest.mark.parametrize(("program", "copies"), [(TREE, 1), (RUNAWAY, 6)],
                         ids=["tree", "runaways"])
def test_killing_a_group_leaves_only_the_spared_process(
        enforcer: Enforcer, group: Group, process: Process, program: str, copies: int) -> None:
    def start() -> None:
        if program is RUNAWAY:
            process.start(python(CROWD))
            until(lambda: (group.usage().tasks or 0) > 200, "the crowd stands")
        for _ in range(copies):
            process.start(python(program))
        if program is TREE:
            until(lambda: len(process.tasks()) == TREE_TASKS, "the tree stands")

    if enforcer.name == "affinity":
        assert not group.kill(frozenset({process.pid}))
        return
    start()
    for _ in range(4):
        # a busy machine may need longer to freeze all than a kill waits
        until(lambda: group.kill(frozenset({process.pid})), "all were frozen and killed")
        # one look may miss what forks away under it
        until(lambda: not any(process.beneath() for _ in range(30)), "they are dead")
        assert process.run(["echo", "alive"]) == (0, "alive\n")
        start()
    until(group.kill, "all were killed")
    until(lambda: process.popen.poll() is not None, "the process is dead too")


def test_a_frozen_group_uses_no_cpu_time(
        enforcer: Enforcer, group: Group, process: Process) -> None:
    process.start(python(BUSY))
    if enforcer.name == "affinity":
        assert not group.freeze(True)
        return
    until(lambda: (group.usage().cpu_ns or 0) > 10_000_000, "it runs")
    until(lambda: group.freeze(True), "it is frozen")
    before, began = group.usage().cpu_ns or 0, time.monotonic_ns()
    time.sleep(0.3)
    spent = (group.usage().cpu_ns or 0) - before  # CPU time of before may be counted late
    assert spent * 20 < time.monotonic_ns() - began
    before += spent
    assert group.freeze(False)
    until(lambda: group.usage().cpu_ns != before, "it runs again")


def test_a_removed_group_leaves_neither_cgroup_nor_process(enforcer: Enforcer,
        processes: Callable[[], Process]) -> None:
    if enforcer.name == "affinity":
        pytest.skip("affinity makes nothing")
    before, process, other = own_cgroups(), processes(), processes()
    group = enter(enforcer, 7, process)
    assert len(own_cgroups()) > len(before)
    process.start(python(TREE))
    until(lambda: len(process.tasks()) == TREE_TASKS, "the tree stands")
    left = process.beneath()
    process.popen.kill()
    process.popen.wait()
    group.remove()
    until(lambda: not any(map(cgroupfs.started, left)), "what it left is dead")
    again = enter(enforcer, 8, other)
    again.remove()  # it is alive: it dies with its group
    until(lambda: other.popen.poll() is not None, "the other process is dead")
    enter(enforcer, 9, processes())  # whoever came late is gone by now
    assert not [f for f in own_cgroups() if f.endswith(("/7", "/8"))]
    enforcer.close()
    assert own_cgroups() <= before


def test_many_groups_hold_no_descriptors(enforcer: Enforcer, process: Process) -> None:
    before = len(os.listdir("/proc/self/fd"))
    groups = [enter(enforcer, n, process) for n in range(60)]
    for group in groups:
        group.limit(100, 100)
        group.bind(CORES[:1], 1)
        group.usage()
    assert len(os.listdir("/proc/self/fd")) == before
    for group in groups[:-1]:
        group.remove()
    assert process.run(["echo", "alive"]) == (0, "alive\n")


def test_two_enforcers_do_not_affect_each_other(
        enforcer: Enforcer, processes: Callable[[], Process]) -> None:
    other = enforce.probe(True, enforcer.name)
    mine, its = processes(), processes()
    group, theirs = enter(enforcer, 1, mine), enter(other, 1, its)
    assert group.bind(CORES[:1], 1) and theirs.bind(CORES[-1:], 1)
    other.close()
    if enforcer.name != "affinity":
        until(lambda: its.popen.poll() is not None, "a closed enforcer's process is dead")
    assert mine.run(python(SEEN)) == (0, f"{list(CORES[:1])}\n")
    assert group.bind(CORES[-1:], 1)
    assert mine.run(python(SEEN)) == (0, f"{list(CORES[-1:])}\n")


# ---- workers that die, and choosing ----

WORKER = """
import subprocess, sys, time
sys.path.insert(0, {repo!r})
from tangram_hpc.resources.cpu import cgroupfs, enforce
enforcer = enforce.probe(True, {name!r})
process = subprocess.Popen(["sleep", "100"])
group = enforcer.group(1, process.pid)
for path in group.joins:
    cgroupfs.write(path, str(process.pid))
group.bind({cores!r}, 1)
print(process.pid, flush=True)
time.sleep(100)
"""


def worker(name: str) -> tuple[subprocess.Popen[str], int]:
    text = WORKER.format(repo=str(REPO), name=name, cores=CORES[:1])
    one = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert one.stdout is not None
    return one, int(one.stdout.readline())


def test_groups_of_a_killed_worker_are_swept_and_those_of_a_live_one_kept(
        enforcer: Enforcer) -> None:
    dead, orphan = worker(enforcer.name)
    alive, child = worker(enforcer.name)
    makes = enforcer.name != "affinity"
    try:
        enforce.sweep()
        assert cgroupfs.started(orphan) and bool(groups_of(dead)) == makes
        dead.kill()
        until(lambda: not cgroupfs.started(dead.pid), "the worker is dead")
        swept = enforce.sweep()  # while it is a zombie still
        if makes:
            assert all(f"tangram-{alive.pid}-" not in folder for folder in swept)
            until(lambda: not cgroupfs.started(orphan), "its process is dead")
        assert not groups_of(dead) and bool(groups_of(alive)) == makes
        assert cgroupfs.started(alive.pid) and cgroupfs.started(child)
        assert os.sched_getaffinity(child) == set(CORES[:1])
    finally:
        for pid in (alive.pid, child, orphan):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for one in (dead, alive):
            one.wait()
            assert one.stdout is not None
            one.stdout.close()
        until(lambda: not cgroupfs.started(child), "the other's process is dead")
        enforce.sweep()
    assert not groups_of(alive)


def groups_of(one: subprocess.Popen[str]) -> set[str]:
    return {path for path in cgroups_of(one.pid) if not path.endswith(cgroupfs.LEAF)}


def test_the_best_working_enforcement_is_chosen() -> None:
    best = enforce.probe(True)
    try:
        for name in enforce.NAMES[: enforce.NAMES.index(best.name)]:
            try:
                better = enforce.probe(True, name)
            except InvalidInput as error:
                assert name in str(error) and "\n" not in str(error)
            else:
                better.close()
                assert len(better.limits) < len(best.limits)
    finally:
        best.close()


def test_units_that_are_no_cores_are_only_counted() -> None:
    with pytest.raises(InvalidInput, match="enforcement: affinity needs units that are cores"):
        enforce.probe(False, "affinity")
    with pytest.raises(InvalidInput, match="enforcement: 'best' is none of"):
        enforce.probe(True, "best")
    one = enforce.probe(False, "counted")
    assert one.name == "counted" and one.limits == frozenset()
    assert not one.group(1, os.getpid()).bind((), 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_plain_user_gets_enforcement_that_needs_no_root() -> None:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        told = []
        for name in ("", "cgroup1", "cgroup2"):
            try:
                one = enforce.probe(True, name)
                told.append(f"{one.name} {sorted(one.limits)}")
            except InvalidInput as error:
                told.append(str(error))
        os.write(theirs, json.dumps(told).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        first, *refusals = json.load(file)
    os.waitpid(pid, 0)
    assert first == "affinity []"
    for name, text in zip(("cgroup1", "cgroup2"), refusals, strict=True):
        assert text.startswith(f"enforcement: {name} does not work here (")
