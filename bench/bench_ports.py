"""Compares streams and forwards to a port of a sandbox with a plain loopback socket.

The same server runs in a session with a network of its own, and beside this process. WAY is
`stream` (`Session.connect`) or `forward` (a socket to `Session.forward`). The results are ratios.
`WAY_trip_over_loopback` is the time of a request and an answer of 64 bytes on an open connection,
divided by the time over the loopback. `WAY_connect_over_loopback` is the same for opening a
connection and one such exchange. `loopback_rate_over_WAY` is the bytes per second that the server
sends over the loopback, divided by those over WAY. All are measured in turn in one run; each result
is the median of the rounds' ratios.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import common

from tangram_hpc import LocalCluster

PORT = 7400
SERVER = f"""
import socketserver
class Handler(socketserver.StreamRequestHandler):
    rbufsize = 0
    def handle(self):
        while data := self.connection.recv(64):
            size = int(data.split()[0])
            self.connection.sendall(data if size == 64 else b"x" * size)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
server = Server(("127.0.0.1", {PORT}), Handler)
print("ready", flush=True)
server.serve_forever()
"""
Connect = Callable[[], Any]


def exchange(line: Any, size: int) -> float:
    """Sends a request; returns the seconds until its answer of `size` bytes was received."""
    began, left = time.perf_counter(), size
    line.sendall(b"%-64d" % size)
    while left:
        left -= len(line.recv(1 << 18))
    return time.perf_counter() - began


def measure(connect: Connect, trips: int, connects: int, size: int) -> dict[str, float]:
    """Returns the seconds of an exchange, of a new connection, and of an answer of `size` bytes."""
    with closing(connect()) as line:
        exchange(line, 64)
        trip = statistics.mean(exchange(line, 64) for _ in range(trips))
        rate = exchange(line, size)
    began = time.perf_counter()
    for _ in range(connects):
        with closing(connect()) as line:
            exchange(line, 64)
    return {"trip": trip, "connect": (time.perf_counter() - began) / connects, "rate": rate}


def main() -> None:
    """Runs the benchmark and prints its result as one line of JSON."""
    tiny = common.arguments(__doc__).tiny
    rounds, trips, connects, size = (1, 5, 2, 1 << 20) if tiny else (5, 200, 30, 64 << 20)
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(LocalCluster(cpus=2, mem_mib=4000, home=home))
        if "loopback" not in cluster.ask("nodes")["nodes"][0]["networks"]:
            return common.line("ports", {}, {"skipped": "no backend has network namespaces here"})
        session = stack.enter_context(cluster.session(
            network="loopback", files={"serve.py": SERVER}, background="run"))
        session.exec("python3 serve.py >/dev/null 2>&1 &").result()
        session.connect(PORT, wait_s=60).close()
        beside = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        stack.callback(beside.wait)
        stack.callback(beside.kill)
        local = stack.enter_context(session.forward(PORT))

        def plain(host: str, port: int) -> socket.socket:
            line = socket.create_connection((host, port))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return line

        ways: dict[str, Connect] = {
            "loopback": lambda: plain("127.0.0.1", PORT),
            "stream": lambda: session.connect(PORT),
            "forward": lambda: plain(local.host, local.port)}
        assert beside.stdout is not None and beside.stdout.readline() == b"ready\n"
        took = [{name: measure(connect, trips, connects, size) for name, connect in ways.items()}
                for _ in range(rounds)]
    figures = {}
    for way in ("stream", "forward"):
        for what in ("trip", "connect", "rate"):
            name = f"loopback_rate_over_{way}" if what == "rate" else f"{way}_{what}_over_loopback"
            figures[name] = round(statistics.median(
                one[way][what] / one["loopback"][what] for one in took), 2)
        figures[f"{way}_trip_ms"] = round(statistics.median(
            one[way]["trip"] for one in took) * 1e3, 3)
        figures[f"{way}_mb_s"] = round(size / 1e6 / statistics.median(
            one[way]["rate"] for one in took), 1)
    common.line("ports", {"rounds": rounds, "trips": trips, "connects": connects, "bytes": size},
                figures)


if __name__ == "__main__":
    main()
