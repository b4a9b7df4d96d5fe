"""Code in a sandbox changes the mode of its own files only, and gives none a set-uid bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.cluster_parts import processes_of, start_worker
from helpers.executor_rig import Rig, as_an_ordinary_user, until
from helpers.hostile_rig import WAYS, Arena, Duel, reason_to_skip
from helpers.hostile_rig import arena as new_arena
from helpers.ordinary_user import ordinary_user

from tangram_hpc.ports import SandboxSettings
from tangram_hpc.resources import process_tree
from tangram_hpc.sandbox import kernel
from tangram_hpc.sandbox.manager import backends
from tangram_hpc.storage.rundir import make_scratch, sweep_scratch

# The raw system calls, so that no C library stands between. argv: a path outside, and a machine.
CALLS = """
X86 = sys.argv[2] == "x86_64"
AT = -100
NUMBERS = ({"chmod": 90, "fchmod": 91, "fchmodat": 268, "open": 2, "creat": 85, "mknod": 133,
            "mkdir": 83, "openat": 257, "mknodat": 259, "mkdirat": 258, "fsetxattr": 190}
           if X86 else {"fchmod": 52, "fchmodat": 53, "openat": 56, "mknodat": 33, "mkdirat": 34,
                        "fsetxattr": 7})
NUMBERS |= {"fchmodat2": 452, "openat2": 437}
libc.syscall.restype = ctypes.c_long
def raw(name, *args):
    words = [ctypes.c_char_p(a) if isinstance(a, bytes) else
             ctypes.c_void_p(a) if isinstance(a, int) else a for a in args]
    if libc.syscall(ctypes.c_long(NUMBERS[name]), *words) == -1:
        return ctypes.get_errno()
    return 0
"""
SET_ID = CALLS + """
open("f", "w").close()
own = os.open("f", os.O_RDWR)
flags = os.O_CREAT | os.O_RDWR
how = ctypes.create_string_buffer(flags.to_bytes(8, "little") + (0o4755).to_bytes(8, "little")
                                  + bytes(8), 24)
found = {}
for bits in (0o4755, 0o2755, 0o6711):
    tries = {"fchmod": (own, bits), "fchmodat": (AT, b"f", bits), "fchmodat2": (AT, b"f", bits, 0),
             "openat": (AT, b"new", flags, bits), "mknodat": (AT, b"new", 0o100000 | bits, 0),
             "mkdirat": (AT, b"newdir", bits)}
    if X86:
        tries |= {"chmod": (b"f", bits), "open": (b"new", flags, bits), "creat": (b"new", bits),
                  "mknod": (b"new", 0o100000 | bits, 0), "mkdir": (b"newdir", bits)}
    for name, args in tries.items():
        found[f"{name} {bits:o}"] = raw(name, *args)
        for made in ("new", "newdir"):
            if os.path.lexists(made):
                found[f"{name} {bits:o} made it"] = -1
                os.rmdir(made) if made == "newdir" else os.unlink(made)
print(json.dumps([found, raw("openat2", AT, b"new", ctypes.cast(how, ctypes.c_void_p), 24),
                  raw("openat", AT, b"f", os.O_RDONLY, 0o4755), oct(os.stat("f").st_mode)]))
"""


# `bwrap`, in which nothing of the host can be named, and Python's way take as long again
SOME = [pytest.param(*way.values, id=way.id, marks=[] if way.id == "process-plain" else
                     [pytest.mark.long]) for way in WAYS]


@pytest.fixture(scope="module", params=SOME)
def arena(request: pytest.FixtureRequest,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    backend, way = request.param
    with new_arena(backend, tmp_path_factory.mktemp("arena"), way=way) as made:
        yield made


@pytest.mark.attack("code", "files")
def test_no_system_call_sets_a_set_id_bit(arena: Arena) -> None:
    with arena.duel() as duel:
        found, openat2, reads, mode = said(duel, SET_ID, "-", kernel.machine())
        assert set(found.values()) == {errno.EPERM}, found
        assert len(found) >= 18
        assert openat2 == errno.ENOSYS
        assert reads == 0, "without O_CREAT the mode of open means nothing"
        assert mode == "0o100600"
        duel.goes_on()


OUTSIDE = CALLS + """
path = os.fsencode(sys.argv[1])
os.symlink(path, "link")
found = {}
names = {"path": path, "link": b"link", "up": os.path.relpath(path)}
for how, name in names.items():
    found[f"fchmodat {how}"] = raw("fchmodat", AT, name, 0o777)
    found[f"fchmodat2 {how}"] = raw("fchmodat2", AT, name, 0o777, 0)
    if X86:
        found[f"chmod {how}"] = raw("chmod", name, 0o777)
for flags in (os.O_RDONLY, os.O_PATH):
    try:
        fd = os.open(path, flags)
    except OSError as error:
        continue
    found[f"fchmod {flags}"] = raw("fchmod", fd, 0o777)
    found[f"by descriptor {flags}"] = raw("fchmodat", AT, b"/proc/self/fd/%d" % fd, 0o777)
    found[f"by its number {flags}"] = raw("fchmodat", AT, b"/proc/%d/fd/%d" % (os.getpid(), fd),
                                          0o777)
    found[f"empty path {flags}"] = raw("fchmodat2", fd, b"", 0o777, 0x1000)
    access_list = bytes.fromhex("02000000" "01000600ffffffff" "04000400ffffffff" "20000600ffffffff")
    found[f"list {flags}"] = raw("fsetxattr", fd, b"system.posix_acl_access",
                                 access_list, len(access_list), 0)
for number in (b"1", b"self", b"thread-self"):
    found[f"root of {number}"] = raw("fchmodat", AT, b"/proc/" + number + b"/root" + path, 0o777)
os.unlink("link")
print(json.dumps(found))
"""


@pytest.mark.attack("code", "files", "settings")
def test_files_outside_keep_their_mode(arena: Arena) -> None:
    """A secret, its folder, the scratch folders, and programs that may be read: the user's own."""
    with arena.duel() as duel:
        home = duel.home(duel.attacker)
        targets = [arena.outside / "secret", arena.outside, arena.outside.parent, home,
                   home.parent, home.parent.parent, home / "cpus", Path(sys.executable).resolve(),
                   Path(sys.prefix), Path.home()]
        before = [stat.S_IMODE(path.stat().st_mode) for path in targets]
        try:
            for path in targets:
                found = said(duel, OUTSIDE, path, kernel.machine())
                assert 0 not in found.values(), (path, found)
            assert before == [stat.S_IMODE(path.stat().st_mode) for path in targets]
        finally:
            for path, mode in zip(targets, before, strict=True):
                if stat.S_IMODE(path.stat().st_mode) != mode:
                    os.chmod(path, mode)
        duel.goes_on()


@pytest.mark.attack("session", "sessions")
def test_another_sessions_files_keep_their_mode(arena: Arena) -> None:
    with arena.duel() as duel:
        home = duel.home(duel.neighbour)
        for path in (home, home / "home", home / "home" / "data", home / "tmp"):
            found = said(duel, OUTSIDE, path, kernel.machine())
            assert 0 not in found.values(), (path, found)
        assert duel.rig.file("data", session=duel.neighbour)[1].data
        duel.goes_on()


EXCHANGE = """
import threading
inside, outside, until = "way", sys.argv[1], time.monotonic() + 1.5
def flip():
    while time.monotonic() < until:
        for target in ("mine", outside):
            os.symlink(target, "next")
            os.rename("next", inside)
open("mine", "w").close()
os.symlink("mine", inside)
other = threading.Thread(target=flip)
other.start()
while time.monotonic() < until:
    try:
        os.chmod(inside, 0o777)
    except OSError:
        pass
other.join()
tell()
"""


@pytest.mark.attack("code", "files")
def test_a_path_exchanged_during_chmod_leads_to_no_file_outside(arena: Arena) -> None:
    secret = arena.outside / "secret"
    secret.chmod(0o600)
    with arena.duel() as duel:
        assert duel.successes(EXCHANGE, secret) == []
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        duel.shell("rm -f way mine next")
        duel.goes_on()


OWN = """
import subprocess
def mode(path):
    return oct(os.stat(path).st_mode & 0o7777)
os.makedirs("d/e")
open("f", "w").close()
os.symlink("f", "l")
here = os.open("d", os.O_RDONLY)
tmp = os.environ["TMPDIR"] + "/t"
open(tmp, "w").close()
told = []
for work, path in (
        (lambda: os.chmod("f", 0o755), "f"), (lambda: os.chmod(os.path.abspath("f"), 0o1711), "f"),
        (lambda: os.chmod("l", 0o444), "f"), (lambda: os.chmod("../f", 0o640, dir_fd=here), "f"),
        (lambda: os.fchmod(os.open("f", os.O_RDONLY), 0o751), "f"),
        (lambda: os.chmod("/proc/self/fd/%d" % here, 0o711), "d"),
        (lambda: os.chmod("/dev/fd/%d" % here, 0o755), "d"),
        (lambda: os.chmod(tmp, 0o604), tmp), (lambda: os.chmod(".", 0o755), ".")):
    work()
    told.append(mode(path))
gone = os.open("gone", os.O_RDWR | os.O_CREAT)
os.unlink("gone")
os.fchmod(gone, 0o640)
told.append(oct(os.fstat(gone).st_mode & 0o7777))
refusals = []
for work in (lambda: os.chmod("none", 0o700), lambda: os.fchmod(99, 0o700),
             lambda: os.chmod("", 0o700), lambda: os.chmod("f/x", 0o700)):
    try:
        work()
    except OSError as error:
        refusals.append(error.errno)
print(json.dumps([told, refusals]))
"""


def test_a_sessions_own_files_get_the_modes_that_it_asks_for(arena: Arena) -> None:
    with arena.duel() as duel:
        told, refusals = said(duel, OWN)
        assert told == ["0o755", "0o1711", "0o444", "0o640", "0o751", "0o711", "0o755", "0o604",
                        "0o755", "0o640"]
        assert refusals == [errno.ENOENT, errno.EBADF, errno.ENOENT, errno.ENOTDIR]
        duel.goes_on()


TOOLS = """set -e
mkdir -p src/deep; echo 'echo works' > src/run; chmod 700 src/run; chmod 750 src/deep
tar cf all.tar src; rm -rf src; tar xpf all.tar
[ "$(stat -c %a src/run)$(stat -c %a src/deep)" = 700750 ]
cp -a src copy; install -m 755 src/run tool; ./tool; [ "$(stat -c %a tool)" = 755 ]
printf 'all:\\n\\tinstall -m 711 src/run made\\n' > Makefile; make -s
[ "$(stat -c %a made)" = 711 ]
"""
GIT = """set -e
git init -q r; cd r; git config user.name a; git config user.email a@b; echo 'echo hi' > x
chmod +x x; git add x; git commit -qm x; git clone -q . ../other; [ -x ../other/x ]; git gc -q
../other/x
"""


@pytest.mark.parametrize(("program", "script", "last"), [("make", TOOLS, "works"),
                                                        ("git", GIT, "hi")])
def test_programs_that_set_modes_work(arena: Arena, program: str, script: str, last: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    with arena.duel() as duel:
        outcome, back = duel.shell(script, timeout_ns=60_000_000_000)
        assert (outcome.exit_code, back.stdout.decode().split()[-1:]) == (0, [last]), back
        duel.goes_on()


@pytest.mark.attack("code", "disk")
def test_folders_that_a_session_made_unreadable_are_measured_and_removed(arena: Arena) -> None:
    """Their init opens them for a look from behind the filter that its commands are under."""
    with arena.duel() as duel:
        duel.shell("mkdir -p a/b; echo x > a/b/f; chmod 0 a/b; chmod 0300 a")
        outcome, _ = duel.shell("sleep 0.8")  # longer than the first look at its disk
        assert outcome.exit_code == 0
        _, back = duel.shell("stat -c %a a; chmod 700 a; stat -c %a a/b")
        assert back.stdout.split() == [b"300", b"0"]
        duel.goes_on()


def test_folders_that_a_command_made_unreadable_are_emptied_for_the_next(tmp_path: Path) -> None:
    if why := reason_to_skip("process"):
        pytest.skip(why)
    rig = Rig(tmp_path, trusted=False, isolation="process", warm=1)
    for _ in range(2):
        outcome, back = rig.shell("ls -A; mkdir -p a/b; chmod 0 a/b; chmod 0 a")
        assert (outcome.exit_code, back.stdout) == (0, b""), (outcome, back)
    rig.close()


def test_many_processes_change_modes_at_once(arena: Arena) -> None:
    source = """
open("f", "w").close()
for n in range(8):
    if os.fork() == 0:
        for i in range(50):
            os.chmod("f", 0o600 + i % 8)
        os._exit(0)
assert not any(os.wait()[1] for n in range(8))
tell()
"""
    with arena.duel() as duel:
        assert duel.successes(source) == []
        duel.goes_on()


@pytest.mark.attack("code", "processes")
def test_a_process_killed_during_chmod_does_not_stop_other_processes(arena: Arena) -> None:
    source = """
open("f", "w").close()
pids = []
for n in range(60):
    pids.append(os.fork())
    if pids[-1] == 0:
        while True:
            os.chmod("f", 0o600)
    if n % 4 == 3:
        time.sleep(0.02)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        pids = []
os.chmod("f", 0o640)
tell()
"""
    with arena.duel() as duel:
        assert duel.successes(source) == []
        duel.goes_on()


def said(duel: Duel, source: str, *args: object) -> list | dict:
    outcome, back = duel.python(source, *args, timeout_ns=60_000_000_000)
    assert outcome.exit_code == 0, (outcome, back)
    return json.loads(back.stdout)


def test_process_is_offered_to_trusted_code_only_where_ptrace_scope_is_above_1(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Yama's ptrace_scope 2 on the keeper may not read a path in a caller's memory."""
    if why := reason_to_skip("process"):
        pytest.skip(why)
    for scope, offered in (("1", True), ("2", False), ("3", False)):
        (tmp_path / "scope").write_text(f"{scope}\n")
        monkeypatch.setattr(backends, "_YAMA", str(tmp_path / "scope"), raising=False)
        found = as_an_ordinary_user(SandboxSettings())
        assert ("process" in found.untrusted) is offered
        assert ("ptrace_scope is above 1" in found.why_not.get("process", "")) is not offered
        assert "process" in found.trusted


# ---- names and scratch folders ----


def test_a_set_gid_bit_above_the_scratch_folder_is_not_inherited(tmp_path: Path) -> None:
    """Else each folder made in a sandbox has the bit, and what copies its mode is refused."""
    if why := reason_to_skip("process"):
        pytest.skip(why)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o2700)
    rig = Rig(tmp_path, trusted=False, isolation="process")
    outcome, back = rig.shell("mkdir d && cp -a d e && chmod 755 e && stat -c %a d e")
    rig.close()
    assert (outcome.exit_code, back.stdout) == (0, b"700\n755\n"), (outcome, back)


@pytest.mark.attack("session", "sessions")
def test_the_folders_of_sandboxes_have_random_names(arena: Arena) -> None:
    with arena.duel() as duel:
        names = [duel.home(n) for n in (duel.attacker, duel.neighbour)]
        for home in names:
            for part in (home.name, home.parent.name.removeprefix("worker-")):
                assert len(part) == 32 and set(part) <= set("0123456789abcdef"), home
        duel.goes_on()


@pytest.mark.attack("code", "keys")
@pytest.mark.attack("user", "keys")
def test_no_command_line_of_a_worker_names_the_access_file_or_a_scratch_folder(
        arena: Arena, tmp_path: Path) -> None:
    from tangram_hpc import LocalCluster

    words = [process_tree.read(f"/proc/{pid}/cmdline") or b"" for pid in arena.rig.processes()]
    assert words and not any(str(arena.rig.scratch).encode() in word for word in words), words
    with LocalCluster(cpus=1, home=tmp_path / "home") as cluster:
        def lines() -> list[bytes]:
            return [process_tree.read(f"/proc/{pid}/cmdline") or b""
                    for child in processes_of(cluster)
                    for pid in (child.pid, *process_tree.descendants(child.pid))]

        assert not any(b"access.json" in line for line in lines()), lines()
        start_worker(cluster, "named")
        until(lambda: cluster.ask("info")["nodes"] == 2, "a worker that was told by an argument")
        assert not any(b"access.json" in line for line in lines()), lines()


@pytest.mark.skipif(os.getuid() == 0, reason="root needs no mode to use a folder")
@pytest.mark.attack("code", "broker")
def test_a_worker_makes_its_scratch_folder_accessible_again(tmp_path: Path) -> None:
    opens_what_was_closed(tmp_path)


def opens_what_was_closed(base: Path) -> None:
    root = base / "root"
    dead = root / "tangram-worker-dead"
    dead.mkdir(parents=True)
    (dead / ".alive").touch()
    dead.chmod(0)
    root.chmod(0)
    made = make_scratch({}, str(root), "worker")
    assert made.parent == root and stat.S_IMODE(root.stat().st_mode) == 0o700
    assert not dead.exists(), "what was left behind cannot hide behind its mode"
    assert sweep_scratch(root) == []


def test_an_ordinary_users_worker_makes_its_scratch_folder_accessible_again(tmp_path: Path) -> None:
    """Root could use it whatever its mode; the worker of a user could not start."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    base = Path(f"/tmp/tangram-modes-{os.getpid()}")
    base.mkdir()
    os.chown(base, 65534, 65534)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            opens_what_was_closed(base)
            status = 0
        finally:
            os._exit(status)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        shutil.rmtree(base)


REMOVE = """
import stat, sys
from pathlib import Path
from helpers.executor_rig import Rig
from tangram_hpc.domain.action import Kind
from tangram_hpc.protocol.payload import FileCall
folder = Path(sys.argv[1])
inner = folder / "outside" / "inner"
inner.mkdir(parents=True)
(inner / "f").write_text("kept")
inner.chmod(0o555)
rig = Rig(folder / "rig", trusted=False, isolation="process")
rig.open()
assert rig.shell(f"ln -s {inner.parent} way", session=1)[0].exit_code == 0
back = rig.end(rig.begin(FileCall("way/inner", op="remove"), Kind.FILE, session=1, cores=()))[1]
rig.close()
print(back.kind, oct(stat.S_IMODE(inner.stat().st_mode)), (inner / "f").read_text())
"""


@pytest.mark.attack("code", "files")
def test_a_removal_through_a_link_is_refused_and_changes_no_mode_outside() -> None:
    """Landlock refuses to an ordinary user's init what it may not remove, but no change of mode."""
    if why := reason_to_skip("process"):
        pytest.skip(why)
    with ordinary_user() as user:
        done = user.run("-c", REMOVE, str(user.folder))
        assert done.stdout.split() == ["EACCES", "0o555", "kept"], (
            done.stdout, done.stderr[-3000:])
