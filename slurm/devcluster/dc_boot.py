"""`up`: boot a cluster and return when every node is idle. Invariants of this module:

- what it makes is recorded before or as it is made, so that `down` finds it after any crash;
- any failure takes down all that was started, names the daemon and shows the end of its log;
- it writes below the prefix only; outside it, it adds at most one unix user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import dc_config
import dc_down
import dc_install
import dc_net
import dc_procs
from dc_base import (
    NAME,
    SAFE_PATH,
    USER,
    Cluster,
    ClusterError,
    User,
    hold,
    require_root,
    resolve_prefix,
    say,
    try_hold,
)

MYSQL_FLAGS = [
    "--skip-networking", "--skip-name-resolve", "--skip-log-bin", "--performance-schema=OFF",
    "--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--sync-frm=OFF",
    "--innodb-doublewrite=0", "--innodb-log-file-size=16M", "--innodb-buffer-pool-size=64M",
    "--innodb-lock-wait-timeout=900", "--innodb-fast-shutdown=2", "--debug-no-sync",
    "--max-allowed-packet=16M",
]  # fmt: skip


def up(o: Namespace) -> Cluster:
    require_root()
    if lack := dc_install.missing(dbd=not o.no_dbd) + dc_net.missing() * o.netns:
        raise ClusterError(f"missing {', '.join(lack)}: run `devcluster install` first", 2)
    cluster = plan(o)
    with contextlib.ExitStack() as held:
        held.enter_context(reserve(cluster, o.base_port))
        began = time.monotonic()
        make_prefix(cluster)
        try:
            boot(cluster)
        except BaseException:
            say(f"taking down what was started of {cluster.name}")
            dc_down.take_down(cluster)
            raise
    say(f"{cluster.name} is up in {time.monotonic() - began:.1f} s: {len(cluster.nodes)} nodes")
    return cluster


def plan(o: Namespace) -> Cluster:
    """The record of the cluster asked for; wrong numbers and names are refused here."""
    name = o.name or "dev"
    if not NAME.match(name):
        raise ClusterError(f"bad --name {name!r}: use up to 15 lower-case letters and digits", 2)
    if o.user and (not USER.match(o.user) or o.user == "root"):
        raise ClusterError(f"bad --user {o.user!r}: name a plain user that is not root", 2)
    counts = [o.cpu_nodes, o.gpu_nodes, o.trainer_nodes]
    if min(counts) < 0 or not 0 < sum(counts) <= dc_config.MAX_NODES:
        raise ClusterError(f"ask for 1 to {dc_config.MAX_NODES} nodes in all", 2)
    if not 1 <= o.cpus_per_node <= 1024 or not 0 <= o.gpus_per_node <= 64:
        raise ClusterError("--cpus-per-node is 1 to 1024, --gpus-per-node 0 to 64", 2)
    if o.threads_per_core < 1 or o.cpus_per_node % o.threads_per_core:
        raise ClusterError(f"--threads-per-core {o.threads_per_core}: --cpus-per-node "
                           f"{o.cpus_per_node} must be a multiple of it", 2)  # fmt: skip
    if o.debian_hosts and not o.netns:
        raise ClusterError("--debian-hosts needs --netns: only then has a node a hosts file", 2)
    binds = [line for line in o.conf_line if line.startswith("TaskPlugin=")][-1:] or ["cgroup"]
    if o.cgroups and "cgroup" in binds[0] and o.cpus_per_node > (os.cpu_count() or 1):
        raise ClusterError(f"--cgroups binds to real CPUs: give --cpus-per-node {os.cpu_count()} "
                           "or less", 2)  # fmt: skip
    if o.netns and any(text.startswith("/tmp/") for text in o.plugin):
        raise ClusterError("--netns gives each node a /tmp of its own: put the plugin elsewhere", 2)
    return Cluster(
        name=name, prefix=str(resolve_prefix(o.prefix, name)), base_port=0,
        users=users(str(resolve_prefix(o.prefix, name)), o.user or f"{name}user", o.users),
        dbd=not o.no_dbd,
        cpu_nodes=dc_config.names(name, "c", o.cpu_nodes),
        gpu_nodes=dc_config.names(name, "g", o.gpu_nodes),
        trainer_nodes=dc_config.names(name, "t", o.trainer_nodes),
        cpus_per_node=o.cpus_per_node, gpus_per_node=o.gpus_per_node, conf_lines=o.conf_line,
        plugins=[plugin_line(text) for text in o.plugin], cgroups=o.cgroups, netns=o.netns,
        threads_per_core=o.threads_per_core, debian_hosts=o.debian_hosts,
        slurmd_env=o.slurmd_env,
    )  # fmt: skip


def users(prefix: str, first: str, count: int) -> list[User]:
    """`first`, and as many more as make `count`, each with a home of its own in the prefix."""
    if not 1 <= count <= 9:
        raise ClusterError("--users is 1 to 9", 2)
    names = [first] + [f"{first}{n}" for n in range(2, count + 1)]
    homes = ["home"] + [f"home{n}" for n in range(2, count + 1)]
    return [User(n, f"{prefix}/{h}") for n, h in zip(names, homes, strict=True)]


def plugin_line(text: str) -> str:
    """Returns a line of plugstack.conf; refuses a missing plugin, which only a log would mention.
    """
    path, _, words = text.partition(" ")
    if not path.startswith("/") or not Path(path).is_file():
        raise ClusterError(f"--plugin {path!r}: give the full path of a built SPANK plugin", 2)
    return f"optional {path} {words}".rstrip()


def reserve(c: Cluster, wanted: int | None) -> contextlib.closing:
    """Picks the base port, from which the addresses follow too; the lock covers the time until the
    daemons hold the ports."""
    if wanted is not None and not 1024 <= wanted <= 65535 - dc_config.SPAN:
        raise ClusterError(f"--base-port is 1024 to {65535 - dc_config.SPAN}", 2)
    for base in dc_config.BASES if wanted is None else [wanted]:
        lock = try_hold(f"port-{base}")
        if lock is None:
            continue
        c.base_port = base
        ports_taken = any(dc_procs.listening(p) for p in dc_config.daemon_ports(c))
        if not ports_taken and not (c.netns and dc_net.addresses_taken(c)):
            return contextlib.closing(lock)
        lock.close()
    if wanted is not None:
        raise ClusterError(f"ports from {wanted}, or the addresses of their network, are in use: "
                           "leave --base-port out")  # fmt: skip
    raise ClusterError("every port span is in use: take a cluster down or give --base-port")


def make_prefix(c: Cluster) -> None:
    root = c.root
    for parent in root.parents:
        if parent.exists() and not parent.stat().st_mode & 0o001:
            raise ClusterError(
                f"{parent} is closed to other users, and {c.user} must reach the prefix: "
                "choose another --prefix", 2,
            )  # fmt: skip
    with hold(f"prefix-{root}", 10):
        try:
            root.mkdir(mode=0o755)
        except FileExistsError:
            if Cluster.load(root):
                remedy = f"run `devcluster down --prefix {root}` first"
                raise ClusterError(f"{root} exists: {remedy}") from None
            if not adoptable(root):
                remedy = "it is not devcluster's, so choose another --prefix"
                raise ClusterError(f"{root} exists: {remedy}") from None
        except FileNotFoundError:
            raise ClusterError(f"{root.parent} does not exist: make it first", 2) from None
        root.chmod(0o755)
        c.save()


def adoptable(root: Path) -> bool:
    """An empty directory of root's (mktemp -d) may become a prefix."""
    own = root.is_dir() and not root.is_symlink() and root.stat().st_uid == 0
    return own and not any(root.iterdir())


def boot(c: Cluster) -> None:
    laps = [("", time.monotonic())]
    dc_config.make_dirs(c)
    database = start_install_db(c) if c.dbd else None
    dc_config.write_config(c)
    dc_config.make_devices(c)
    start_munged(c)
    if c.netns:
        dc_net.plug_in(c)
    for user in c.users:
        make_user(c, user)
    laps.append(("munged, user", time.monotonic()))
    if database is not None:
        boot_database(c, database)
        laps.append(("database", time.monotonic()))
        boot_slurmdbd(c)
        laps.append(("slurmdbd", time.monotonic()))
        add_associations(c)
        laps.append(("associations", time.monotonic()))
    boot_slurm(c)
    laps.append(("slurmctld", time.monotonic()))
    wait_idle(c, 30 + len(c.nodes))
    laps.append(("nodes idle", time.monotonic()))
    c.ready = True
    c.save()
    steps = [f"{what} {at - laps[i][1]:.1f}" for i, (what, at) in enumerate(laps[1:])]
    say("boot in seconds: " + ", ".join(steps))


def make_user(c: Cluster, user: User) -> None:
    """The unix user: an existing one or a new one; either way its home is in the prefix."""
    try:
        who = pwd.getpwnam(user.name)
    except KeyError:
        user.created = True
        c.save()
        who = add_user(user)
    if who.pw_uid == 0:
        raise ClusterError(f"--user {user.name} must not be root", 2)
    user.uid = who.pw_uid
    c.save()
    Path(user.home).mkdir(mode=0o755)
    os.chown(user.home, who.pw_uid, who.pw_gid)


def add_user(user: User) -> pwd.struct_passwd:
    argv = ["useradd", "--no-create-home", "--home-dir", user.home, "--shell", "/bin/bash",
            user.name]  # fmt: skip
    for _ in range(30):
        done = subprocess.run(
            argv, env={"PATH": SAFE_PATH}, capture_output=True, text=True, check=False
        )
        if done.returncode != 1:  # 1: another process has locked /etc/passwd
            break
        time.sleep(0.1)
    if done.returncode:
        raise ClusterError(f"useradd {user.name} failed: {done.stderr.strip()}")
    return pwd.getpwnam(user.name)


def start_munged(c: Cluster) -> None:
    at = f"{c.prefix}/munge"
    log = f"{c.prefix}/log/munged.log"
    argv = ["munged", "--foreground", f"--key-file={at}/munge.key", f"--socket={at}/munge.sock",
            f"--pid-file={at}/munged.pid", f"--seed-file={at}/munge.seed",
            f"--log-file={log}", "--num-threads=4"]  # fmt: skip
    proc = dc_procs.start(c, "munged", argv, log)
    dc_procs.wait_for(c, "munged", proc, lambda: connects(f"{at}/munge.sock"), 10)


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def start_install_db(c: Cluster) -> subprocess.Popen:
    argv = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={c.prefix}/db",
            "--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve",
            "--innodb-flush-method=nosync", "--innodb-log-file-size=16M",
            "--sync-frm=OFF", "--debug-no-sync"]  # fmt: skip
    return dc_procs.start(c, "mariadb-install-db", argv, "")


def boot_database(c: Cluster, database: subprocess.Popen) -> None:
    name, prefix = "mariadb-install-db", c.prefix
    try:
        if database.wait(60):
            raise dc_procs.fail(c, name, f"failed (exit {database.returncode}); it says")
    except subprocess.TimeoutExpired:
        raise dc_procs.fail(c, name, "did not end in 60 s; it says") from None
    sock = f"{prefix}/db/mysql.sock"
    argv = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={prefix}/db",
            f"--socket={sock}", f"--pid-file={prefix}/db/mariadbd.pid",
            f"--tmpdir={prefix}/db", f"--init-file={prefix}/etc/database.sql",
            *MYSQL_FLAGS]  # fmt: skip
    proc = dc_procs.start(c, "mariadbd", argv, "")
    dc_procs.wait_for(c, "mariadbd", proc, lambda: connects(sock), 60)


def boot_slurmdbd(c: Cluster) -> None:
    log, sock = f"{c.prefix}/log/slurmdbd.log", f"{c.prefix}/db/mysql.sock"
    proc = dc_procs.start(c, "slurmdbd", ["slurmdbd", "-D"], log, MYSQL_UNIX_PORT=sock)
    dc_procs.wait_for(c, "slurmdbd", proc, lambda: dc_procs.listening(c.base_port + 1), 60)


def add_associations(c: Cluster) -> None:
    done = run_tool(c, ["sacctmgr", "-i", "load", f"file={c.prefix}/etc/associations"], 60)
    if done.returncode:
        raise dc_procs.fail(c, "slurmdbd", f"refused the users ({done.stdout[-300:].strip()})")


def run_tool(c: Cluster, argv: list[str], seconds: float) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            argv, env=dc_procs.base_env(c), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, f"no answer in {seconds:.0f} s", "")


def boot_slurm(c: Cluster) -> None:
    boot_slurmctld(c)
    for node in c.nodes:
        start_slurmd(c, node)


def boot_slurmctld(c: Cluster) -> None:
    ctld = dc_procs.start(
        c, "slurmctld", ["slurmctld", "-D", "-f", c.conf], f"{c.prefix}/log/slurmctld.log"
    )
    dc_procs.wait_for(c, "slurmctld", ctld, lambda: dc_procs.listening(c.base_port), 30)


DAEMONS = {"slurmctld": boot_slurmctld, "slurmdbd": boot_slurmdbd}


def stop_daemon(c: Cluster, name: str) -> None:
    """Ends slurmctld or slurmdbd in order, as before its restart."""
    for d in c.daemons:
        if d["name"] == name and dc_procs.alive(d):
            dc_procs.end({d["pid"]}, 20)


def start_daemon(c: Cluster, name: str) -> None:
    """Starts slurmctld or slurmdbd again after `stop_daemon`."""
    if any(d["name"] == name and dc_procs.alive(d) for d in c.daemons):
        raise ClusterError(f"{name} runs: stop it first", 2)
    c.daemons = [d for d in c.daemons if d["name"] != name]
    DAEMONS[name](c)


def start_slurmd(c: Cluster, node: str, *, rebooted: bool = False) -> None:
    """Starts a node's slurmd; `rebooted` makes it report that the node has just booted, as the
    nodes have no boot time of their own."""
    argv = [*dc_net.enter(c, node), "slurmd", "-D", "-N", node, "-f", c.conf, *["-b"] * rebooted]
    name = f"slurmd-{node}"
    c.daemons = [d for d in c.daemons if d["name"] != name]
    dc_procs.start(c, name, argv, f"{c.prefix}/log/{name}.log",
                   **dict(line.split("=", 1) for line in c.slurmd_env))


def node_states(c: Cluster, seconds: float = 10) -> dict[str, str]:
    done = run_tool(c, ["sinfo", "-h", "-N", "-o", "%N %T"], seconds)
    if done.returncode:
        return {}
    return dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)


def wait_idle(c: Cluster, seconds: float) -> None:
    """Every node idle, or the error of the first daemon that died or node that is not."""
    end = time.monotonic() + seconds
    while True:
        states = node_states(c)
        late = [n for n in c.nodes if states.get(n) != "idle"]
        if not late:
            return
        for d in c.daemons:
            if d["name"] != "mariadb-install-db" and not dc_procs.alive(d):
                raise dc_procs.fail(c, d["name"], "ended during boot; its log says")
        if time.monotonic() > end:
            name = f"slurmd-{late[0]}" if states else "slurmctld"
            state = states.get(late[0], "unknown")
            why = f"is not ready after {seconds:.0f} s ({late[0]} is {state}); its log says"
            raise dc_procs.fail(c, name, why)
        time.sleep(0.05)
