"""The system call filter: its instructions, what it refuses, and the programs that run under it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.jail_rig import Place, filtered, place, refused  # noqa: F401

from tangram_hpc.sandbox import bpf, kernel
from tangram_hpc.sandbox.isolation import landlock, seccomp
from tangram_hpc.sandbox.syscalls import BOTH, NEWEST, NUMBERS

needs_filter = pytest.mark.skipif(not seccomp.available(), reason="no system call filters here")
needs_both = pytest.mark.skipif(not seccomp.available() or landlock.abi() < 6,
                                reason="no filters here, or no Landlock that holds signals")
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, ERRNO, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
ASKS = -1  # the call waits for who holds the filter's listener
DONE = -2  # success is reported, and no call is made
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
           "aarch64": "/usr/include/asm-generic/unistd.h"}


def number(machine: str, name: str) -> int:
    return BOTH[name] if name in BOTH else NUMBERS[name][list(ARCH).index(machine)]


def answer(code: bytes, arch: int, nr: int, *args: int) -> int:
    """Runs a filter as the kernel would: an errno, 0 for allowed, ASKS for notified, or DONE."""
    value = struct.unpack_from("<I", code, 8 * path(code, arch, nr, *args)[-1] + 4)[0]
    assert value in (ALLOWED, NOTIFY) or value & 0xFFFF0000 == ERRNO
    return {ALLOWED: 0, NOTIFY: ASKS, ERRNO: DONE}.get(value, value & 0xFFFF)


def path(code: bytes, arch: int, nr: int, *args: int) -> list[int]:
    """The instructions that a filter takes, in order; the last one returns."""
    data = struct.pack("<iIQ6Q", nr, arch, 0, *(a & (1 << 64) - 1 for a in (*args, *[0] * 6)[:6]))
    at = held = 0
    taken: list[int] = []
    for _ in range(len(code)):
        taken.append(at)
        op, yes, no, value = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if op == 0x20:
            held = struct.unpack_from("<I", data, value)[0]
        elif op == 0x54:
            held &= value
        elif op == 0x05:
            at += value
        elif op in (0x15, 0x35, 0x45):
            true = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[op]
            at += yes if true else no
        else:
            assert op == 0x06, f"instruction {op:#x}"
            return taken
    raise AssertionError("no end")


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize("namespaced", [False, True])
@pytest.mark.parametrize("network", [False, True])
def test_each_system_call_number_gets_its_intended_answer(
        machine: str, namespaced: bool, network: bool) -> None:
    code = seccomp.program(machine, namespaced=namespaced, network=network, gid=7)
    named = {number(machine, n): n for n in [*BOTH, *NUMBERS] if number(machine, n) >= 0}
    for nr in range(NEWEST + 1):
        if nr not in named:
            assert answer(code, ARCH[machine], nr) == 0, nr
    never = {n: answer(code, ARCH[machine], number(machine, n)) for n in (
        "mount", "umount2", "pivot_root", "setns", "bpf", "reboot", "chroot", "acct", "keyctl",
        "open_tree_attr", "io_uring_setup", "sched_setaffinity", "add_key", "swapon", "syslog")}
    assert set(never.values()) == {errno.EPERM}, never
    alone = {n: answer(code, ARCH[machine], number(machine, n)) for n in (
        "ptrace", "process_vm_readv", "setxattr", "shmget", "mq_open", "inotify_add_watch")}
    assert all(bool(got) != namespaced for got in alone.values()), alone
    prctl = number(machine, "prctl")
    assert [answer(code, ARCH[machine], prctl, *args) for args in ((4, 0), (4, 1), (4, 2), (15, 0))
            ] == [DONE, 0, DONE, 0]  # nobody becomes not dumpable
    for nr in (NEWEST + 1, 0x3FFFFFFF, 0x40000000, 0x40000000 + 165, -1):
        assert answer(code, ARCH[machine], nr) == errno.ENOSYS
    for arch in (0x40000003, 0x40000028, 0):
        assert answer(code, arch, 0) == errno.ENOSYS
    assert len(code) // 8 < 300  # the kernel takes 4096


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize("namespaced", [False, True])
def test_frequent_system_calls_are_decided_within_few_instructions(
        machine: str, namespaced: bool) -> None:
    """The kernel remembers no answer of calls that are looked at with their arguments."""
    code = seccomp.program(machine, namespaced=namespaced, network=False, gid=7,
                           password=None if namespaced else (1, 2))
    for name, *args in [("openat", 0, 0, os.O_RDONLY), ("ioctl", 0, 0x5413), ("fcntl", 0, 1)]:
        assert len(path(code, ARCH[machine], number(machine, name), *args)) <= 12, name
    assert max(len(path(code, ARCH[machine], nr)) for nr in range(NEWEST + 1)) <= 16


@pytest.mark.parametrize("machine", ARCH)
def test_only_the_exact_password_passes_the_filter(machine: str) -> None:
    password = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    code = seccomp.program(machine, namespaced=False, network=False, gid=7, password=password)

    def ask(mode: int, *last: int) -> int:
        return answer(code, ARCH[machine], number(machine, "fchmodat"), 0, 0, mode, 0, *last)

    assert ask(0o755, *password) == 0
    assert ask(0o4755, *password) == errno.EPERM
    assert ask(0o755, *reversed(password)) == ask(0o755) == ASKS
    for bit in range(128):
        near = (password[0] ^ (1 << bit if bit < 64 else 0),
                password[1] ^ (1 << bit - 64 if bit >= 64 else 0))
        assert ask(0o755, *near) == ASKS, bit
    other = seccomp.program(machine, namespaced=False, network=False, gid=7, password=(1, 2))
    assert len(other) == len(code) and answer(
        other, ARCH[machine], number(machine, "fchmodat"), 0, 0, 0o755, 0, *password) == ASKS


@pytest.mark.parametrize("machine", ARCH)
@pytest.mark.parametrize("trusted", [False, True])
def test_in_an_image_changes_of_users_and_owners_succeed_without_effect(
        machine: str, trusted: bool) -> None:
    code = seccomp.program(machine, namespaced=True, network=False, gid=0, rootlike=True,
                           trusted=trusted)

    def ask(name: str, *args: int) -> int:
        return answer(code, ARCH[machine], number(machine, name), *args)

    for name in ("setuid", "setgid", "setresuid", "setresgid", "setreuid", "setregid", "setgroups",
                 "setfsuid", "setfsgid", "capset", "fchown", "fchownat"):
        assert ask(name, 7, 7, 7) == DONE, name
    for kind, want in ((0o020644, DONE), (0o060644, DONE), (0o010644, 0), (0o140644, 0)):
        assert ask("mknodat", 0, 0, kind) == want, oct(kind)
    for name, at in (("fchmod", 1), ("fchmodat", 2), ("mkdirat", 2)):
        assert ask(name, *[0] * at, 0o6755) == 0, name
    for name in ("mount", "setns", "chroot", "bpf", "keyctl", "io_uring_setup", "pivot_root",
                 "move_mount", "open_tree", "init_module", "open_by_handle_at"):
        assert ask(name) == (0 if trusted else errno.EPERM), name
    assert ask("unshare", 0x10000000) == (0 if trusted else errno.EPERM)
    plain = seccomp.program(machine, namespaced=True, network=False, gid=0)
    assert answer(plain, ARCH[machine], number(machine, "setuid"), 7) == 0
    assert answer(plain, ARCH[machine], number(machine, "fchmod"), 0, 0o6755) == errno.EPERM


def test_comparisons_work_beyond_the_reach_of_one_jump() -> None:
    """No filter of ours is so long that a conditional jump, of 255 at most, does not reach."""
    masks = [bpf.masked(0xFF, bpf.equal(7, bpf.answer(ALLOWED), bpf.answer(ERRNO | nr)))
             for nr in range(400)]
    ranges = [(nr, bpf.low(nr % 3, mask)) for nr, mask in enumerate(masks)]
    code, holes = bpf.assemble(bpf.load(bpf.NUMBER_AT, bpf.binary_search(ranges, often={9})))
    assert len(code) // 8 > 1600 and holes == []
    for nr in range(400):
        args = [7 if at == nr % 3 else nr for at in range(3)]
        assert answer(code, 0, nr, *args) == 0
        assert answer(code, 0, nr, 8, 8, 8) == (nr or DONE)


def test_equal_decisions_share_their_instructions() -> None:
    yes, no = bpf.answer(ALLOWED), bpf.answer(ERRNO | 1)
    both = [bpf.low(0, bpf.equal(5, bpf.low(at, bpf.any_bit(6, no, yes)), yes)) for at in (1, 1)]
    one, _ = bpf.assemble(both[0])
    two, _ = bpf.assemble(bpf.load(bpf.NUMBER_AT, bpf.binary_search([(0, both[0]), (9, both[1])])))
    assert (len(one) // 8, len(two) // 8) == (6, 8)


@pytest.mark.parametrize("machine", ARCH)
def test_arguments_are_compared_as_the_kernel_reads_them(machine: str) -> None:
    code = seccomp.program(machine, namespaced=False, network=False, gid=7, uid=6)

    def ask(name: str, *args: int) -> int:
        return answer(code, ARCH[machine], number(machine, name), *args)

    high = 1 << 32
    assert ask("ioctl", 0, 0x5412) == ask("ioctl", 0, high | 0x5412) == errno.EPERM
    assert ask("ioctl", 0, 0x541C) == errno.EPERM
    assert ask("ioctl", 0, 0x5413) == 0
    assert ask("fcntl", 0, 1024) == ask("fcntl", 0, high | 1040) == errno.EPERM  # leases
    assert ask("fcntl", 0, 1025) == ask("fcntl", 0, 4) == 0
    assert ask("kill", -1) == ask("kill", 0xFFFFFFFF) == errno.EPERM
    assert ask("kill", 5) == ask("kill", 0) == ask("kill", -5) == 0
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask("clone", flag | 17) == ask("unshare", flag) == errno.EPERM
    assert ask("unshare", 0x80) == errno.EPERM
    assert ask("unshare", 0x400) == 0  # CLONE_FILES
    assert ask("clone", 0x3D0F00) == ask("clone", 0x01200011) == ask("clone", 0x4111) == 0
    assert ask("clone3") == errno.ENOSYS
    assert ask("prlimit64", 0, 7, 1) == ask("prlimit64", 9, 7, 0) == 0
    assert ask("prlimit64", 9, 7, 1) == ask("prlimit64", 9, 7, high) == errno.EPERM
    assert ask("prlimit64", high, 7, 1) == 0  # pid 0, as the kernel takes it
    assert ask("setpriority", 0, 0, 5) == 0
    assert ask("setpriority", 0, 9, 5) == ask("setpriority", 2, 0, 5) == errno.EPERM
    for name, before in {"chown": 1, "lchown": 1, "fchown": 1, "fchownat": 2}.items():
        if number(machine, name) >= 0:
            asked = {(user, group): ask(name, *[0] * before, user, group)
                     for user in (6, -1, 0, 7) for group in (7, -1, 0, 6)}
            kept = {owner for owner, got in asked.items() if got == DONE}
            assert kept == {(6, 7), (6, -1), (-1, 7), (-1, -1)}, name
            assert {asked[owner] for owner in asked if owner not in kept} == {errno.EPERM}, name
    stream, datagram, packet, nonblocking = 1, 2, 5, 0x80800
    assert ask("socketpair", 1, stream | nonblocking) == ask("socketpair", 1, packet) == 0
    assert ask("socketpair", 1, datagram) == ask("socketpair", 1, 3) == errno.EACCES
    assert ask("socketpair", 2, stream) == errno.EACCES


@pytest.mark.parametrize(("namespaced", "network", "open_", "shut"), [
    (False, False, (), (1, 2, 10, 16)), (False, True, (2, 10, 16), (1,)),
    (True, False, (1, 2, 10, 16), ()), (True, True, (1, 2, 10, 16), ())])
def test_only_the_listed_socket_families_are_allowed(
        namespaced: bool, network: bool, open_: tuple[int, ...], shut: tuple[int, ...]) -> None:
    for machine, arch in ARCH.items():
        code = seccomp.program(machine, namespaced=namespaced, network=network, gid=7)
        got = {family: answer(code, arch, number(machine, "socket"), family, 1)
               for family in range(46)}
        assert {f for f, code_ in got.items() if code_ == 0} == set(open_)
        assert {f for f, code_ in got.items() if code_ == errno.EACCES} == set(shut)
        rest = [got[f] for f in got if f not in (*open_, *shut)]
        assert set(rest) == {errno.EAFNOSUPPORT}


@pytest.mark.parametrize("machine", ARCH)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", header.read_text()))
    for name in [*NUMBERS, *BOTH]:
        ours, theirs = number(machine, name), found.get(name)
        if theirs is not None:
            assert ours == int(theirs), name
        else:
            assert ours < 0 or ours > 450, f"{name} is not in the header"


# ---- for real ----


def call(name: str, *args: int) -> int:
    return refused(lambda: kernel.call(number(kernel.machine(), name), *args))


@needs_filter
@pytest.mark.attack("code", "processes")
def test_the_kernel_refuses_attacks_on_another_process(place: Place) -> None:  # noqa: F811
    victim = place.victim.pid

    def attacks() -> dict[str, int]:
        tries: dict[str, Callable[[], object]] = {
            "setaffinity": lambda: os.sched_setaffinity(victim, os.sched_getaffinity(0)),
            "own affinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
            "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
            "limits": lambda: resource.prlimit(victim, resource.RLIMIT_CORE, (0, 0)),
            "scheduler": lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)),
        }
        found = {name: refused(work) for name, work in tries.items()}
        found["ptrace"] = call("ptrace", 16, victim)
        found["userns"] = call("unshare", 0x10000000)
        return found

    told = place.run(attacks, filtered)
    assert set(told.values()) == {errno.EPERM}, told
    free = place.run(attacks)
    assert set(free.values()) <= {0, errno.EPERM}
    for name in ("own affinity", "setaffinity", "priority", "limits", "scheduler", "ptrace"):
        assert free[name] == 0, f"{name} is refused without the filter too"


@needs_filter
@pytest.mark.attack("code", "keys")
def test_the_kernel_refuses_mounts_namespaces_and_keyrings(place: Place) -> None:  # noqa: F811
    def work() -> list[int]:
        return [call("mount"), call("chroot"), call("setns", 0, 0), call("io_uring_setup", 1),
                call("bpf"), call("userfaultfd"), call("perf_event_open"), call("keyctl"),
                call("unshare", 0x10020000), call("clone", 0x10000000 | 17)]

    assert place.run(work, filtered) == [errno.EPERM] * 10
    assert place.run(lambda: [call("clone3"), call("setxattr"), call("shmget")], filtered) == [
        errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOSYS]


@needs_filter
@pytest.mark.attack("code", "files")
def test_files_outside_keep_their_group_and_their_set_id_bits(place: Place) -> None:  # noqa: F811
    """A change of the owner to oneself clears these bits; it is answered and not made."""
    path = place.outside / "program"
    path.touch()
    os.chown(path, place.uid, os.getegid())  # the group of root, or else one's own
    path.chmod(0o6755)
    before = path.stat()

    def work() -> list[int]:
        uid, gid = os.geteuid(), os.getegid()
        fd = os.open(path, os.O_RDONLY)
        found = []
        for group in (-1, gid):
            for user in (-1, uid):
                found += [refused(lambda u=user, g=group: os.chown(path, u, g)),
                          refused(lambda u=user, g=group: os.lchown(path, u, g)),
                          refused(lambda u=user, g=group: os.fchown(fd, u, g))]
        return [*found, refused(lambda: os.fchown(fd, -1, gid + 1)),
                refused(lambda: os.chown(path, uid + 1, -1))]

    assert place.run(work, filtered) == [0] * 12 + [errno.EPERM] * 2
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid)


@needs_filter
@pytest.mark.attack("code", "processes")
def test_kill_minus_1_is_refused(place: Place) -> None:  # noqa: F811
    def work() -> int:
        return refused(lambda: os.kill(-1, 0))  # 0: a filter that fails harms nobody

    assert place.run(work, filtered) == errno.EPERM
    assert place.victim.poll() is None


@needs_both
def test_kill_minus_1_from_a_shell_is_refused(place: Place) -> None:  # noqa: F811
    code, output, _ = place.program(["/bin/sh", "-c", "kill -9 -1; echo $?"])
    assert (code, output) == (0, "1\n")
    assert place.victim.poll() is None


@needs_filter
@pytest.mark.attack("code", "network")
def test_unix_sockets_outside_cannot_be_reached(place: Place) -> None:  # noqa: F811
    path = str(place.outside / "socket")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        server.bind(path)
        server.listen()
        log.bind(path + "-log")
        for name in (path, path + "-log"):
            os.chmod(name, 0o777)

        def work() -> list[int]:
            def connect() -> None:
                socket.socket(socket.AF_UNIX).connect(path)

            def send() -> None:
                socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", path + "-log")

            return [refused(connect), refused(send)]

        assert place.run(work) == [0, 0]
        assert place.run(work, filtered) == [errno.EACCES, errno.EACCES]
        assert place.run(work, lambda: seccomp.restrict(namespaced=False, network=True)) == [
            errno.EACCES, errno.EACCES]

        def reuse() -> list[int]:
            one, other = socket.socketpair()
            other.close()
            sent = [refused(lambda: one.sendto(b"x", path)), refused(lambda: one.connect(path))]
            return [*sent, refused(one.listen)]

        assert 0 not in place.run(reuse, filtered)
        assert 0 not in place.run(reuse, lambda: seccomp.restrict(namespaced=False, network=True))


@needs_filter
@pytest.mark.attack("code", "network")
def test_inet_sockets_are_refused_without_network(place: Place) -> None:  # noqa: F811
    def work() -> list[int]:
        return [refused(lambda: socket.socket(socket.AF_INET)),
                refused(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)),
                refused(lambda: socket.create_server(("127.0.0.1", 0)))]

    assert place.run(work, filtered) == [errno.EACCES] * 3
    assert place.run(work, lambda: seccomp.restrict(namespaced=False, network=True)) == [0] * 3
    assert place.run(work, lambda: seccomp.restrict(namespaced=True, network=False)) == [0] * 3


@needs_both
@pytest.mark.attack("code", "files")
def test_names_of_files_outside_cannot_be_watched(place: Place) -> None:  # noqa: F811
    def watched(folder: Path) -> str:
        """What a watch of the folder tells of a file that is made in it."""
        libc = ctypes.CDLL(None, use_errno=True)
        watch = libc.inotify_init1(os.O_NONBLOCK)
        if watch < 0 or libc.inotify_add_watch(watch, os.fsencode(folder), 0x100) < 0:
            return errno.errorcode[ctypes.get_errno()]
        (folder / "name").touch()
        return os.read(watch, 999)[16:].strip(b"\0").decode()

    assert place.run(lambda: watched(place.outside)) == "name"
    assert place.run(lambda: watched(place.outside), place.landlocked, filtered) == "ENOSYS"


@needs_filter
def test_a_process_changes_its_own_limits_and_niceness(place: Place) -> None:  # noqa: F811
    def work() -> list[object]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os.setpriority(os.PRIO_PROCESS, 0, os.nice(1) + 1)  # the tests may be nice already
        pid = os.posix_spawn("/bin/sleep", ["sleep", "99"], {}, setsid=True)
        os.kill(pid, signal.SIGKILL)
        return [resource.prlimit(place.victim.pid, resource.RLIMIT_NOFILE) != (64, 64),
                os.WTERMSIG(os.wait4(pid, 0)[1])]

    assert place.run(work, filtered) == [True, signal.SIGKILL]


# ---- programs, under Landlock and the filter ----

MULTI = """
import multiprocessing as mp, concurrent.futures as cf
def work(q): q.put(mp.current_process().name)
if __name__ == "__main__":
    mp.set_start_method("fork")  # the default before Python 3.14; forkserver needs Unix sockets
    with mp.Pool(2) as pool: assert pool.map(abs, range(-9, 0)) == list(range(9, 0, -1))
    q = mp.Queue(); p = mp.Process(target=work, args=(q,)); p.start(); q.get(); p.join()
    a, b = mp.Pipe(); a.send(1); assert b.recv() == 1
    for way in ("fork", "spawn"):
        with cf.ProcessPoolExecutor(2, mp.get_context(way)) as pool:
            assert list(pool.map(abs, [-1, -2])) == [1, 2]
    print("done")
"""
THREADS = """
import threading, subprocess, asyncio, os, tempfile
t = [threading.Thread(target=subprocess.run, args=(["true"],)) for _ in range(4)]
[x.start() for x in t]; [x.join() for x in t]
async def main():
    p = await asyncio.create_subprocess_exec("echo", "hi", stdout=subprocess.PIPE)
    assert (await p.communicate())[0] == b"hi\\n"
asyncio.run(main())
tempfile.TemporaryFile().write(b"x")
open(os.devnull, "w").write("x"); os.urandom(3); open("/proc/cpuinfo").read(9); os.cpu_count()
print("done")
"""
SHELL = """set -e
echo a > a; cp -a a b; mv b c; ln -s a l; chmod 755 c; ls -la >/dev/null; mkdir -p x/y; touch x/y/z
find . | sort | head -2 | grep -q .; (sleep 9 & kill $!); ulimit -n 99; nice -n 3 true
tar cf t.tar a x; tar xf t.tar; rm -rf x; mkfifo f; (echo hi > f &)
read r < f; nproc > /dev/null; ps > /dev/null
[ "$r" = hi ] && echo done
"""
GIT = """set -e
git init -q r; cd r; git config user.name a; git config user.email a@b; echo x > x; git add x
git commit -qm x; git checkout -qb y; git clone -q . ../copy; git gc -q; git log --oneline | wc -l
"""


def needs(program: str) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")


@needs_both
@pytest.mark.parametrize(("program", "script", "expected"), [
    ("sh", SHELL, "done"), ("git", GIT, "1"),
    ("gcc", "set -e; echo 'int main(){return 7;}' > m.c; gcc -O1 -o m m.c; ./m || echo $?", "7"),
    ("make", "printf 'all: a b c\\na b c:\\n\\t@$(MAKE) -f /dev/null -v >/dev/null; echo $@\\n'"
     " > Makefile; make -j3 | sort | tr '\\n' ' '", "a b c"),
    ("node", "node -e 'require(\"child_process\").execFileSync(\"true\");"
     "new (require(\"worker_threads\").Worker)(\"1\", {eval: true});"
     "setTimeout(() => console.log(\"done\"), 9)'", "done"),
    ("java", "java -version 2>&1 | grep -c version", "1"),
], ids=lambda text: text.split()[0] if len(text) < 6 else "")
def test_common_programs_run_under_the_filter(
        place: Place, program: str, script: str, expected: str) -> None:  # noqa: F811
    needs(program)
    code, output, complaints = place.program(["/bin/sh", "-c", script])
    assert (code, output.strip()) == (0, expected), complaints


@needs_both
@pytest.mark.parametrize("script", [MULTI, THREADS], ids=["multiprocessing", "threads"])
def test_python_runs_under_the_filter(place: Place, script: str) -> None:  # noqa: F811
    (place.home / "it.py").write_text(script)
    code, output, complaints = place.program([place.python, "it.py"])
    assert (code, output) == (0, "done\n"), complaints


@needs_both
@pytest.mark.parametrize("workers", ["0", "2"])
def test_pytest_runs_under_the_filter(place: Place, workers: str) -> None:  # noqa: F811
    (place.home / "test_it.py").write_text("def test_a(tmp_path): (tmp_path / 'x').touch()\n"
                                           "def test_b(): assert 0\n")
    if not os.path.realpath(place.python).endswith(f"python3.{sys.version_info.minor}"):
        pytest.skip(f"{place.python} is another Python than the one that pytest is installed for")
    argv = [place.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    if workers != "0":
        pytest.importorskip("xdist")
        argv += ["-n", workers]
    code, output, complaints = place.program(argv)
    assert code == 1 and "1 failed, 1 passed" in output, json.dumps([output, complaints])
