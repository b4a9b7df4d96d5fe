"""The process that gives a sandbox an open network, outside of the sandbox's namespaces.

The process starts slirp4netns, a TCP/IP stack in a process of the worker's user, which makes a
network device in the sandbox's network namespace and connects for it from the node's network. So
the sandbox reaches what the node reaches, except the node's loopback, to which its packets have no
route (`fenced_routes`). `name_relay` looks names up. Nobody reaches the sandbox, as nothing listens
for it on the node.

slirp4netns ends with this process, which ends with its init (`helper_process`). If slirp4netns
ends, so does this process. Both are outside of the session's cgroup, as a proxy is.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import shutil
import socket
from collections.abc import Sequence

from ..isolation import landlock
from . import fenced_routes
from .helper_process import HelperProcess
from .name_relay import NameRelay

STACK = "slirp4netns"
DEVICE = "tap0"
# The network between sandbox and stack is from a range for documentation (RFC 5737), which no site
# uses. With `--disable-dns` the stack is no name server: packets to NAME_SERVER are passed on.
NETWORK, GATEWAY, NAME_SERVER = "192.0.2.0/24", "192.0.2.2", "192.0.2.3"
NOT_INSTALLED = f"{STACK} is not installed (apt-get install {STACK}, dnf install {STACK})"
_TUN = "/dev/net/tun"
_OPTIONS = ("--configure", f"--cidr={NETWORK}", "--mtu=65520", "--disable-host-loopback",
            "--disable-dns", "--enable-seccomp")
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_SYSTEM = ("/etc", "/run", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/var/lib")
_READY_S = 20.0
_SAID_MAX = 4096
_OK = b"+"


class NoOpenNetwork(Exception):
    """The network cannot be built; the text is one line that says why."""


def why_not() -> str:
    """Why this node cannot build an open network, as far as a look tells; empty if it may."""
    if not _program():
        return NOT_INSTALLED
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return f"there is no {_TUN} (modprobe tun)"
        return (f"{_TUN} cannot be opened ({error.strerror}); the site can give it mode 0666, "
                "which udev gives it by itself")
    return ""


def _program() -> str:
    """The program's path, also where a user's PATH has no /usr/sbin; empty if it is missing."""
    return shutil.which(STACK, path=f"{os.environ.get('PATH', os.defpath)}:{_PATH}") or ""


class OpenNetwork:
    """The process of one sandbox, seen from the init that has forked it.

    Attributes:
        pid: its process id.
    """

    def __init__(self, read: Sequence[str]) -> None:
        """Forks the process, which must happen before this one enters a namespace.

        Args:
            read: paths of the node that the process may read.

        Raises:
            NoOpenNetwork: this node cannot build an open network.
            OSError: the process cannot be forked.
        """
        if reason := why_not():
            raise NoOpenNetwork(reason)
        self._process = HelperProcess("tangram-net", lambda link: _build_and_serve(link, read))
        self.pid = self._process.pid

    def attach(self, pid: int) -> None:
        """Gives the network namespace of process `pid` its way out. No code that is not trusted may
        run there yet.

        Raises:
            NoOpenNetwork: it cannot be built.
            OSError: the process has ended.
        """
        spaces = fenced_routes.namespaces_of(pid)
        try:
            socket.send_fds(self._process.link, [b"n"], spaces)
        finally:
            for fd in spaces:
                os.close(fd)
        self._process.link.settimeout(_READY_S)
        try:
            said = self._process.link.recv(_SAID_MAX)
        except TimeoutError:
            said = f"{STACK} was not ready in {_READY_S:g} s".encode()
        if said != _OK:
            raise NoOpenNetwork(said.decode(errors="replace") or f"{STACK} ended at once")

    def variables(self) -> dict[str, str]:
        """No environment variable is needed."""
        return {}

    def end(self) -> None:
        """Ends the process; its init waits for it."""
        self._process.end()


def _build_and_serve(link: socket.socket, read: Sequence[str]) -> None:
    """Builds the way out and serves until the init or the stack is gone, in the forked process."""
    spaces = array.array("i")
    data, more, _, _ = link.recvmsg(1, socket.CMSG_SPACE(2 * spaces.itemsize))
    if not data or not more:
        return
    spaces.frombytes(more[0][2])
    try:
        sockets = fenced_routes.prepare(*spaces)
        if os.geteuid():
            _confine(read)  # the stack too
        said, keep = _start(*spaces)
    except (OSError, NoOpenNetwork) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        link.send(str(why).encode()[:_SAID_MAX])
        return
    for fd in spaces:
        os.close(fd)
    if not os.geteuid():
        _confine(read)
    link.send(_OK)
    _serve(link, said, NameRelay(*sockets))
    os.close(keep)


def _confine(read: Sequence[str]) -> None:
    with contextlib.suppress(OSError):  # a kernel without Landlock: the process is its user's
        landlock.restrict([*read, *_SYSTEM, *_installed()], [_TUN, os.devnull], network=True)


def _installed() -> list[str]:
    """The program, and the libraries that are beside it where it is in a folder of its user's."""
    if not (found := _program()):
        return []
    program = os.path.realpath(found)
    prefix = os.path.dirname(os.path.dirname(program))
    return [program, os.path.join(prefix, "lib"), os.path.join(prefix, "lib64")]


def _start(network: int, owner: int) -> tuple[int, int]:
    """Starts the stack. Returns a descriptor of its stderr, and a descriptor whose closing ends the
    stack.

    Raises:
        NoOpenNetwork: it cannot be run, or it has ended, with its last words.
    """
    ready, ends = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    said = os.pipe2(os.O_CLOEXEC)
    # `--enable-sandbox` makes the stack give up the powers of root. The stack makes mounts for
    # that, so Landlock must not be on yet. Started by another user, the stack would need a user 0
    # in the sandbox's user namespace, which a bwrap sandbox does not have.
    options = _OPTIONS if os.geteuid() else (*_OPTIONS, "--enable-sandbox")
    argv = [STACK, *options, f"--ready-fd={ready[1]}", f"--exit-fd={ends[0]}",
            "--netns-type=path", f"--userns-path=/proc/self/fd/{owner}",
            f"/proc/self/fd/{network}", DEVICE]
    for fd in (network, owner, ready[1], ends[0]):
        os.set_inheritable(fd, True)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    program = _program()
    try:
        os.posix_spawn(program, argv, {"PATH": _PATH}, file_actions=[
            (os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1),
            (os.POSIX_SPAWN_DUP2, said[1], 2)], setsigmask=())
    except OSError as error:
        raise NoOpenNetwork(f"{program} cannot be run ({error.strerror})") from error
    for fd in (ready[1], ends[0], said[1], null):
        os.close(fd)
    if not os.read(ready[0], 1):
        raise NoOpenNetwork(f"{STACK}: {_last_line(said[0])}")
    os.close(ready[0])
    return said[0], ends[1]


def _last_line(said: int) -> str:
    text = b""
    while piece := os.read(said, _SAID_MAX):
        text = (text + piece)[-_SAID_MAX:]
    lines = [line for line in text.decode(errors="replace").splitlines()
             if line.strip() and not line.startswith(("child failed", "parent failed"))]
    return lines[-1].strip() if lines else "it ended at once"


def _serve(link: socket.socket, said: int, relay: NameRelay) -> None:
    while True:
        poll = select.poll()
        for fd in (link.fileno(), said, *relay.fds()):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            if fd == link.fileno() or (fd == said and not os.read(said, _SAID_MAX)):
                return
            if fd != said:
                relay.serve(fd)
