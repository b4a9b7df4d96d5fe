"""Landlock: a process that confined itself reaches its home and nothing else of its user's."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.jail_rig import Place, place, refused  # noqa: F401

from tangram_hpc.sandbox.isolation import landlock, visible_paths
from tangram_hpc.sandbox.process import bootstrap

ABI = landlock.abi()
pytestmark = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")
needs_tcp = pytest.mark.skipif(ABI < 4, reason=f"Landlock ABI {ABI} does not hold TCP")
needs_scopes = pytest.mark.skipif(ABI < 6, reason=f"Landlock ABI {ABI} does not hold signals")
REFUSED = {errno.EACCES, errno.EPERM, errno.EXDEV}
_libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


def ptrace(pid: int) -> None:
    if _libc.ptrace(PTRACE_ATTACH, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
    os.waitpid(pid, 0x40000000)  # __WALL: it is no child of the tracer's
    _libc.ptrace(PTRACE_DETACH, pid, None, None)


def guarded() -> None:
    bootstrap.guard("tangram-init", signal.SIGTERM)


def symlinked(p: Place) -> None:
    (p.home / "link").symlink_to(p.outside / "secret")
    (p.home / "link").read_text()


def folder_symlinked(p: Place) -> None:
    (p.home / "folder").symlink_to(p.outside)
    os.listdir(p.home / "folder")


def moved_out(p: Place) -> None:
    (p.home / "mine").touch()
    os.rename(p.home / "mine", p.outside / "mine")


ATTACKS: dict[str, Callable[[Place], object]] = {
    "read": lambda p: (p.outside / "secret").read_text(),
    "read the key": lambda p: (p.outside / ".tangram" / "key").read_text(),
    "list": lambda p: os.listdir(p.outside),
    "dot dot": lambda p: Path(f"{p.home}/../outside/secret").read_text(),
    "symlink": symlinked,
    "symlink to a folder": folder_symlinked,
    "hard link": lambda p: os.link(p.outside / "secret", p.home / "hard"),
    "rename into the home": lambda p: os.rename(p.outside / "secret", p.home / "taken"),
    "rename out of the home": moved_out,
    "write": lambda p: (p.outside / "secret").write_text("mine"),
    "make": lambda p: (p.outside / "new").touch(),
    "mkdir": lambda p: (p.outside / "folder").mkdir(),
    "unlink": lambda p: (p.outside / "secret").unlink(),
    "environ": lambda p: Path(f"/proc/{p.victim.pid}/environ").read_bytes(),
    "mem": lambda p: open(f"/proc/{p.victim.pid}/mem", "rb").close(),
    "maps": lambda p: Path(f"/proc/{p.victim.pid}/maps").read_bytes(),
    "fd": lambda p: os.readlink(f"/proc/{p.victim.pid}/fd/0"),
    "open fd": lambda p: open(f"/proc/{p.victim.pid}/fd/0", "rb").close(),
    "root": lambda p: os.listdir(os.path.join("/proc", str(p.victim.pid), "root", "usr")),
    "cwd": lambda p: os.listdir(f"/proc/{p.victim.pid}/cwd"),
    "ptrace": lambda p: ptrace(p.victim.pid),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.attack("code", "files")
def test_a_confined_process_is_refused_what_its_user_may_do(
        place: Place, attack: str) -> None:  # noqa: F811
    def work() -> int:
        return refused(lambda: ATTACKS[attack](place))

    assert place.run(work, place.landlocked) in REFUSED
    for left in place.home.iterdir():
        left.unlink()
    assert place.run(work) == 0, "refused without Landlock too: the test shows nothing"


@pytest.mark.skipif(ABI < 3, reason=f"Landlock ABI {ABI} does not hold truncation")
@pytest.mark.attack("code", "files")
def test_a_confined_process_cannot_truncate_a_file_outside(place: Place) -> None:  # noqa: F811
    secret = place.outside / "secret"
    assert place.run(lambda: refused(lambda: os.truncate(secret, 0)), place.landlocked) in REFUSED
    assert secret.read_text() == "secret"
    assert place.run(lambda: refused(lambda: os.truncate(secret, 0))) == 0


def test_the_first_process_and_the_parent_keep_their_environment(place: Place) -> None:  # noqa: F811
    for pid in (1, os.getpid()):
        for name in ("environ", "mem", "fd/0", "root"):
            def work(path: str = f"/proc/{pid}/{name}") -> int:
                return refused(lambda: os.listdir(path) if path.endswith("root") else
                               Path(path).open("rb").close())
            assert place.run(work, place.landlocked) in REFUSED, (pid, name)


@needs_scopes
@pytest.mark.attack("code", "processes")
def test_a_confined_process_signals_only_its_own_processes(place: Place) -> None:  # noqa: F811
    def work() -> list[int]:
        child = os.fork()
        if child == 0:
            signal.pause()
        own = refused(lambda: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        return [own, refused(lambda: os.kill(place.victim.pid, signal.SIGTERM)),
                refused(lambda: os.kill(os.getppid(), 0)),
                refused(lambda: signal.pidfd_send_signal(
                    os.pidfd_open(place.victim.pid), signal.SIGTERM))]

    assert place.run(work, place.landlocked) == [0, errno.EPERM, errno.EPERM, errno.EPERM]
    assert place.victim.poll() is None


@needs_tcp
@pytest.mark.attack("code", "network")
def test_tcp_is_refused_without_network(place: Place) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as server:
        def work() -> list[int]:
            return [refused(lambda: socket.create_server(("127.0.0.1", 0))),
                    refused(lambda: socket.socket().connect(server.getsockname()))]

        def networked() -> object:
            return landlock.restrict([], [], network=True)

        assert place.run(work, place.landlocked) == [errno.EACCES, errno.EACCES]
        assert place.run(work, networked) == [0, 0]


@needs_scopes
@pytest.mark.attack("code", "network")
def test_abstract_unix_sockets_outside_are_not_reached(place: Place) -> None:  # noqa: F811
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("")
        server.listen()

        def work() -> int:
            return refused(lambda: socket.socket(socket.AF_UNIX).connect(server.getsockname()))

        assert place.run(work, place.landlocked) == errno.EPERM
        assert place.run(work) == 0


@pytest.mark.attack("code", "files")
def test_root_makes_no_device_nodes(place: Place) -> None:  # noqa: F811
    def work() -> int:
        return refused(lambda: os.mknod("null", stat.S_IFCHR | 0o600, os.makedev(1, 3)))

    assert place.run(work, place.landlocked) in REFUSED
    if place.uid == 0:
        assert place.run(work) == 0


def test_a_confined_process_uses_its_home_and_the_devices(place: Place) -> None:  # noqa: F811
    def work() -> str:
        home = place.home
        (home / "a" / "b").mkdir(parents=True)
        (home / "a" / "run").write_text("#!/bin/sh\necho ran > ../out\n")
        (home / "a" / "run").chmod(0o700)
        if ABI >= 2:
            os.rename(home / "a" / "run", home / "a" / "b" / "run")
            os.link(home / "a" / "b" / "run", home / "a" / "run")
        os.chdir(home / "a")
        pid = os.posix_spawn("./run", ["run"], {"PATH": "/bin"})
        assert os.waitpid(pid, 0)[1] == 0
        os.mkfifo(home / "pipe")
        os.symlink("out", home / "link")
        for device in visible_paths.devices():
            fd = os.open(device, os.O_RDWR if device == "/dev/null" else os.O_RDONLY)
            os.read(fd, 1)
            os.close(fd)
        (home / "link").open("r+").truncate(2)
        return (home / "link").read_text()

    assert place.run(work, place.landlocked) == "ra"


def test_a_confined_sandbox_process_still_serves_files_and_starts_programs(
        place: Place) -> None:  # noqa: F811
    held = os.open(place.home / "held", os.O_RDWR | os.O_CREAT, 0o600)
    os.fchown(held, place.uid, -1)

    def work() -> list[object]:
        fd = os.memfd_create("stdin")
        os.pwrite(held, b"x", 0)
        os.utime(held, ns=(1, 1))
        pid = os.posix_spawn("/bin/sleep", ["sleep", "99"], {})
        below = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        seen = str(pid) in below.read_text().split() if below.exists() else True
        os.kill(pid, signal.SIGKILL)
        status = os.wait4(pid, 0)[1]
        return [os.write(fd, b"y"), seen, os.WTERMSIG(status)]

    assert place.run(work, guarded, place.landlocked) == [1, True, signal.SIGKILL]
    os.close(held)


@pytest.mark.attack("code", "keys")
def test_commands_cannot_read_the_proc_files_of_their_sandbox_process(
        place: Place) -> None:  # noqa: F811
    def work() -> list[int]:
        mine = f"/proc/{os.getpid()}"
        codes = []
        for path in (f"{mine}/environ", f"{mine}/maps", f"{mine}/fd/0", f"{mine}/status"):
            pid = os.posix_spawn("/bin/cp", ["cp", path, "/dev/null"], {"PATH": "/bin"})
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return codes

    assert place.run(work, guarded, place.landlocked) == [1, 1, 1, 0]


def test_files_in_shared_memory_open_by_name_and_cannot_be_listed(
        place: Place) -> None:  # noqa: F811
    def work() -> list[int]:
        name = f"{visible_paths.SHARED_MEMORY}/tangram-test-{os.getpid()}"
        with open(name, "w+") as file:
            file.write("x")
        os.link(name, name + "-2")
        os.unlink(name)
        os.unlink(name + "-2")
        return [refused(lambda: os.listdir(visible_paths.SHARED_MEMORY)),
                refused(lambda: os.mkdir(name))]

    assert place.run(work, place.landlocked) == [errno.EACCES, errno.EACCES]


def test_a_second_restriction_narrows_and_never_widens(place: Place) -> None:  # noqa: F811
    def work() -> int:
        landlock.restrict(["/"], ["/"], network=True)
        return refused(lambda: (place.outside / "secret").read_text())

    assert place.run(work, place.landlocked) == errno.EACCES


def test_missing_paths_are_skipped(place: Place) -> None:  # noqa: F811
    def work() -> int:
        return landlock.restrict(["/none/such", "/etc/passwd/x"], ["/none"], network=False)

    assert place.run(work) == ABI


def test_a_process_with_several_threads_is_refused_and_not_confined_in_part(
        place: Place) -> None:  # noqa: F811
    def work() -> list[int]:
        done = threading.Event()
        threading.Thread(target=done.wait).start()
        first = refused(place.landlocked)
        done.set()
        return [first, refused(lambda: (place.outside / "secret").read_text())]

    assert place.run(work) == [errno.EBUSY, 0]
