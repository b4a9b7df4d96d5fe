"""The command line: verbs, one JSON line on stdout, all other text on stderr. Invariants:

- stdout carries only text for programs (JSON of up and status, export lines of env);
- an error is one line, with the end of a daemon's log after it where there is one;
  exit status 1: the verb failed; 2: it cannot work here, or its arguments are wrong; 3: `status`
  found a node or daemon that does not work;
- `exec` gives its command a clean environment and the user's rights, never root's by default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shlex
import signal
import sys
import time
from types import FrameType

import dc_boot
import dc_down
import dc_install
import dc_net
import dc_procs
from dc_base import SAFE_PATH, Cluster, ClusterError, require_root, resolve_prefix, say

FATES = ("cut", "join", "kill", "start")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="devcluster", description="A real Slurm on one machine.")
    verbs = top.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install", help="install Debian's Slurm packages (root)")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--prefix", help="the cluster's directory (default: by its name in /tmp)")
    shared.add_argument("--name", help="the cluster's name (default: dev)")
    add_up(verbs.add_parser("up", parents=[shared], help="boot; prints a JSON line"))
    verbs.add_parser("down", parents=[shared], help="end and remove all of it")
    verbs.add_parser("env", parents=[shared], help="print export lines for eval")
    verbs.add_parser("status", parents=[shared], help="print a JSON line; exit 0 when healthy")
    node = verbs.add_parser("node", parents=[shared], help="what befalls a node of `up --netns`")
    node.add_argument("fate", choices=FATES, help="cut, join: its cable; kill: as a power cut; "
                                                  "start: slurmd again, with its cable")
    node.add_argument("node")
    daemon = verbs.add_parser("daemon", parents=[shared], help="end a daemon, or start it again")
    daemon.add_argument("fate", choices=("stop", "start"))
    daemon.add_argument("daemon", choices=tuple(dc_boot.DAEMONS))
    run = verbs.add_parser("exec", parents=[shared], help="exec [options] -- CMD...")
    run.add_argument("--root", action="store_true", help="as root instead of the user")
    run.add_argument("--user", help="as this one of the cluster's users (default: the first)")
    run.add_argument("--setenv", metavar="K=V", action="append", default=[])
    return top


def add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--base-port", type=int, help="first of 200 ports (default: a free span)")
    up.add_argument("--cpu-nodes", type=int, default=3)
    up.add_argument("--gpu-nodes", type=int, default=2)
    up.add_argument("--trainer-nodes", type=int, default=1)
    up.add_argument("--cpus-per-node", type=int, default=8)
    up.add_argument("--threads-per-core", type=int, default=1,
                    help="hyperthreads: so many CPUs are one core, as Slurm's configuration says")
    up.add_argument("--gpus-per-node", type=int, default=4)
    up.add_argument("--user", help="unix user (default: NAMEuser, created when missing)")
    up.add_argument("--users", type=int, default=1, help="so many users: NAMEuser, NAMEuser2, ...")
    up.add_argument("--no-dbd", action="store_true", help="no accounting: boots in a second")
    up.add_argument(
        "--conf-line", metavar="K=V", action="append", default=[],
        help="one more line for slurm.conf (the last one of a key counts)",
    )  # fmt: skip
    up.add_argument("--netns", action="store_true",
                    help="each node in a network namespace, with its own address and host name")
    up.add_argument("--debian-hosts", action="store_true",
                    help="with --netns: a node's own name is 127.0.1.1 to itself, as on Debian")
    up.add_argument("--cgroups", action="store_true", help="Slurm tracks and limits by cgroups")
    up.add_argument(
        "--plugin", metavar="'PATH [ARG...]'", action="append", default=[],
        help="a SPANK plugin with its arguments, loaded as `optional`",
    )  # fmt: skip
    up.add_argument("--slurmd-env", metavar="K=V", action="append", default=[],
                    help="a variable in the environment of every slurmd, and so of its slurmstepds")


def do_up(o: argparse.Namespace) -> int:
    began = time.monotonic()
    c = dc_boot.up(o)
    out = {
        "name": c.name, "prefix": c.prefix, "conf": c.conf, "base_port": c.base_port,
        "nodes": c.nodes, "cpu_nodes": c.cpu_nodes, "gpu_nodes": c.gpu_nodes,
        "trainer_nodes": c.trainer_nodes, "user": c.user, "home": c.home, "dbd": c.dbd,
        "users": {u.name: u.home for u in c.users},
        "boot_seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip
    print(json.dumps(out), flush=True)
    return 0


def do_status(o: argparse.Namespace) -> int:
    c = Cluster.demand(resolve_prefix(o.prefix, o.name))
    lasting = [d for d in c.daemons if d["name"] != "mariadb-install-db"]
    daemons = {d["name"]: {"pid": d["pid"], "alive": dc_procs.alive(d)} for d in lasting}
    states = dc_boot.node_states(c)
    dead = [name for name, d in daemons.items() if not d["alive"]]
    healthy = c.ready and not dead and set(states) == set(c.nodes)
    out = {
        "name": c.name, "prefix": c.prefix, "conf": c.conf, "user": c.user, "home": c.home,
        "healthy": healthy, "nodes": states, "daemons": daemons,
    }  # fmt: skip
    print(json.dumps(out))
    say(f"{c.name}: " + ("healthy" if healthy else f"not healthy, dead: {dead or 'none'}"))
    return 0 if healthy else 3


def do_node(o: argparse.Namespace) -> int:
    c = Cluster.demand(resolve_prefix(o.prefix, o.name))
    require_root()
    dc_net.demand(c, o.node)
    if o.fate == "start":
        dc_net.join(c, o.node)
        dc_boot.start_slurmd(c, o.node, rebooted=True)
    else:
        {"cut": dc_net.cut, "join": dc_net.join, "kill": dc_net.kill}[o.fate](c, o.node)
    say(f"{o.fate} {o.node}")
    return 0


def do_daemon(o: argparse.Namespace) -> int:
    c = Cluster.demand(resolve_prefix(o.prefix, o.name))
    require_root()
    if o.daemon == "slurmdbd" and not c.dbd:
        raise ClusterError("this cluster has no slurmdbd: it was made by `up --no-dbd`", 2)
    {"stop": dc_boot.stop_daemon, "start": dc_boot.start_daemon}[o.fate](c, o.daemon)
    say(f"{o.fate} {o.daemon}")
    return 0


def do_env(o: argparse.Namespace) -> int:
    c = Cluster.demand(resolve_prefix(o.prefix, o.name))
    print(f"export SLURM_CONF={shlex.quote(c.conf)}")
    return 0


def do_exec(o: argparse.Namespace, command: list[str]) -> int:
    c = Cluster.demand(resolve_prefix(o.prefix, o.name))
    require_root()
    if not command:
        raise ClusterError("exec needs a command: devcluster exec [options] -- CMD...", 2)
    homes = {u.name: u.home for u in c.users}
    name = "root" if o.root else o.user or c.user
    if not o.root and name not in homes:
        raise ClusterError(f"--user {name!r}: this cluster has {', '.join(homes)}", 2)
    try:
        who = pwd.getpwnam(name)
    except KeyError:
        raise ClusterError(f"user {name} is gone: run `devcluster down`, then `up`") from None
    home = homes.get(name, who.pw_dir)
    env = {"PATH": SAFE_PATH, "HOME": home, "USER": who.pw_name, "LOGNAME": who.pw_name,
           "SHELL": "/bin/bash", "LANG": "C.UTF-8", "SLURM_CONF": c.conf}  # fmt: skip
    for pair in o.setenv:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ClusterError(f"--setenv {pair!r} is not K=V", 2)
        env[key] = value
    os.initgroups(who.pw_name, who.pw_gid)
    os.setgid(who.pw_gid)
    os.setuid(who.pw_uid)
    os.umask(0o022)
    os.chdir(home)
    # Python ignores these signals, but the command must not
    for sig in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(sig, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, env)
    except OSError as err:
        raise ClusterError(f"cannot run {command[0]}: {err.strerror}", 127) from err


VERBS = {"up": do_up, "status": do_status, "env": do_env, "node": do_node, "daemon": do_daemon}


def run(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    o = parser().parse_args(argv[:cut])
    command = argv[cut + 1 :]
    if o.verb == "exec":
        return do_exec(o, command)
    if command:
        raise ClusterError(f"{o.verb} takes no command after --", 2)
    os.umask(0o022)
    if o.verb == "install":
        dc_install.install()
        dc_install.install_of_images()
    elif o.verb == "down":
        dc_down.down(resolve_prefix(o.prefix, o.name))
    else:
        return VERBS[o.verb](o)
    return 0


def interrupted(signum: int, frame: FrameType | None) -> None:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    raise ClusterError(f"interrupted by {signal.Signals(signum).name}", 128 + signum)


def main(argv: list[str]) -> int:
    if "exec" not in argv[:1]:
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, interrupted)
    try:
        return run(argv)
    except ClusterError as err:
        say(f"error: {err}")
        if err.tail:
            print(err.tail, file=sys.stderr)
        return err.code
    except OSError as err:
        with contextlib.suppress(OSError):
            say(f"error: {err}: check that path and this machine's limits, then try again")
        return 1
