"""The HTTP proxy of a session with a filtered network: it connects to what is listed, and to
nothing else.

It speaks CONNECT, for HTTPS and everything else that can use a tunnel, and plain HTTP with the
whole URL in the request line. The proxy looks the name up and connects to an address that it has
checked, so a second answer of a name server changes nothing. Only the first request of a connection
is checked; all further bytes go to the same server, whatever they say.

Everything that comes from the sandbox is hostile. The head of a request has a bound in size, each
wait for a piece of it has a bound in time, each connection has two threads, and there are at most
`CONNECTIONS_MAX` connections.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time

from ...protocol.allow_list import Address, AllowList, is_public, literal
from .near_addresses import NearAddresses

CONNECTIONS_MAX = 64
_HEAD_MAX = 64 * 1024  # bytes of a request before its body
_HEAD_S, _CONNECT_S = 30.0, 20.0
_PIECE = 1 << 16
_PAUSE_S = 0.1  # before another try to accept, where one has failed
_REQUEST = re.compile(rb"([A-Z]{1,32}) (\S{1,16384}) HTTP/1\.[01]")
_TARGET = re.compile(r"http://([^/?#@\s]+)([/?][^#\s]*)?", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
# fields that concern this connection alone, and the one that is made anew
_DROPPED = (b"host", b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization")
_STATUS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}


class Refused(Exception):
    """The request is not served; the text is one line for the program that sent it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Proxy:
    """Serves the connections of one sandbox.

    Args:
        allowed: what may be reached.
        near: the addresses that are reached only if they are listed themselves.
    """

    def __init__(self, allowed: AllowList, near: NearAddresses) -> None:
        import threading  # here, not above: see `run_program`

        self._allowed, self._near, self._thread = allowed, near, threading.Thread
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections until the listener is closed."""
        while True:
            self._places.acquire()
            try:
                inside, _ = listener.accept()
            except OSError:
                self._places.release()
                if listener.fileno() < 0:
                    return
                time.sleep(_PAUSE_S)  # such as: it has too many files open
                continue
            try:
                self._thread(target=self._one, args=(inside,), daemon=True).start()
            except RuntimeError:  # the user has as many threads as the kernel allows
                inside.close()
                self._places.release()

    def _one(self, inside: socket.socket) -> None:
        try:
            self._serve_one(inside)
        finally:
            self._places.release()

    def _serve_one(self, inside: socket.socket) -> None:
        with inside:
            try:
                outside, first, reply = self._open(inside)
            except Refused as error:
                _answer(inside, error.status, str(error))
            except OSError:
                pass  # the sandbox has given up
            else:
                with outside, contextlib.suppress(OSError):
                    inside.sendall(reply)
                    outside.sendall(first)
                    _carry(inside, outside)

    def _open(self, inside: socket.socket) -> tuple[socket.socket, bytes, bytes]:
        """Reads a request and connects to its server. Returns the connection, what the server gets
        first, and what the sandbox gets first.
        """
        inside.settimeout(_HEAD_S)
        head, rest = _head(inside)
        lines = head.split(b"\r\n")
        found = _REQUEST.fullmatch(lines[0])
        if found is None or not all(map(_FIELD.fullmatch, lines[1:])):
            raise Refused(400, "this is no request to an HTTP proxy")
        method, target = found[1], found[2].decode("latin-1")
        if method == b"CONNECT":
            host, port = _host_and_port(target, 0)
            return self._connect(host, port), rest, b"HTTP/1.1 200 Connection established\r\n\r\n"
        address = _TARGET.fullmatch(target)
        if address is None:
            raise Refused(400, "a request to this proxy names http://HOST/PATH, or is a CONNECT")
        host, port = _host_and_port(address[1], 80)
        fields = [line for line in lines[1:] if line.partition(b":")[0].lower() not in _DROPPED]
        path = address[2] or "/"
        path = path if path.startswith("/") else f"/{path}"
        asked = b"\r\n".join([
            b"%s %s HTTP/1.1" % (method, path.encode("latin-1")),
            b"Host: " + address[1].encode("latin-1"), *fields, b"Connection: close", b"", b""])
        return self._connect(host, port), asked + rest, b""

    def _connect(self, host: str, port: int) -> socket.socket:
        """Connects to a host if it may be reached."""
        number = literal(host)
        if number is not None:
            if not self._allowed.lists(number, port):
                raise Refused(403, f"{host}:{port} is not in the allow-list of this session")
            return _dial([number], port)
        if not self._allowed.names(host, port):
            raise Refused(403, f"{host}:{port} is not in the allow-list of this session")
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise Refused(502, f"the name {host} is not known") from None
        addresses = [one for *_, place in found
                     if (one := literal(str(place[0]).partition("%")[0])) is not None]
        may = [one for one in addresses if self._allowed.lists(one, port)
               or (is_public(one) and not self._near.has(one))]
        if not may:
            raise Refused(403, f"{host} has the address {addresses[0] if addresses else 'none'}, "
                               "which is not public; list the address too")
        return _dial(may, port)


def _dial(addresses: list[Address], port: int) -> socket.socket:
    """Connects to the first address that answers."""
    why = "no address"
    for address in dict.fromkeys(addresses):
        try:
            outside = socket.create_connection((str(address), port), _CONNECT_S)
        except OSError as error:
            why = f"{address}: {error.strerror or 'no answer in time'}"
            continue
        outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return outside
    raise Refused(502, f"no connection: {why}")


def _head(inside: socket.socket) -> tuple[bytes, bytes]:
    """Reads the head of a request; returns it, and the bytes that came after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _HEAD_MAX:
            raise Refused(400, f"the request has more than {_HEAD_MAX} bytes before its body")
        piece = inside.recv(_PIECE)
        if not piece:
            raise OSError("it ended early")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _host_and_port(text: str, port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    number = int(found[2] or port) if found is not None else 0
    if found is None or not 0 < number < 1 << 16:
        raise Refused(400, f"{text[:100]!a} is not HOST:PORT")
    return found[1], number


def _answer(inside: socket.socket, status: int, text: str) -> None:
    body = f"tangram: {text}\n".encode()
    head = (f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
    with contextlib.suppress(OSError):
        inside.sendall(head.encode() + body)


def _carry(inside: socket.socket, outside: socket.socket) -> None:
    """Copies in both directions until both have ended."""
    import threading  # here, not above: see `run_program`

    for each in (inside, outside):
        each.settimeout(None)
    back = threading.Thread(target=_copy, args=(outside, inside), daemon=True)
    back.start()
    _copy(inside, outside)
    back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_PIECE):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one side broke, so break the other side too
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
