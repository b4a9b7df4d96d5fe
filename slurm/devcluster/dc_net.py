"""Nodes as network namespaces (`up --netns`): each with an address, a host name and a cable of its
own, so that it can be cut off or lost as a machine is. Invariants of this module:

- a node is a holder, a recorded process that sleeps in namespaces of its own (network, host name,
  mounts: its own /tmp, /dev/shm and /etc/hosts); no namespace has a name and no mount is outside
  one, so all of it goes with the node's processes;
- the bridge and the cables in the host's namespace have names made of the base port and the prefix
  as their alias, and no interface by another name or with another alias is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import dc_procs
from dc_base import SAFE_PATH, Cluster, ClusterError

# $1 hosts file, $2 name, $3 the node's /tmp, $4 the prefix. Nodes must not share /tmp, because a
# Unix socket in it would connect nodes whose cable is cut. The prefix is the shared file system.
HOLD = """\
set -e
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
case "$4" in /tmp/*) mkdir -p "$3${4#/tmp}"; mount --bind "$4" "$3${4#/tmp}" ;; esac
mount --rbind "$3" /tmp
exec sleep infinity
"""


def prefix_of(c: Cluster) -> str:
    """Returns the first three numbers of the cluster's addresses, which follow from its base port.
    """
    return f"10.{c.base_port >> 8}.{c.base_port & 255}"


def host_address(c: Cluster) -> str:
    return f"{prefix_of(c)}.1" if c.netns else "127.0.0.1"


def node_address(c: Cluster, node: str) -> str:
    return f"{prefix_of(c)}.{10 + c.nodes.index(node)}" if c.netns else "127.0.0.1"


def bridge(c: Cluster) -> str:
    return f"dcb{c.base_port}"


def cable(c: Cluster, node: str) -> str:
    """Returns the interface at the host's end of a node's cable; the node's end is its eth0."""
    return f"dcv{c.base_port}n{c.nodes.index(node)}"


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], env={"PATH": SAFE_PATH}, capture_output=True, text=True,
                          check=False)  # fmt: skip
    if done.returncode:
        raise ClusterError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def missing() -> list[str]:
    return [p for p in ("ip", "unshare", "nsenter") if not shutil.which(p, path=SAFE_PATH)]


# ---- up and down -------------------------------------------------------------------------------


def addresses_taken(c: Cluster) -> bool:
    """Returns whether this machine has a route to any of the cluster's addresses already: a network
    of its own, or the bridge of a cluster that is being taken down or was killed."""
    return bool(ip("-4", "route", "show", "root", f"{prefix_of(c)}.0/24").strip())


def plug_in(c: Cluster) -> None:
    """Makes the bridge, and for each node a namespace with a cable to the bridge."""
    ip("link", "add", bridge(c), "type", "bridge")
    ip("link", "set", bridge(c), "alias", c.prefix)
    ip("addr", "add", f"{host_address(c)}/24", "dev", bridge(c))
    ip("link", "set", bridge(c), "up")
    for node in c.nodes:
        hosts = f"{c.prefix}/etc/hosts-{node}"
        Path(hosts).write_text(hosts_of(c, node))
        hold(c, node, hosts)


def hosts_of(c: Cluster, here: str) -> str:
    """A node's hosts file. Debian's and Ubuntu's installers give a machine's own name a
    loopback address."""
    names = ["127.0.0.1 localhost", f"{host_address(c)} {os.uname().nodename}"]
    for node in c.nodes:
        own = c.debian_hosts and node == here
        names.append(f"{'127.0.1.1' if own else node_address(c, node)} {node}")
    return "\n".join(names) + "\n"


def hold(c: Cluster, node: str, hosts: str) -> None:
    tmp = Path(c.prefix, "tmp", node)
    tmp.mkdir(parents=True)
    tmp.chmod(0o1777)
    argv = ["unshare", "--net", "--uts", "--mount", "--propagation", "private",
            "sh", "-c", HOLD, "hold", hosts, node, str(tmp), c.prefix]  # fmt: skip
    name = f"node-{node}"
    proc = dc_procs.start(c, name, argv, "")
    dc_procs.wait_for(c, name, proc, lambda: comm(proc.pid) == "sleep", 10)
    ip("link", "add", cable(c, node), "type", "veth", "peer", "name", "eth0", "netns",
       str(proc.pid))  # fmt: skip
    ip("link", "set", cable(c, node), "alias", c.prefix)
    ip("link", "set", cable(c, node), "master", bridge(c), "up")
    routes = [["route", "add", f"{address}/32", "via", host_address(c)]
              for address in addresses_of_host()]  # fmt: skip
    for words in (["addr", "add", f"{node_address(c, node)}/24", "dev", "eth0"],
                  ["link", "set", "eth0", "up"], *routes):  # fmt: skip
        done = subprocess.run([*inside(proc.pid), "ip", *words], env={"PATH": SAFE_PATH},
                              capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode:
            raise dc_procs.fail(c, name, f"cannot be plugged in ({done.stderr.strip()})")


def addresses_of_host() -> list[str]:
    """Returns this host's own addresses, besides those of the clusters' bridges, as they are now.
    Nodes reach this host at them, as a site's nodes reach the login node at the address of its
    name. Nothing is forwarded beyond this host."""
    rows = (row.split() for row in ip("-4", "-o", "addr", "show", "scope", "global").splitlines())
    return sorted({row[3].partition("/")[0] for row in rows if not row[1].startswith("dcb")})


def comm(pid: int) -> str:
    return dc_procs.read_proc(pid, "comm").decode(errors="replace").strip()


def inside(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--net", "--uts", "--mount"]


def enter(c: Cluster, node: str) -> list[str]:
    """Returns the words in front of a command line that make it run on the node."""
    return inside(holder_of(c, node)) if c.netns else []


def plugged_in(c: Cluster) -> list[str]:
    """Returns the host's ends of the cluster's cables and its bridge, as far as they exist. Another
    cluster may have the same base port, and with it the same names, if this one's daemons died. An
    interface without an alias is of an `up` that was killed before it gave one."""
    names = [*(cable(c, node) for node in c.nodes), bridge(c)]
    return [name for name in names if alias(name) in ("", c.prefix)]


def alias(interface: str) -> str | None:
    try:
        return Path("/sys/class/net", interface, "ifalias").read_text().strip()
    except OSError:  # it does not exist, or the kernel is removing it
        return None


def unplug(c: Cluster) -> None:
    """Removes the host's ends of all cables and the bridge; all else ended with the processes."""
    for name in plugged_in(c):
        with contextlib.suppress(ClusterError):  # the kernel may be removing it already
            ip("link", "del", name)
    end = time.monotonic() + 10
    while left := plugged_in(c):
        if time.monotonic() > end:
            raise ClusterError(f"interfaces {left} do not go: run `ip link del` and `down` again")
        time.sleep(0.1)


# ---- a node's fate -----------------------------------------------------------------------------


def holder_of(c: Cluster, node: str) -> int:
    for d in c.daemons:
        if d["name"] == f"node-{node}" and dc_procs.alive(d):
            return d["pid"]
    raise ClusterError(f"node {node} has no namespace: `up --netns` makes them", 2)


def demand(c: Cluster, node: str) -> None:
    if node not in c.nodes:
        raise ClusterError(f"node {node!r} is not known: this cluster has {', '.join(c.nodes)}", 2)
    if not c.netns:
        raise ClusterError("this cluster's nodes share one network: `up --netns` parts them", 2)


def cut(c: Cluster, node: str) -> None:
    """Unplugs the cable: no packet passes, and no process is told."""
    ip("link", "set", cable(c, node), "down")


def join(c: Cluster, node: str) -> None:
    ip("link", "set", cable(c, node), "up")


def kill(c: Cluster, node: str) -> list[int]:
    """Acts like a power cut: unplugs the cable, then kills all processes of the node.

    The cable comes first, so that no message about the end gets out. The node's namespaces stay for
    `start`.
    """
    cut(c, node)
    holder, gone = holder_of(c, node), []
    for _ in range(100):
        if not (found := set(dc_procs.on_node(holder)) - {holder}):
            return gone
        gone += [pid for pid in found if pid not in gone]
        dc_procs.send(found, signal.SIGKILL)
        time.sleep(0.05)
    raise ClusterError(f"processes {sorted(found)} of node {node} do not end")
