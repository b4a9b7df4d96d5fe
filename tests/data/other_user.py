"""What a hostile user of the same nodes tries against another user's broker; prints, as JSON, what
succeeded though it must not. Law: every attack is bounded, none harms whoever it does not name."""

import ctypes
import json
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

told = json.loads(sys.stdin.read())
libc, done, tried = ctypes.CDLL(None, use_errno=True), [], 0


def attempt(name: str, work: Callable[[], object]) -> None:
    """Notes what could be done."""
    global tried
    tried += 1
    try:
        done.append([name, repr(work())[:100]])
    except (OSError, PermissionError):
        pass


def call(name: str, *args: object) -> int:
    """A call of the C library that failed is an OSError."""
    if (value := getattr(libc, name)(*args)) == -1:
        raise OSError(ctypes.get_errno(), name)
    return value


def spoil(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"spoilt")


def peek(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(10)


for path in told["paths"]:
    attempt(f"read {path}", lambda p=path: Path(p).read_bytes()[:40])
    attempt(f"write {path}", lambda p=path: spoil(p))
    attempt(f"list {path}", lambda p=path: os.listdir(p))
    attempt(f"mode {path}", lambda p=path: os.chmod(p, 0o777))
    attempt(f"times {path}", lambda p=path: os.utime(p))
    attempt(f"move {path}", lambda p=path: os.rename(p, f"{p}.mine"))
    attempt(f"remove {path}", lambda p=path: os.unlink(p))
    attempt(f"rmdir {path}", lambda p=path: os.rmdir(p))
    attempt(f"beside {path}", lambda p=path: os.mkdir(f"{p}/mine"))
    attempt(f"hard link {path}", lambda p=path: os.link(p, f"{os.getcwd()}/mine"))

SYS_PIDFD_OPEN, SYS_PIDFD_GETFD, PTRACE_ATTACH = 434, 438, 16
for pid in told["pids"]:
    proc = f"/proc/{pid}"
    for name in ("environ", "mem", "maps", "io", "auxv", "syscall"):
        attempt(f"{proc}/{name}", lambda p=f"{proc}/{name}": peek(p))
    for name in ("fd", "map_files", "task/../fdinfo"):
        attempt(f"{proc}/{name}", lambda p=f"{proc}/{name}": os.listdir(p))
    for name in ("cwd", "root", "exe", "ns/net"):
        attempt(f"{proc}/{name}", lambda p=f"{proc}/{name}": os.readlink(p))
    for number in (0, signal.SIGCONT, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
        attempt(f"signal {number} to {pid}", lambda p=pid, n=number: os.kill(p, n))
    attempt(f"group of {pid}", lambda p=pid: os.killpg(os.getpgid(p), signal.SIGTERM))
    attempt(f"trace {pid}", lambda p=pid: call("ptrace", PTRACE_ATTACH, p, 0, 0))
    attempt(f"nice {pid}", lambda p=pid: os.setpriority(os.PRIO_PROCESS, p, 19))
    attempt(f"bind {pid}", lambda p=pid: os.sched_setaffinity(p, {0}))
    attempt(f"limit {pid}", lambda p=pid: resource.prlimit(p, resource.RLIMIT_NOFILE, (9, 9)))
    attempt(f"take a descriptor of {pid}", lambda p=pid: call(
        "syscall", SYS_PIDFD_GETFD, call("syscall", SYS_PIDFD_OPEN, p, 0), 0, 0))
    attempt(f"enter {pid}", lambda p=pid: call(
        "setns", call("syscall", SYS_PIDFD_OPEN, p, 0), 0x40000000))

IPC_RMID, IPC_STAT = 0, 2
for kind, _words in (("shm", ("shmat",)), ("sem", ()), ("msg", ())):
    for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]:
        _, number, *rest = row.split()
        if str(told["uid"]) in rest:
            attempt(f"attach {kind} {number}", lambda n=number: call("shmat", int(n), 0, 0))

for folder, _, names in os.walk("/sys/fs/cgroup"):
    mine = os.stat(folder).st_uid == os.getuid()
    for name in names if not mine else ():
        if os.access(f"{folder}/{name}", os.W_OK):
            done.append([f"cgroup {folder}/{name}", "writable"])

# ---- its listeners: connecting is free, a word is not ------------------------------------------


def spoken(address: str, sent: bytes) -> bytes:
    """What a broker says beyond its greeting."""
    kind, _, where = address.partition("#")[0].partition(":")
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(8)
        sock.connect(where if kind == "unix" else (where.rpartition(":")[0],
                                                   int(where.rpartition(":")[2])))
        if kind == "tls":  # the certificate is shown to everybody
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sock = context.wrap_socket(sock)
        greeting = sock.recv(48)
        if kind == "unix" and not greeting:
            raise OSError("not a word")
        sock.sendall(sent)
        if more := sock.recv(100):
            return more
        raise OSError("not a word")


for address in told["addresses"]:
    for what, sent in (("zeroes", bytes(64)), ("noise", os.urandom(4096)),
                       ("a frame", b"\x10\0\0\0" + bytes(200))):
        attempt(f"{what} to {address}", lambda a=address, s=sent: spoken(a, s))

print(json.dumps({"tried": tried, "done": done}))
