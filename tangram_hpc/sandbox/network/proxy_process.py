"""The process in which a sandbox's proxy runs, outside of the sandbox's namespaces.

The init passes it a socket that listens on the loopback inside. So the process connects from the
node's own network, and code in the sandbox has no other way out than that one socket. Where the
kernel has Landlock, the process can read only the paths that the sandbox may read and those that
name lookups need, can write no file, and holds no capability.
"""

from __future__ import annotations

import array
import contextlib
import socket
from collections.abc import Sequence

from ...protocol.allow_list import AllowList
from ..isolation import landlock
from ..isolation.hosts import HOSTNAME
from .helper_process import HelperProcess
from .near_addresses import NearAddresses
from .proxy import CONNECTIONS_MAX, Proxy

_RESOLVER = ("/etc", "/run", "/usr", "/lib", "/lib64", "/var/lib/sss")
_LOOPBACK = "127.0.0.1"
# The sandbox itself. Python's urllib knows ::1 only in brackets, but httpx makes no client at all
# where an entry has them.
_NOT_BY_PROXY = f"localhost,{_LOOPBACK},::1,{HOSTNAME}"


class ProxyProcess:
    """A proxy, seen from the init that has forked it.

    Attributes:
        pid: its process id.
        port: the port that it serves inside; 0 before `listen`.
    """

    def __init__(self, entries: Sequence[str], read: Sequence[str]) -> None:
        """Forks the process, which must happen before this one enters a namespace.

        Args:
            entries: the allow-list.
            read: paths of the node that the process may read.

        Raises:
            OSError: it cannot be forked.
        """
        self.port = 0
        self._process = HelperProcess(
            "tangram-proxy", lambda link: _serve(link, AllowList(entries), read))
        self.pid = self._process.pid

    def listen(self) -> None:
        """Listens on the loopback of the namespace that this process is in now, and passes the
        listening socket to the proxy.

        Raises:
            OSError: the socket cannot be made or passed.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen(CONNECTIONS_MAX)
            self.port = listener.getsockname()[1]
            socket.send_fds(self._process.link, [b"l"], [listener.fileno()])

    def variables(self) -> dict[str, str]:
        """Returns the environment variables by which programs find the proxy."""
        here = f"http://{_LOOPBACK}:{self.port}"
        own = {"http_proxy": here, "https_proxy": here, "no_proxy": _NOT_BY_PROXY}
        return {**own, **{name.upper(): value for name, value in own.items()}}

    def end(self) -> None:
        """Ends the process; its init waits for it."""
        self._process.end()


def _serve(link: socket.socket, allowed: AllowList, read: Sequence[str]) -> None:
    """Runs the proxy, in the forked process."""
    near = NearAddresses()
    with contextlib.suppress(OSError):  # a kernel without it: the process is its user's
        landlock.restrict([*read, *_RESOLVER], [], network=True)
    size = array.array("i").itemsize
    data, more, _, _ = link.recvmsg(1, socket.CMSG_SPACE(size))
    if not data or not more:
        return
    (fd,) = array.array("i", more[0][2])
    Proxy(allowed, near).serve(socket.socket(fileno=fd))
