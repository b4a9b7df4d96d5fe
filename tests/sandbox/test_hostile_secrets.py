"""Hostile code against secrets: what is its user's, the broker's, Slurm's or another session's can
be read by no path, and no path leads out of a session on the way up or down.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.cluster_parts import processes_of
from helpers.hostile_rig import BACKENDS, WAYS, Arena, UsersCluster, program, reason_to_skip
from helpers.hostile_rig import arena as new_arena

import tangram_hpc
from tangram_hpc import LocalCluster
from tangram_hpc.domain.action import Kind
from tangram_hpc.domain.states import ActionState
from tangram_hpc.protocol.payload import ExecCall, FileCall, FileList
from tangram_hpc.resources import process_tree
from tangram_hpc.sandbox.files import scratch


@pytest.fixture(scope="module", params=WAYS)
def arena(request: pytest.FixtureRequest,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    backend, way = request.param
    with new_arena(backend, tmp_path_factory.mktemp("arena"), way=way) as made:
        yield made


# argv: the token in two halves, so that it is not found in the searcher; then paths
SEARCH = """
token = (sys.argv[1] + sys.argv[2]).encode()
def look(path):
    with open(path, "rb") as file:
        return token in file.read(1 << 20)
def found(path):
    try:
        if look(path):
            done.append(path)
    except OSError:
        pass
for name, value in os.environ.items():
    if token.decode() in value or name.startswith(("SLURM", "MUNGE", "PMI", "TANGRAM_A")):
        done.append(name)
paths = sys.argv[3:]
for path in paths:
    found(path)
    attempt("list " + path, lambda: os.listdir(path))
"""
# only plain files: to read another's pipe would take from it
PROCESSES = SEARCH + """
import stat
for number in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "maps", "mounts", "task/%s/environ" % number):
        found(f"/proc/{number}/{name}")
    if int(number) in (os.getpid(), os.getppid()):
        continue
    for link in ("root", "cwd"):
        for path in paths:
            found(f"/proc/{number}/{link}/{path.lstrip('/')}")
        for name in ("data", "secret", "../secret", "../home/data"):
            found(f"/proc/{number}/{link}/{name}")
    for fd in range(64):
        try:
            if stat.S_ISREG(os.stat(f"/proc/{number}/fd/{fd}").st_mode):
                found(f"/proc/{number}/fd/{fd}")
        except OSError:
            pass
tell()
"""


@pytest.mark.attack("code", "files", "keys")
@pytest.mark.attack("session", "sessions")
def test_secrets_of_the_user_and_of_other_sessions_cannot_be_read(arena: Arena) -> None:
    with arena.duel() as duel:
        arena.rig.file("secret", arena.token.encode(), session=duel.neighbour)
        top = duel.home(duel.neighbour)
        home = Path(scratch.home(str(top)))
        half = len(arena.token) // 2
        account = Path(os.path.expanduser("~"))
        paths = [arena.outside / "secret", home / "secret", home, top, top.parent,
                 arena.rig.scratch, arena.outside, account / ".ssh"]
        # an escape by the directory that it has
        paths += [Path("../..") / top.name / home.name / "secret",
                  Path("../../..") / "outside/secret"]
        said = duel.successes(PROCESSES, arena.token[:half], arena.token[half:], *paths)
        assert said == [], said
        duel.goes_on()


def test_the_search_for_secrets_finds_them_as_trusted_code(arena: Arena) -> None:
    """Else the tests beside it prove nothing: trusted code in the same executor sees it all."""
    before = arena.photo()
    session = arena.open(trusted=True, backend="process")
    half = len(arena.token) // 2
    search = program(SEARCH + "tell()", arena.token[:half], arena.token[half:],
                     arena.outside / "secret")
    outcome, back = arena.rig.exec(*search, session=session)
    found = json.loads(back.stdout)
    assert outcome.state is ActionState.COMPLETED and str(arena.outside / "secret") in found
    arena.close(session)
    arena.settles(before)


MACHINE = """
for path in sys.argv[1:]:
    attempt(path, lambda: os.read(os.open(path, os.O_RDONLY), 10))
    attempt("write " + path, lambda: os.open(path, os.O_WRONLY))
for path in ("/run/munge/munge.socket.2", "/var/run/munge/munge.socket.2",
             "/run/dbus/system_bus_socket", "/run/systemd/private", "/var/run/docker.sock"):
    def reach():
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
    attempt(path, reach)
for path in ("/etc/passwd", "/usr/bin/env", "/etc/hosts"):
    attempt(path, lambda: os.open(path, os.O_WRONLY))
    attempt("chmod " + path, lambda: os.chmod(path, 0o777) if os.getuid() else os.listdir("/none"))
tell()
"""


@pytest.mark.attack("code", "files", "keys")
def test_secrets_of_the_machine_cannot_be_read(arena: Arena) -> None:
    with arena.duel() as duel:
        assert duel.successes(MACHINE, "/etc/shadow", "/etc/gshadow", "/etc/munge/munge.key",
                              "/etc/slurm/slurm.conf", "/etc/ssh/ssh_host_rsa_key", "/dev/mem",
                              "/dev/kmsg", "/proc/kcore", "/etc/sudoers") == []
        duel.goes_on()


FLIP = """
import shutil
os.makedirs("real", exist_ok=True)
open("real/f", "w").write("inside")
open("up", "w").close()
until = time.monotonic() + 20
while not os.path.exists("stop") and time.monotonic() < until:
    try:
        os.rename("real", "way")
        os.rename("way", "real")
        os.symlink(sys.argv[1], "way")
        os.unlink("way")
    except OSError:  # a file went up meanwhile, and its folder with it
        os.unlink("way") if os.path.islink("way") else shutil.rmtree("way", ignore_errors=True)
        if not os.path.exists("real/f"):
            os.makedirs("real", exist_ok=True)
            open("real/f", "w").write("inside")
"""


@pytest.mark.attack("code", "files")
def test_links_exchanged_during_file_calls_lead_to_no_file_outside(arena: Arena) -> None:
    with arena.duel() as duel:
        rig, mine = arena.rig, duel.attacker
        (arena.outside / "f").write_text(arena.token)
        lease = rig.begin(ExecCall(argv=program(FLIP, arena.outside)), Kind.EXEC, session=mine)
        while rig.file("up", session=mine)[0].state is not ActionState.COMPLETED:
            assert lease not in rig.done, rig.done
        reads, n, until = set(), 0, time.monotonic() + 20
        while n < 300 or (len(reads) < 2 and time.monotonic() < until):
            n += 1
            outcome, back = rig.file("way/f", session=mine)
            reads.add(back.data if outcome.state is ActionState.COMPLETED else outcome.reason)
            rig.file("way/new" if n % 2 else "way/f", b"inside", session=mine)
            call = FileCall("way", op="list")
            _, listed, _ = rig.end(rig.begin(call, Kind.FILE, session=mine, cores=()))
            assert not isinstance(listed, FileList) or "secret" not in {
                e.name for e in listed.entries}, listed
        assert arena.token.encode() not in reads and len(reads) > 1, reads
        assert (arena.outside / "f").read_text() == arena.token
        assert sorted(p.name for p in arena.outside.iterdir()) == ["f", "secret"]
        rig.file("stop", b"", session=mine)
        assert rig.end(lease)[0].state is ActionState.COMPLETED
        duel.shell("rm -rf way stop up")
        duel.goes_on()


@pytest.mark.attack("code", "files")
def test_file_calls_reach_no_file_that_the_sandbox_cannot_reach(arena: Arena) -> None:
    outside = arena.outside / "secret"
    with arena.duel() as duel:
        rig, mine = arena.rig, duel.attacker
        other = scratch.home(str(duel.home(duel.neighbour)))
        made = duel.shell(
            f"ln -s {outside} l1; ln -s {arena.outside} l2; ln -s ../../.. l3; ln -s / l4; "
            f"ln -s /proc/self/cwd/../../etc l5; ln -s {other} l6; mkdir d; ln -s ../../x d/up; "
            "ln -s l7 l7; mkfifo pipe; ln -s /proc/self/environ l8; ln -s /proc/1/root l9")
        assert made[0].state is ActionState.COMPLETED
        ours = [f"/proc/{pid}/environ" for pid in (os.getpid(), *rig.processes())]
        for path in ("l1", "l2/secret", "l3/outside/secret", "l4/etc/passwd", "l5/passwd",
                     "l6/data", "../home/../../x", "d/up", "d/../l1", "l7", "pipe", str(outside),
                     "/etc/passwd", "l4/proc/self/environ", "l8", "l9/etc/passwd", "/etc/shadow",
                     "/proc/thread-self/environ", "/proc/self/fd/0", *ours):
            outcome, back, _ = rig.end(rig.begin(FileCall(path), Kind.FILE, session=mine, cores=()))
            assert "\n" not in outcome.reason
            if outcome.state is ActionState.COMPLETED:  # then a command may read it as well
                seen, told = duel.shell(f"cat {path}")
                assert seen.exit_code == 0 and told.stdout == back.data, (path, back, told)
                assert arena.token.encode() not in back.data, path
            for call in (FileCall(path, b"evil"), FileCall(path, op="mkdir"),
                         FileCall(path, op="move", target="mine"), FileCall(path, op="remove"),
                         FileCall("d", op="move", target=path)):
                if path.startswith("/") or "/" in path:  # else it is the attacker's own link
                    rig.end(rig.begin(call, Kind.FILE, session=mine, cores=()))
        for path in ("l2", "l3", "l4", "l6", "..", "/", "/proc"):
            outcome, back, _ = rig.end(rig.begin(FileCall(path, op="list", depth=1), Kind.FILE,
                                                 session=mine, cores=()))
            if outcome.state is ActionState.COMPLETED:
                seen, told = duel.shell(f"ls -A {path}/")
                names = set(told.stdout.decode().split("\n")) | {""}
                found = {entry.name for entry in back.entries if not entry.name.isdigit()}
                assert seen.exit_code == 0 and found <= names, (path, found - names)
        assert outside.read_text() == arena.token
        assert {p.name for p in arena.outside.iterdir()} <= {"f", "secret"}
        assert "evil" not in Path("/etc/passwd").read_text()
        duel.goes_on()


# ---- a whole cluster: the broker's own ----

@pytest.fixture(scope="module", params=BACKENDS)
def cluster(request: pytest.FixtureRequest,
            tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    if why := reason_to_skip(request.param):
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_JWT", "MUNGE_SOCKET", "TANGRAM_NOTE"):
            patch.setenv(name, "s3cr3t" + "-value")
        with UsersCluster(cpus=2, mem_mib=600, isolation=request.param,
                          home=tmp_path_factory.mktemp("home")) as made:
            yield made


@pytest.mark.attack("code", "keys", "broker")
def test_the_brokers_key_and_processes_cannot_be_read(cluster: LocalCluster) -> None:
    key = cluster.access.read_text()
    with cluster.session(mem=100) as s:
        paths = [str(cluster.access), str(cluster.folder), str(cluster.folder / "journal"),
                 str(cluster.folder / "worker.log"), str(cluster.folder.parent)]
        ours = [pid for child in processes_of(cluster) for pid in (child.pid,
                                                               *process_tree.descendants(child.pid))]
        assert len(ours) >= 4  # broker, worker, fork server, an init
        done = s.exec(list(program(PROCESSES, "s3cr3t", "-value", *paths)), timeout=60).result()
        assert done.ok and done.text.strip() == "[]", done
        source = ("".join(f"attempt({pid}, lambda: open('/proc/{pid}/environ','rb').read(9))\n"
                          f"attempt({pid}, lambda: os.kill({pid}, 0))\n" for pid in ours
                          if pid not in _seen_inside(cluster)) + "tell()\n")
        done = s.exec(list(program(source)), timeout=60).result()
        mine = done.text.strip()
        assert done.ok and "TANGRAM" not in mine and "SLURM" not in mine, mine
    assert key == cluster.access.read_text()


def _seen_inside(cluster: LocalCluster) -> set[int]:
    """The inits: in one domain with their commands, which may signal them (and so lose)."""
    names = {pid: (process_tree.read(f"/proc/{pid}/comm") or b"") for child in processes_of(cluster)
             for pid in process_tree.descendants(child.pid)}
    return {pid for pid, name in names.items() if name.startswith(b"tangram-init")}


@pytest.mark.attack("code", "files", "settings")
def test_a_download_writes_only_below_its_target_folder(
        cluster: LocalCluster, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    with cluster.session(mem=100) as s:
        s.exec(f"mkdir d; echo in >d/f; ln -s {outside} d/way; ln -s /usr/lib/os-release d/p; "
               "ln -s ../../.. d/up").result()
        with pytest.raises(tangram_hpc.InvalidInput, match="is a link"):
            s.download("d", tmp_path / "down")
        assert s.download("d", tmp_path / "down", skip_others=True) == 1
        assert [p.name for p in (tmp_path / "down").rglob("*")] == ["f"]
        for path in ("d/way/secret", "../x", "/etc/shadow"):
            with pytest.raises((tangram_hpc.ActionFailed, tangram_hpc.InvalidInput)):
                s.download(path, tmp_path / "one")
        assert s.download("d/p", tmp_path / "one") == 1  # what a command may read as well
        assert (tmp_path / "one").read_text() == s.exec("cat d/p").result().text
        local = tmp_path / "local"
        local.mkdir()
        (local / "f").write_text("evil")
        for path in ("d/way", "d/way/", "d/up", "../x", str(outside)):
            with suppress(tangram_hpc.ActionFailed, tangram_hpc.InvalidInput):
                s.upload(local, path)  # may succeed where the sandbox has a /tmp of its own
        assert [p.name for p in outside.iterdir()] == ["secret"]
        assert {p.name for p in tmp_path.iterdir()} == {"outside", "down", "one", "local"}
        shutil.rmtree(local)
