"""Hostile code: whatever it does to processes, memory, disk, output and the network is contained,
told rightly, disturbs no neighbour, and leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator

import pytest
from helpers.executor_rig import alive, until
from helpers.hostile_rig import (
    CONTAINER,
    DISK_MIB,
    OUTPUT_MAX,
    PIDS,
    WAYS,
    Arena,
    program,
    sysv_key,
)
from helpers.hostile_rig import arena as new_arena
from helpers.own_address import own_address

from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall
from tangram_hpc.resources import process_tree

# where what is enforced matters: as the kernel does it, and as an unprivileged user has it
EVERYWHERE = pytest.mark.parametrize(
    "arena", [pytest.param((*way.values[0], e), id=f"{way.id}-{e or 'best'}", marks=way.marks)
              for way in WAYS for e in ("", "affinity")], indirect=True)


# what only an unprivileged user's worker has to look for: a cgroup counts it by itself
LOOKED_FOR = pytest.mark.parametrize(
    "arena", [pytest.param((*way.values[0], "affinity"), id=f"{way.id}-affinity", marks=way.marks)
              for way in WAYS], indirect=True)


@pytest.fixture(scope="module", params=WAYS)
def arena(request: pytest.FixtureRequest,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    backend, way, enforcement = (*request.param, "")[:3]
    with new_arena(backend, tmp_path_factory.mktemp("arena"), enforcement, way) as made:
        if enforcement == "" and made.rig.executor.enforcement == "counted":
            pytest.skip("nothing is enforced here: too few cores")
        yield made


# ---- processes ----

BOMB = """
for generation in range(9):
    try:
        os.fork()
    except OSError:
        os._exit(7)
time.sleep(20)
"""


@EVERYWHERE
@pytest.mark.attack("code", "processes", "broker")
def test_a_fork_bomb_is_stopped_by_the_process_limit(arena: Arena) -> None:
    with arena.duel(mem_mib=2000, background="end") as duel:
        outcome, _ = duel.python("first = os.getpid()\n" + BOMB, timeout_ns=1_500_000_000)
        if outcome.state is ActionState.FAILED:
            assert "pids" in outcome.reason or outcome.exit_code == 7, outcome
        else:  # some forks were refused, the first process had its own
            assert outcome.state is ActionState.TIMEOUT, outcome
        duel.goes_on()


@EVERYWHERE
@pytest.mark.attack("code", "processes")
def test_processes_over_the_limit_are_refused_or_killed(arena: Arena) -> None:
    """Whether the kernel refuses them or a look finds them."""
    source = """
had = 0
for n in range(300):
    try:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    except OSError:
        break
    had += 1
print(had, flush=True)
time.sleep(20 if had == 300 else 0.5)
"""
    with arena.duel(mem_mib=2000, background="end") as duel:
        outcome, back = duel.python(source, timeout_ns=15_000_000_000)
        if outcome.state is ActionState.FAILED:
            assert outcome.reason == f"pids: more than {PIDS} processes at once"
        else:
            assert outcome.state is ActionState.COMPLETED and int(back.stdout) <= PIDS, outcome
        duel.goes_on()


THREADS = """
import threading
for n in range(6000):
    try:
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    except RuntimeError:
        break
    if n % 50 == 0:
        time.sleep(0.01)
print(threading.active_count(), flush=True)
time.sleep(0.5)
os._exit(0)
"""


@LOOKED_FOR
@pytest.mark.attack("code", "processes")
def test_threads_over_the_limit_are_refused_or_killed(arena: Arena) -> None:
    """A cgroup counts them as processes; a check without one allows eight for each process."""
    with arena.duel(mem_mib=2000, background="end") as duel:
        outcome, back = duel.python(THREADS, timeout_ns=15_000_000_000)
        if outcome.state is ActionState.FAILED:
            assert outcome.reason == f"pids: more than {8 * PIDS} threads at once"
        else:
            assert outcome.state is ActionState.COMPLETED and int(back.stdout) <= PIDS, outcome
        duel.goes_on()


FLIGHT = """
until, n = time.monotonic() + 30, 0
while time.monotonic() < until:
    n += 1
    if os.fork():
        os._exit(0)
    os.setsid()
    if n % 50 == 0:
        open("hops", "w").write(str(n))
open("free", "w")
"""


@EVERYWHERE
@pytest.mark.parametrize("first", ["waits", "leaves"])
@pytest.mark.attack("code", "processes", "cpu")
def test_a_process_that_forks_and_exits_for_ever_is_killed(arena: Arena, first: str) -> None:
    stay = "if os.fork():\n    time.sleep(40)\n" if first == "waits" else ""
    with arena.duel(background="end") as duel:
        # who leaves ends by itself, however long its Python takes to start
        limit_ns = 400_000_000 if first == "waits" else 20_000_000_000
        outcome, _ = duel.python(stay + FLIGHT, timeout_ns=limit_ns)
        want = ActionState.TIMEOUT if first == "waits" else ActionState.COMPLETED
        assert outcome.state is want, outcome
        assert duel.shell("test -e free")[0].exit_code == 1
        duel.goes_on()


DAEMON = """
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        n, until = 0, time.monotonic() + 60
        beat = os.open("beat", os.O_WRONLY | os.O_CREAT, 0o600)
        while time.monotonic() < until:
            n += 1
            os.pwrite(beat, b"%020d" % n, 0)
    os._exit(0)
while not os.path.exists("beat"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("background", ["end", "stop"])
@pytest.mark.attack("code", "processes", "cpu")
def test_a_daemon_that_outlives_its_parent_is_frozen_or_killed(
        arena: Arena, background: str) -> None:
    with arena.duel(background=background) as duel:
        outcome, _ = duel.python(DAEMON)
        assert outcome.state is ActionState.COMPLETED
        beats = [duel.rig.file("beat", session=duel.attacker)[1].data for _ in range(2)]
        assert beats[0] == beats[1], "it runs though no action does"
        again, back = duel.shell("cat beat; sleep 0.3; echo; cat beat")
        assert again.state is ActionState.COMPLETED
        before, after = back.stdout.split()
        assert (before == after) == (background == "end")
        duel.goes_on()


@pytest.mark.attack("code", "processes")
def test_a_process_that_ignores_all_signals_is_killed_at_its_timeout(arena: Arena) -> None:
    with arena.duel() as duel:
        source = """
for number in set(signal.valid_signals()) - {9, 19}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except OSError:
        pass
print("ready", flush=True)
os.fork()
os.setpgid(0, 0) if os.getpid() != os.getsid(0) else 0
time.sleep(40)
"""
        for seconds in (1, 5, 25):  # longer where Python itself did not start in time
            outcome, back = duel.python(source, timeout_ns=seconds * 10**9)
            if back.stdout == b"ready\n":
                break
        assert back.stdout == b"ready\n"
        assert outcome.state is ActionState.TIMEOUT and outcome.signal == signal.SIGKILL
        assert f"{seconds} s" in outcome.reason
        duel.goes_on()


@pytest.mark.attack("session", "sessions", "processes")
def test_kill_minus_1_reaches_only_the_sessions_own_processes(arena: Arena) -> None:
    with arena.duel() as duel:
        outcome, _ = duel.shell("kill -9 -1; sleep 0.1; echo here")
        assert outcome.state in (ActionState.COMPLETED, ActionState.FAILED)
        source = """
for number in os.listdir("/proc"):
    # the first of a pid namespace hears nothing from inside, whatever kill(2) says; what it runs
    # to wait for in a container is started again
    def end():
        with open(f"/proc/{number}/stat") as file:
            parent = file.read().rpartition(")")[2].split()[1]
        if sys.argv[1] == "True" and parent == "1":
            raise OSError
        os.kill(int(number), signal.SIGKILL)
    if number.isdigit() and int(number) not in (os.getpid(), os.getppid() or 1):
        attempt(number, end)
tell()
"""
        assert duel.successes(source, arena.backend == CONTAINER) == []
        duel.goes_on()
    assert arena.rig.executor.fork_server_pid in arena.rig.processes()


@pytest.mark.attack("code", "sessions")
def test_killing_its_parent_costs_only_its_own_action(arena: Arena) -> None:
    with arena.duel() as duel:
        duel.rig.file("kept", b"kept", session=duel.attacker)
        outcome, _ = duel.shell("kill -9 $PPID; kill -9 1; sleep 0.2; exit 3")
        assert outcome.state is ActionState.FAILED, outcome
        # no parent to be seen: then that was its own group
        assert outcome.signal == 9 or "init ended (signal 9" in outcome.reason, outcome
        assert duel.rig.file("kept", session=duel.attacker)[1].data == b"kept"
        duel.goes_on()


# ---- memory ----

GREED = """
pieces = []
for n in range(int(sys.argv[1])):
    pieces.append(bytearray(os.urandom(1 << 12)) * 2048)
    time.sleep(0.004)
time.sleep(5)
"""
MANY = """
for n in range(40):
    if os.fork() == 0:
        hoard = bytearray(b"x") * (16 << 20)
        time.sleep(10)
        os._exit(0)
    time.sleep(0.01)
assert not any(os.wait()[1] for n in range(40))
"""
GROUPLESS = """
for n in range(8):
    if os.fork() == 0:
        os.setsid()
        hoard = bytearray(b"x") * (64 << 20)
        time.sleep(10)
        os._exit(0)
assert not any(os.wait()[1] for n in range(8))
"""


@EVERYWHERE
@pytest.mark.parametrize("source", [GREED, MANY, GROUPLESS], ids=["one", "many", "scattered"])
@pytest.mark.attack("code", "memory")
@pytest.mark.attack("session", "memory")
def test_an_action_over_its_memory_limit_ends_out_of_memory(arena: Arena, source: str) -> None:
    with arena.duel(mem_mib=128, background="end") as duel:
        outcome, _ = duel.python(source, 120, timeout_ns=20_000_000_000)
        assert outcome.state is ActionState.OUT_OF_MEMORY, outcome
        assert outcome.reason.startswith("mem: ")
        duel.goes_on()
        assert duel.shell("exit 5")[0].state is ActionState.FAILED  # not told so again


TABLES = """
import mmap
held = []
for n in range(24):
    held.append(mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | 0x4000))
    held[-1].madvise(15)  # no huge pages: each page that is touched has a table of its own
    for at in range(0, 4 << 30, 2 << 20):
        held[-1][at]
    time.sleep(0.02)
time.sleep(0.5)
"""


@LOOKED_FOR
@pytest.mark.attack("code", "memory")
def test_page_tables_count_as_memory(arena: Arena) -> None:
    """Reading one page in each 2 MiB costs no page, but a page table."""
    with arena.duel(mem_mib=64, background="end") as duel:
        outcome, _ = duel.python(TABLES, timeout_ns=20_000_000_000)
        assert outcome.state is ActionState.OUT_OF_MEMORY, outcome
        duel.goes_on()


UNOWNED = """
def fill(fd):
    for n in range(600):
        os.write(fd, b"x" * (1 << 20))
def memory_file():
    fill(os.memfd_create("hoard"))
def segment():
    libc.shmat.restype = ctypes.c_void_p
    libc.shmat.argtypes = [ctypes.c_int] + [ctypes.c_void_p] * 2
    libc.shmdt.argtypes = [ctypes.c_void_p]
    for n in range(20):
        number = libc.shmget(0, 32 << 20, 0o1600)
        if number == -1:
            raise OSError(ctypes.get_errno(), "shmget")
        place = libc.shmat(number, None, 0)
        ctypes.memset(place, 1, 32 << 20)
        libc.shmdt(place)
def named():
    fill(os.open("/dev/shm/hoard", os.O_WRONLY | os.O_CREAT, 0o600))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt(sys.argv[1], globals()[sys.argv[1]])
time.sleep(0.3)
tell()
"""


@EVERYWHERE
@pytest.mark.parametrize("how", ["memory_file", "segment", "named"])
@pytest.mark.attack("code", "memory")
def test_memory_without_an_owning_process_is_counted_or_refused(arena: Arena, how: str) -> None:
    """It is either counted or cannot be had."""
    with arena.duel(mem_mib=128, disk_mib=1000) as duel:
        outcome, back = duel.python(UNOWNED, how, timeout_ns=20_000_000_000)
        if outcome.state is ActionState.COMPLETED:
            assert json.loads(back.stdout) == []
        else:
            assert outcome.state is ActionState.OUT_OF_MEMORY, (outcome, back)
        duel.goes_on()


# ---- disk and output ----

HIDDEN = """
libc.prctl(4, 0, 0, 0, 0)
held = []
for n in range(100):
    held.append(open('f', 'wb', buffering=0)); os.unlink('f')
    held[-1].write(b'x' * (1 << 20))
time.sleep(20)
"""


@LOOKED_FOR
@pytest.mark.attack("code", "disk")
def test_a_process_cannot_hide_the_files_that_it_holds_open(arena: Arena) -> None:
    with arena.duel() as duel:
        outcome, _ = duel.python(HIDDEN, timeout_ns=15_000_000_000)
        assert outcome.state is ActionState.FAILED and "disk:" in outcome.reason, outcome
        duel.shell("sleep 0.7")
        duel.goes_on()


@pytest.mark.parametrize(("source", "said"), [
    ("with open('big', 'wb') as f:\n    for n in range(200): f.write(b'x' * (1 << 20))",
     "SIGXFSZ"),
    ("for n in range(4000):\n    open(f'{n}', 'wb').write(b'x' * (1 << 16))\ntime.sleep(20)",
     "disk:"),
    ("top = os.getcwd()\nfor n in range(400):\n    os.mkdir('d'); os.chdir('d')\n"
     "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(20)", "disk:"),
    ("for n in range(30):\n    os.mkdir('d' * 250); os.chdir('d' * 250)\n"
     "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(20)", "disk:"),
    ("os.mkdir('shut', 0o300); os.chdir('shut')\n"
     "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(20)", "disk:"),
    ("held = []\nfor n in range(100):\n"
     "    held.append(open('f', 'wb', buffering=0)); os.unlink('f')\n"
     "    held[-1].write(b'x' * (1 << 20))\ntime.sleep(20)", "disk:"),
    ("os.chdir(os.environ['TMPDIR'])\n"
     "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(20)", "disk:"),
], ids=["one", "many", "deep", "long", "closed", "unlinked", "tmp"])
@pytest.mark.attack("code", "disk")
@pytest.mark.attack("session", "disk")
def test_an_action_over_its_disk_limit_fails(arena: Arena, source: str, said: str) -> None:
    with arena.duel() as duel:
        outcome, _ = duel.python(f"signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n{source}",
                                 timeout_ns=15_000_000_000)
        assert outcome.state is ActionState.FAILED and said in outcome.reason, outcome
        refused, _ = duel.rig.file("more", b"x", session=duel.attacker)
        if said == "disk:" and "unlink" not in source:
            assert refused.state is ActionState.FAILED and "disk:" in refused.reason
        # longer than the first looks at its disk, which is still too full
        outcome, _ = duel.shell("sleep 0.7; chmod -R u+rwx . $TMPDIR; rm -rf * $TMPDIR/*")
        assert outcome.state is ActionState.COMPLETED, outcome
        duel.goes_on()
    assert DISK_MIB < 100


@pytest.mark.parametrize(("size", "stream"), [(1_000_000_000, False), (100_000_000, True)])
@pytest.mark.attack("code", "memory", "broker")
def test_a_gigabyte_of_output_is_cut_and_fills_no_memory(
        arena: Arena, size: int, stream: bool) -> None:
    with arena.duel() as duel:
        process = duel.rig.session(duel.attacker).process
        assert process is not None
        before = peak_kib(process.pid)
        lease = duel.rig.begin(ExecCall(shell=f"head -c {size} /dev/zero; echo e >&2; exit 4",
                                        stream=stream), Kind.EXEC, session=duel.attacker)
        outcome, back, _ = duel.rig.end(lease)
        assert (outcome.state, outcome.exit_code) == (ActionState.FAILED, 4), outcome
        pieces = duel.rig.pieces.get(lease, []) if stream else [(1, back.stdout), (2, back.stderr)]
        sizes = {n: sum(len(data) for s, data in pieces if s == n) for n in (1, 2)}
        assert sizes == {1: OUTPUT_MAX, 2: 2} and back.cut == (size - OUTPUT_MAX, 0)
        assert peak_kib(process.pid) - before < 4000, "its init holds what it must not keep"
        duel.goes_on()


def peak_kib(pid: int) -> int:
    """The most memory that a process ever had."""
    text = (process_tree.read(f"/proc/{pid}/status") or b"").decode()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))


@pytest.mark.attack("code", "results", "broker")
def test_protocol_frames_in_its_output_are_only_output(arena: Arena) -> None:
    source = """
from struct import pack
for fd in range(3, 1024):
    attempt(fd, lambda: os.write(fd, pack("<I", 20) + b"x" * 20))
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        for fd in (3, 4, 5, 6, 7):
            attempt(f"{name}:{fd}", lambda: os.open(f"/proc/{name}/fd/{fd}", os.O_RDWR))
sys.stderr.write(chr(0) * 100)
tell()
"""
    with arena.duel() as duel:
        assert duel.successes(source) == []
        duel.goes_on()


# ---- the network and what is shared by name ----

@pytest.mark.attack("code", "network")
def test_a_listening_socket_is_not_reached_from_outside(arena: Arena) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    source = """
try:
    s = socket.socket()
    s.bind(("0.0.0.0", int(sys.argv[1])))
    s.listen()
except OSError:
    pass
open("up", "w")
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    with arena.duel() as duel:
        lease = duel.rig.begin(ExecCall(argv=program(source, port)), Kind.EXEC,
                               session=duel.attacker)
        until(lambda: duel.rig.file("up", session=duel.attacker)[0].state
              is ActionState.COMPLETED, "it to be up")
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", port))
        duel.rig.file("go", b"", session=duel.attacker)
        assert duel.rig.end(lease)[0].state is ActionState.COMPLETED
        duel.goes_on()


CALLS = """
tcp, udp, path, abstract = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], "\\0" + sys.argv[4]
def send(family, kind, where):
    with socket.socket(family, kind) as s:
        s.connect(where)
        s.send(b"hello")
for kind, port in ((socket.SOCK_STREAM, tcp), (socket.SOCK_DGRAM, udp)):
    for host in ("127.0.0.1", sys.argv[5]):
        try:
            send(socket.AF_INET, kind, (host, port))
        except OSError:
            pass
for where in (path, abstract):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        attempt(where, lambda: send(socket.AF_UNIX, kind, where))
try:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    attempt("pair", lambda: pair[0].sendto(b"hello", abstract))
    attempt("pair", lambda: pair[0].sendto(b"hello", path))
except OSError:
    pass
tell()
"""


@pytest.mark.attack("code", "network")
def test_no_connection_leads_out(arena: Arena) -> None:
    """What listens outside hears nothing; a network of its own may swallow what it likes."""
    listeners = [socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
    path, abstract = arena.outside / "socket", f"name-{arena.token}"
    for where in (str(path), "\0" + abstract):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            if kind == socket.SOCK_DGRAM or where[0] == "\0":
                listeners.append(socket.socket(socket.AF_UNIX, kind))
                listeners[-1].bind(where)
    for listener in listeners:
        if listener.family == socket.AF_INET:
            listener.bind(("0.0.0.0", 0))
        if listener.type == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
    tcp, udp = (listener.getsockname()[1] for listener in listeners[:2])
    try:
        with arena.duel() as duel:
            assert duel.successes(CALLS, tcp, udp, path, abstract, own_address("127.0.0.1")) == []
            duel.goes_on()
        for listener in listeners:
            with pytest.raises(BlockingIOError):
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(9)
    finally:
        for listener in listeners:
            listener.close()
        path.unlink()


LITTER = """
token, key = sys.argv[1], int(sys.argv[2])
def leave(path):
    open(path, "w").write("x" * 100)
for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run", "/dev/mqueue"):
    attempt(folder, lambda: leave(f"{folder}/left-{token}"))
for name, args in (("shmget", (key, 4096, 0o1666)), ("semget", (key, 1, 0o1666)),
                   ("msgget", (key, 0o1666))):
    attempt(name, lambda: call(name, *args))
attempt("mq_open", lambda: call("mq_open", f"/left-{token}".encode(), 0o102, 0o600, None))
"""


@pytest.mark.attack("code", "memory", "files")
@pytest.mark.attack("session", "memory")
def test_nothing_is_left_in_tmp_shared_memory_or_sysv_ipc(arena: Arena) -> None:
    with arena.duel() as duel:
        outcome, _ = duel.python(LITTER, arena.token, sysv_key(arena.token))
        assert outcome.state is ActionState.COMPLETED, outcome
        assert arena.photo().shared == set() and arena.photo().sysv == set()
        seen, back = arena.rig.shell("ls /tmp /dev/shm /var/tmp 2>/dev/null; true",
                                     session=arena.open())
        assert seen.state is ActionState.COMPLETED and arena.token not in back.stdout.decode()
        arena.close(max(arena.rig.up))


NAMESPACES = """
for name in ("USER", "NS", "PID", "NET", "IPC", "UTS", "CGROUP"):
    flag = {"USER": 0x10000000, "NS": 0x20000, "PID": 0x20000000, "NET": 0x40000000,
            "IPC": 0x8000000, "UTS": 0x4000000, "CGROUP": 0x2000000}[name]
    attempt(name, lambda: call("unshare", flag))
for what in (b"tmpfs", b"proc", b"sysfs", b"cgroup2", b"cgroup", b"bpf"):
    attempt(what, lambda: call("mount", what, b".", what, 0, None))
attempt("bind", lambda: call("mount", b"/etc", b".", None, 4096, None))
attempt("again", lambda: call("mount", None, b"/usr", None, 32, None))
attempt("umount", lambda: call("umount2", b"/proc", 2))
attempt("chroot", lambda: os.chroot("."))
attempt("host name", lambda: socket.sethostname("owned"))
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
for folder, below, names in os.walk("/sys/fs/cgroup"):
    attempt(folder, lambda: os.mkdir(f"{folder}/mine"))
    for name in names:
        if name in ("cgroup.procs", "tasks", "memory.max", "memory.limit_in_bytes",
                    "cpuset.cpus", "pids.max", "cgroup.kill", "cgroup.subtree_control"):
            attempt(f"{folder}/{name}", lambda: write(f"{folder}/{name}", "1"))
for path in ("sys/kernel/core_pattern", "sys/kernel/shmmax", "sys/vm/drop_caches", "sysrq-trigger",
             "sys/net/ipv4/ip_forward", "irq/default_smp_affinity"):
    attempt(path, lambda: os.open(f"/proc/{path}", os.O_WRONLY))
tell()
"""


@pytest.mark.attack("code", "processes", "files")
def test_no_namespaces_mounts_or_cgroups_are_made(arena: Arena) -> None:
    with arena.duel() as duel:
        assert duel.successes(NAMESPACES) == []
        duel.goes_on()


NEIGHBOUR = """
victim = int(sys.argv[1])
class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(64)
near, far = Piece(ctypes.addressof(room), 64), Piece(0x400000, 64)
attempt("attach", lambda: call("ptrace", 16, victim, 0, 0))
attempt("seize", lambda: call("ptrace", 0x4206, victim, 0, 0))
for name in ("process_vm_readv", "process_vm_writev"):
    attempt(name, lambda: call(name, victim, ctypes.byref(near), 1, ctypes.byref(far), 1, 0))
for number in (0, signal.SIGCONT, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    attempt(f"kill {number}", lambda: os.kill(victim, number))
    attempt(f"killpg {number}", lambda: os.killpg(victim, number))
if hasattr(os, "pidfd_open"):
    attempt("pidfd", lambda: signal.pidfd_send_signal(os.pidfd_open(victim), signal.SIGKILL))
attempt("affinity", lambda: os.sched_setaffinity(victim, {0}))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, victim, 19))
if sys.argv[2] == "process":  # with a pid namespace all of a user are those in it
    attempt("nice all", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
attempt("batch", lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)))
import resource
attempt("limit", lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)))
for name in ("mem", "environ", "maps", "auxv", "stack", "syscall", "root/etc/passwd", "fd/0"):
    attempt(name, lambda: os.read(os.open(f"/proc/{victim}/{name}", os.O_RDONLY), 64))
for name in ("cwd", "root", "fd/1", "exe"):
    attempt(name, lambda: os.readlink(f"/proc/{victim}/{name}"))
for name in ("oom_score_adj", "coredump_filter", "clear_refs", "comm"):
    attempt(name, lambda: os.open(f"/proc/{victim}/{name}", os.O_WRONLY))
tell()
"""


@pytest.mark.attack("session", "processes", "sessions")
@pytest.mark.attack("code", "processes")
def test_another_sessions_process_cannot_be_signalled_traced_or_changed(arena: Arena) -> None:
    with arena.duel() as duel:
        victim = duel.victim()
        about = (os.sched_getaffinity(victim), os.getpriority(os.PRIO_PROCESS, victim),
                 os.sched_getscheduler(victim))
        assert duel.successes(NEIGHBOUR, victim, arena.backend) == []
        assert alive(victim) and process_tree.state(victim) != "T"
        assert about == (os.sched_getaffinity(victim), os.getpriority(os.PRIO_PROCESS, victim),
                         os.sched_getscheduler(victim))
        duel.goes_on()


STOPS = """
keeper, times, pause = os.getppid(), int(sys.argv[1]), float(sys.argv[2])
for _ in range(times):
    if keeper:  # 0 where it is in another pid namespace
        attempt("stop", lambda: os.kill(keeper, signal.SIGSTOP))
    time.sleep(pause)
print("stopped", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("times", "pause"), [(1, 0), (5, 0.3), (100_000, 0.0001)])
@pytest.mark.attack("code", "processes", "memory")
def test_an_action_that_stops_its_init_keeps_all_limits(
        arena: Arena, times: int, pause: float) -> None:
    """That goes on; when it is stopped again and again it ends, and the action with it."""
    with arena.duel() as duel:
        outcome, _ = duel.python(STOPS, times, pause, timeout_ns=2_000_000_000)
        assert outcome.state is ActionState.TIMEOUT or (
            times > 20 and outcome.state is ActionState.FAILED
            and outcome.reason.startswith("the sandbox's init ended")), outcome
        duel.goes_on()


@pytest.mark.attack("code", "sessions")
def test_a_session_goes_on_after_its_init_was_stopped_between_actions(arena: Arena) -> None:
    with arena.duel(background="share") as duel:
        line = shlex.join(program(STOPS, 1, 0))
        duel.shell(f"(sleep 0.2; exec {line}) >/dev/null 2>&1 &")
        time.sleep(0.6)
        duel.goes_on()


LEASES = """
import fcntl
signal.signal(signal.SIGIO, signal.SIG_IGN)
open("leased", "w").close()
file = os.open("leased", os.O_RDWR)
for name, number in (("lease", 1024), ("delegation", 1040)):
    attempt(name, lambda: fcntl.fcntl(file, number, fcntl.F_WRLCK))
tell()
"""


@pytest.mark.attack("code", "sessions")
def test_file_leases_are_refused(arena: Arena) -> None:
    with arena.duel() as duel:
        assert duel.successes(LEASES) == []
        duel.goes_on()


@pytest.mark.attack("code", "results")
@pytest.mark.attack("session", "results")
def test_a_runner_cannot_report_the_end_of_another_lease(arena: Arena) -> None:
    """A runner is its user's own, but what it says of another's lease is not heard."""
    def lie(lease: int) -> str:
        import os

        from tangram_hpc.domain.outcome import Outcome
        from tangram_hpc.domain.states import ActionState
        from tangram_hpc.protocol.process_frames import Ended, frame
        os.write(3, frame(Ended(lease, Outcome(ActionState.COMPLETED), b"", True)))
        return "said"

    assert arena.rig.value(lie, 999_999) == "said"
    with arena.duel() as duel:  # which asserts that the neighbour goes on
        assert arena.rig.value(lie, duel.lease) == "said"
        assert arena.rig.value(os.getpid) in arena.rig.processes()
