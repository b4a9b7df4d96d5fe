"""A node of its own for sessions with an open network, and what their code reaches from there.

Run as a program by root in network and mount namespaces of its own. The node has a loopback, on
which its resolver and a private server are, and one other address. What happened is printed as
JSON. The exit status is 77 where no such node can be made.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.root_folder_rig import make_image
from tangram_hpc import LocalCluster
from tangram_hpc.resources import process_tree

NOBODY = 65534
METADATA = ("168.63.129.16", "100.100.100.200")  # of clouds; this node has them on its loopback
ADDRESS, ANSWER, RESOLVER = "198.51.100.1", "198.51.100.77", "127.0.0.53"
NAME = "server.trial.example"
PORT = 7000
INSIDE = r"""
import json, socket, sys
address, name, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
told = {}
def attempt(what, work):
    try:
        told[what] = work()
    except OSError as error:
        told[what] = f"OSError {error.errno}"
def tcp(to, device=""):
    with socket.socket() as line:
        line.settimeout(10 if to == address else 0.04)
        if device:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        line.connect((to, port))
        return line.recv(100).decode()
def udp(to, device=""):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.settimeout(10 if to == address else 0.04)
        if device:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        line.sendto(b"hello", (to, port))
        return line.recv(100).decode()
for to in (address, "127.0.0.1", "192.0.2.2", "192.0.2.3", "127.0.0.53", *sys.argv[4:]):
    attempt("tcp " + to, lambda: tcp(to))
    attempt("udp " + to, lambda: udp(to))
    if to != address:
        attempt("tcp by device " + to, lambda: tcp(to, "tap0"))
        attempt("udp by device " + to, lambda: udp(to, "tap0"))
attempt("name", lambda: socket.gethostbyname(name))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and "made")
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) and "made")
print(json.dumps(told))
"""


class Server:
    """Answers on TCP and UDP at one address, and remembers who came."""

    def __init__(self, address: str) -> None:
        self.came: list[str] = []
        streams = socket.create_server((address, PORT))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind((address, PORT))
        for work in (lambda: self._accept(streams), lambda: self._receive(datagrams)):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self, streams: socket.socket) -> None:
        while True:
            line, _ = streams.accept()
            self.came.append("tcp")
            line.sendall(b"tcp answer")
            line.close()

    def _receive(self, datagrams: socket.socket) -> None:
        while True:
            _, asker = datagrams.recvfrom(100)
            self.came.append("udp")
            datagrams.sendto(b"udp answer", asker)


def serve_names() -> None:
    """Answers every query for an address with ANSWER, on the node's loopback."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((RESOLVER, 53))

    def serve() -> None:
        while True:
            query, asker = datagrams.recvfrom(1000)
            end = query.index(b"\0", 12) + 5
            answer = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04" + socket.inet_aton(ANSWER)
            datagrams.sendto(query[:2] + b"\x81\x80\0\x01\0\x01\0\0\0\0" + query[12:end] + answer,
                             asker)

    threading.Thread(target=serve, daemon=True).start()


def stacks() -> list[int]:
    """The processes of slirp4netns beneath this one."""
    return [pid for pid in process_tree.descendants(os.getpid())
            if process_tree.read(f"/proc/{pid}/comm") == b"slirp4netns\n"]


def until(done: Callable[[], bool]) -> bool:
    """Waits for at most 20 s."""
    end = time.monotonic() + 20
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def trial(cluster: LocalCluster, home: Path) -> dict[str, Any]:
    """What happens to sessions with an open network."""
    told: dict[str, Any] = {"networks": cluster.ask("nodes")["nodes"][0]["networks"]}
    outside, private = Server(ADDRESS), Server("127.0.0.1")
    metadata = [Server(address) for address in METADATA]
    serve_names()
    with cluster.session(network="open", files={"a.py": INSIDE}, background="run") as session:
        ran = session.exec(["python3", "a.py", ADDRESS, NAME, str(PORT), *METADATA]).result()
        told |= {"inside": json.loads(ran.text), "isolation": ran.isolation,
                 "private": private.came,
                 "metadata": [each.came for each in metadata],
                 "outside": list(outside.came)}
        session.exec("python3 -m http.server 7777 >/dev/null 2>&1 &").result()
        with session.connect(7777, wait_s=20):
            told["port"] = "connected"
        with cluster.session(network="open") as other:
            knock = ("import socket; "
                     "print([socket.socket().connect_ex((a, 7777)) for a in "
                     f"('192.0.2.100', '{ADDRESS}', '127.0.0.1')])")
            told["other"] = json.loads(other.exec(["python3", "-c", knock]).result().text)
            with other.fork() as fork:
                told["fork"] = fork.exec("true").result().isolation
        image = make_image(home / "image", ("sh", "cat"))
        with cluster.session(network="open", image=str(image)) as rooted:
            told["rooted"] = rooted.exec("cat /etc/resolv.conf").result().text
        told["plain"] = cluster.submit("cat /proc/net/route").result().isolation
        session.write("kept", b"kept").result()
        before = stacks()
        for pid in before:
            os.kill(pid, 9)

        def again() -> bool:
            return session.exec("cat kept; cat /proc/net/route | grep -c tap0"
                                ).result().text.startswith("kept2") and bool(
                                    {*stacks()} - {*before})

        told["again"] = bool(before) and until(again)
    session.closed.result(20)
    told["left"] = not until(lambda: not stacks())
    return told


def make_node(home: str) -> None:
    """Makes the node of the namespaces that this process is in."""
    resolv = Path(home) / "resolv.conf"
    resolv.write_text(f"search trial.example\nnameserver {RESOLVER}\n")
    for words in ("ip link set lo up", "ip link add outer type veth peer name far",
                  *(f"ip addr add {each}/32 dev lo" for each in METADATA),
                  f"ip addr add {ADDRESS}/24 dev outer", "ip link set outer up",
                  "ip link set far up", f"mount --bind {resolv} /etc/resolv.conf"):
        if subprocess.run(words.split(), check=False).returncode:
            sys.exit(77)


def become_nobody(home: str) -> None:
    """Goes on as an ordinary user, who may open the device and use the port of a resolver."""
    device = Path(home) / "tun"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(10, 200))
    device.chmod(0o666)
    if subprocess.run(["mount", "--bind", device, "/dev/net/tun"], check=False).returncode:
        sys.exit(77)
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    words = [sys.executable, "-m", "helpers.open_network_trial", home, "here"]
    os.execve(sys.executable, words, os.environ | {"HOME": home, "TMPDIR": home})


def main(home: str, who: str) -> None:
    """Prints what happened to sessions of "root" or "nobody" on a node that is made for them; with
    "here" on the node that is there."""
    if who != "here":
        make_node(home)
    if who == "nobody":
        become_nobody(home)
    with LocalCluster(cpus=2, mem_mib=4000, warm=0, home=Path(home) / "cluster") as cluster:
        print(json.dumps(trial(cluster, Path(home))))


if __name__ == "__main__":
    main(*sys.argv[1:])
